"""Which consecutive rows of a common store each slot has. Knows numbers alone; its owner copies what has to move.

A slot's rows grow with its sequence: where they are followed by free ones they are extended, else they move to a larger
gap, and where there is none all rows are packed anew. Whoever grows gets half as much again where that is free, so that
a sequence of n rows is copied about log(n) times.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class Move(NamedTuple):
    """Rows that are to be copied elsewhere, first of all moves or after those before it; may overlap its own target."""

    source: int
    target: int
    num_rows: int


class _Rows(NamedTuple):
    """Rows of a slot: `size` of them are its own, of which the first `used` may hold something."""

    start: int
    size: int
    used: int

    @property
    def end(self) -> int:
        """The row after the last one."""
        return self.start + self.size


class RowPool:
    """Consecutive rows for each of some slots.

    Attributes:
        num_rows: Of the store, a multiple of `granule`.
        granule: Every slot's rows begin at a multiple of it, and are a multiple of it.
    """

    def __init__(self, num_slots: int, num_rows: int, *, granule: int, most: int) -> None:
        """No slot has any rows.

        Args:
            num_slots: Slots.
            num_rows: Of the store; rounded down to a multiple of `granule`.
            granule: See the class.
            most: Rows of a slot that are of use.
        """
        self.granule, self.num_rows = granule, num_rows // granule * granule
        self._most = self._rounded(most)
        self._rows: list[_Rows | None] = [None] * num_slots

    def start(self, slot: int) -> int:
        """The first row of a slot, 0 where it has none."""
        rows = self._rows[slot]
        return 0 if rows is None else rows.start

    def size(self, slot: int) -> int:
        """Rows of a slot."""
        rows = self._rows[slot]
        return 0 if rows is None else rows.size

    def fits(self, counts: Iterable[int]) -> bool:
        """Whether slots could have so many rows each, if no others had any."""
        return sum(map(self._rounded, counts)) <= self.num_rows

    def release(self, slot: int) -> None:
        """A slot has no rows any more."""
        self._rows[slot] = None

    def trim(self, slot: int, count: int) -> None:
        """A slot keeps at most its first `count` rows."""
        rows, wanted = self._rows[slot], self._rounded(count)
        if rows is not None and wanted < rows.size:
            self._rows[slot] = _Rows(rows.start, wanted, wanted) if wanted else None

    def reserve(self, slot: int, count: int) -> list[Move] | None:
        """Gives a slot at least `count` rows, of which the first ones are those it had.

        Args:
            slot: Which.
            count: At most `num_rows`.

        Returns:
            What has to be copied, in order; None where other slots have too many, and nothing has changed.
        """
        wanted = self._rounded(count)
        rows = self._rows[slot]
        old = rows or _Rows(0, 0, 0)
        if wanted <= old.size:
            self._rows[slot] = _Rows(old.start, old.size, wanted)
            return []
        roomy = max(wanted, min(self._rounded(wanted + wanted // 2), self._most))
        if rows is not None and (free := self._free_after(rows)) >= wanted - old.size:
            self._rows[slot] = _Rows(old.start, min(old.size + free, roomy), wanted)
            return []
        for least in (roomy, wanted):
            for start, end in self._gaps():
                if end - start >= least:
                    self._rows[slot] = _Rows(start, least, wanted)
                    return [Move(old.start, start, old.used)] if old.used else []
        return self._packed(slot, wanted)

    def _packed(self, slot: int, wanted: int) -> list[Move] | None:
        """Packs the rows in use of all slots, `wanted` of one of them, and shares what is left among them."""
        order = sorted((rows.start, each) for each, rows in enumerate(self._rows) if rows is not None and each != slot)
        own = self._rows[slot]
        order.append((self.num_rows if own is None else own.start, slot))
        order.sort()
        used = {each: wanted if each == slot else self._used(each) for _, each in order}
        free = self.num_rows - sum(used.values())
        if free < 0:
            return None
        more = free // len(order) // self.granule * self.granule
        moves, start, packed = list[Move](), 0, dict[int, _Rows]()
        for _, each in order:
            packed[each] = _Rows(start, max(used[each], min(used[each] + more, self._most)), used[each])
            old = self._rows[each]
            if old is not None and old.used and old.start != start:
                moves.append(Move(old.start, start, old.used))
            start = packed[each].end
        for each, rows in packed.items():
            self._rows[each] = rows
        # The order of the slots stays: rows that go down never meet those that go up.
        down = [move for move in moves if move.target < move.source]
        return down + [move for move in reversed(moves) if move.target > move.source]

    def _gaps(self) -> list[tuple[int, int]]:
        """Where rows that no slot has begin and end."""
        taken = sorted((rows.start, rows.end) for rows in self._rows if rows is not None)
        bounds = [(0, 0), *taken, (self.num_rows, self.num_rows)]
        return [(before[1], after[0]) for before, after in pairwise(bounds) if after[0] > before[1]]

    def _free_after(self, rows: _Rows) -> int:
        """Free rows behind those of a slot."""
        return next((end - start for start, end in self._gaps() if start == rows.end), 0)

    def _used(self, slot: int) -> int:
        """Rows of a slot that may hold something."""
        rows = self._rows[slot]
        return 0 if rows is None else rows.used

    def _rounded(self, count: int) -> int:
        """Up to a multiple of the granule."""
        return -(-count // self.granule) * self.granule
