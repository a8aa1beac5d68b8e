"""Options: any value for an engine's own arguments is refused in one sentence, or gives an engine that works."""

import random
from itertools import chain
from typing import Any

import torch
from end_to_end.tiny_llms import datastore, llm, target, tokenizer

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ForetokenError
from fuzz import engines, values
from fuzz.engines import shown
from fuzz.worker import Case, FindingError, check_refusal

# Those that any method takes, or the policy, or none; and each method's own.
_KEYS = ("method", "model", "num_speculative_tokens", "tree", "max_nodes", "tree_top_k", "pruning", "acceptance",
         "rejection_sample_method", "lenience", "posterior_threshold", "posterior_alpha", "quantization",
         "draft_sample_method", "drafters", "seed", "enforce_eager", "nope")  # fmt: skip
_OWN_KEYS = {
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
    "draft_model": ("vocab_match", "use_heterogeneous_vocab", "model"),
    "suffix": ("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests",
               "suffix_decoding_max_cached_bytes", "suffix_decoding_max_spec_factor",
               "suffix_decoding_min_token_prob"),
    "lookahead": ("lookahead_window", "lookahead_ngram", "lookahead_guesses", "lookahead_pool_from_prompt"),
    "prediction": ("prediction_max_match", "prediction_min_match"),
    "rest": ("datastore", "rest_max_match", "rest_min_match", "rest_max_matches"),
    "early_exit": ("exit_layer",),
    "sparse_kv": ("kv_selection", "kv_budget", "kv_ratio", "kv_sinks", "exit_layer", "draft_with"),
    "oracle": ("references", "pattern"),
    "tests.drafters.adversarial": ("behaviour",),
}  # fmt: skip
_METHODS = (*_OWN_KEYS, "recycling", "medusa", "hydra", "mlp_speculator", "eagle3", "Ngram")
_EVERY_KEY = sorted({*_KEYS, *chain(*_OWN_KEYS.values())})
_TREES = ("chain", "tree", "mc_sim_7b_63", {"widths": [2, 2]}, {"widths": [10**9]}, {"widths": []}, [[0], [1], [0, 0]],
          [[0, 0]], [[-1]], [[]], [[0] * 70], [[10**9]], {"widths": [1] * 600})  # fmt: skip
_ARGUMENTS = ("max_num_seqs", "max_model_len", "seed", "runner", "dtype", "device", "tokenizer", "speculative_config",
              "allow_unknown_ids", "drafter", "kv_cache_dtype")  # fmt: skip


def run(case: Case) -> None:
    """An engine with any values for its arguments: refused, or one that works."""
    rng = case.rng
    config: Any = _config(rng)
    if rng.random() < 0.2:
        parts = [_named(rng) if rng.random() < 0.5 else _config(rng) for _ in range(rng.choice([1, 2, 2, 3]))]
        config = {"drafters": parts, **(config if rng.random() < 0.2 else {})}
    arguments: dict[str, Any] = {"speculative_config": config, "max_num_seqs": 2}
    arguments |= {key: values.odd(rng) for key in rng.sample(_ARGUMENTS, rng.choice([0, 0, 0, 1, 2]))}
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


def _named(rng: random.Random) -> str:
    """A method that needs nothing but its name."""
    return rng.choice(["ngram", "suffix", "lookahead", "recycling", "prediction", "early_exit", "sparse_kv"])


def _config(rng: random.Random) -> dict[str, Any]:
    """Some keys of `speculative_config`: any at all, or those of a method that would work without them."""
    if rng.random() < 0.3:
        return {key: _config_value(rng, key) for key in rng.sample(_EVERY_KEY, rng.choice([0, 1, 2, 4]))}
    method = rng.choice(_METHODS)
    config: dict[str, Any] = {"method": method}
    if method in ("rest", "draft_model"):
        config |= _needed(method)
    own = _OWN_KEYS.get(method, ())
    chosen = [*rng.sample(own, rng.randint(0, len(own))), *rng.sample(_KEYS[2:7], rng.choice([0, 1, 1, 2]))]
    share = rng.choice([0.6, 1.0, 1.0])
    return {**config, **{key: _config_value(rng, key, share) for key in chosen}}


