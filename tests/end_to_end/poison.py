"""NaN in all rows that were never committed, after every commit: whatever reads one of them changes what is written.

That holds for the target's cache, for that of a head's block, and for a draft model's own, whose drafted rows stay
alive until the next proposal decides which of them were accepted.
"""

from __future__ import annotations

from typing import Any

from foretoken import LLM
from foretoken.core.token_tree import TokenTree
from foretoken.drafters.base import DraftContext, Prefix
from foretoken.drafters.draft_model import DraftModelDrafter
from foretoken.drafters.head_drafter import HeadDrafter
from foretoken.drafters.head_features import WaitingFeatures
from foretoken.drafters.text_draft import TextDraftDrafter
from foretoken.engine.sequence import Sequence, slot_of


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

    def poisoned_begin(sequence: Sequence, prefix: Prefix | None, is_first: bool) -> None:
        begin(sequence, prefix, is_first)
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


def poison_caches(engine: LLM, **more: Any) -> None:
    """Poisons every cache of an engine, see `poison_target`."""
    for guard in engine._engine._drafting._guards:
        drafter = guard._drafter
        if isinstance(drafter, DraftModelDrafter | TextDraftDrafter):
            poison_draft_model(drafter)
        elif isinstance(drafter, HeadDrafter) and isinstance(drafter._features, WaitingFeatures):
            poison_block(drafter, drafter._features)
    poison_target(engine, **more)
