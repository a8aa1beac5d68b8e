"""States inside the texts of slots, at which other texts can begin: within a number of bytes, the last used ones.

Keys and values are known of every position, a recurrent state is not: it has absorbed the whole text. So the states at
some positions are kept. They are never changed: slots share them, and what several of them lie in counts once.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

SPACING = 1000  # tokens, at least; a choice: two chunks of 512 prompt tokens, which are read again in about a second


class State(Protocol):
    """The states of all recurrent layers behind some tokens; never changed."""

    def tensors(self) -> Iterable[Tensor]:
        """Returns the memory that it is in, perhaps with other states."""
        ...


class _Kept(NamedTuple):
    """A state, and whether it goes only for want of memory."""

    state: State
    is_marked: bool


class Snapshots:
    """States by slot and number of tokens; the one that was used least recently goes first.

    Attributes:
        most_bytes: Bound on the bytes of all states, which counts from the next one on; None for no bound.
        num_bytes: Bytes of all states.
    """

    def __init__(self, num_slots: int, most_bytes: int | None = None) -> None:
        """Begins without states."""
        self.most_bytes, self.num_bytes = most_bytes, 0
        self._kept: dict[tuple[int, int], _Kept] = {}  # the least recently used first
        self._lengths: list[list[int]] = [[] for _ in range(num_slots)]  # ascending
        self._users: Counter[int] = Counter()  # of a tensor, by `id`

    def keep(self, slot: int, length: int, state: State, *, is_marked: bool = True) -> None:
        """Keeps the state behind `length` tokens of a slot's text, and drops others for its bytes."""
        is_marked |= self.drop(slot, length)
        self._kept[slot, length] = _Kept(state, is_marked)
        insort(self._lengths[slot], length)
        for tensor in state.tensors():
            self._users[id(tensor)] += 1
            self.num_bytes += tensor.nbytes if self._users[id(tensor)] == 1 else 0
        while self.most_bytes is not None and self.num_bytes > self.most_bytes:
            self.drop(*next(iter(self._kept)))

    def keep_end(self, slot: int, length: int, state: State) -> None:
        """Keeps the state at the end of what was read of a prompt; the end before only `SPACING` behind another one."""
        lengths = self._lengths[slot]
        at = bisect_right(lengths, length)
        if at and lengths[at - 1] != length and not self._kept[slot, lengths[at - 1]].is_marked:
            before = lengths[at - 2] if at > 1 else 0
            if lengths[at - 1] - before < SPACING:
                self.drop(slot, lengths[at - 1])
        self.keep(slot, length, state, is_marked=False)

    def find(self, slot: int, length: int) -> State | None:
        """Returns the state behind `length` tokens of a slot's text, which is thereby used; None if it is not kept."""
        kept = self._kept.pop((slot, length), None)
        if kept is None:
            return None
        self._kept[slot, length] = kept
        return kept.state

    def longest(self, slot: int, length: int) -> int:
        """Returns the greatest number of tokens, at most `length`, whose state is kept; 0 if none is."""
        lengths = self._lengths[slot]
        at = bisect_right(lengths, length)
        return lengths[at - 1] if at else 0

    def copy(self, source: int, slot: int, length: int) -> None:
        """Gives a slot the states of another one behind at most `length` tokens, in place of its own."""
        self.cut(slot, 0)
        for each in [each for each in self._lengths[source] if each <= length]:
            if (kept := self._kept.get((source, each))) is not None:
                self.keep(slot, each, kept.state, is_marked=kept.is_marked)

    def cut(self, slot: int, length: int) -> None:
        """Drops the states of a slot behind more than `length` tokens."""
        lengths = self._lengths[slot]
        while lengths and lengths[-1] > length:
            self.drop(slot, lengths[-1])

    def drop(self, slot: int, length: int) -> bool:
        """Drops a state, if it is kept; returns whether it was marked."""
        kept = self._kept.pop((slot, length), None)
        if kept is None:
            return False
        self._lengths[slot].remove(length)
        for tensor in kept.state.tensors():
            self._users[id(tensor)] -= 1
            if not self._users[id(tensor)]:
                del self._users[id(tensor)]
                self.num_bytes -= tensor.nbytes
        return kept.is_marked
