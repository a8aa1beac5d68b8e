"""The attention kernels against the definition in float64.

Cache rows that must not be read hold NaN in every test. Slow because kernels run in Triton's interpreter.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
from kernel_device import DEVICE, GuardedMemory, OnDevice, random_parents
from pairwise import slow_products

from foretoken.attention.layout import AttentionLayout, reference_attention
from foretoken.attention.triton_tree import choose_num_splits, choose_tiling, tree_attention_triton
from foretoken.attention.triton_weights import WeighedTokens, attention_weights_triton
from foretoken.core.passes import Pass, PassTables

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
    """One pass.

    Kinds: `tree` (random ones), `causal` (chains, known as such), `mixed` (trees and chains in turn). `tokens` and
    `earlier`, nodes computed before the pass, are of each sequence or of all; of trees, all but the last are smaller
    if one number is given. `padding` tokens and two sequences without any follow.
    """

    kind: str = "tree"
    prefix: tuple[int, ...] = (70,)
    tokens: int | tuple[int, ...] = 5
    earlier: int | tuple[int, ...] = 0
    padding: int = 0
    heads: int = 2
    kv_heads: int = 1
    widths: tuple[int, int] = (16, 16)
    dtype: torch.dtype = FP32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    splits: tuple[int | None, ...] = (1, 3)
    query_order: str = "MHD"  # order of the dimensions in memory
    cache_by_row: bool = False  # heads of a cache row beside each other in memory

    @property
    def counts(self) -> list[int]:
        """Tokens of each sequence."""
        last = len(self.prefix) - 1
        if isinstance(self.tokens, tuple):
            return list(self.tokens)
        if self.kind == "causal":
            return [self.tokens] * len(self.prefix)
        return [self.tokens if row == last else max(self.tokens - 2 * row - 2, 1) for row in range(last + 1)]


CASES = {
    # prefix around the edges of tiles of 32 keys, in one ragged batch
    "edges": Case(prefix=(0, 31, 32, 33), tokens=3),
    "edges, more": Case(prefix=(63, 64, 65), tokens=2),
    "scratch rows across an edge": Case(prefix=(30, 95, 61), tokens=7),
    "empty prefix": Case(prefix=(0,), tokens=33, dtype=FP16, splits=(1, 2)),
    "more splits than are merged at once": Case(prefix=(520,), tokens=2, widths=(16, 256), splits=(17,)),
    "splits without a share": Case(prefix=(0, 100), splits=(2, 9)),
    # plain steps, chains and prompts
    "plain step": Case(kind="causal", prefix=(70, 0, 3), tokens=1),
    "chain": Case(kind="causal", prefix=(40, 33), tokens=5, splits=(1, 2, 4, None)),
    "prompt": Case(kind="causal", prefix=(0,), tokens=21),
    "chunk of a prompt": Case(kind="causal", prefix=(50,), tokens=21),
    # sequences of very different sizes, and what pads a pass
    "ragged": Case(prefix=(40, 9, 70), tokens=(1, 33, 5), heads=4, kv_heads=2, splits=(1, 3, None)),
    "ragged, chains": Case(kind="causal", prefix=(40, 0, 7), tokens=(1, 33, 5), splits=(1, 3)),
    "ragged, padded": Case(prefix=(40, 9), tokens=(33, 2), padding=29, heads=4, kv_heads=2, splits=(1, 3, None)),
    "padded steps": Case(kind="causal", prefix=(40, 9, 33), tokens=1, padding=5),
    "trees and prompts": Case(kind="mixed", prefix=(40, 0, 5, 33), tokens=(7, 40, 1, 3), padding=13, dtype=FP16),
    # trees of more than one word and more than one tile of rows
    "33 nodes": Case(tokens=33, prefix=(37,)),
    "65 nodes": Case(tokens=65, prefix=(20, 70), heads=1, dtype=FP16),
    "130 nodes": Case(tokens=130, prefix=(45,), heads=1, dtype=BF16, splits=(1, 2)),
    # levels over nodes that earlier passes computed
    "grown": Case(prefix=(60, 9), tokens=5, earlier=3),
    "grown far": Case(prefix=(41,), tokens=4, earlier=40),
    "grown, one token": Case(prefix=(31,), tokens=1, earlier=33),
    "grown, ragged": Case(prefix=(60, 9, 0), tokens=(2, 5, 17), earlier=(0, 40, 3), padding=8),
    "grown, ragged, window": Case(
        kind="mixed", prefix=(60, 9, 0), tokens=(2, 17, 5), earlier=(4, 40, 3), padding=8, window=7
    ),
    "chains behind earlier nodes": Case(kind="causal", prefix=(60, 9), tokens=(3, 1), earlier=(2, 40), window=30),
    # heads
    "no groups": Case(heads=3, kv_heads=3),
    "groups of three": Case(heads=6, kv_heads=2, prefix=(33,)),
    "groups of four": Case(heads=8, kv_heads=2, prefix=(70, 8), tokens=3),
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
    "bfloat16, several tiles": Case(dtype=BF16, tokens=33, widths=(128, 128), heads=4, splits=(1, 2)),
    "bfloat16, width 256": Case(dtype=BF16, widths=(256, 256)),
    "bfloat16, width 96": Case(dtype=BF16, widths=(96, 96), tokens=20, prefix=(65,)),
    "bfloat16, grown, window": Case(dtype=BF16, earlier=70, tokens=9, prefix=(150,), window=90),
    "bfloat16, prompt": Case(dtype=BF16, kind="causal", tokens=130, heads=1, splits=(1, 2)),
    "float16": Case(dtype=FP16, widths=(64, 64), prefix=(130, 63)),
    "float16, sinks": Case(dtype=FP16, sinks=True, softcap=3.0),
    # windows that end in the prefix, in the scratch rows and nowhere
    "window": Case(window=40, prefix=(130, 3, 70), splits=(1, 3)),
    "window of an edge": Case(window=32, prefix=(96, 95, 97), tokens=3),
    "window of few": Case(window=2, prefix=(70, 33), tokens=12, heads=1),
    "window of one": Case(window=1, prefix=(64,), tokens=3),
    "window, chain": Case(kind="causal", window=9, tokens=21),
    "window, grown": Case(window=4, prefix=(70, 4), earlier=6, tokens=4),
    "window that hides nothing": Case(window=1000, prefix=(70, 4)),
    # what else models do to scores
    "softcap": Case(softcap=1.5, prefix=(70, 9), heads=4, kv_heads=2),
    "sinks": Case(sinks=True, prefix=(70, 0), heads=4, kv_heads=2),
    "window, softcap and sinks": Case(window=20, softcap=2.0, sinks=True, prefix=(70, 9)),
    # strides
    "queries by head": Case(query_order="HMD", prefix=(40, 9), heads=4, kv_heads=2),
    "cache by row": Case(cache_by_row=True, prefix=(70, 9), heads=4, kv_heads=2),
    "queries by width": Case(query_order="DMH", prefix=(40, 9)),
}


@dataclass(frozen=True, kw_only=True)
class Given:
    """What kernels are given, on `DEVICE`, and the pass that says the same, on the host."""

    work: Pass
    tables: PassTables
    query: Tensor
    keys: Tensor
    values: Tensor
    sinks: Tensor | None

    @property
    def layout(self) -> AttentionLayout:
        return AttentionLayout(self.work)


def pass_of(case: Case, slots: list[int], generator: torch.Generator) -> Pass:
    earlier = case.earlier if isinstance(case.earlier, tuple) else (case.earlier,) * len(slots)
    parents, positions = [], []
    for row, (prefix, count, before) in enumerate(zip(case.prefix, case.counts, earlier, strict=True)):
        is_chain = case.kind == "causal" or (case.kind == "mixed" and row % 2)
        own = random_parents(count + before, 1 if is_chain else 3 + 4 * row, generator)
        depths: list[int] = []
        for parent in own:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        parents += own
        positions += [prefix + depth for depth in depths]
    offsets = [0, *accumulate(case.counts)]
    return Pass(
        tokens=torch.zeros(offsets[-1], dtype=torch.int64), positions=torch.tensor(positions),
        parents=torch.tensor(parents), slots=slots, prefix_lens=case.prefix, offsets=offsets,
        num_earlier=earlier if any(earlier) else None, logit_rows=None, is_causal=case.kind == "causal",
    )  # fmt: skip


def tables_of(case: Case, work: Pass) -> PassTables:
    """The layout's, on the device; with padding, whose words see everything and which no sequence has."""
    tables = AttentionLayout(work).tables()
    names = ("slots", "prefix", "starts", "node_starts", "positions", "words")
    parts = {name: table for name in names if (table := getattr(tables, name)) is not None}
    if case.padding:
        for name in ("slots", "prefix", "starts", "node_starts"):
            parts[name] = torch.cat([parts[name], parts[name][-1:], parts[name][-1:]])
        if "words" in parts:
            parts["words"] = torch.nn.functional.pad(parts["words"], (0, 0, 0, case.padding), value=-1)
    return replace(tables, **{name: table.to(DEVICE) for name, table in parts.items()})


