"""Options: any value for an engine's own arguments is refused in one sentence, or gives an engine that works."""

from __future__ import annotations

import random
from typing import Any

import torch
from end_to_end.tiny_llms import llm, target, tokenizer

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ForetokenError
from fuzz import engines, values
from fuzz.engines import shown
from fuzz.worker import Case, FindingError, check_refusal

_KEYS = ("method", "model", "num_speculative_tokens", "tree", "max_nodes", "prompt_lookup_min", "prompt_lookup_max",
         "acceptance", "rejection_sample_method", "lenience", "posterior_threshold", "posterior_alpha", "quantization",
         "draft_sample_method", "behaviour", "references", "pattern", "seed", "enforce_eager", "nope")  # fmt: skip
_METHODS = (
    "ngram",
    "draft_model",
    "tests.drafters.adversarial",
    "oracle",
    "medusa",
    "hydra",
    "mlp_speculator",
    "eagle3",
    "Ngram",
)
_TREES = ("chain", "tree", "mc_sim_7b_63", {"widths": [2, 2]}, {"widths": [10**9]}, {"widths": []}, [[0], [1], [0, 0]],
          [[0, 0]], [[-1]], [[]], [[0] * 70], [[10**9]], {"widths": [1] * 600})  # fmt: skip
_ARGUMENTS = ("max_num_seqs", "max_model_len", "seed", "runner", "dtype", "device", "tokenizer", "speculative_config",
              "allow_unknown_ids", "drafter")  # fmt: skip


def run(case: Case) -> None:
    """An engine with any values for its arguments: refused, or one that works."""
    rng = case.rng
    config: Any = {key: _config_value(rng, key) for key in rng.sample(_KEYS, rng.choice([0, 1, 2, 4]))}
    config = {"method": rng.choice(_METHODS), **config} if rng.random() < 0.8 else config
    arguments: dict[str, Any] = {"speculative_config": config, "max_num_seqs": 2}
    arguments |= {key: values.odd(rng) for key in rng.sample(_ARGUMENTS, rng.choice([0, 0, 1, 2]))}
    arguments = {"tokenizer": tokenizer(), "runner": case.settings.runner, **arguments}
    case.note("LLM(target, " + ", ".join(f"{key}={shown(value)}" for key, value in arguments.items()) + ")")
    case.size += 1
    try:
        engine = LLM(target("llama", getattr(torch, case.settings.dtype)), **arguments)
    except ForetokenError as err:
        check_refusal(err)
        case.count("engines refused")
        return
    case.count("odd engines accepted")
    _check_engine(case, engine)


def _config_value(rng: random.Random, key: str) -> Any:
    """A value of a key of `speculative_config`."""
    plausible: dict[str, Any] = {
        "method": rng.choice(_METHODS), "tree": rng.choice(_TREES), "max_nodes": rng.choice([2, 9, 64, 512, 513]),
        "num_speculative_tokens": rng.choice([1, 3, 64, 65, 0]), "model": rng.choice(["nowhere", "", "a\x00b"]),
        "acceptance": rng.choice([*engines.RULES, "greedy"]), "lenience": rng.choice([1, 0.5, 0, 2, True]),
        "prompt_lookup_min": rng.choice([1, 3, 0]), "prompt_lookup_max": rng.choice([1, 4, 10**9]),
        "rejection_sample_method": rng.choice(["standard", "block", "x"]), "pattern": [3], "references": [[5, 6, 7]],
        "draft_sample_method": rng.choice(["greedy", "probabilistic", "gumbel"]), "behaviour": "random", "seed": 10**30,
    }  # fmt: skip
    return plausible[key] if key in plausible and rng.random() < 0.6 else values.odd(rng)


def _check_engine(case: Case, engine: LLM) -> None:
    """It answers as plain decoding does, wherever its rule, runner and tokenizer let us compare."""
    params = SamplingParams(temperature=0.0, max_tokens=9)
    got = engine.generate([[5, 6, 7, 5, 6]], params)[0].outputs[0]
    context_len = engine.target.context_len
    engines.check_valid(got, [5, 6, 7, 5, 6], params, context_len)
    kernels = engines.plain(case.settings.runner, case.settings.dtype, None).target.name
    if not engine.is_lossy and engine.target.name == kernels:
        plain = llm({}, module=target("llama", getattr(torch, case.settings.dtype)), runner=case.settings.runner)
        want = plain.generate([[5, 6, 7, 5, 6]], params)[0].outputs[0]
        length = min(len(got.token_ids), len(want.token_ids))
        if got.token_ids[:length] != want.token_ids[:length]:
            raise FindingError(f"{got.token_ids} instead of {want.token_ids}")
