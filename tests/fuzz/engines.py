"""Engines with every drafter over one tiny target, what plain decoding alone answers, and comparing the two."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from end_to_end.tiny_heads import HEADS
from end_to_end.tiny_llms import RUNNERS, drafters, noisy, target, tokenizer
from made_once import new_folder
from tiny_models import ARCHITECTURES, CONTEXT_LEN, LEAN_ARCHITECTURES

from foretoken import LLM, RequestOutput, SamplingParams
from foretoken.core.errors import ConfigError, ForetokenError, ModelError
from foretoken.core.results import CompletionOutput
from foretoken.drafting.policies import CONTROLS
from foretoken.models.loaded import LoadedModel
from foretoken.models.loading import load_model, load_tokenizer
from foretoken.models.making.in_memory import quantize_model
from foretoken.runner.costs import WIDTHS, CostCurve, PassCosts
from foretoken.runner.decoders import probe_layer_shapes
from foretoken.trees.stopping import TRAINED
from fuzz.worker import FindingError, Settings

CONTEXT_LENS = (8, 16, 24, 44, 44, None, None)
RULES = ("auto", "auto", "auto", "coupled", "sequential", "block", "traversal", "lenient", "typical")
BUNDLED = "tinycode"  # among architectures: the bundled model, whose heads are trained
_QUANTIZATIONS = (None, None, None, "int8", "int4", "w8a8", "w4a8")
_MODELS = Path(__file__).parents[2] / "models"
# Words with which names of drafters begin whose weights would need training.
_TRAINED = (*HEADS, "heads", "lookup and head")
_BUNDLED_HEADS = ("eagle", "eagle3", "falcon", "hass", "hydra", "medusa", "mlp_speculator", "draft_model")
_BUNDLED_TREES: dict[str, dict[str, Any]] = {
    "adaptive": {}, "chain": {"tree": "chain", "num_speculative_tokens": 3}, "tree": {"tree": "tree"},
    "dynamic": {"tree": "dynamic", "max_nodes": 12, "num_speculative_tokens": 3},
    "widths": {"tree": {"widths": [3, 2]}},
    "window": {"num_speculative_tokens": 3, "draft_window_size": 12},
    "retrieval": {"num_speculative_tokens": 3, "draft_window_size": 12, "draft_retrieval": True},
    "as stored": {"num_speculative_tokens": 3, "quantization": "none"},
    "in int4": {"num_speculative_tokens": 3, "quantization": "int4"},
    "pruned": {"tree": "tree", "pruning": {"path_probability": 0.05}},
}  # fmt: skip
_CONTROL = [5, 6, 7, 5, 6]
_MOST_ANSWERS = 256
_answers: dict[Any, RequestOutput] = {}
_FINISHED = ("stop", "length", "error")


class Target(NamedTuple):
    """A model and how it is run: what plain decoding has in common with drafting.

    Attributes:
        runner: See `LLM`.
        dtype: By name.
        architecture: One of `ARCHITECTURES`, or `BUNDLED`.
        quantization: See `LLM`.
        kv_cache_dtype: See `LLM`.
    """

    runner: str
    dtype: str
    architecture: str = "llama"
    quantization: str | None = None
    kv_cache_dtype: str | None = None

    @classmethod
    def of(cls, settings: Settings) -> Target:
        """The usual one of a run."""
        return cls(settings.runner, settings.dtype)

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return _bundled_tokenizer() if self.architecture == BUNDLED else tokenizer()

    @property
    def module(self) -> Any:
        """Its weights as they are stored."""
        is_bundled = self.architecture == BUNDLED
        return (
            _bundled(self.dtype, None).module if is_bundled else target(self.architecture, getattr(torch, self.dtype))
        )

    def llm(self, arguments: Mapping[str, Any], **more: Any) -> LLM:
        """An `LLM` over it; raises `ForetokenError` as `LLM` does."""
        model = _bundled(self.dtype, self.quantization) if self.architecture == BUNDLED else self.module
        how = {name: getattr(self, name) for name in ("tokenizer", "runner", "quantization", "kv_cache_dtype")}
        return LLM(model, **how, **arguments, **more)


class Setup(NamedTuple):
    """An engine that drafts.

    Attributes:
        target: Its target.
        drafter: A key of `all_drafters`.
        rule: Of acceptance.
        control: Of `speculative_config`, or a table of depths by batch size, or None.
        threads: Of torch, and so of the kernels.
        slope: What each token adds to the cost of a pass, relative to a pass without tokens. Nothing is timed, since
            that takes seconds.
        size: Other arguments of `LLM`.
    """

    target: Target
    drafter: str
    rule: str = "auto"
    control: Any = None
    threads: int = 1
    slope: float = 0.01
    size: Mapping[str, Any] = {}

    @property
    def context_len(self) -> int | None:
        """Of both engines."""
        found: int | None = self.size["max_model_len"]
        return found

    def values(self) -> dict[str, Any]:
        """Every option by its name, for counts."""
        named = {**self.target._asdict(), **self._asdict(), **self.size}
        named["control"] = "table" if isinstance(self.control, list) else self.control
        return {name: value for name, value in named.items() if name not in ("target", "size")}


@cache
def _bundled(dtype: str, quantization: Any) -> LoadedModel:
    loaded = load_model(_MODELS / BUNDLED, dtype=dtype)
    return loaded if quantization is None else quantize_model(loaded, quantization)


@cache
def _bundled_tokenizer() -> Any:
    return load_tokenizer(str(_MODELS / BUNDLED))


@cache
def all_drafters(architecture: str, dtype: str) -> dict[str, Any]:
    """Short name of a drafter to what makes it, see `drafters`; and draft models that are read from a directory."""
    if architecture == BUNDLED:
        return _bundled_drafters()
    known = drafters(architecture, getattr(torch, dtype))
    known = {name: make for name, make in known.items() if not name.startswith(_TRAINED)}

    def saved(**options: Any) -> Any:
        return lambda references: {
            "speculative_config": {"method": "draft_model", "model": str(draft_directory(architecture)), **options}
        }

    return {
        **known,
        "saved draft": saved(num_speculative_tokens=3),
        "saved draft adaptive": saved(),
        "saved draft tree": saved(tree="tree"),
        "saved draft widths": saved(tree={"widths": [2, 2, 1]}),
    }


def _bundled_drafters() -> dict[str, Any]:
    """Those of the bundled model: what drafts without weights as over tiny models, trained heads, and several."""

    def config(**keys: Any) -> Any:
        return lambda references: {"speculative_config": keys}

    known = drafters("llama", torch.bfloat16)
    kinds = (
        "none",
        "ngram",
        "suffix",
        "prediction",
        "lookahead",
        "recycling",
        "early exit",
        "sparse kv",
        "two lookups",
    )
    heads = {
        f"{name} {shape}": config(method=name, model=str(_MODELS / f"{BUNDLED}-{name.removesuffix('_model')}"), **keys)
        for name in _BUNDLED_HEADS
        for shape, keys in _BUNDLED_TREES.items()
    }
    several = {
        f"lookups and {name}": config(drafters=["ngram", {"method": "suffix", "tree": "tree"}, {"method": name}])
        for name in _BUNDLED_HEADS
    }
    return {name: make for name, make in known.items() if name.startswith(kinds)} | heads | several


@cache
def draft_directory(architecture: str = "llama") -> Path:
    """A draft model on disk: the target with a little noise."""
    directory = new_folder("draft")
    noisy(architecture, 0.02, torch.float32).save_pretrained(directory)
    return directory


@lru_cache(16)
def plain(target: Target, context_len: int | None) -> LLM:
    """Plain decoding, one sequence at a time."""
    return target.llm({}, max_num_seqs=1, max_model_len=context_len)


def alone(target: Target, context_len: int | None, prompt: list[int], params: SamplingParams) -> RequestOutput:
    """What plain decoding answers to one request; asked twice, it is not decoded again."""
    key = (target, context_len, tuple(prompt), repr(params))
    if key not in _answers:
        if len(_answers) >= _MOST_ANSWERS:
            _answers.clear()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        _answers[key] = plain(target, context_len).generate([prompt], params)[0]
        torch.set_num_threads(threads)
    return _answers[key]


def engine_with(setup: Setup, references: list[list[int]]) -> tuple[LLM, Setup]:
    """An engine that drafts; and what it follows of a setup: drafters made in memory know no rule and no control.

    Raises:
        ForetokenError: As `LLM` does.
    """
    target, more = setup.target, dict(setup.size)
    make = all_drafters(target.architecture, target.dtype)[setup.drafter]
    arguments = make(references or [list(range(3, 15))])  # heads train on a text
    config = arguments.get("speculative_config")
    if config is None:
        setup = setup._replace(rule="auto", control=None)
    else:
        config = dict(config) | ({} if setup.rule == "auto" else {"acceptance": setup.rule})
        if setup.control is not None:
            name = "control" if isinstance(setup.control, str) else "num_speculative_tokens_per_batch_size"
            config[name] = setup.control
        arguments = {"speculative_config": config}
    torch.set_num_threads(setup.threads)
    curve = CostCurve(WIDTHS, [1e-3 * (1 + setup.slope * width) for width in WIDTHS])
    while True:  # until the memory has room for KV rows of the longest sequence with the drafter's widest tree
        try:
            with (
                mock.patch("foretoken.entrypoints.llm.pass_costs", return_value=PassCosts(curve, curve, curve)),
                mock.patch("foretoken.drafting.choice._LIMIT_S", 0.0),
            ):
                made = target.llm(arguments, **more)
            if setup.context_len is not None or made.target.context_len == CONTEXT_LEN:
                return made, setup
        except (ConfigError, ModelError) as err:
            if more.get("kv_cache_memory_bytes") is None or "memory" not in str(err):
                raise
        more["kv_cache_memory_bytes"] *= 2


def is_text_fixed(params: SamplingParams, rule: str) -> bool:
    """Whether a request's text may depend on nothing but the target."""
    if rule in ("lenient", "typical"):
        return False
    return params.is_greedy or (params.seed is not None and rule in ("auto", "coupled"))


