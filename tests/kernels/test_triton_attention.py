"""The attention kernels against the definition in float64, and against each other.

Cache rows that must not be read hold NaN in every test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
from kernel_device import DEVICE, OnDevice, random_parents

from foretoken.attention.layout import AttentionLayout
from foretoken.attention.reference import reference_attention
from foretoken.attention.tables import PassTables
from foretoken.attention.triton_masked import masked_attention_triton
from foretoken.attention.triton_tree import choose_num_splits, choose_tiling, tree_attention_triton
from foretoken.core.token_tree import TokenTree, TreeRow

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def nan_in_new_memory() -> Iterator[None]:
    """What a kernel does not write, or reads before it is written, shows as NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One pass. Kinds: `tree` (random, ragged), `causal`, `grown` (on `offset` earlier scratch rows)."""

    kind: str = "tree"
    prefix: tuple[int, ...] = (70,)
    queries: int = 5
    offset: int = 0
    heads: int = 2
    kv_heads: int = 1
    widths: tuple[int, int] = (16, 16)
    dtype: torch.dtype = FP32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    splits: tuple[int | None, ...] = (1, 3)
    query_order: str = "BTHD"  # order of the dimensions in memory
    cache_by_row: bool = False  # heads of a cache row beside each other in memory


CASES = {
    # prefix around the edges of tiles of 32 keys, in one ragged batch
    "edges": Case(prefix=(0, 31, 32, 33), queries=3),
    "edges, more": Case(prefix=(63, 64, 65), queries=2),
    "scratch rows across an edge": Case(prefix=(30, 95, 61), queries=7),
    "empty prefix": Case(prefix=(0,), queries=33, dtype=FP16, splits=(1, 2)),
    "more splits than are merged at once": Case(prefix=(520,), queries=2, widths=(16, 256), splits=(17,)),
    "splits without a share": Case(prefix=(0, 100), splits=(2, 9)),
    # plain steps, chains and prompts
    "plain step": Case(kind="causal", prefix=(70, 0, 3), queries=1),
    "chain": Case(kind="causal", prefix=(40, 33), queries=5, splits=(1, 2, 4, None)),
    "prompt": Case(kind="causal", prefix=(0,), queries=21),
    "chunk of a prompt": Case(kind="causal", prefix=(50,), queries=21),
    # trees of more than one word and more than one tile of rows
    "33 nodes": Case(queries=33, prefix=(37,)),
    "65 nodes": Case(queries=65, prefix=(20, 70), heads=1, dtype=FP16),
    "130 nodes": Case(queries=130, prefix=(45,), heads=1, dtype=BF16, splits=(1, 2)),
    # levels over earlier scratch rows
    "grown": Case(kind="grown", prefix=(60, 9), queries=5, offset=3),
    "grown far": Case(kind="grown", prefix=(41,), queries=4, offset=40),
    "grown, one token": Case(kind="grown", prefix=(31,), queries=1, offset=33),
    # heads
    "no groups": Case(heads=3, kv_heads=3),
    "groups of three": Case(heads=6, kv_heads=2, prefix=(33,)),
    "groups of four": Case(heads=8, kv_heads=2, prefix=(70, 8), queries=3),
    "groups of eight": Case(heads=8, prefix=(50, 8)),
    # widths
    "width 32": Case(widths=(32, 32), prefix=(40,)),
    "width 64": Case(widths=(64, 64)),
    "width 96": Case(widths=(96, 96)),
    "width 128": Case(widths=(128, 128)),
    "width 256": Case(widths=(256, 256), prefix=(40,)),
    "narrow values": Case(widths=(48, 24)),
    "wide values": Case(widths=(20, 80)),
    "narrower than a dot": Case(widths=(8, 4)),
    # dtypes: other tilings
    "bfloat16": Case(dtype=BF16, widths=(64, 64), prefix=(130, 64), kv_heads=2),
    "bfloat16, several tiles": Case(dtype=BF16, queries=33, widths=(128, 128), heads=4, splits=(1, 2)),
    "bfloat16, width 256": Case(dtype=BF16, widths=(256, 256)),
    "bfloat16, width 96": Case(dtype=BF16, widths=(96, 96), queries=20, prefix=(65,)),
    "bfloat16, grown, window": Case(dtype=BF16, kind="grown", offset=70, queries=9, prefix=(150,), window=90),
    "bfloat16, prompt": Case(dtype=BF16, kind="causal", queries=130, heads=1, splits=(1, 2)),
    "float16": Case(dtype=FP16, widths=(64, 64), prefix=(130, 63)),
    "float16, sinks": Case(dtype=FP16, sinks=True, softcap=3.0),
    # windows that end in the prefix, in the scratch rows and nowhere
    "window": Case(window=40, prefix=(130, 3, 70), splits=(1, 3)),
    "window of an edge": Case(window=32, prefix=(96, 95, 97), queries=3),
    "window of few": Case(window=2, prefix=(70, 33), queries=12, heads=1),
    "window of one": Case(window=1, prefix=(64,), queries=3),
    "window, chain": Case(kind="causal", window=9, queries=21),
    "window, grown": Case(kind="grown", window=4, prefix=(70, 4), offset=6, queries=4),
    "window that hides nothing": Case(window=1000, prefix=(70, 4)),
    # what else models do to scores
    "softcap": Case(softcap=1.5, prefix=(70, 9), heads=4, kv_heads=2),
    "sinks": Case(sinks=True, prefix=(70, 0), heads=4, kv_heads=2),
    "window, softcap and sinks": Case(window=20, softcap=2.0, sinks=True, prefix=(70, 9)),
    # strides
    "queries by head": Case(query_order="BHTD", prefix=(40, 9), heads=4, kv_heads=2),
    "cache by row": Case(cache_by_row=True, prefix=(70, 9), heads=4, kv_heads=2),
    "queries by width": Case(query_order="DBTH", prefix=(40, 9)),
}


@dataclass(frozen=True, kw_only=True)
class Pass:
    """What kernels are given, on `DEVICE`, and the layout that says the same, on the host."""

    layout: AttentionLayout
    tables: PassTables
    query: Tensor
    keys: Tensor
    values: Tensor
    sinks: Tensor | None


def layout_of(case: Case, slots: list[int], generator: torch.Generator) -> AttentionLayout:
    prefix, batch = torch.tensor(case.prefix).unsqueeze(1), len(case.prefix)
    if case.kind == "causal":
        positions = prefix + torch.arange(case.queries)
        return AttentionLayout(slots=slots, prefix=case.prefix, positions=positions)
    width = case.offset + case.queries
    sizes = [width if row == batch - 1 else max(width - 2 * row - 2, 1) for row in range(batch)]  # ragged: padding
    parents = [random_parents(size, 3 + 4 * row, generator) for row, size in enumerate(sizes)]
    tree = TokenTree.from_rows([TreeRow([0] * len(row), row) for row in parents])
    positions = prefix + tree.depths
    if case.kind == "tree":
        return AttentionLayout(slots=slots, prefix=case.prefix, positions=positions, tree=tree)
    return AttentionLayout(
        slots=slots, prefix=case.prefix, offset=case.offset, positions=positions[:, case.offset :],
        visible=tree.ancestor_mask()[:, case.offset :], scratch_positions=positions,
    )  # fmt: skip


def prepare(case: Case, seed: int = 0) -> Pass:
    generator = torch.Generator().manual_seed(seed)
    batch, key_width = len(case.prefix), case.widths[0]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    slots = torch.randperm(batch + 2, generator=generator)[:batch].tolist()
    layout = layout_of(case, slots, generator)
    capacity = max(case.prefix) + case.offset + case.queries + 5
    keys, values = (normal(batch + 2, case.kv_heads, capacity, width) for width in case.widths)
    if case.cache_by_row:
        keys, values = (cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in (keys, values))
    for slot in range(batch + 2):
        end = layout.num_keys(slots.index(slot)) if slot in slots else 0
        keys[slot, :, end:] = float("nan")
        values[slot, :, end:] = float("nan")
    shape = dict(zip("BHTD", (batch, case.heads, case.queries, key_width), strict=True))
    query = normal(*(shape[name] for name in case.query_order)).permute([case.query_order.index(n) for n in "BHTD"])
    sinks = normal(case.heads) + 1 if case.sinks else None
    tables = layout.tables()
    on_device = {
        name: table.to(DEVICE) for name in ("slots", "prefix", "positions", "scratch_positions", "words")
        if (table := getattr(tables, name)) is not None
    }  # fmt: skip
    return Pass(
        layout=layout, tables=replace(tables, **on_device), query=query.to(DEVICE), keys=keys.to(DEVICE),
        values=values.to(DEVICE), sinks=None if sinks is None else sinks.to(DEVICE),
    )  # fmt: skip


def scale_of(case: Case) -> float:
    return 1.3 * case.widths[0] ** -0.5


def mask_free(case: Case, given: Pass, num_splits: int | None) -> Tensor:
    return tree_attention_triton(
        given.query, given.keys, given.values, given.tables, scale=scale_of(case), window=case.window,
        softcap=case.softcap, sinks=given.sinks, num_splits=num_splits,
    )  # fmt: skip


def masked(case: Case, given: Pass) -> Tensor:
    counts = [given.layout.num_keys(row) for row in range(len(case.prefix))]
    mask = torch.zeros(len(counts), case.queries, max(counts), dtype=torch.bool)
    for row, count in enumerate(counts):
        seen = given.layout.mask(row, case.window)
        mask[row, :, :count] = True if seen is None else seen
    return masked_attention_triton(
        given.query, given.keys, given.values, given.tables.slots,
        torch.tensor(counts, dtype=torch.int32, device=DEVICE), mask.to(DEVICE),
        scale=scale_of(case), softcap=case.softcap, sinks=given.sinks,
    )  # fmt: skip


def defined(case: Case, given: Pass) -> Tensor:
    """(B, T, H, Dv) float64 on the host, by `reference_attention`."""
    rows = []
    for row, slot in enumerate(given.layout.slots):
        end = given.layout.num_keys(row)
        query, key, value = (
            x.cpu().double() for x in (given.query[row], given.keys[slot, :, :end], given.values[slot, :, :end])
        )
        rows.append(
            reference_attention(
                query, key, value, given.layout.mask(row, case.window), scale=scale_of(case), softcap=case.softcap,
                sinks=None if given.sinks is None else given.sinks.cpu().double(),
            )
        )  # fmt: skip
    return torch.stack(rows).transpose(1, 2)


def tolerance(case: Case, given: Pass) -> float:
    """Weights are rounded to the dtype before they meet the values, and the result is: half an ulp of a value each.

    All else is float32: 1e-5 for scores of order 10, whose error the exponential passes on.
    """
    return torch.finfo(case.dtype).eps * float(given.values.nan_to_num().abs().max()) + 1e-5


def assert_near(result: Tensor, expected: Tensor, atol: float) -> None:
    torch.testing.assert_close(result.cpu().double(), expected.cpu().double(), rtol=0.0, atol=atol)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_kernels_equal_the_definition_and_each_other(case: Case) -> None:
    given = prepare(case)
    expected = defined(case, given)
    assert expected.isfinite().all()
    plain, atol = masked(case, given), tolerance(case, given)
    assert plain.dtype == case.dtype
    assert_near(plain, expected, atol)
    for num_splits in case.splits:
        result = mask_free(case, given, num_splits)
        assert result.dtype == case.dtype
        assert result.shape == (len(case.prefix), case.queries, case.heads, case.widths[1])
        assert_near(result, expected, atol)
        assert_near(result, plain, 2 * atol)


def test_bounds_far_above_the_lengths_only_cost_splits() -> None:
    case = Case(prefix=(40,))
    given = prepare(case)
    far = replace(given, tables=replace(given.tables, max_prefix=1 << 20))
    assert_near(mask_free(case, far, None), defined(case, given), tolerance(case, given))


def test_sequences_do_not_share_slots_or_lengths() -> None:
    # The same sequence alone and as the last of a ragged batch. Float32: only the order of sums may differ, not here.
    case = Case(kind="causal", prefix=(9, 100, 41))
    given = prepare(case)
    alone = replace(
        given,
        query=given.query[2:],
        tables=replace(
            given.tables,
            **{name: getattr(given.tables, name)[2:] for name in ("slots", "prefix", "positions", "scratch_positions")},
        ),
    )
    for num_splits in (1, 3):
        assert torch.equal(mask_free(case, alone, num_splits)[0], mask_free(case, given, num_splits)[2])


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("max_prefix", [0, 1 << 20])
@pytest.mark.parametrize("window", [None, 50])
def test_lengths_are_read_on_the_device(num_splits: int, max_prefix: int, window: int | None) -> None:
    # What a captured launch relies on: the bound that shaped it is not the length.
    case = Case(prefix=(130, 5), window=window)
    given = prepare(case)
    other = replace(given, tables=replace(given.tables, max_prefix=max_prefix))
    assert torch.equal(mask_free(case, other, num_splits), mask_free(case, given, num_splits))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_queries_that_see_nothing_give_zero(sinks: bool, num_splits: int) -> None:
    case = Case(kind="grown", prefix=(40,), offset=3, queries=4, window=3, sinks=sinks)
    given = prepare(case)
    visible = given.layout.visible.clone()
    visible[0, 1] = False
    positions = given.layout.positions.clone()
    positions[0, 1] = 1000  # past the window of every row
    layout = replace(given.layout, visible=visible, positions=positions)
    tables = replace(layout.tables(), max_prefix=40)
    on_device = {name: getattr(tables, name).to(DEVICE) for name in ("slots", "prefix", "positions")}
    on_device |= {name: getattr(tables, name).to(DEVICE) for name in ("scratch_positions", "words")}
    blind = replace(given, layout=layout, tables=replace(tables, **on_device))
    expected = defined(case, blind)
    if sinks:  # a softmax over the sink alone
        assert not expected[0, 1].any()
    expected[0, 1] = 0
    assert_near(mask_free(case, blind, num_splits), expected, tolerance(case, given))
    assert not mask_free(case, blind, num_splits)[0, 1].any()
    assert_near(masked(case, blind), expected, tolerance(case, given))


@pytest.mark.parametrize("num_splits", [1, 3])
def test_nan_of_the_model_is_not_hidden(num_splits: int) -> None:
    # A NaN in a row that counts, of the prefix or of the root, must be told from a row that saw nothing.
    for row in (2, 70):
        case = Case(kind="causal", prefix=(70, 70), kv_heads=2)
        given = prepare(case)
        given.keys[given.layout.slots[0], 1, row] = float("nan")
        result = mask_free(case, given, num_splits)
        assert result[0, :, 1].isnan().all()
        result[0, :, 1] = 0
        assert result.isfinite().all()


@pytest.mark.parametrize("num_splits", [1, 3])
def test_keys_unlike_any_before_do_not_overflow(num_splits: int) -> None:
    # Scores of hundreds, growing from tile to tile: only differences are exponentiated.
    case = Case(prefix=(130,))
    given = prepare(case)
    given.keys.mul_(torch.linspace(1, 60, given.keys.shape[2], device=DEVICE).view(1, 1, -1, 1))
    # Scores reach about 1e3: float32 rounds them by 1e-4.
    assert_near(mask_free(case, given, num_splits), defined(case, given), 2e-3)


def test_neither_kernel_waits_for_the_host() -> None:
    for case in (Case(), Case(kind="causal", sinks=True), Case(window=9, softcap=2.0)):
        given = prepare(case)
        for num_splits in (1, 3):
            mask_free(case, given, num_splits)  # compiles
            with OnDevice():
                mask_free(case, given, num_splits)
        counts, mask = given.tables.prefix + case.queries, torch.ones(1, 5, 75, dtype=torch.bool, device=DEVICE)
        arguments = (given.query, given.keys, given.values, given.tables.slots, counts, mask)
        masked_attention_triton(*arguments, scale=1.0)
        with OnDevice():
            masked_attention_triton(*arguments, scale=1.0)


@pytest.mark.parametrize("kind", ["tree", "causal"])
def test_memory_does_not_grow_with_the_prefix(kind: str) -> None:
    allocated = []
    for prefix in (100, 1500):
        case = Case(kind=kind, prefix=(prefix,), heads=2, kv_heads=1, widths=(16, 20), window=None)
        given = prepare(case)
        for num_splits in (1, 3):
            with OnDevice() as calls:
                mask_free(case, given, num_splits)
            shapes = [(1, 5, 2, 20)] + ([(1, 5, 2, 3, 20), (1, 5, 2, 3)] if num_splits == 3 else [])
            assert calls.allocated == shapes
        with OnDevice() as calls:
            mask_free(case, given, None)
        allocated.append(sum(torch.Size(shape).numel() for shape in calls.allocated))
    most_splits = 128
    assert max(allocated) <= 5 * 2 * (20 + most_splits * 21)


# For 32 query and 8 KV heads of width 128 on 132 multiprocessors: 8 programs a sequence and row tile, 2 resident.
@pytest.mark.parametrize(("prefix_tiles", "least", "most"), [(0, 1, 1), (3, 1, 1), (16, 4, 17), (128, 28, 33)])
def test_splits_fill_the_gpu_once(prefix_tiles: int, least: int, most: int) -> None:
    splits = choose_num_splits(8, prefix_tiles, 2, 264)
    assert least <= splits <= most
    assert splits == 1 or 8 * splits <= 264


def test_full_gpus_are_not_split_further() -> None:
    assert choose_num_splits(264, 8, 2, 264) == 1
    assert choose_num_splits(2640, 8, 2, 264) == 1


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("width", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("rows", [1, 16, 17, 40, 64, 65, 256, 2048])
def test_tilings_fit_a_multiprocessor(dtype: torch.dtype, width: int, rows: int) -> None:
    tiling = choose_tiling(width, width, rows, dtype)
    assert tiling.rows >= 16
    assert tiling.keys % 32 == 0
    assert dtype == FP32 or tiling.rows >= min(rows, 128)
    padded = triton.next_power_of_2(width)
    tile_bytes = dtype.itemsize * padded * (2 * tiling.keys * tiling.stages + tiling.rows)
    assert tiling.resident * tile_bytes <= 227 * 1024


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("rows", [16, 64, 2048])
def test_tilings_fit_smaller_gpus(width, rows) -> None:
    """99 KiB of an RTX 4090, 163 of an A100; Hopper's own tilings stay as they are."""
    tiling = choose_tiling(width, width, rows, BF16)
    assert tiling.fitted(2 * width, 2, 232_448) == tiling
    for limit in (99 * 1024, 163 * 1024):
        small = tiling.fitted(2 * width, 2, limit)
        assert small.rows >= 16
        assert small.stages >= 1
        assert (small.rows * width + small.stages * small.keys * 2 * width) * 2 <= limit
