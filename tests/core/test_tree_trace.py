"""What a trace says became of every node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretoken.core.records import NodeOutcome, TreeTrace

#   0 ─┬─ 1 ─┬─ 3 ─── 6
#      │     └─ 4
#      ├─ 2 ─── 5
#      └─ 7 ─── 8       (7 is a probe)
TRACE = TreeTrace(
    rule="greedy",
    position=9,
    tokens=[50, 11, 12, 13, 14, 15, 16, 17, 18],
    parents=[-1, 0, 0, 1, 1, 2, 3, 0, 7],
    depths=[0, 1, 1, 2, 2, 2, 3, 1, 2],
    drafters=[(), *[("a",)] * 8],
    probes=frozenset({7}),
    scores=None,
    draft_probs=None,
    token_probs=[None, *[0.5] * 8],
    target_tokens=[11, 14, 1, 2, 30, 4, 5, 6, 7],
    target_probs=[0.5] * 9,
    path=[1, 4],
    next_token=30,
)
ROOT, TAKEN, OUT, FAR, ENDED, PROBE = (
    NodeOutcome.ROOT,
    NodeOutcome.ACCEPTED,
    NodeOutcome.REJECTED,
    NodeOutcome.UNREACHED,
    NodeOutcome.ENDED,
    NodeOutcome.PROBE,
)


@pytest.mark.parametrize(
    ("path", "next_token", "outcomes"),
    [
        ([1, 4], 30, [ROOT, TAKEN, OUT, OUT, TAKEN, FAR, FAR, PROBE, PROBE]),
        ([], 30, [ROOT, OUT, OUT, FAR, FAR, FAR, FAR, PROBE, PROBE]),
        ([1], None, [ROOT, TAKEN, OUT, ENDED, ENDED, FAR, FAR, PROBE, PROBE]),
        ([], None, [ROOT, ENDED, ENDED, FAR, FAR, FAR, FAR, PROBE, PROBE]),
        ([1, 3, 6], 5, [ROOT, TAKEN, OUT, TAKEN, OUT, FAR, TAKEN, PROBE, PROBE]),
    ],
)
def test_outcomes(path: list[int], next_token: int | None, outcomes: list[NodeOutcome]) -> None:
    trace = replace(TRACE, path=path, next_token=next_token)
    assert trace.outcomes() == outcomes
    assert trace.is_accepted == [outcome is TAKEN for outcome in outcomes]


def test_what_was_written_after_a_node() -> None:
    assert [TRACE.written_after(node) for node in (0, 1, 4, 2, 3)] == [11, 14, 30, None, None]
    assert replace(TRACE, next_token=None).written_after(4) is None