def check_same(got: CompletionOutput, want: CompletionOutput, target: Target) -> None:
    """Raises `FindingError` unless a completion is what plain decoding answers, log-probabilities included."""
    for name in ("token_ids", "text", "finish_reason", "stop_reason", "error"):
        if getattr(got, name) != getattr(want, name):
            raise FindingError(f"{name}: {getattr(got, name)!r} instead of {getattr(want, name)!r}")
    if (got.logprobs is None) != (want.logprobs is None):
        raise FindingError("log-probabilities on one side only")
    tolerance = 0.0 if target.runner == "lean-native" else 1e-6
    for place, (ours, theirs) in enumerate(zip(got.logprobs or [], want.logprobs or [], strict=True)):
        if list(ours) != list(theirs):
            raise FindingError(f"most probable tokens at {place}: {list(ours)} instead of {list(theirs)}")
        for token, one in ours.items():
            other = theirs[token]
            if (one.rank, one.decoded_token) != (other.rank, other.decoded_token):
                raise FindingError(f"token {token} at {place}: {one} instead of {other}")
            if abs(one.logprob - other.logprob) > tolerance * max(1.0, abs(other.logprob)):
                raise FindingError(f"token {token} at {place}: {one.logprob!r} instead of {other.logprob!r}")


def check_valid(
    got: CompletionOutput, prompt: list[int], params: SamplingParams, context_len: int | None, vocab_size: int
) -> None:
    """Raises `FindingError` unless a completion could be an answer at all, whatever the text."""
    most = (context_len or 1 << 20) - len(prompt)
    most = most if params.max_tokens is None else min(most, int(params.max_tokens))
    is_missing = not got.token_ids and got.error is None
    if got.finish_reason not in _FINISHED or len(got.token_ids) > most or is_missing:
        raise FindingError(f"{got.finish_reason!r} after {len(got.token_ids)} of {most} tokens, error: {got.error}")
    if got.error is not None and not got.error.startswith("no token is possible"):
        raise FindingError(f"error: {got.error}")
    if not all(isinstance(token, int) and 0 <= token < vocab_size for token in got.token_ids):
        raise FindingError(f"token ids {got.token_ids}")
    if (got.logprobs is None) != (params.logprobs is None):
        raise FindingError("log-probabilities that were not asked for, or none")
    if got.logprobs is not None:
        if len(got.logprobs) != len(got.token_ids):
            raise FindingError(f"{len(got.logprobs)} log-probabilities for {len(got.token_ids)} tokens")
        total = sum(each[token].logprob for each, token in zip(got.logprobs, got.token_ids, strict=True))
        if got.cumulative_logprob is None or not math.isclose(total, got.cumulative_logprob, abs_tol=1e-6):
            raise FindingError(f"cumulative_logprob {got.cumulative_logprob} instead of {total}")
    if params.allowed_token_ids is not None and not set(got.token_ids) <= set(params.allowed_token_ids):
        raise FindingError(f"tokens in {got.token_ids} that are not among {params.allowed_token_ids}")
    for word in params.bad_words:
        if not isinstance(word, str) and _holds(prompt[1 - len(word) or len(prompt) :] + got.token_ids, list(word)):
            raise FindingError(f"bad word {word!r} in {got.token_ids}")


