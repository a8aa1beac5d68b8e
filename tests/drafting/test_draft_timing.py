"""Drafts of several sequences at once, timed before any request."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken import LLM, SamplingParams
from foretoken.drafting.draft_timing import time_drafts

MODEL = str(Path(__file__).parents[2] / "models/tinycode")
PARAMS = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["def read_config(path):\n", "class Queue:\n", "import os\n"]


@pytest.fixture(scope="module")
def plain() -> list[str]:
    return [each.outputs[0].text for each in LLM(MODEL, max_num_seqs=3).generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("drafter", ["hass:chain", "draft_model"])
def test_drafts_of_three_sequences_are_timed_and_leave_nothing_behind(drafter: str, plain: list[str]) -> None:
    llm = LLM(MODEL, speculative_config=f"{drafter}:num_speculative_tokens=6", max_num_seqs=3)
    for slot in range(3):
        llm.target.cache.reserve(slot, 64)
    drafted: list[tuple[int, int]] = []
    own = llm.drafters[0]
    propose = own.propose

    def counted(context):
        tree = propose(context)
        drafted.append((tree.batch_size, tree.max_depth))
        return tree

    own.propose = counted  # type: ignore[method-assign]
    timed = time_drafts(own, llm.handle, 3)
    own.propose = propose  # type: ignore[method-assign]
    assert {depth for depth, _ in timed} == {1, 4}
    assert {size for size, _ in drafted} == {3}
    assert all(seconds > 0 for _, seconds in timed)
    for slot in range(3):
        llm.target.cache.trim(slot, 0)
    assert [each.outputs[0].text for each in llm.generate(PROMPTS, PARAMS)] == plain
