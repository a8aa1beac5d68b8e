"""Rows of a common store: nobody's overlap, what a slot had stays its own, and room that is there is found."""

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from foretoken.decoder.slot_cache import Move, RowPool

SLOTS, GRANULE, MOST = 5, 4, 60
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["reserve", "grow", "trim", "release"]), st.integers(0, SLOTS - 1), st.integers(1, MOST)),
    max_size=60,
)


class Store:
    """Rows with what was written to them, beside what every slot should hold."""

    def __init__(self, num_rows: int) -> None:
        self.pool = RowPool(SLOTS, num_rows, granule=GRANULE, most=MOST)
        self.rows: list[tuple[int, int] | None] = [None] * self.pool.num_rows
        self.held: list[list[tuple[int, int]]] = [[] for _ in range(SLOTS)]
        self.asked = [0] * SLOTS
        self.written = 0

    def reserve(self, slot: int, count: int) -> bool:
        """Reserves, copies, and writes every row that is there."""
        others = [asked for each, asked in enumerate(self.asked) if each != slot]
        moves = self.pool.reserve(slot, count)
        assert (moves is not None) == self.pool.fits([*others, count])
        if moves is None:
            return False
        for source, target, length in moves:
            assert 0 <= min(source, target) <= max(source, target) <= len(self.rows) - length
            self.rows[target : target + length] = self.rows[source : source + length]
        self.asked[slot] = count
        self.check()
        for at in range(len(self.held[slot]), count):
            self.written += 1
            self.held[slot].append((slot, self.written))
            self.rows[self.pool.first_row(slot) + at] = self.held[slot][at]
        return True

    def check(self) -> None:
        """Whether every slot has its rows, and no other slot's."""
        spans = sorted((self.pool.first_row(s), self.pool.first_row(s) + self.pool.size(s)) for s in range(SLOTS))
        spans = [span for span in spans if span[0] < span[1]]
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        for slot in range(SLOTS):
            start, size = self.pool.first_row(slot), self.pool.size(slot)
            assert start % GRANULE == 0
            assert size % GRANULE == 0
            assert self.asked[slot] <= size
            assert start + size <= self.pool.num_rows
            assert self.rows[start : start + len(self.held[slot])] == self.held[slot]


@settings(max_examples=300, deadline=None)
@given(st.integers(MOST, 200), ACTIONS)
@example(60, [("reserve", 1, 37), ("trim", 1, 53), ("reserve", 0, 1), ("reserve", 2, 1)])
def test_slots_keep_what_they_hold(num_rows: int, actions: list[tuple[str, int, int]]) -> None:
    store = Store(num_rows)
    for action, slot, count in actions:
        if action == "release":
            store.pool.trim(slot, 0)
            store.held[slot], store.asked[slot] = [], 0
        elif action == "trim":
            store.pool.trim(slot, count)
            store.asked[slot] = min(store.asked[slot], count)
            store.held[slot] = store.held[slot][:count]
        else:
            wanted = count if action == "reserve" else min(store.asked[slot] + count % 7, MOST)
            store.held[slot] = store.held[slot][:wanted]
            store.reserve(slot, wanted)
        store.check()


def test_growing_alone_moves_nothing() -> None:
    pool = RowPool(2, 64, granule=4, most=64)
    assert all(pool.reserve(1, count) == [] for count in range(1, 65))
    assert pool.reserve(0, 1) is None
    pool.trim(1, 60)
    assert pool.reserve(0, 1) == []


def test_half_as_much_again_is_taken_where_it_is_free() -> None:
    pool = RowPool(2, 1024, granule=4, most=600)
    moves = 0
    pool.reserve(0, 4)
    for count in range(1, 401):
        moves += bool(pool.reserve(1, count)) + bool(pool.reserve(0, min(count, 400)))
    assert moves < 16  # 100 granules each
    assert pool.size(0) <= 600


def test_packing_finds_scattered_rows() -> None:
    pool = RowPool(4, 32, granule=4, most=32)
    for slot in range(4):
        assert pool.reserve(slot, 8) == []
        pool.trim(slot, 8)
    pool.trim(0, 0)
    pool.trim(2, 0)
    assert pool.reserve(3, 16) == [Move(8, 0, 8), Move(24, 12, 8)]
    assert (pool.first_row(1), pool.size(1), pool.first_row(3), pool.size(3)) == (0, 12, 12, 20)
    assert pool.reserve(1, 20) is None
    assert pool.reserve(1, 16) == [Move(12, 16, 16)]


@pytest.mark.parametrize(("counts", "fits"), [([5, 5, 4], True), ([8, 8, 8, 1], False), ([], True), ([24], True)])
def test_what_fits_is_counted_in_granules(counts: list[int], fits: bool) -> None:
    assert RowPool(4, 26, granule=4, most=24).fits(counts) is fits
