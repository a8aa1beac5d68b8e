"""Comparing what two engines said, to the last log-probability."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from foretoken import RequestOutput


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
        for a, b in zip(ours.outputs, theirs.outputs, strict=True):
            where = f"{name}, completion {b.index}"
            assert a.token_ids == b.token_ids, where
            assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason), where
            if b.logprobs is None:
                assert a.logprobs is None, where
                continue
            assert a.logprobs is not None, where
            assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, rel=tolerance, abs=tolerance), where
            for ours_at, theirs_at in zip(a.logprobs, b.logprobs, strict=True):
                assert list(ours_at) == list(theirs_at), where
                for p, q in zip(ours_at.values(), theirs_at.values(), strict=True):
                    assert (p.rank, p.decoded_token) == (q.rank, q.decoded_token), where
                    assert p.logprob == pytest.approx(q.logprob, rel=tolerance, abs=tolerance), where
