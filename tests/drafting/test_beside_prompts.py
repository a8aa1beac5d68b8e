"""Drafts beside prompts: there is room while twice as wide a pass takes hardly longer."""

import pytest

from foretoken.drafting.costs import BesidePrompts
from foretoken.runner.costs import CostCurve

# A pass of up to 16 tokens takes 10 ms, and every further one half a millisecond.
ROOM = BesidePrompts(CostCurve([1, 16, 1016], [0.010, 0.010, 0.510]))


@pytest.mark.parametrize(
    ("num_sequences", "num_prompt_tokens", "has_room"),
    [(1, 3, True), (4, 8, True), (8, 20, False), (1, 40, False), (4, 400, False)],
)
def test_passes_that_read_prompts(num_sequences: int, num_prompt_tokens: int, has_room: bool) -> None:
    assert ROOM.has_room(num_sequences, num_prompt_tokens) == has_room


def test_passes_without_prompts_are_left_to_the_controller() -> None:
    assert ROOM.has_room(400, 0)
