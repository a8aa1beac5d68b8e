"""Rows of the slot cache moved and written by kernels: those of `SlotCache`, and no other bit changes."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from kernel_device import DEVICE, OnDevice, few
from torch import Tensor

from foretoken.attention.layout import AttentionLayout
from foretoken.core.passes import Pass
from foretoken.decoder.slot_cache import LayerShape, SlotCache
from foretoken.decoder.triton_kernels import commit_rows

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def random_cache(shapes: list[LayerShape], slots: int, capacity: int, dtype: torch.dtype, seed: int) -> SlotCache:
    """Every bit pattern, NaN of every payload included."""
    cache = SlotCache(shapes, num_slots=slots, capacity=capacity, dtype=dtype, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for store in cache._stores.values():
        store.view(torch.uint8).copy_(torch.randint(256, store.view(torch.uint8).shape, generator=generator))
    return cache


def random_path(length: int, nodes: int, generator: torch.Generator) -> list[int]:
    """Ascending nodes of a tree, none of them the root."""
    return sorted((torch.randperm(nodes - 1, generator=generator)[:length] + 1).tolist())


def padded(paths: list[list[int]]) -> tuple[Tensor, Tensor]:
    """(B, D) int64, -1 past the end, and (B,) int64."""
    longest = max(map(len, paths))
    return (
        torch.tensor([path + [-1] * (longest - len(path)) for path in paths], dtype=torch.int64),
        torch.tensor([len(path) for path in paths]),
    )


def assert_commit(cache: SlotCache, slots: list[int], prefix: list[int], paths: list[list[int]]) -> None:
    """The kernel and `move_rows` leave the same bits in the whole of every store."""
    path, num_accepted = (t.to(DEVICE) for t in padded(paths))
    before = [store.clone() for store in cache._stores.values()]
    stores = [store.to(DEVICE, copy=True) for store in before]
    for store in stores:
        commit_rows(
            store, torch.tensor(slots, dtype=torch.int32, device=DEVICE),
            torch.tensor(prefix, dtype=torch.int32, device=DEVICE), path, num_accepted,
        )  # fmt: skip
    for slot, root, nodes in zip(slots, prefix, paths, strict=True):
        cache.move_rows(slot, [root + node for node in nodes], root + 1)
    for moved, expected, old in zip(stores, cache._stores.values(), before, strict=True):
        bits = BITS[moved.element_size()]
        assert torch.equal(moved.cpu().view(bits), expected.view(bits))
        assert any(path != list(range(1, len(path) + 1)) for path in paths) == (
            not torch.equal(old.view(bits), expected.view(bits))
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float64])
def test_types_and_unequal_widths(dtype: torch.dtype) -> None:
    cache = random_cache([LayerShape(2, 24, 16), LayerShape(1, 24, 24), LayerShape(2, 24, 16)], 3, 20, dtype, seed=1)
    assert_commit(cache, [2, 0], [5, 1], [[1, 3, 4, 9], [2, 5]])


@pytest.mark.parametrize("width", [1, 3, 16, 100, 128, 130, 320])
def test_widths(width: int) -> None:
    cache = random_cache([LayerShape(2, width, width)], 2, 12, torch.float16, seed=width)
    assert_commit(cache, [1], [2], [[2, 3, 7, 8]])


@pytest.mark.parametrize("seed", range(8))
def test_random_ragged_batches(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    cache = random_cache([LayerShape(1, 8, 8)] * 2, 5, 90, torch.bfloat16, seed)
    lengths = torch.randint(0, 40, (3,), generator=generator).tolist()
    slots = torch.randperm(5, generator=generator)[:3].tolist()
    prefix = torch.randint(0, 40, (3,), generator=generator).tolist()
    assert_commit(cache, slots, prefix, [random_path(length, 50, generator) for length in [*lengths[:2], 17]])


@pytest.mark.parametrize(
    "path",
    [
        list(range(2, 513)),  # every destination but the first was a source just before
        list(range(1, 512)),  # a chain: nothing moves
        [*range(1, 10), *range(12, 40)],  # in place at first
        [512],
        list(range(8, 24)),  # a block of destinations is the block of sources before it
        list(range(9, 40)),
        list(range(2, 512, 2)),
    ],
)
def test_overlapping_moves(path: list[int]) -> None:
    assert_commit(random_cache([LayerShape(1, 4, 4)], 2, 520, torch.float32, seed=4), [1], [3], [path])


def test_sequences_that_accept_nothing_touch_nothing() -> None:
    """Neither their slot, which may be none at all, nor what their path holds is looked at."""
    cache = random_cache([LayerShape(1, 4, 4)], 2, 12, torch.float32, seed=6)
    store = next(iter(cache._stores.values())).to(DEVICE)
    expected = store.clone()
    expected[:, 1, :, 4] = store[:, 1, :, 6]
    commit_rows(
        store, torch.tensor([-1 << 20, 1, 1 << 20], device=DEVICE), torch.tensor([1 << 30, 3, 7], device=DEVICE),
        torch.tensor([[1 << 40, 9], [3, 1 << 40], [-1, -1]], device=DEVICE), torch.tensor([0, 1, 0], device=DEVICE),
    )  # fmt: skip
    assert torch.equal(store.view(torch.int32), expected.view(torch.int32))


def test_a_store_need_not_be_contiguous() -> None:
    """Rows are found by the store's strides: here one half of a wider one."""
    wide = torch.randn(2, 3, 2, 9, 16, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    expected = wide.clone()
    expected[:, 2, :, 3, 8:] = wide[:, 2, :, 5, 8:]
    arguments = [torch.tensor(values, device=DEVICE) for values in ([2], [2], [[3]], [1])]
    commit_rows(wide[..., 8:], *arguments)
    assert torch.equal(wide, expected)


def test_no_depth_is_no_work() -> None:
    store = torch.randn(1, 1, 1, 4, 4, device=DEVICE)
    expected = store.clone()
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    commit_rows(store, zero, zero, zero.view(1, 1)[:, :0], zero)
    assert torch.equal(store, expected)


def test_nothing_is_read_or_allocated() -> None:
    cache = random_cache([LayerShape(2, 8, 8)], 2, 12, torch.bfloat16, seed=9)
    store = next(iter(cache._stores.values())).to(DEVICE)
    arguments = [torch.tensor(values, device=DEVICE) for values in ([1], [2], [[3, 4]], [2])]
    with OnDevice() as calls:
        commit_rows(store, *arguments)
    assert not calls.allocated


PASS = Pass.of_chains([[0] * 3, [0] * 2], slots=[3, 1], prefix_lens=[5, 0], device=DEVICE)


@pytest.mark.parametrize(
    ("dtype", "widths", "is_strided"),
    few([torch.float32, torch.bfloat16, torch.float64], [(8, 8), (6, 20)], [False, True]),
)
def test_rows_of_a_captured_pass(widths, dtype, *, is_strided) -> None:
    """Each token's row is written, no other one, and tokens of no sequence write nothing; nothing is looked at."""
    generator = torch.Generator().manual_seed(0)
    cache = SlotCache([LayerShape(2, *widths)] * 2, num_slots=4, capacity=9, dtype=dtype, device=torch.device(DEVICE))
    for store in cache._stores.values():
        store.copy_(torch.randn(store.shape, generator=generator))
    padded = [torch.randn(7, 2, width, generator=generator).to(DEVICE, dtype) for width in widths]
    if is_strided:
        padded = [part.permute(2, 1, 0).contiguous().permute(2, 1, 0) for part in padded]
    tables = AttentionLayout(PASS).tables()
    filler = torch.tensor([3, 0], device=DEVICE)  # slots that exist; row -1 would be their last one
    tables = replace(
        tables,
        written_slots=torch.cat([tables.written_slots, filler]),
        written_rows=torch.cat([tables.written_rows, torch.full_like(filler, -1)]),
    )
    expected = [part.clone() for part in (cache.keys[1], cache.values[1])]
    others = [part.clone() for part in (cache.keys[0], cache.values[0])]
    for part, new in zip(expected, padded, strict=True):
        for token, (slot, row) in enumerate([(3, 5), (3, 6), (3, 7), (1, 0), (1, 1)]):
            part[slot, :, row] = new[token]
    layout = AttentionLayout(replace(PASS, tables=tables))
    with OnDevice():
        written = cache.write(1, layout, *padded)
    for part, wanted in zip(written, expected, strict=True):
        assert torch.equal(part, wanted)
    for part, wanted in zip((cache.keys[0], cache.values[0]), others, strict=True):
        assert torch.equal(part, wanted), "the other layer"
