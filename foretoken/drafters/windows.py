"""Which KV rows a drafter reads: all of a text, or a small slot with listed rows and those of recent positions.

Keys keep their true positions. When a slot is full, its rows are listed anew: from a store of whole texts, or without
one by moving the recent rows behind the first ones.

Sources: StreamingLLM (arXiv 2309.17453) for sinks; SpecExtend for retrieval by the target's attention: chunks of 32
positions, the best 32 of them, chosen anew every eight verifications.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import torch
from pydantic import Field, model_validator

from foretoken.core.errors import ConfigError
from foretoken.drafters.base import DrafterOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from foretoken.decoder.slot_cache import SlotCache
    from foretoken.drafters.base import Committed, TargetReads

_LEAST_ROOM, _MOST_ROOM = 32, 512  # rows behind a full window, before its rows move; a choice: a part of a prompt
_CHUNK, _BEST_CHUNKS, _EVERY = 32, 32, 8  # SpecExtend


class WindowOptions(DrafterOptions):
    """Options of drafters with a KV cache of their own.

    Attributes:
        draft_window_size: Last positions that drafts attend to; None for the whole text. SGLang's
            `speculative_draft_window_size`.
        draft_sink_size: First positions that drafts attend to beside a window.
        draft_retrieval: Whether drafts also attend to the 32 chunks of 32 positions that the target attends to most.
            Keeps all rows of the drafter beside those that it reads.
    """

    draft_window_size: int | None = Field(default=None, ge=1, le=1 << 20)
    draft_sink_size: int = Field(default=4, ge=0, le=1024)
    draft_retrieval: bool = False

    @model_validator(mode="after")
    def _retrieves_beside_a_window(self) -> Self:
        if self.draft_retrieval and self.draft_window_size is None:
            raise ConfigError(
                "draft_retrieval chooses rows beside a window, and draft_window_size is missing. Set it, for example "
                "to 256, or leave draft_retrieval out."
            )
        return self

    @property
    def partial_rows(self) -> int | None:
        """Rows of a slot without those of drafted nodes; None for the whole text."""
        window = self.draft_window_size
        if window is None:
            return None
        return self.draft_sink_size + self.draft_retrieval * _CHUNK * _BEST_CHUNKS + window + _room(window)

    def with_attention(self, reads: TargetReads) -> TargetReads:
        """Returns what a drafter reads of the target, with what retrieval needs."""
        if not self.draft_retrieval:
            return reads
        return replace(reads, attention_tokens=1, attention_every=_EVERY)


def _room(window: int) -> int:
    return min(max(window, _LEAST_ROOM), _MOST_ROOM)


@dataclass(slots=True)
class _Slot:
    """The rows of one text: `num_listed` listed ones, then those of the positions from `first` on.

    Attributes:
        listed: (n,), (L, n) or (L, Hk, n) int64, ascending: positions to list; None for the first ones.
        end: Positions from here on are newer than the list; None to list what lies before the window.
        is_stale: Whether the slot does not hold this list yet.
        shared: Positions before this one are equal in the slot and in the store, or not in the slot.
    """

    listed: Tensor | None = None
    end: int | None = None
    is_stale: bool = False
    num_listed: int = 0
    first: int = 0
    shared: int = 0


@dataclass(slots=True)
class PartialRows:
    """Slots with a part of the KV rows of longer texts; without a window row i holds position i.

    Attributes:
        cache: Of the drafter's passes.
        most_fed: Rows that stay free for the nodes of a draft.
        sinks: First positions to list.
        window: Returns the recent positions to keep of a text by its length.
        store: Rows of whole texts; None lists `sinks` alone.
        is_copy: Whether rows come from the store. Otherwise the drafter's passes write them, and the store copies them.
        most_at_once: Positions of a text that fit into a slot at once.
        most: Returns the most rows to read of a text by its length; None for all that a slot holds.
    """

    cache: SlotCache
    most_fed: int
    sinks: int = 0
    window: Callable[[int], int] | None = None
    store: SlotCache | None = None
    is_copy: bool = False
    most_at_once: int = _MOST_ROOM
    most: Callable[[int], int] | None = None
    _slots: list[_Slot] = field(init=False)

    def __post_init__(self) -> None:
        self._slots = [_Slot() for _ in range(self.cache.num_slots)]

    @classmethod
    def own(
        cls, cache: SlotCache, most_fed: int, options: WindowOptions | None = None, context_len: int = 0
    ) -> PartialRows:
        """Returns the rows that a drafter's own passes write; `options`: None for whole texts.

        `context_len`: the target's, for retrieval. Raises `ConfigError` if there is no memory for the rows that it
        keeps.
        """
        if options is None or options.draft_window_size is None:
            return cls(cache, most_fed)
        size, sinks, store = options.draft_window_size, options.draft_sink_size, None
        if options.draft_retrieval:
            rows = min(cache.num_positions, context_len + 1)
            if not cache.affords(rows):
                raise ConfigError(
                    f"draft_retrieval keeps {rows} KV rows of the drafter for each of {cache.num_slots} sequences, and "
                    "the free memory does not hold them. Lower max_model_len or max_num_seqs, or leave it out."
                )
            store = cache.with_capacity(rows)
        return cls(cache, most_fed, sinks, lambda _: size, store, most_at_once=_room(size))

    def begin(self, slot: int, source: int | None = None, length: int = 0) -> None:
        """Starts a text, with the first `length` positions of another text that `reusable` allowed."""
        if source is None or not length:
            self._slots[slot] = _Slot(is_stale=self.is_copy)
        elif source != slot:
            theirs = self._slots[source]
            self._slots[slot] = replace(theirs, shared=min(theirs.shared, length))
            self.cache.copy_rows(source, slot, self.row(source, length))
            if self.store is not None:
                self.store.copy_rows(source, slot, min(theirs.shared, length))
        elif self._slots[slot].shared > length:
            self._slots[slot].shared = length

    @property
    def room(self) -> int:
        """Rows of a slot for its text."""
        return self.cache.capacity - self.most_fed

    def forget(self) -> None:
        """Lists the rows of all slots anew before their next use."""
        for state in self._slots:
            state.is_stale = True

    def reusable(self, slot: int, length: int) -> int:
        """Returns how many of the first positions of a slot another text can take: all of `length`, or 0."""
        first = self._slots[slot].first
        least = first + self.window(length) // 2 if first and self.window is not None else 0
        return length if length >= least else 0

    def row(self, slot: int, position: int) -> int:
        """Returns the row of a position that is not listed."""
        state = self._slots[slot]
        return state.num_listed + position - state.first

    def make_room(self, slot: int, length: int, count: int = 0) -> int:
        """Makes room for `count` positions behind the first `length`; returns the row of the first of them.

        At most `most_at_once` positions fit. Rows of drafted nodes are lost.
        """
        state = self._slots[slot]
        if self.window is not None and (
            self.row(slot, length) + count > self._room_for(length)
            or (state.is_stale and (self.is_copy or length > self.window(length)))
        ):
            self._list(slot, state, length, self.window(length))
        if self.is_copy and state.shared < length:
            self._copy(slot, state, length)
        return self.row(slot, length)

    def _room_for(self, length: int) -> int:
        return self.room if self.most is None else min(self.room, self.most(length))

    def choose(self, slot: int, listed: Tensor, end: int | None = None) -> None:
        """Takes the positions to list from now on, and where the newer ones begin; see `_Slot`."""
        state = self._slots[slot]
        state.listed, state.end, state.is_stale = listed, end, True

    def retrieve(self, committed: Committed) -> None:
        """Chooses chunks of positions by the target's attention in its last block, where there is any."""
        if self.store is None or committed.attention is None:  # the weights may be for another drafter
            return
        for slot, weights in zip(committed.slots, committed.attention, strict=True):
            if weights is None or weights.shape[2] < _CHUNK:
                continue
            by_row = weights[-1].mean(0)
            chunks = by_row[: len(by_row) // _CHUNK * _CHUNK].view(-1, _CHUNK).mean(1)
            best = chunks.topk(min(_BEST_CHUNKS, len(chunks))).indices.sort().values
            within = torch.arange(_CHUNK, device=best.device)
            self.choose(slot, (_CHUNK * best.unsqueeze(1) + within).flatten())

    def _list(self, slot: int, state: _Slot, length: int, window: int) -> None:
        """Lists rows behind the first `length` positions, and the recent rows behind these."""
        cache, store, row = self.cache, self.store, self.row(slot, length)
        sinks = min(self.sinks, length)
        first = max(length - window, sinks)
        if store is None:
            cache.move_rows(slot, range(row - (length - first), row), sinks)
            state.num_listed, state.first = sinks, first
            return
        start = max(state.shared, state.first)
        if not self.is_copy and start < length:
            store.copy_from(cache, (slot, slot), range(self.row(slot, start), row), start)
        listed = torch.arange(sinks, device=cache.keys[0].device)
        if state.listed is not None and state.end is not None:
            listed = state.listed
            first = max(
                state.end, length - (self._room_for(length) - listed.shape[-1]) // 2
            )  # half is left for rows to come
        elif state.listed is not None:
            listed = torch.cat([listed, state.listed[(state.listed >= sinks) & (state.listed < first)]])
        rows = listed if listed.dim() > 1 else listed.expand(len(cache.keys), -1)
        cache.gather_from(store, (slot, slot), rows, 0)
        state.is_stale, state.num_listed = False, rows.shape[-1]
        state.first = state.shared = first
        self._copy(slot, state, length)

    def _copy(self, slot: int, state: _Slot, length: int) -> None:
        """Copies the rows of positions from `shared` to `length` from the store."""
        assert self.store is not None, "copies come from it"
        new = range(state.shared, length)
        self.cache.copy_from(self.store, (slot, slot), new, self.row(slot, new.start))
        state.shared = length
