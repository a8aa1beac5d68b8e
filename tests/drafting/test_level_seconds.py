"""Seconds of drafts by depth, from the drafts that were made."""

from __future__ import annotations

import numpy as np
import pytest

from foretoken.drafting.draft_costs import LevelSeconds


def learned(*drafts: tuple[int, float]) -> LevelSeconds:
    made = LevelSeconds()
    for depth, seconds in drafts:
        made.learn_seconds(depth, seconds)
    return made


def test_nothing_is_known_before_the_first_draft() -> None:
    assert LevelSeconds()(np.array([1, 2, 9])).tolist() == [0.0, 0.0, 0.0]


def test_one_depth_tells_of_all_in_proportion() -> None:
    assert learned((2, 1.0))(np.array([1, 2, 6])) == pytest.approx([0.5, 1.0, 3.0])


def test_a_first_level_that_is_cheap() -> None:
    """It expands the root alone; further levels go on as the last two say."""
    assert learned((4, 3.25), (1, 0.25))(np.arange(1, 7)) == pytest.approx([0.25, 1.25, 2.25, 3.25, 4.25, 5.25])


def test_a_draft_that_reads_a_prompt_or_was_interrupted_changes_nothing() -> None:
    assert learned((2, 1.0), (2, 9.0), (2, 1.0))(2) == 1.0


def test_a_deeper_draft_is_never_faster() -> None:
    assert learned((1, 1.0), (3, 0.8))(np.array([1, 2, 3, 4])) == pytest.approx([1.0] * 4)


def test_a_machine_that_becomes_faster() -> None:
    """What a depth took that is drafted no more is forgotten."""
    made = learned(*[(4, 8.0)] * 5)
    for _ in range(120):
        made.learn_seconds(1, 0.5)
    assert made(4) == pytest.approx(2.0)