def prepare(case: Case, seed: int = 0) -> Given:
    generator = torch.Generator().manual_seed(seed)
    batch, key_width = len(case.prefix), case.widths[0]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    slots = torch.randperm(batch + 2, generator=generator)[:batch].tolist()
    work = pass_of(case, slots, generator)
    layout = AttentionLayout(work)
    capacity = max(layout.num_keys(row) for row in range(batch)) + 5
    keys, values = (normal(batch + 2, case.kv_heads, capacity, width) for width in case.widths)
    if case.cache_by_row:
        keys, values = (cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in (keys, values))
    for slot in range(batch + 2):
        end = layout.num_keys(slots.index(slot)) if slot in slots else 0
        keys[slot, :, end:] = float("nan")
        values[slot, :, end:] = float("nan")
    shape = {"M": work.num_tokens + case.padding, "H": case.heads, "D": key_width}
    query = normal(*(shape[name] for name in case.query_order)).permute([case.query_order.index(n) for n in "MHD"])
    query[work.num_tokens :] = float("nan")
    sinks = normal(case.heads) + 1 if case.sinks else None
    return Given(
        work=work, tables=tables_of(case, work), query=query.to(DEVICE), keys=keys.to(DEVICE),
        values=values.to(DEVICE), sinks=None if sinks is None else sinks.to(DEVICE),
    )  # fmt: skip


