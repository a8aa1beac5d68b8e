"""The depth of dynamic trees: what a level brings against what it costs."""

from __future__ import annotations

import numpy as np
import pytest

from foretoken.control.paying_depth import PayingDepth


def settled(brings: list[float], *, level_s: float, rest_s: float, drafts: int = 60, first_s: float = 0.0) -> list[int]:
    """What is asked for in turn when each level brings so much and takes so long."""
    made, asked = PayingDepth(len(brings)), []
    for index in range(drafts):
        depth = made.next()
        asked.append(depth)
        draft_s = depth * level_s + (first_s if not index else 0.0)
        made.learn(depth, np.array(brings), draft_s=draft_s, rest_s=rest_s)
    return asked


def rate(brings: list[float], depth: int, *, level_s: float, rest_s: float) -> float:
    return (1 + sum(brings[:depth])) / (rest_s + depth * level_s)


@pytest.mark.parametrize("level_s", [0.001, 0.02, 0.05, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("brings", [[0.8, 0.6, 0.4, 0.25, 0.1], [0.3, 0.05, 0.01, 0.0, 0.0], [0.9] * 5])
def test_the_depth_that_earns_most_is_drafted_and_now_and_then_one_more(brings: list[float], level_s: float) -> None:
    asked = settled(brings, level_s=level_s, rest_s=1.0)
    best = max(range(1, 6), key=lambda depth: rate(brings, depth, level_s=level_s, rest_s=1.0))
    assert asked[:2] == [5, 5], "before anything is known"
    later = asked[10:]
    assert set(later) == {best, min(best + 1, 5)}
    assert later.count(best) >= 0.8 * len(later)


def test_a_first_draft_that_reads_the_prompt_is_no_reason() -> None:
    brings = [0.8, 0.6, 0.4]
    assert settled(brings, level_s=0.01, rest_s=1.0, first_s=100.0)[-1] == 3


def test_a_text_that_becomes_easier_is_drafted_deeper() -> None:
    made = PayingDepth(6)
    hard, easy = np.array([0.4, 0.05, 0, 0, 0, 0]), np.full(6, 0.95)
    for brings, depth in ((hard, 1), (easy, 6)):
        for _ in range(200):
            asked = made.next()
            made.learn(asked, np.where(np.arange(6) < asked, brings, 0.0), draft_s=0.1 * asked, rest_s=1.0)
        assert made.next() in (depth, min(depth + 1, 6))
