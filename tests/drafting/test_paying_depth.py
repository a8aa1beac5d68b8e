"""The depth of dynamic trees: what a level brings against what it costs."""

from __future__ import annotations

import numpy as np
import pytest

from foretoken.drafting.best_nodes import PayingDepth
from foretoken.drafting.buying import Earnings


class Drafts:
    """Drafts each level of which brings so many tokens for a sequence and lengthens the rest of an iteration."""

    def __init__(self, deepest: int, *, plain_s: float = 1.0, batch_size: int = 4) -> None:
        self.made = PayingDepth(deepest)
        self._plain_s, self._batch_size = plain_s, batch_size

    def draft(self, brings: list[float], widens: list[float], level_s: float, *, fixed_s: float = 0.0) -> int:
        depth = self.made.next()
        tokens, seconds = 1 + np.cumsum(brings[:depth]), self._plain_s + np.cumsum(widens[:depth])
        earned = Earnings(self._batch_size * tokens, seconds)
        self.made.learn_earnings(earned, batch_size=self._batch_size, plain_s=self._plain_s)
        self.made.learn_seconds(depth, fixed_s + depth * level_s)
        return depth


def best_of(brings: list[float], widens: list[float], level_s: float, *, fixed_s: float = 0.0) -> int:
    """By an exhaustive comparison."""

    def rate(depth: int) -> float:
        return (1 + sum(brings[:depth])) / (1 + sum(widens[:depth]) + fixed_s + depth * level_s)

    return max(range(1, len(brings) + 1), key=rate)


@pytest.mark.parametrize("fixed_s", [0.0, 0.15])
@pytest.mark.parametrize("level_s", [0.001, 0.02, 0.05, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("widens", [[0.0] * 5, [0.05, 0.1, 0.2, 0.2, 0.3]])
@pytest.mark.parametrize("brings", [[0.8, 0.6, 0.4, 0.25, 0.1], [0.3, 0.05, 0.01, 0.0, 0.0], [0.9] * 5])
def test_the_depth_that_earns_most_is_drafted_and_now_and_then_one_more(
    brings: list[float], widens: list[float], level_s: float, fixed_s: float
) -> None:
    drafts = Drafts(5)
    asked = [drafts.draft(brings, widens, level_s, fixed_s=fixed_s) for _ in range(100)]
    best = best_of(brings, widens, level_s, fixed_s=fixed_s)
    assert asked[0] == 5, "before anything is known"
    later = asked[60:]
    assert set(later) == {best, min(best + 1, 5)}
    assert later.count(best) >= 0.8 * len(later)


def test_a_first_draft_that_reads_the_prompt_is_no_reason() -> None:
    drafts = Drafts(3)
    for index in range(60):
        asked = drafts.draft([0.8, 0.6, 0.4], [0.0] * 3, 0.01, fixed_s=100.0 if not index else 0.0)
    assert asked == 3


def test_a_text_that_becomes_easier_is_drafted_deeper() -> None:
    drafts = Drafts(6)
    for brings, depth in (([0.4, 0.05, 0, 0, 0, 0], 1), ([0.95] * 6, 6)):
        for _ in range(200):
            drafts.draft(brings, [0.0] * 6, 0.1)
        assert drafts.made.next() in (depth, min(depth + 1, 6))


def test_levels_that_widen_the_pass_more_than_they_bring_are_not_drafted() -> None:
    """Drafting them costs next to nothing, verifying them does."""
    drafts = Drafts(4)
    asked = [drafts.draft([0.5, 0.3, 0.3, 0.3], [0.1, 0.5, 0.5, 0.5], 0.001) for _ in range(40)]
    assert set(asked[10:]) == {1, 2}


def test_batches_of_all_sizes_and_speeds_teach_the_same() -> None:
    """What is remembered is relative to an iteration of plain decoding."""
    asked = []
    for plain_s, batch_size in ((1.0, 1), (0.01, 8)):
        drafts = Drafts(4, plain_s=plain_s, batch_size=batch_size)
        widens = [0.1 * plain_s] * 4
        asked.append([drafts.draft([0.6, 0.4, 0.2, 0.1], widens, 0.05 * plain_s) for _ in range(50)])
    assert asked[0] == asked[1]
