"""What is known of a drafter where those before it are wrong, and what its drafts take."""

from __future__ import annotations

import numpy as np
import pytest

from foretoken.drafting.asking import Reach
from foretoken.drafting.draft_costs import DraftSeconds


def test_reach_is_that_of_what_others_leave() -> None:
    """Independent drafters: one right half of the time at the first level, the other at 0.7, then 0.9 of that."""
    rng, reach = np.random.default_rng(1), Reach(4)
    for _ in range(3000):
        before = 2 * int(rng.random() < 0.5)
        right = int(rng.random() < 0.7) * (1 + int(rng.random() < 0.9))
        reach.learn_draft(before=before, right=right, asked=2, generated=max(before, right) + 1)
    found = reach.probabilities()
    assert found[:2] == pytest.approx([0.7, 0.63], abs=0.1)
    assert 0 < found[3] < found[2] < found[1], "deeper ones go on at the mean rate"


def test_drafts_that_are_right_to_their_end_do_not_hide_what_is_below() -> None:
    """The drafter is right at 0.8 of all levels, and mostly asked for two: deeper ones are rarely seen."""
    rng, reach = np.random.default_rng(2), Reach(6)
    for index in range(3000):
        asked = 6 if index % 10 == 0 else 2
        right = next((depth for depth in range(asked) if rng.random() >= 0.8), asked)
        reach.learn_draft(before=0, right=right, asked=asked, generated=right + 1)
    assert reach.probabilities() == pytest.approx(0.8 ** np.arange(1, 7), abs=0.12)


def test_a_few_wrong_drafts_do_not_end_drafting() -> None:
    reach = Reach(6)
    for _ in range(3):
        reach.learn_draft(before=0, right=0, asked=4, generated=1)
    assert reach.probabilities()[0] > 0.25
    for _ in range(60):
        reach.learn_draft(before=0, right=0, asked=4, generated=1)
    assert reach.probabilities()[0] < 0.05


def test_what_nobody_knows_is_not_counted() -> None:
    reach = Reach(6)
    for _ in range(50):
        reach.learn_draft(before=0, right=2, asked=6, generated=2)  # the text ended inside the draft
    seen, right = reach.counts().tolist()
    assert seen[2:] == [0, 0, 0, 0]
    assert seen == right
    assert seen[0] > 20
    for _ in range(50):
        reach.learn_draft(before=3, right=3, asked=6, generated=3)  # so did it inside that of those before
    assert reach.counts()[0, 2] == 0
    restored = Reach(6)
    restored.restore(reach.counts())
    assert np.array_equal(restored.counts(), reach.counts())


def test_a_draft_that_reads_a_prompt_says_little_of_the_next() -> None:
    seconds = DraftSeconds(8)
    assert not seconds.is_known
    seconds.learn_seconds(8, 30.0)
    for _ in range(3):
        seconds.learn_seconds(8, 0.8)
    assert seconds.of_deepest == pytest.approx(0.8)
    seconds.learn_seconds(8, 30.0)
    assert seconds.of_deepest < 1.2
    for _ in range(100):
        for depth in (2, 4, 8):
            seconds.learn_seconds(depth, 0.2 + 0.1 * depth)
    assert [float(seconds(depth)) for depth in (2.0, 4.0, 8.0)] == pytest.approx([0.4, 0.6, 1.0], rel=0.02)


def test_timed_drafts_are_known_beforehand() -> None:
    """The fastest of each depth: the first reads the prompt."""
    assert DraftSeconds(4, [(4, 9.0), (4, 2.0), (4, 2.5)]).of_deepest == pytest.approx(2.0)
    seconds = DraftSeconds(8, [(4, 9.0), (1, 1.1), (4, 2.5), (1, 1.0)])
    assert [float(seconds(depth)) for depth in (1.0, 4.0, 8.0)] == pytest.approx([1.0, 2.5, 4.5], rel=0.01)


def test_one_long_proposal_says_nothing_and_two_in_a_row_are_believed() -> None:
    """The first of a request reads the prompt."""
    seconds = DraftSeconds(4, [(4, 1.0)])
    for _ in range(10):
        seconds.learn_seconds(4, 1.0)
    seconds.learn_seconds(2, 30.0)
    assert float(seconds(4.0)) == pytest.approx(1.0)
    for _ in range(60):
        seconds.learn_seconds(4, 2.0)
    assert float(seconds(4.0)) > 1.5
