"""The tables made by a kernel are those that `AttentionLayout` builds, whatever the kernel's bounds."""

from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_device import DEVICE, GuardedMemory, OnDevice, random_parents

pytest.importorskip("triton")

from foretoken.attention.layout import AttentionLayout
from foretoken.attention.triton_tables import pass_tables
from foretoken.core.passes import Pass, PassTables
from foretoken.decoder.cuda_graphs import captured_pass, padded_inputs, shape_of


@dataclass(frozen=True)
class Row:
    """One sequence: parents of its nodes, how many of them are no tokens of this pass, and its prefix."""

    parents: list[int]
    num_earlier: int = 0
    prefix: int = 3


def pass_of(rows: list[Row]) -> Pass:
    """Slots in reverse, positions that tell every node from every other."""
    counts = [len(row.parents) for row in rows]
    offsets = [0, *accumulate(len(row.parents) - row.num_earlier for row in rows)]
    return Pass(
        tokens=torch.arange(offsets[-1], device=DEVICE),
        positions=torch.randperm(sum(counts), generator=torch.Generator().manual_seed(5)).to(DEVICE) + 100,
        parents=torch.tensor([parent for row in rows for parent in row.parents], device=DEVICE),
        slots=range(len(rows), 0, -1), prefix_lens=[row.prefix for row in rows], offsets=offsets,
        num_earlier=[row.num_earlier for row in rows], logit_rows=None,
    )  # fmt: skip


def made(work: Pass, *, extra_tokens: int = 0, extra_nodes: int = 0, extra_sequences: int = 0, more_nodes: int = 0):
    """The kernel's tables of a pass with so much padding, and the positions of its tokens."""
    end, node_end = work.offsets[-1], work.node_offsets[-1]

    def places(values, last) -> torch.Tensor:
        return torch.tensor([*values, *[last] * extra_sequences], dtype=torch.int32, device=DEVICE)

    rubbish = torch.full((extra_nodes,), 1 << 40, device=DEVICE)
    counts = [b - a for a, b in zip(work.node_offsets[:-1], work.node_offsets[1:], strict=True)]
    return pass_tables(
        torch.cat([work.parents, rubbish]), torch.cat([work.positions, rubbish]),
        places(work.slots, 77), places(work.prefix_lens, 77), places(work.offsets, end),
        places(work.node_offsets, node_end), num_tokens=end + extra_tokens, max_prefix=1000, max_tokens=max(counts),
        max_nodes=max(counts) + more_nodes,
    )  # fmt: skip


def assert_tables(work: Pass, tables: PassTables, token_positions: torch.Tensor) -> None:
    """Equal to the layout's in all that belongs to a sequence; nothing to be written, nothing seen elsewhere."""
    expected, end = AttentionLayout(work).tables(), work.num_tokens
    assert expected.words is not None
    assert tables.words is not None
    known = min(expected.words.shape[1], tables.words.shape[1])
    assert torch.equal(tables.words[:end, :known], expected.words[:, :known])
    for words in (tables.words[:end, known:], expected.words[:, known:], tables.words[end:]):
        assert not words.any()
    assert torch.equal(tables.positions[: len(work.positions)], expected.positions)
    assert torch.equal(token_positions[:end], work.token_positions)
    assert torch.equal(tables.written_slots[:end], expected.written_slots)
    assert torch.equal(tables.written_rows[:end], expected.written_rows)
    assert (tables.written_rows[end:] == -1).all()
    assert not token_positions[end:].any()
    assert not tables.written_slots[end:].any()
    assert tables.words.dtype == tables.positions.dtype == torch.int32
    assert tables.written_rows.dtype == tables.written_slots.dtype == token_positions.dtype == torch.int64


