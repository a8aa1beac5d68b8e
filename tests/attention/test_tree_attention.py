"""The fast path against the definition, on random layouts; rows that are not read do not matter."""

from __future__ import annotations

import pytest
import torch
from attention_loop import loop_attention
from hypothesis import given
from hypothesis import strategies as st

from foretoken.attention.dispatch import tree_attention
from foretoken.attention.layout import AttentionLayout

HEADS, KV_HEADS, KEY_WIDTH, VALUE_WIDTH, SLOTS, CAPACITY = 4, 2, 4, 6, 3, 16


@st.composite
def layouts(draw: st.DrawFn) -> AttentionLayout:
    """Ragged batches of trees, some grown on earlier scratch rows, and causal prompts."""
    batch, queries = draw(st.integers(1, SLOTS)), draw(st.integers(1, 5))
    slots = draw(st.permutations(range(SLOTS)))[:batch]
    prefix = draw(st.lists(st.integers(0, 6), min_size=batch, max_size=batch))
    if draw(st.booleans()):
        positions = torch.tensor(prefix).unsqueeze(1) + torch.arange(queries)
        return AttentionLayout(slots=slots, prefix=prefix, positions=positions)
    offset = draw(st.integers(0, 4))
    width = offset + queries
    parents = [draw(st.integers(-1, node - 1)) for node in range(width)]
    depths, sees = [0] * width, torch.eye(width, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            depths[node] = depths[parent] + 1
            sees[node] |= sees[parent]
    positions = torch.tensor(prefix).unsqueeze(1) + torch.tensor(depths)
    return AttentionLayout(
        slots=slots,
        prefix=prefix,
        offset=offset,
        positions=positions[:, offset:],
        visible=sees[offset:].expand(batch, -1, -1),
        scratch_positions=positions,
    )


def rows_that_count(layout: AttentionLayout, row: int, window: int | None) -> list[list[bool]]:
    """What the queries of one sequence see, cell by cell, from the layout's own words."""
    prefix, queries = layout.prefix[row], layout.num_queries
    sees = []
    for query in range(queries):
        position = int(layout.positions[row, query])
        line = []
        for key in range(layout.num_keys(row)):
            scratch = key - prefix
            if scratch < 0:
                is_visible, at = True, key
            elif layout.visible is None:
                is_visible, at = scratch <= query, prefix + scratch
            else:
                assert layout.scratch_positions is not None
                is_visible = bool(layout.visible[row, query, scratch])
                at = int(layout.scratch_positions[row, scratch])
            line.append(is_visible and (window is None or position - at < window))
        sees.append(line)
    return sees


@given(
    layout=layouts(),
    window=st.sampled_from([None, 1, 2, 3, 5]),
    softcap=st.sampled_from([None, None, 2.0]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equals_the_loop_whatever_unread_rows_hold(
    layout: AttentionLayout, window: int | None, softcap: float | None, has_sinks: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    batch, queries = layout.positions.shape
    query = normal(batch, HEADS, queries, KEY_WIDTH)
    keys = normal(SLOTS, KV_HEADS, CAPACITY, KEY_WIDTH)
    values = normal(SLOTS, KV_HEADS, CAPACITY, VALUE_WIDTH)
    sinks = normal(HEADS) if has_sinks else None
    for slot in range(SLOTS):
        end = layout.num_keys(layout.slots.index(slot)) if slot in layout.slots else 0
        keys[slot, :, end:] = float("nan")
        values[slot, :, end:] = float("nan")
    ours = tree_attention(query, keys, values, layout, scale=0.6, window=window, softcap=softcap, sinks=sinks)
    assert ours.shape == (batch, queries, HEADS, VALUE_WIDTH)
    for row, slot in enumerate(layout.slots):
        end = layout.num_keys(row)
        theirs = loop_attention(
            query[row],
            keys[slot, :, :end],
            values[slot, :, :end],
            rows_that_count(layout, row, window),
            scale=0.6,
            softcap=softcap,
            sinks=sinks,
        )
        # float64 on both sides; sums of at most 15 terms of order 1 in another order.
        torch.testing.assert_close(ours[row].transpose(0, 1), theirs, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("lost", ["visible", "window"])
def test_control_a_lost_mask_shows(lost: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, HEADS, 3, KEY_WIDTH, generator=generator)
    keys = torch.randn(1, KV_HEADS, CAPACITY, KEY_WIDTH, generator=generator)
    positions = torch.tensor([[4, 5, 5]])
    visible = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    tree = AttentionLayout(slots=[0], prefix=[4], positions=positions, visible=visible, scratch_positions=positions)
    right = tree_attention(query, keys, keys, tree, scale=1.0, window=3)
    if lost == "visible":
        causal = AttentionLayout(slots=[0], prefix=[4], positions=positions)
        wrong = tree_attention(query, keys, keys, causal, scale=1.0, window=3)
    else:
        wrong = tree_attention(query, keys, keys, tree, scale=1.0)
    assert (wrong - right).abs().max() > 0.1
