"""Engines with every drafter over one tiny target, what plain decoding alone answers, and comparing the two."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from end_to_end.tiny_heads import HEADS
from end_to_end.tiny_llms import drafters, llm, noisy, target
from tiny_models import CONTEXT_LEN, VOCAB_SIZE

from foretoken import LLM, RequestOutput, SamplingParams
from foretoken.core.errors import ConfigError, ForetokenError, ModelError
from foretoken.core.results import CompletionOutput
from foretoken.runner.decoders import probe_layer_shapes
from fuzz.worker import FindingError, Settings

CONTEXT_LENS = (8, 16, 24, 44, 44, None, None)
RULES = ("auto", "auto", "auto", "coupled", "sequential", "block", "traversal", "kseq", "lenient", "typical")
# Drafters whose weights, where they have any, need no training.
_TRAINED = {*HEADS, *(f"{name} adaptive" for name in HEADS)}
_TRAINED |= {
    f"{name} {shape}" for name in HEADS for shape in ("chain", "choices", "widths", "dynamic", "dynamic adaptive")
}
_CONTROL = [5, 6, 7, 5, 6]
_MOST_ANSWERS = 256
_answers: dict[Any, RequestOutput] = {}
_FINISHED = ("stop", "length", "error")


@cache
def all_drafters(dtype: str) -> dict[str, Any]:
    """Short name of a drafter to what makes it, see `drafters`; and draft models that are read from a directory."""
    known = {name: make for name, make in drafters("llama", getattr(torch, dtype)).items() if name not in _TRAINED}

    def saved(**options: Any) -> Any:
        return lambda references: {
            "speculative_config": {"method": "draft_model", "model": str(draft_directory()), **options}
        }

    return {
        **known,
        "saved draft": saved(num_speculative_tokens=3),
        "saved draft adaptive": saved(),
        "saved draft tree": saved(tree="tree"),
        "saved draft widths": saved(tree={"widths": [2, 2, 1]}),
    }


@cache
def draft_directory() -> Path:
    """A draft model on disk: the target with a little noise."""
    directory = Path(tempfile.mkdtemp(prefix="foretoken-fuzz-draft-"))
    noisy("llama", 0.02, torch.float32).save_pretrained(directory)
    return directory


@cache
def plain(runner: str, dtype: str, context_len: int | None) -> LLM:
    """Plain decoding, one sequence at a time."""
    module = target("llama", getattr(torch, dtype))
    return llm({}, module=module, runner=runner, max_num_seqs=1, max_model_len=context_len)


def alone(settings: Settings, context_len: int | None, prompt: list[int], params: SamplingParams) -> RequestOutput:
    """What plain decoding answers to one request; asked twice, it is not decoded again."""
    key = (settings.runner, settings.dtype, context_len, tuple(prompt), repr(params))
    if key not in _answers:
        if len(_answers) >= _MOST_ANSWERS:
            _answers.clear()
        _answers[key] = plain(settings.runner, settings.dtype, context_len).generate([prompt], params)[0]
    return _answers[key]


def engine_with(
    settings: Settings, drafter: str, rule: str, references: list[list[int]], **more: Any
) -> tuple[LLM, bool]:
    """An engine with a drafter; whether `rule` is what it follows (drafters made in memory follow "auto").

    Raises:
        ForetokenError: As `LLM` does.
    """
    arguments = all_drafters(settings.dtype)[drafter](references or [list(range(3, 15))])  # heads train on a text
    config = arguments.get("speculative_config")
    if config is not None and rule != "auto":
        arguments = {"speculative_config": {**config, "acceptance": rule}}
    module = target("llama", getattr(torch, settings.dtype))
    while True:  # until the memory has room for KV rows of the longest sequence with the drafter's widest tree
        try:
            made = llm(arguments, module=module, runner=settings.runner, **more)
            if more.get("max_model_len") is not None or made.target.context_len == CONTEXT_LEN:
                return made, config is not None
        except (ConfigError, ModelError) as err:
            if more.get("kv_cache_memory_bytes") is None or "memory" not in str(err):
                raise
        more["kv_cache_memory_bytes"] *= 2


def is_text_fixed(params: SamplingParams, rule: str) -> bool:
    """Whether a request's text may depend on nothing but the target."""
    if rule in ("lenient", "typical"):
        return False
    return params.is_greedy or (params.seed is not None and rule in ("auto", "coupled"))