@pytest.mark.parametrize(
    ("nodes", "reach"),
    [
        pytest.param(nodes, (1, 2, 7, 600)[(place + turn) % 4], marks=pytest.mark.slow if turn else [])
        for place, nodes in enumerate([1, 2, 3, 4, 5, 31, 32, 33, 63, 64, 65, 127, 129, 340, 511, 512])
        for turn in range(4)
    ],
)  # fmt: skip
def test_random_trees(nodes: int, reach: int) -> None:
    work = pass_of([Row(random_parents(nodes, reach, torch.Generator().manual_seed(nodes * 1000 + reach)))])
    assert_tables(work, *made(work))


def test_ragged_batches_with_padding(monkeypatch) -> None:
    """Few nodes beside many, levels behind earlier nodes, and several trees over one prefix."""
    generator = torch.Generator().manual_seed(1)
    rows = [
        Row([-1], prefix=0),
        Row(random_parents(512, 1, generator), prefix=2_000_000_000),
        Row([-1, 0, -1, -1, 2, 4], num_earlier=5, prefix=131_000),
        Row(random_parents(70, 3, generator), num_earlier=64),
        Row(random_parents(300, 20, generator), num_earlier=1),
        Row(random_parents(33, 9, generator), num_earlier=32),
    ]
    work = pass_of(rows)
    guarded = GuardedMemory(monkeypatch)
    assert_tables(work, *made(work, extra_tokens=1200, extra_nodes=9, extra_sequences=3))
    guarded.check()


@st.composite
def rows_of_passes(draw: st.DrawFn) -> list[Row]:
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 40))
        parents = [draw(st.integers(-1, node - 1)) for node in range(size)]
        rows.append(Row(parents, draw(st.integers(0, size - 1)), draw(st.integers(0, 1000))))
    return rows


@settings(max_examples=30)
@given(rows_of_passes(), st.integers(0, 40), st.integers(0, 3), st.integers(0, 100))
def test_tables_are_the_layouts(rows: list[Row], extra_tokens: int, extra_sequences: int, more_nodes: int) -> None:
    work = pass_of(rows)
    assert_tables(work, *made(work, extra_tokens=extra_tokens, extra_sequences=extra_sequences, more_nodes=more_nodes))


@settings(max_examples=20)
@given(rows_of_passes())
def test_passes_as_they_are_captured(rows: list[Row]) -> None:
    """Rounded up to few shapes, a pass is still itself, and what it is padded with can be embedded and sees nothing."""
    work = pass_of(rows)
    shape = shape_of(work)
    assert all(size & (size - 1) == 0 for size in shape)
    inputs = [part.to(DEVICE) for part in padded_inputs(work, shape)]
    captured = captured_pass(shape, inputs)
    assert captured.tables is not None
    assert_tables(work, captured.tables, captured.positions)
    assert captured.num_tokens == shape.num_tokens == len(captured.tokens) == len(captured.token_positions)
    assert torch.equal(captured.tokens[: work.num_tokens], work.tokens)
    assert set(captured.tokens.tolist()) <= set(work.tokens.tolist())
    with OnDevice():  # nor is anything looked at under capture
        captured_pass(shape, inputs)


def test_nothing_but_the_tables_is_written_or_allocated() -> None:
    rows = [Row(random_parents(40, 4, torch.Generator().manual_seed(2)), 7), Row([-1, 0, 0, 1])]
    work = pass_of(rows)
    starts, node_starts, slots, prefix = (
        torch.tensor(list(values), dtype=torch.int32, device=DEVICE)
        for values in (work.offsets, work.node_offsets, work.slots, work.prefix_lens)
    )
    bounds = {"num_tokens": 48, "max_prefix": 512, "max_tokens": 64, "max_nodes": 64}
    arguments = (work.parents, work.positions, slots, prefix, starts, node_starts)
    pass_tables(*arguments, **bounds)  # compiles
    with OnDevice() as calls:
        tables, token_positions = pass_tables(*arguments, **bounds)
    assert sorted(calls.allocated) == sorted(
        [(48, 2), tuple(work.positions.shape), (48,), (48,), (48,)]
    ), "words, positions of nodes and of tokens, slots and rows"  # fmt: skip
    assert_tables(work, tables, token_positions)
