"""Rows that were never committed are never read: with NaN in all of them, after every commit, nothing changes.

That holds for the target's cache, for that of a head's block, and for a draft model's own, whose drafted rows stay
alive until the next proposal decides which of them were accepted.
"""

from __future__ import annotations

from typing import Any

import pytest
from end_to_end.request_mix import CONTEXT_LEN, plain_mix, references, request_mix
from end_to_end.same_text import assert_same_text
from end_to_end.tiny_llms import RUNNERS, drafters, llm

from foretoken import LLM
from foretoken.core.results import GenerationMetrics
from foretoken.core.token_tree import TokenTree
from foretoken.drafters.base import DraftContext, Prefix
from foretoken.drafters.draft_model import DraftModelDrafter
from foretoken.drafters.head_drafter import HeadDrafter
from foretoken.drafters.head_features import WaitingFeatures
from foretoken.drafters.text_draft import TextDraftDrafter
from foretoken.engine.sequence import Sequence, slot_of

DRAFTERS = {runner: drafters(dtype=dtype) for runner, dtype in RUNNERS.items()}
NAMES = list(DRAFTERS["generic"])
SLOTS = 4
# Drafters with rows of their own, and tokens a pass that they reach on the mix, less a tenth and more.
WITH_OWN_ROWS = {
    "draft itself": 2.5, "draft itself tree": 2.5, "hydra++": 2.5, "eagle": 2.5, "eagle dynamic": 2.3, "eagle3": 2.1,
    "eagle3 dynamic": 1.9,
}  # fmt: skip


def poison_target(engine: LLM, *, start: int = 0) -> None:
    """Overwrites all rows of all slots that are neither committed nor kept, after every iteration and at every reuse.

    Args:
        engine: Changed.
        start: Moves the first row.
    """
    loop, scheduler = engine._engine, engine._engine._scheduler
    step, begin = loop.step, scheduler._begin

    def poison(committed: dict[int, int]) -> None:
        for slot, length in committed.items():
            engine.target.cache.poison(slot, max(0, length + start))

    def poisoned_step() -> Any:
        changed = step()
        poison({held.slot: held.length for held in scheduler._slots._free})
        poison({slot_of(sequence): sequence.num_cached for sequence in scheduler.running})
        return changed

    def poisoned_begin(sequence: Sequence, prefix: Prefix | None) -> None:
        begin(sequence, prefix)
        poison({slot_of(sequence): sequence.num_cached})

    loop.step, scheduler._begin = poisoned_step, poisoned_begin


def poison_draft_model(drafter: DraftModelDrafter | TextDraftDrafter) -> None:
    """Overwrites what the draft model did not keep, and what a text that begins does not share with the one before."""
    levels, cache = drafter._levels, drafter._runner.cache
    keep, begin = levels._keep_accepted, levels.begin

    def poisoned_keep(slot: int, tokens: list[int]) -> Any:
        state = keep(slot, tokens)
        cache.poison(slot, len(state.tokens))
        return state

    def poisoned_begin(slot: int, *arguments: Any) -> None:
        begin(slot, *arguments)
        cache.poison(slot, len(levels._slots[slot].tokens))

    levels._keep_accepted, levels.begin = poisoned_keep, poisoned_begin


def poison_block(drafter: HeadDrafter, features: WaitingFeatures) -> None:
    """Overwrites all rows of a head's block that are no committed positions, before and after every proposal."""
    propose, cache = drafter.propose, features.cache

    def poison_all() -> None:
        for slot, fed in enumerate(features._fed):  # and what a native draft fed, which waits all the same
            cache.poison(slot, fed + features._has_seen[slot] * sum(map(len, features._waiting[slot])))

    def poisoned_propose(context: DraftContext) -> TokenTree:
        poison_all()
        tree = propose(context)
        poison_all()
        return tree

    drafter.propose = poisoned_propose


def poisoned_llm(arguments: dict[str, Any], runner: str, **more: Any) -> LLM:
    """An engine whose every cache is poisoned."""
    engine = llm(arguments, max_num_seqs=SLOTS, max_model_len=CONTEXT_LEN, runner=runner)
    poison_caches(engine, **more)
    return engine


def poison_caches(engine: LLM, **more: Any) -> None:
    """Poisons every cache of an engine, see `poison_target`."""
    for guard in engine._engine._drafting._guards:
        drafter = guard._drafter
        if isinstance(drafter, DraftModelDrafter | TextDraftDrafter):
            poison_draft_model(drafter)
        elif isinstance(drafter, HeadDrafter) and isinstance(drafter._features, WaitingFeatures):
            poison_block(drafter, drafter._features)
    poison_target(engine, **more)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("drafter", NAMES)
def test_uncommitted_rows_are_never_read(drafter: str, runner: str) -> None:
    # More sequences than slots, greedy and sampled ones, and others on each runner. How much is accepted has been
    # measured on half of the mix.
    quarter = slice((NAMES.index(drafter) + list(RUNNERS).index(runner)) % 4, None, 4)
    part = slice(None, None, 2) if drafter in WITH_OWN_ROWS else quarter
    mix, plain = request_mix()[part], plain_mix(runner)[part]
    engine = poisoned_llm(DRAFTERS[runner][drafter](references(plain_mix())), runner)
    got = engine.generate([r.prompt for r in mix], [r.params for r in mix])
    assert_same_text(got, plain, [r.name for r in mix])
    # A drafter that read NaN would cost acceptance, not text.
    if drafter in WITH_OWN_ROWS:
        metrics = GenerationMetrics.total(output.metrics for output in got)
        assert metrics.mean_acceptance_length > WITH_OWN_ROWS[drafter]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("drafter", ["none", "oracle tree", "draft itself"])
def test_control_one_committed_row_is_noticed(drafter: str, runner: str) -> None:
    """The same poison one row further up must end every request that decodes on."""
    mix = [r for r in request_mix() if r.params.n == 1 and r.params.max_tokens == 24]
    engine = poisoned_llm(DRAFTERS[runner][drafter](references(plain_mix(runner))), runner, start=-1)
    got = engine.generate([r.prompt for r in mix], [r.params for r in mix])
    # A pass that reaches the end in one go never meets the poisoned row.
    assert {o.outputs[0].finish_reason for o in got if o.metrics.steps > 1} == {"error"}