def scale_of(case: Case) -> float:
    return 1.3 * case.widths[0] ** -0.5


def mask_free(case: Case, given: Given, num_splits: int | None) -> Tensor:
    """(M, H, Dv), without what pads the pass."""
    output = tree_attention_triton(
        given.query, given.keys, given.values, given.tables, scale=scale_of(case), window=case.window,
        softcap=case.softcap, sinks=given.sinks, num_splits=num_splits,
    )  # fmt: skip
    assert output.shape == (given.work.num_tokens + case.padding, case.heads, case.widths[1])
    return output[: given.work.num_tokens]


def defined(case: Case, given: Given) -> Tensor:
    """(M, H, Dv) float64 on the host, by `reference_attention`."""
    layout, parts = given.layout, []
    for row, slot in enumerate(layout.slots):
        end = layout.num_keys(row)
        query = given.query[layout.tokens_of(row)].cpu().double().transpose(0, 1)
        key, value = (cache[slot, :, :end].cpu().double() for cache in (given.keys, given.values))
        part = reference_attention(
            query, key, value, layout.mask(row, case.window), scale=scale_of(case), softcap=case.softcap,
            sinks=None if given.sinks is None else given.sinks.cpu().double(),
        )  # fmt: skip
        parts.append(part.transpose(0, 1))
    return torch.cat(parts)


def tolerance(case: Case, given: Given) -> float:
    """Weights are rounded to the dtype before they meet the values, and the result is: half an ulp of a value each.

    All else is float32: 1e-5 for scores of order 10, whose error the exponential passes on.
    """
    return torch.finfo(case.dtype).eps * float(given.values.nan_to_num().abs().max()) + 1e-5


def assert_near(result: Tensor, expected: Tensor, atol: float) -> None:
    torch.testing.assert_close(result.cpu().double(), expected.cpu().double(), rtol=0.0, atol=atol)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_kernel_equals_the_definition(case: Case) -> None:
    given = prepare(case)
    expected = defined(case, given)
    assert expected.isfinite().all()
    for num_splits in case.splits:
        result = mask_free(case, given, num_splits)
        assert result.dtype == case.dtype
        assert_near(result, expected, tolerance(case, given))


PLAIN = {
    name: case
    for name, case in CASES.items()
    if not (case.padding or case.window or case.softcap or case.sinks or case.earlier)
}


