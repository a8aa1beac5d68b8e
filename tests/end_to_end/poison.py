"""NaN in all rows that were never committed, after every commit: whatever reads one of them changes what is written.

That holds for the target's cache, for that of a head's block, and for a draft model's own, whose drafted rows stay
alive until the next proposal decides which of them were accepted. Of recurrent layers it holds for states behind dead
tokens, and for the stored inputs of rejected tokens.
"""

import copy
from typing import Any

import torch

from foretoken import LLM
from foretoken.core.token_tree import TokenTree
from foretoken.decoder.native_states import StateBlock
from foretoken.decoder.recurrent_states import LayerState, NodeRow, PathState, RecurrentStates, _At, _LastPass
from foretoken.decoder.torch_mixers import TorchBlock
from foretoken.drafters.base import DraftContext, Prefix
from foretoken.drafters.draft_model import DraftModelDrafter, TextDraftDrafter
from foretoken.drafters.head_drafter import HeadDrafter
from foretoken.drafters.head_features import WaitingFeatures
from foretoken.engine.sequence import Sequence, slot_of
from foretoken.models.level_states import LayerStates


def poison_target(engine: LLM, *, start: int = 0) -> None:
    """Overwrites all rows of all slots that are neither committed nor kept, after every iteration and at every reuse.

    Args:
        engine: Changed.
        start: Moves the first row.
    """
    loop, scheduler = engine._engine, engine._engine._scheduler
    step, begin, states = loop.step, scheduler._begin, engine.target.cache.states

    def poison(committed: dict[int, int]) -> None:
        for slot, length in committed.items():
            engine.target.cache.poison(slot, max(0, length + start))
            if states is not None:
                poison_states(states, slot, max(0, length + start))
        if states is not None and engine.target.name != "generic":
            with torch.inference_mode():
                poison_inputs(states, getattr(engine.target.decoder, "_state_memory", ()))

    def poisoned_step() -> Any:
        changed = step()
        poison({held.slot: held.length for held in scheduler._slots._free})
        poison({slot_of(sequence): sequence.num_cached for sequence in scheduler.running})
        return changed

    def poisoned_begin(sequence: Sequence, prefix: Prefix | None, is_first: bool) -> None:
        begin(sequence, prefix, is_first)
        poison({slot_of(sequence): sequence.num_cached})

    loop.step, scheduler._begin = poisoned_step, poisoned_begin


def poison_states(states: RecurrentStates, slot: int, start: int) -> None:
    """NaN in the place of a slot's states behind more than `start` tokens."""

    def dead(at: _At) -> _At:
        return at if at.length <= start else at._replace(state=_nan(at.state))

    last, snapshots, before = states._last[slot], states.snapshots, states._before[slot]
    states._committed[slot], states._before[slot] = dead(states._committed[slot]), before and dead(before)
    for length in [each for each in snapshots._lengths[slot] if each > start]:
        snapshots.keep(slot, length, _nan(snapshots.find(slot, length)))
    if last is not None and last.length + len(last.parents) > start and not isinstance(last.states, _PartlyDead):
        states._last[slot] = last._replace(states=_PartlyDead(last, start))


def poison_inputs(states: RecurrentStates, memories: Any) -> None:
    """NaN in the rows of blocks that no state needs, and in the memory of native kernels that nobody uses."""
    alive: dict[int, tuple[StateBlock | TorchBlock, set[int]]] = {}
    known = [*states._committed, *filter(None, states._before), *states.snapshots._kept.values()]
    kept = [at.state for at in known]
    for last in states._last:
        if last is not None:
            nodes = range(last.first, last.first + len(last.parents))
            kept += [last.states.after(node) for node in nodes if last.states.is_kept(node)]
    for state in filter(None, kept):
        for block, place in [*([(state.block, -1)] if state.block else []), *state.rows]:
            alive.setdefault(id(block), (block, set()))[1].add(place)
    for block, places in alive.values():
        rows = _rows(block)
        for place in set(range(len(rows))) - places:
            rows[place] = torch.nan
    for memory in (memory for each in memories for memory in each._idle):
        memory.fill_(torch.nan)


def _rows(block: StateBlock | TorchBlock) -> torch.Tensor:
    """Returns the rows behind the window, of all layers."""
    if isinstance(block, TorchBlock):
        return block.rows[block.window :]
    rows, width = block.tensor[(block.first_row - block.tensor.data_ptr()) // 4 :], block._row_bytes // 4
    return rows[: len(rows) // width * width].view(-1, width)


class _PartlyDead:
    """The states of a slot's last pass; those behind more than `start` tokens are NaN."""

    def __init__(self, last: _LastPass, start: int) -> None:
        self._last, self._start, self.starts = last, start, last.states.starts

    def is_kept(self, node: int) -> bool:
        return self._last.states.is_kept(node)

    def after(self, node: int) -> Any:
        state, length, at = self._last.states.after(node), self._last.length, node - self._last.first
        while at >= 0:
            at, length = self._last.parents[at], length + 1
        return state if length <= self._start else _nan(state)


def _nan(state: Any) -> Any:
    if isinstance(state, PathState):
        rows = [NodeRow(_nan_block(row.block), row.place) for row in state.rows]
        return PathState(None if state.block is None else _nan_block(state.block), rows)
    if state is None:
        return None
    return LayerStates({layer: LayerState(*map(_filled, each)) for layer, each in state.items()})


def _nan_block(block: Any) -> Any:
    if isinstance(block, TorchBlock):
        return TorchBlock(_filled(block.state), _filled(block.rows), block.window)
    dead = copy.copy(block)
    dead.tensor = torch.full_like(block.tensor, torch.nan)
    dead.first_row += dead.tensor.data_ptr() - block.tensor.data_ptr()
    return dead


def _filled(part: Any) -> Any:
    return None if part is None else torch.full_like(part, torch.nan)


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