def _holds(ids: list[int], word: list[int]) -> bool:
    """Whether a word is among token ids."""
    return any(ids[i : i + len(word)] == word for i in range(len(ids) - len(word) + 1))


def check_idle(engine: LLM, setup: Setup) -> None:
    """Raises `FindingError` unless an engine answers a further request rightly and has nothing left to do then."""
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=1)
    got = engine.generate([_CONTROL], params)[0].outputs[0]
    check_valid(got, _CONTROL, params, setup.context_len, engine.target.vocab_size)
    if is_text_fixed(params, setup.rule):
        check_same(got, alone(setup.target, setup.context_len, _CONTROL, params).outputs[0], setup.target)
    loop = engine._engine
    if loop.has_work or sorted(loop._scheduler._slots.free) != list(range(setup.size["max_num_seqs"])):
        raise FindingError(f"not idle: free slots {loop._scheduler._slots.free}, work left: {loop.has_work}")


def drawn_target(rng: random.Random, settings: Settings) -> Target:
    """The run's runner and dtype mostly; any architecture that the runner knows; weights and KV rows as they are stored
    or rounded, which other runners than lean-native refuse."""
    others = [(runner, str(dtype).removeprefix("torch.")) for runner, dtype in RUNNERS.items()]
    runner, dtype = rng.choice([(settings.runner, settings.dtype)] * 6 + others + [("lean-native", "float32")])
    kinds = LEAN_ARCHITECTURES if "lean" in runner else ARCHITECTURES
    architecture = rng.choice(["llama", "llama", "llama", BUNDLED, *rng.choices(kinds, k=3)])
    made = Target(runner, dtype, "llama" if architecture == BUNDLED and runner != "lean-native" else architecture)
    if runner == "lean-native" or rng.random() < 0.1:
        made = made._replace(quantization=rng.choice(_QUANTIZATIONS), kv_cache_dtype=rng.choice([None, "auto", "int8"]))
    return made


