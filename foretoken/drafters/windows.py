"""Which rows of its own KV cache a drafter reads: all of a text, or sinks, rows that were retrieved, and a window.

With a window a slot holds a few listed rows, then the rows of consecutive recent positions. Keys keep their true
positions. When a slot is full, the window's rows move behind the listed ones.

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


@dataclass(slots=True)
class _Slot:
    """The rows of one text: `listed` positions, then those from `first` on.

    `chosen`: positions to retrieve at the next move; None if nothing changed. `saved`: positions in the store.
    """

    listed: list[int] = field(default_factory=list)
    first: int = 0
    chosen: list[int] | None = None
    saved: int = 0


def _room(window: int) -> int:
    return min(max(window, _LEAST_ROOM), _MOST_ROOM)


class OwnRows:
    """Places of a drafter's own KV rows: row i holds position i, or slots hold a part of their texts.

    Attributes:
        most_at_once: Positions of a text that fit into a slot at once.
    """

    def __init__(self, cache: SlotCache, options: WindowOptions | None, num_slots: int, most_fed: int) -> None:
        """Takes the cache of the drafter's passes; `most_fed` rows stay free for the nodes of a draft.

        `options`: None for the rows of whole texts.
        """
        self._cache, self._room = cache, cache.capacity - most_fed
        self._window = None if options is None else options.draft_window_size
        self.most_at_once = _MOST_ROOM if self._window is None else _room(self._window)
        self._sinks = 0 if options is None else options.draft_sink_size
        self._slots = [_Slot() for _ in range(num_slots)]
        retrieves = options is not None and options.draft_retrieval
        self._store = cache.with_capacity(cache.num_positions) if retrieves else None

    def begin(self, slot: int, source: int | None = None, length: int = 0) -> None:
        """Starts a text, with the first `length` positions of another text that `reusable` allowed."""
        if source is None or not length:
            self._slots[slot] = _Slot()
        elif source != slot:
            theirs = self._slots[source]
            self._slots[slot] = _Slot(list(theirs.listed), theirs.first, theirs.chosen, min(theirs.saved, length))
            self._cache.copy_rows(source, slot, self.row(source, length))
            if self._store is not None:
                self._store.copy_rows(source, slot, min(theirs.saved, length))
        elif self._slots[slot].saved > length:
            self._slots[slot].saved = length

    def reusable(self, slot: int, length: int) -> int:
        """Returns how many of the first positions of a slot another text can take: all of `length`, or 0."""
        state = self._slots[slot]
        return length if not state.first or length >= state.first + (self._window or 0) // 2 else 0

    def row(self, slot: int, position: int) -> int:
        """Returns the row of a position that is not listed."""
        state = self._slots[slot]
        return len(state.listed) + position - state.first

    def make_room(self, slot: int, length: int, count: int) -> int:
        """Makes room for `count` positions behind the first `length`; returns the row of the first of them.

        At most `most_at_once` positions fit. Rows of drafted nodes are lost.
        """
        state = self._slots[slot]
        if self._window is not None and (
            self.row(slot, length) + count > self._room or (state.chosen is not None and length > self._window)
        ):
            self._move(slot, state, length)
        return self.row(slot, length)

    def choose(self, committed: Committed) -> None:
        """Chooses the positions to retrieve by the target's attention in its last block, where there is any."""
        if self._store is None or committed.attention is None:  # the weights may be for another drafter
            return
        for slot, weights in zip(committed.slots, committed.attention, strict=True):
            if weights is None or weights.shape[2] < _CHUNK:
                continue
            by_row = weights[-1].mean(0)
            chunks = by_row[: len(by_row) // _CHUNK * _CHUNK].view(-1, _CHUNK).mean(1)
            best = chunks.topk(min(_BEST_CHUNKS, len(chunks))).indices.tolist()
            self._slots[slot].chosen = [_CHUNK * chunk + i for chunk in sorted(best) for i in range(_CHUNK)]

    def _move(self, slot: int, state: _Slot, length: int) -> None:
        assert self._window is not None, "there is a window"
        cache, store, row = self._cache, self._store, self.row(slot, length)
        first = max(length - self._window, min(self._sinks, length))
        if store is None:
            sinks = min(self._sinks, first)
            cache.move_rows(slot, range(row - (length - first), row), sinks)
            state.listed, state.first = list(range(sinks)), first
            return
        start = max(state.saved, state.first)
        if start < length:
            store.copy_from(cache, (slot, slot), range(self.row(slot, start), row), start)
        state.saved = length
        known = state.listed if state.chosen is None else state.chosen
        state.listed = sorted({*range(min(self._sinks, first)), *(each for each in known if each < first)})
        state.first, state.chosen = first, None
        listed = torch.tensor(state.listed, dtype=torch.int64, device=cache.keys[0].device)
        cache.gather_from(store, (slot, slot), listed.expand(len(cache.keys), -1), 0)
        cache.copy_from(store, (slot, slot), range(first, length), len(state.listed))
