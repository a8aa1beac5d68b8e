"""Moving, writing and poisoning rows against a numpy model; nothing is allocated after the start."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import threads

from foretoken.attention.layout import AttentionLayout
from foretoken.core.passes import Pass
from foretoken.decoder import slot_cache
from foretoken.decoder.library import library_or_none
from foretoken.decoder.slot_cache import GRANULE, LayerShape, SlotCache, affordable_rows, gather_rows

SLOTS, CAPACITY = 3, 10
# Layers of two sizes whose keys and values differ, and a square one between them that shares the first one's key size.
SHAPES = [LayerShape(2, 3, 5), LayerShape(2, 3, 3), LayerShape(1, 4, 2), LayerShape(2, 3, 5)]


def filled() -> SlotCache:
    """A cache in which every number is another one."""
    cache = SlotCache(SHAPES, num_slots=SLOTS, capacity=CAPACITY, dtype=torch.float64, device=torch.device("cpu"))
    count = 0
    for part in (*cache.keys, *cache.values):
        part.copy_(torch.arange(count, count + part.numel(), dtype=torch.float64).view_as(part))
        count += part.numel()
    return cache


def snapshot(cache: SlotCache) -> list[np.ndarray]:
    return [part.numpy().copy() for part in (*cache.keys, *cache.values)]


def assert_equal(cache: SlotCache, expected: list[np.ndarray]) -> None:
    for ours, theirs in zip(snapshot(cache), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_shapes_and_sharing() -> None:
    cache = filled()
    for shape, keys, values in zip(SHAPES, cache.keys, cache.values, strict=True):
        assert keys.shape == (SLOTS, shape.num_heads, CAPACITY, shape.key_width)
        assert values.shape == (SLOTS, shape.num_heads, CAPACITY, shape.value_width)
    # Every number of `filled` is there once: no two layers lie on the same memory.
    everything = np.concatenate([part.ravel() for part in snapshot(cache)])
    assert len(np.unique(everything)) == everything.size
    pointers = {part.untyped_storage().data_ptr() for part in (*cache.keys, *cache.values)}
    assert len(pointers) == len({(2, 3), (2, 5), (1, 4), (1, 2)})  # one store a size


@given(data=st.data())
def test_rows_move_like_a_copy_of_the_rows(data: st.DataObject) -> None:
    """Any increasing rows to any place at or before them: how accepted paths move, overlaps included."""
    slot, start = data.draw(st.integers(0, SLOTS - 1)), data.draw(st.integers(0, CAPACITY - 1))
    source = sorted(data.draw(st.sets(st.integers(start, CAPACITY - 1), max_size=CAPACITY - start)))
    cache = filled()
    expected = snapshot(cache)
    for part in expected:
        rows = part[slot][:, source].copy()
        part[slot][:, start : start + len(source)] = rows
    cache.move_rows(slot, source, start)
    assert_equal(cache, expected)


@given(data=st.data())
def test_rows_move_anywhere(data: st.DataObject) -> None:
    """Rows in any order, twice even, to any place, in front or behind."""
    count = data.draw(st.integers(0, CAPACITY))
    start = data.draw(st.integers(0, CAPACITY - count))
    source = data.draw(st.lists(st.integers(0, CAPACITY - 1), min_size=count, max_size=count))
    cache = filled()
    expected = snapshot(cache)
    for part in expected:
        part[1][:, start : start + count] = part[1][:, source].copy()
    cache.move_rows(1, source, start)
    assert_equal(cache, expected)


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("layer", range(len(SHAPES)))
def test_writing_changes_its_own_rows_only(layer: int, *, is_captured: bool) -> None:
    cache, width = filled(), 3
    expected = snapshot(cache)
    shape = SHAPES[layer]
    key = -1 - torch.arange(2 * shape.num_heads * width * shape.key_width, dtype=torch.float64)
    value = -1000 - torch.arange(2 * shape.num_heads * width * shape.value_width, dtype=torch.float64)
    key = key.view(2 * width, shape.num_heads, shape.key_width)
    value = value.view(2 * width, shape.num_heads, shape.value_width)
    # Slots out of order, one of them to the very end, and one behind a node of an earlier pass.
    for first, slot, start, end in ((0, 2, 6, 10), (4, 0, 2, 4)):
        tokens = slice(first, first + end - start)
        expected[layer][slot][:, start:end] = key[tokens].transpose(0, 1).numpy()
        expected[layer + len(SHAPES)][slot][:, start:end] = value[tokens].transpose(0, 1).numpy()
    work = Pass(
        tokens=torch.zeros(6, dtype=torch.int64),
        positions=torch.zeros(7, dtype=torch.int64),
        parents=torch.full((7,), -1),
        slots=[2, 0],
        prefix_lens=[6, 1],
        offsets=[0, 4, 6],
        num_earlier=[0, 1],
        logit_rows=None,
    )
    layout = AttentionLayout(work)
    if is_captured:
        layout = AttentionLayout(replace(work, tables=layout.tables()))
    keys, values = cache.write(layer, layout, key, value)
    assert keys is cache.keys[layer]
    assert values is cache.values[layer]
    assert_equal(cache, expected)


@pytest.mark.parametrize("start", [0, 4, CAPACITY])
def test_poison_is_everything_from_a_row_on(start: int) -> None:
    cache = filled()
    expected = snapshot(cache)
    for part in expected:
        part[1][:, start:] = np.nan
    cache.poison(1, start)
    assert_equal(cache, expected)


def test_nothing_moves_in_memory() -> None:
    """Thousands of iterations write where the first one did; transformers keeps the views of the first pass."""
    cache = filled()
    parts = [*cache.keys, *cache.values]
    before = [part.data_ptr() for part in parts]
    for step in range(2000):
        layer, start = step % len(SHAPES), step % 5
        shape = SHAPES[layer]
        cache.write(
            layer,
            AttentionLayout(Pass.of_chains([[0] * 4], slots=[step % SLOTS], prefix_lens=[start])),
            torch.ones(4, shape.num_heads, shape.key_width, dtype=torch.float64),
            torch.ones(4, shape.num_heads, shape.value_width, dtype=torch.float64),
        )
        cache.move_rows(step % SLOTS, [start + 1, start + 3], start)
        cache.poison(step % SLOTS, start + 2)
    after = [*cache.keys, *cache.values]
    assert [part.data_ptr() for part in after] == before
    assert all(one is other for one, other in zip(parts, after, strict=True))


def test_a_chain_needs_no_move() -> None:
    """Accepted rows of a chain already stand where they belong: not a single number is written."""
    cache = filled()
    versions = [part._version for part in (*cache.keys, *cache.values)]
    cache.move_rows(0, [4, 5, 6], 4)
    cache.move_rows(0, [], 4)
    assert [part._version for part in (*cache.keys, *cache.values)] == versions


NEEDS = st.lists(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 90)), max_size=25)


@settings(max_examples=60, deadline=None)
@given(st.integers(6, 14), NEEDS)
def test_shared_rows_move_with_what_they_hold(granules: int, needs: list[tuple[int, int]]) -> None:
    """Every slot's rows, of all layers, are those that were written to it, however often others grow and shrink."""
    cache = SlotCache(
        SHAPES, num_slots=SLOTS, capacity=90, dtype=torch.float64, device=torch.device("cpu"),
        num_rows=granules * GRANULE,
    )  # fmt: skip
    assert cache.is_shared
    held = [0] * SLOTS
    for turn, (slot, count) in enumerate(needs):
        if count < held[slot]:
            cache.trim(slot, count)
            held[slot] = count
            continue
        if not cache.reserve(slot, count):
            assert not cache.fits([count, *held[:slot], *held[slot + 1 :]])
            continue
        assert cache.rows(slot) >= count
        (place,) = cache.places([slot])
        for index, part in enumerate((*cache.keys, *cache.values)):
            part[place, :, held[slot] : count] = slot + 10.0 * index
        held[slot] = count
        cache.poison(slot, count)
        if turn % 4 == 3 and count:
            cache.move_rows(slot, [count - 1], 0)
        for each, place in enumerate(cache.places(range(SLOTS))):
            for index, part in enumerate((*cache.keys, *cache.values)):
                assert bool((part[place, :, : held[each]] == each + 10.0 * index).all())