def _needed(method: str) -> dict[str, Any]:
    """What a method cannot do without: a datastore, a draft model."""
    if method == "rest":
        return {"datastore": datastore(((5, 6, 7, 5, 6, 8, 9, 5, 6, 7),))}
    return {"model": str(engines.draft_directory())}


def _config_value(rng: random.Random, key: str, share: float = 0.6) -> Any:
    """A value of a key of `speculative_config`, plausible with a probability where there are such values."""
    plausible: dict[str, Any] = {
        "method": rng.choice(_METHODS), "tree": rng.choice(_TREES), "max_nodes": rng.choice([2, 9, 64, 512, 513]),
        "num_speculative_tokens": rng.choice([1, 3, 64, 65, 0]), "model": rng.choice(["nowhere", "", "a\x00b"]),
        "acceptance": rng.choice([*engines.RULES, "greedy"]), "lenience": rng.choice([1, 0.5, 0, 2, True]),
        "prompt_lookup_min": rng.choice([1, 3, 0]), "prompt_lookup_max": rng.choice([1, 4, 10**9]),
        "rejection_sample_method": rng.choice(["standard", "block", "x"]), "pattern": [3], "references": [[5, 6, 7]],
        "draft_sample_method": rng.choice(["greedy", "probabilistic", "gumbel"]), "behaviour": "random", "seed": 10**30,
        "tree_top_k": rng.choice([1, 4, 64, 65]), "exit_layer": rng.choice([1, 2, 3, 99]),
        "kv_selection": rng.choice(["vegas", "snapkv", "streaming_llm", "quest"]), "kv_budget": rng.choice([8, 40]),
        "draft_with": rng.choice(["ngram", "nowhere", str(engines.draft_directory())]),
        "vocab_match": rng.choice(["auto", "same", "intersection", "text", "x"]), "use_heterogeneous_vocab": True,
        "pruning": {rng.choice(["token_probability", "path_probability", "entropy_weighted"]): rng.choice([0.1, 1.0])},
        "drafters": [_named(rng), rng.choice([_named(rng), {"method": "suffix", "tree": "tree"}, "nowhere"])],
        "suffix_decoding_max_tree_depth": rng.choice([2, 24, 256]), "suffix_decoding_max_cached_bytes": 1 << 12,
        "suffix_decoding_max_cached_requests": rng.choice([0, 1, 9]),
        "suffix_decoding_max_spec_factor": rng.choice([0.0, 1.0, 4.0]),
        "suffix_decoding_min_token_prob": rng.choice([0.0, 0.1, 1.0]),
        "lookahead_window": rng.choice([1, 4, 12, 256]), "lookahead_ngram": rng.choice([2, 3, 5, 32]),
        "lookahead_guesses": rng.choice([1, 7]), "lookahead_pool_from_prompt": rng.choice([True, False]),
        "prediction_max_match": rng.choice([1, 16]), "prediction_min_match": rng.choice([1, 2, 17]),
        "rest_max_match": rng.choice([1, 2, 32]), "rest_min_match": rng.choice([1, 2, 3]),
        "rest_max_matches": rng.choice([1, 128]), "datastore": rng.choice(["nowhere", _needed("rest")["datastore"]]),
    }  # fmt: skip
    return plausible[key] if key in plausible and rng.random() < share else values.odd(rng)


def _check_engine(case: Case, engine: LLM) -> None:
    """It answers as plain decoding does, wherever its rule, runner and tokenizer let us compare."""
    params = SamplingParams(temperature=0.0, max_tokens=9)
    got = engine.generate([[5, 6, 7, 5, 6]], params)[0].outputs[0]
    context_len = engine.target.context_len
    engines.check_valid(got, [5, 6, 7, 5, 6], params, context_len, engine.target.vocab_size)
    kernels = engines.plain(engines.Target.of(case.settings), None).target.name
    if not engine.is_lossy and engine.target.name == kernels:
        plain = llm({}, module=target("llama", getattr(torch, case.settings.dtype)), runner=case.settings.runner)
        want = plain.generate([[5, 6, 7, 5, 6]], params)[0].outputs[0]
        length = min(len(got.token_ids), len(want.token_ids))
        if got.token_ids[:length] != want.token_ids[:length]:
            raise FindingError(f"{got.token_ids} instead of {want.token_ids}")
