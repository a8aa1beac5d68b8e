"""Comparing what two engines said, to the last log-probability."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from foretoken import RequestOutput, SamplingParams

# Prompts of several lengths, each with another way of sampling.
PROMPTS = [[5], [7, 8, 9] * 4, [40, 3, 12, 9, 61, 17], list(range(3, 20))]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, logprobs=2),
    SamplingParams(temperature=0.8, seed=1, max_tokens=24),
    SamplingParams(temperature=0.0, max_tokens=24, repetition_penalty=1.2),
    SamplingParams(temperature=0.9, seed=2, max_tokens=24, top_p=0.9),
]


def assert_same_text(
    got: Iterable[RequestOutput], want: Iterable[RequestOutput], names: Sequence[str], *, tolerance: float = 1e-6
) -> None:
    """Token ids, text, reasons and log-probabilities of every completion agree.

    Args:
        got: One side.
        want: The other.
        names: Names of the requests, for the message.
        tolerance: Of log-probabilities. Float64 logits are rounded to float32 once, which a pass of another width may
            do the other way; float32 models differ by their own rounding.
    """
    for name, ours, theirs in zip(names, got, want, strict=True):
        assert_same_scores(ours.prompt_logprobs, theirs.prompt_logprobs, f"{name}, prompt", tolerance)
        for a, b in zip(ours.outputs, theirs.outputs, strict=True):
            where = f"{name}, completion {b.index}"
            assert a.token_ids == b.token_ids, where
            assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason), where
            assert_same_scores(a.logprobs, b.logprobs, where, tolerance)
            if b.logprobs is not None:
                assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, rel=tolerance, abs=tolerance), where


def assert_same_scores(ours: Any, theirs: Any, where: str, tolerance: float) -> None:
    """Log-probabilities at some tokens agree, or there are none on either side."""
    assert (ours is None) == (theirs is None), where
    for ours_at, theirs_at in zip(ours or (), theirs or (), strict=True):
        assert list(ours_at or ()) == list(theirs_at or ()), where
        for p, q in zip((ours_at or {}).values(), (theirs_at or {}).values(), strict=True):
            assert (p.rank, p.decoded_token) == (q.rank, q.decoded_token), where
            assert p.logprob == pytest.approx(q.logprob, rel=tolerance, abs=tolerance), where