def test_a_prefix_is_copied_between_shared_rows() -> None:
    cache = SlotCache(
        SHAPES, num_slots=SLOTS, capacity=90, dtype=torch.float64, device=torch.device("cpu"), num_rows=96
    )
    assert cache.reserve(0, 30)
    assert cache.reserve(2, 40)
    source, place = cache.places([2, 0])  # the place of slot 0 has its number, that of slot 2 has not
    for part in (*cache.keys, *cache.values):
        part[source, :, :40] = torch.arange(40.0, dtype=torch.float64)[:, None]
    cache.copy_rows(2, 0, 25)
    assert all(bool((p[place, :, :25] == p[source, :, :25]).all()) for p in (*cache.keys, *cache.values))
    with pytest.raises(ValueError, match="rows are copied that a slot does not have"):
        cache.copy_rows(2, 0, 80)


@pytest.mark.parametrize("is_gpu", [False, True])
@pytest.mark.parametrize("num_rows", [None, 4 * GRANULE])
@pytest.mark.parametrize("heads", [(), (2,)])
def test_listed_rows_are_gathered(
    heads: tuple[int, ...], num_rows: int | None, *, is_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two of three layers, for all heads or each; in the order of the list, and nothing else is written."""
    monkeypatch.setattr("foretoken.decoder.slot_cache.runs_cpu_kernels", lambda device: not is_gpu)
    kinds: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    shapes = [LayerShape(2, 4, 4)] * 3
    source = SlotCache(shapes, num_slots=3, capacity=2 * GRANULE, num_rows=num_rows, **kinds)
    own = SlotCache(shapes, num_slots=2, capacity=9, **kinds)
    if num_rows is not None:
        source.reserve(2, GRANULE + 5)
    (place,) = source.places([2])
    for part in (*source.keys, *source.values):
        part[place].normal_()
    rows = torch.stack([torch.randperm(20)[:4].sort().values for _ in range(2 * (heads or (1,))[0])])
    rows = rows.view(2, *heads, 4)
    own.gather_from(source, (2, 1), rows, 3)
    for theirs, ours in ((source.keys, own.keys), (source.values, own.values)):
        for layer in range(2):
            for head in range(2):
                listed = rows[layer, head] if heads else rows[layer]
                assert torch.equal(ours[layer][1, head, 3:7], theirs[layer][place, head, listed])
        assert not ours[2].any()
        assert not any(part[0].any() or part[1, :, :3].any() or part[1, :, 7:].any() for part in ours)


@pytest.mark.parametrize("num_rows", [None, 2 * GRANULE])
def test_rounded_rows_take_a_byte_an_element_and_four(num_rows: int | None) -> None:
    kinds: dict[str, Any] = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "is_rounded": True}
    cache = SlotCache(SHAPES, num_slots=2, capacity=2 * GRANULE, num_rows=num_rows, **kinds)
    for cached in (cache, cache.with_capacity(7)):
        for part, width in zip((*cached.keys, *cached.values), (3, 3, 4, 3, 5, 3, 2, 5), strict=True):
            assert part.dtype == torch.int8
            assert part.shape[3] == width + 4
    row = sum(s.num_heads * (s.key_width + s.value_width + 8) for s in SHAPES)
    assert affordable_rows(SHAPES, memory_bytes=10 * row + 1, **kinds) == 10
    cache.reserve(1, 9)
    cache.poison(1, 5)
    (place,) = cache.places([1])
    for part in (*cache.keys, *cache.values):
        assert part[place, :, 5:9, -4:].contiguous().view(torch.float32).isnan().all()
        assert not part[place, :, :5].any()


@pytest.fixture(params=[0, 1, 2, 3], ids=["torch", "1 thread", "2 threads", "3 threads"])
def gathering(request: pytest.FixtureRequest) -> Iterator[None]:
    """The kernels on some threads, or torch."""
    library = library_or_none() if request.param else None
    with threads(max(request.param, 1)), mock.patch.object(slot_cache, "library_or_none", return_value=library):
        yield


@pytest.mark.usefixtures("gathering")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_by_head", [False, True], ids=["one list", "a list of each head"])
def test_listed_rows_are_copied(dtype: torch.dtype, *, is_by_head: bool) -> None:
    """Two parts of different widths, from one place of a cache to rows behind others."""
    generator = torch.Generator().manual_seed(2)
    sources = [torch.randn(5, 3, 50, width, generator=generator).to(dtype)[1] for width in (8, 33)]
    outs = [torch.zeros(2, 3, 20, width, dtype=dtype) for width in (8, 33)]
    rows = torch.rand(3 if is_by_head else 1, 50, generator=generator).topk(11).indices.sort(-1).values.expand(3, -1)
    gather_rows(sources, [rows, rows], [out[1, :, 4:] for out in outs])
    for source, out in zip(sources, outs, strict=True):
        assert out[1, :, 4:15].equal(torch.stack([part[each] for part, each in zip(source, rows, strict=True)]))
        assert not out[0].any()
        assert not out[1, :, :4].any()
        assert not out[1, :, 15:].any()


@pytest.mark.usefixtures("gathering")
def test_rows_past_the_end_are_refused() -> None:
    source, out = torch.zeros(2, 10, 4), torch.zeros(2, 10, 4)
    for row in (-1, 10):
        with pytest.raises((ValueError, IndexError), match=r"refused|out of range"):
            gather_rows([source], [torch.tensor([[0, row]] * 2)], [out])
    with pytest.raises(ValueError, match="6 rows are listed, and an output has 5"):
        gather_rows([source], [torch.arange(6).expand(2, -1)], [out[:, :5]])