def drawn_setup(rng: random.Random, target: Target) -> Setup:
    """Any way to draft over a target, and the size of an engine."""
    size: dict[str, Any] = {"max_num_seqs": rng.randint(1, 4), "max_model_len": rng.choice(CONTEXT_LENS)}
    if target.architecture == BUNDLED:
        size["max_model_len"] = size["max_model_len"] or CONTEXT_LEN
    size["enable_prefix_caching"] = rng.choice([None, True, False])
    size["max_num_batched_tokens"] = rng.choice([None, None, 1, 5, 16, 64])
    if rng.random() < 0.4:  # rows of one sequence with the widest tree, and a few more, for all of them
        size["kv_cache_memory_bytes"] = _row_bytes(target) * (CONTEXT_LEN + rng.choice((64, 96, 128)))
    free = [each for each in CONTROLS if each not in TRAINED]
    control = rng.choice([None] * 8 + free + [rng.choice(TRAINED), [[1, 2, 3], [3, 64, 1]]])
    drafter = rng.choice(sorted(all_drafters(target.architecture, target.dtype)))
    return Setup(
        target, drafter, rng.choice(RULES), control, rng.choice([1] * 10 + [2, 3]), rng.choice([0.0, 0.01, 0.3]), size
    )


@cache
def _row_bytes(target: Target) -> int:
    """Bytes of a KV row of the target."""
    shapes = probe_layer_shapes(target.module)
    if target.kv_cache_dtype == "int8":  # with a scale for each row of a head
        return sum(s.num_heads * (s.key_width + s.value_width + 8) for s in shapes)
    return sum(s.num_heads * (s.key_width + s.value_width) for s in shapes) * getattr(torch, target.dtype).itemsize


def shown(value: Any, longest: int = 1500) -> str:
    """A value as Python would write it, where it has such a text; of sampling parameters those that were set."""
    try:
        if isinstance(value, SamplingParams):
            given = {f.name: getattr(value, f.name) for f in fields(value)}
            defaults = SamplingParams()
            given = {name: each for name, each in given.items() if repr(each) != repr(getattr(defaults, name))}
            return f"SamplingParams(**{shown(given, longest)})"
        return repr(value)[:longest]
    except (RuntimeError, ValueError, ForetokenError):
        return f"<{type(value).__name__}>"