def check_same(got: CompletionOutput, want: CompletionOutput, settings: Settings) -> None:
    """Raises `FindingError` unless a completion is what plain decoding answers, log-probabilities included."""
    for name in ("token_ids", "text", "finish_reason", "stop_reason", "error"):
        if getattr(got, name) != getattr(want, name):
            raise FindingError(f"{name}: {getattr(got, name)!r} instead of {getattr(want, name)!r}")
    if (got.logprobs is None) != (want.logprobs is None):
        raise FindingError("log-probabilities on one side only")
    tolerance = 0.0 if settings.runner == "lean-native" else 1e-6
    for place, (ours, theirs) in enumerate(zip(got.logprobs or [], want.logprobs or [], strict=True)):
        if list(ours) != list(theirs):
            raise FindingError(f"most probable tokens at {place}: {list(ours)} instead of {list(theirs)}")
        for token, one in ours.items():
            other = theirs[token]
            if (one.rank, one.decoded_token) != (other.rank, other.decoded_token):
                raise FindingError(f"token {token} at {place}: {one} instead of {other}")
            if abs(one.logprob - other.logprob) > tolerance * max(1.0, abs(other.logprob)):
                raise FindingError(f"token {token} at {place}: {one.logprob!r} instead of {other.logprob!r}")


def check_valid(got: CompletionOutput, prompt: list[int], params: SamplingParams, context_len: int | None) -> None:
    """Raises `FindingError` unless a completion could be an answer at all, whatever the text."""
    most = (context_len or 1 << 20) - len(prompt)
    most = most if params.max_tokens is None else min(most, int(params.max_tokens))
    is_missing = not got.token_ids and got.error is None
    if got.finish_reason not in _FINISHED or len(got.token_ids) > most or is_missing:
        raise FindingError(f"{got.finish_reason!r} after {len(got.token_ids)} of {most} tokens, error: {got.error}")
    if got.error is not None and not got.error.startswith("no token is possible"):
        raise FindingError(f"error: {got.error}")
    if not all(isinstance(token, int) and 0 <= token < VOCAB_SIZE for token in got.token_ids):
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


def check_idle(engine: LLM, rule: str, settings: Settings, size: Mapping[str, Any]) -> None:
    """Raises `FindingError` unless an engine answers a further request rightly and has nothing left to do then."""
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=1)
    got = engine.generate([_CONTROL], params)[0].outputs[0]
    check_valid(got, _CONTROL, params, size["max_model_len"])
    if is_text_fixed(params, rule):
        check_same(got, alone(settings, size["max_model_len"], _CONTROL, params).outputs[0], settings)
    loop = engine._engine
    if loop.has_work or sorted(loop._scheduler._slots.free) != list(range(size["max_num_seqs"])):
        raise FindingError(f"not idle: free slots {loop._scheduler._slots.free}, work left: {loop.has_work}")


def drawn_setup(rng: random.Random, settings: Settings) -> tuple[str, str, dict[str, Any]]:
    """A drafter's name, a rule and the size of an engine."""
    drafter = rng.choice(sorted(all_drafters(settings.dtype)))
    rule = rng.choice(RULES)
    size = {"max_num_seqs": rng.randint(1, 4), "max_model_len": rng.choice(CONTEXT_LENS)}
    if rng.random() < 0.4:  # rows of one sequence with the widest tree, and a few more, for all of them
        size["kv_cache_memory_bytes"] = _row_bytes(settings.dtype) * (CONTEXT_LEN + rng.choice((64, 96, 128)))
    return drafter, rule, size


@cache
def _row_bytes(dtype: str) -> int:
    """Bytes of a KV row of the target."""
    module = target("llama", getattr(torch, dtype))
    elements = sum(s.num_heads * (s.key_width + s.value_width) for s in probe_layer_shapes(module))
    return elements * getattr(torch, dtype).itemsize


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