@pytest.mark.parametrize(
    ("most", "case"),
    [
        pytest.param(most, case, marks=[] if place % 2 == turn else pytest.mark.slow, id=f"{most}-{name}")
        for turn, most in enumerate((2, 40)) for place, (name, case) in enumerate(PLAIN.items())
    ],
)  # fmt: skip
def test_weights_of_some_tokens_equal_the_definition(case: Case, most: int) -> None:
    """Of the first and last tokens, and of up to 40; every third sequence has none."""
    given, ends = prepare(case), accumulate(case.counts)
    tokens = [list(range(end - count, end)) for end, count in zip(ends, case.counts, strict=True)]
    tokens = [[*each[: most // 2], *each[most // 2 :][-(most - most // 2) :]] for each in tokens]
    tokens = [[] if row % 3 == 1 else each for row, each in enumerate(tokens)]
    num_keys = max(map(given.layout.num_keys, range(len(tokens))))
    weighed = WeighedTokens.of(tokens, num_keys, torch.device(DEVICE))
    found = attention_weights_triton(given.query, given.keys, given.tables, weighed, scale=scale_of(case))
    layout, expected = given.layout, torch.zeros(len(tokens), case.kv_heads, num_keys, dtype=torch.float64)
    for row, slot in enumerate(layout.slots):
        end, own = layout.num_keys(row), layout.tokens_of(row)
        query = given.query[own].cpu().double().transpose(0, 1)
        key, unit = given.keys[slot, :, :end].cpu().double(), torch.eye(end, dtype=torch.float64)
        probs = reference_attention(
            query, key, unit.expand(case.kv_heads, -1, -1), layout.mask(row, None), scale=scale_of(case)
        )
        chosen = probs[:, [token - own.start for token in tokens[row]]].sum(1)
        expected[row, :, :end] = chosen.unflatten(0, (case.kv_heads, -1)).sum(1)
    assert found.dtype == torch.float32
    assert_near(found, expected, 1e-5 * most)


def test_bounds_far_above_the_lengths_only_cost_splits() -> None:
    case = Case(prefix=(40,))
    given = prepare(case)
    far = replace(given, tables=replace(given.tables, max_prefix=1 << 20))
    assert_near(mask_free(case, far, None), defined(case, given), tolerance(case, given))


def test_sequences_do_not_share_slots_or_lengths() -> None:
    # The same sequence alone and as the last of a ragged batch. Float32: only the order of sums may differ, not here.
    case = Case(kind="causal", prefix=(9, 100, 41), tokens=(1, 7, 5))
    given = prepare(case)
    work = Pass(
        tokens=given.work.tokens[8:], positions=given.work.positions[8:], parents=given.work.parents[8:],
        slots=given.work.slots[2:], prefix_lens=[41], offsets=[0, 5], logit_rows=None, is_causal=True,
    )  # fmt: skip
    alone = replace(given, work=work, query=given.query[8:], tables=tables_of(case, work))
    for num_splits in (1, 3):
        assert torch.equal(mask_free(case, alone, num_splits), mask_free(case, given, num_splits)[8:])


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("window", [None, 20])
def test_padding_and_bounds_change_no_bit(num_splits: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    # As a captured launch has them: bounds above the lengths, tokens and sequences that are none.
    case = Case(prefix=(40, 9, 70), tokens=(1, 33, 5), earlier=(3, 0, 9), window=window)
    given = prepare(case)
    expected = mask_free(case, given, num_splits)
    padded = replace(case, padding=25)
    other = prepare(padded)
    query = torch.cat([given.query, other.query[-25:]])
    tables = replace(tables_of(padded, given.work), max_prefix=512, max_tokens=64, max_nodes=128)
    guarded = GuardedMemory(monkeypatch)
    result = mask_free(padded, replace(given, query=query, tables=tables), num_splits)
    assert torch.equal(result, expected)
    guarded.check()


@pytest.mark.parametrize(("window", "max_prefix", "num_splits"), slow_products([None, 50], [0, 1 << 20], [1, 4]))
def test_lengths_are_read_on_the_device(num_splits: int, max_prefix: int, window: int | None) -> None:
    # What a captured launch relies on: the bound that shaped it is not the length.
    case = Case(prefix=(130, 5), window=window)
    given = prepare(case)
    other = replace(given, tables=replace(given.tables, max_prefix=max_prefix))
    assert torch.equal(mask_free(case, other, num_splits), mask_free(case, given, num_splits))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_tokens_that_see_nothing_give_zero(sinks: bool, num_splits: int) -> None:
    case = Case(prefix=(40,), earlier=3, tokens=4, window=3, sinks=sinks)
    given = prepare(case)
    expected = defined(case, given)
    blind = 3  # a leaf: nobody sees it
    expected[blind] = 0  # with a sink it is a softmax over the sink alone
    words, positions = given.tables.words.clone(), given.tables.positions.clone()
    words[blind] = 0
    positions[case.earlier + blind] = 1000  # past the window of every row
    without = replace(given, tables=replace(given.tables, words=words, positions=positions))
    result = mask_free(case, without, num_splits)
    assert_near(result, expected, tolerance(case, given))
    assert not result[blind].any()


@pytest.mark.parametrize("num_splits", [1, 3])
def test_nan_of_the_model_is_not_hidden(num_splits: int) -> None:
    # A NaN in a row that counts, of the prefix or of the root, must be told from a row that saw nothing.
    for row in (2, 70):
        case = Case(kind="causal", prefix=(70, 70), kv_heads=2)
        given = prepare(case)
        given.keys[given.work.slots[0], 1, row] = float("nan")
        result = mask_free(case, given, num_splits)
        assert result[:5, 1].isnan().all()
        result[:5, 1] = 0
        assert result.isfinite().all()


@pytest.mark.parametrize("num_splits", [1, 3])
def test_keys_unlike_any_before_do_not_overflow(num_splits: int) -> None:
    # Scores of hundreds, growing from tile to tile: only differences are exponentiated.
    case = Case(prefix=(130,))
    given = prepare(case)
    given.keys.mul_(torch.linspace(1, 60, given.keys.shape[2], device=DEVICE).view(1, 1, -1, 1))
    # Scores reach about 1e3: float32 rounds them by 1e-4.
    assert_near(mask_free(case, given, num_splits), defined(case, given), 2e-3)


def test_the_kernel_does_not_wait_for_the_host() -> None:
    for case in (Case(), Case(kind="causal", sinks=True), Case(window=9, softcap=2.0)):
        given = prepare(case)
        for num_splits in (1, 3):
            mask_free(case, given, num_splits)  # compiles
            with OnDevice():
                mask_free(case, given, num_splits)


@pytest.mark.parametrize("kind", ["tree", "causal"])
def test_memory_does_not_grow_with_the_prefix(kind: str) -> None:
    allocated = []
    for prefix in (100, 1500):
        case = Case(kind=kind, prefix=(prefix,), heads=2, kv_heads=1, widths=(16, 20), window=None)
        given = prepare(case)
        for num_splits in (1, 3):
            with OnDevice() as calls:
                mask_free(case, given, num_splits)
            shapes = [(5, 2, 20)] + ([(5, 2, 3, 20), (5, 2, 3)] if num_splits == 3 else [])
            assert calls.allocated == shapes
        with OnDevice() as calls:
            mask_free(case, given, None)
        allocated.append(sum(torch.Size(shape).numel() for shape in calls.allocated))
    most_splits = 128
    assert max(allocated) <= 5 * 2 * (20 + most_splits * 21)


# For 32 query and 8 KV heads of width 128 on 132 multiprocessors: 8 programs a sequence and row tile, 2 resident.
@pytest.mark.parametrize(("prefix_tiles", "least", "most"), [(0, 1, 1), (3, 1, 1), (16, 4, 17), (128, 28, 33)])
def test_splits_fill_the_gpu_once(prefix_tiles: int, least: int, most: int) -> None:
    splits = choose_num_splits(8, prefix_tiles, 2, 264, 32)
    assert least <= splits <= most
    assert splits == 1 or 8 * splits <= 264


def test_full_gpus_are_not_split_further() -> None:
    assert choose_num_splits(264, 8, 2, 264, 2048) == 1
    assert choose_num_splits(2640, 8, 2, 264, 2048) == 1
    assert choose_num_splits(128, 32, 2, 264, 8 * 64 * 32) == 1, "merging would cost more than it saves"


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
