"""The fast path against the definition, on random layouts; rows that are not read do not matter."""

from dataclasses import replace

import pytest
import torch
from attention_loop import loop_attention
from hypothesis import given
from hypothesis import strategies as st
from passes import LONGEST_PREFIX, MOST_NODES, SLOTS, some_passes

from foretoken.attention.layout import AttentionLayout, tree_attention
from foretoken.core.passes import Pass

HEADS, KV_HEADS, KEY_WIDTH, VALUE_WIDTH = 4, 2, 4, 6
CAPACITY = LONGEST_PREFIX + MOST_NODES + 1


def rows_that_count(work: Pass, row: int, window: int | None) -> list[list[bool]]:
    """What the tokens of one sequence see, cell by cell, from parents and positions."""
    first, end = work.node_offsets[row], work.node_offsets[row + 1]
    parents, positions = work.parents[first:end].tolist(), work.positions[first:end].tolist()
    prefix, num_tokens = work.prefix_lens[row], work.offsets[row + 1] - work.offsets[row]
    keys = [*range(prefix), *positions]
    sees = []
    for node in range(len(parents) - num_tokens, len(parents)):
        line, ancestor = [key < prefix for key in range(len(keys))], node
        while ancestor >= 0:
            line[prefix + ancestor], ancestor = True, parents[ancestor]
        sees.append([
            is_seen and (window is None or positions[node] - key < window)
            for is_seen, key in zip(line, keys, strict=True)
        ])  # fmt: skip
    return sees


@given(
    work=some_passes(),
    window=st.sampled_from([None, 1, 2, 3, 5]),
    softcap=st.sampled_from([None, None, 2.0]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equals_the_loop_whatever_unread_rows_hold(
    work: Pass, window: int | None, softcap: float | None, has_sinks: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    layout = AttentionLayout(work)
    query = normal(work.num_tokens, HEADS, KEY_WIDTH)
    keys = normal(SLOTS, KV_HEADS, CAPACITY, KEY_WIDTH)
    values = normal(SLOTS, KV_HEADS, CAPACITY, VALUE_WIDTH)
    sinks = normal(HEADS) if has_sinks else None
    for slot in range(SLOTS):
        end = layout.num_keys(list(work.slots).index(slot)) if slot in work.slots else 0
        keys[slot, :, end:] = float("nan")
        values[slot, :, end:] = float("nan")
    ours = tree_attention(query, keys, values, layout, scale=0.6, window=window, softcap=softcap, sinks=sinks)
    assert ours.shape == (work.num_tokens, HEADS, VALUE_WIDTH)
    for row, slot in enumerate(work.slots):
        end = layout.num_keys(row)
        theirs = loop_attention(
            query[layout.tokens_of(row)].transpose(0, 1),
            keys[slot, :, :end],
            values[slot, :, :end],
            rows_that_count(work, row, window),
            scale=0.6,
            softcap=softcap,
            sinks=sinks,
        )
        # float64 on both sides; sums of at most 15 terms of order 1 in another order.
        torch.testing.assert_close(ours[layout.tokens_of(row)].transpose(0, 1), theirs, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("lost", ["visible", "window"])
def test_control_a_lost_mask_shows(lost: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, HEADS, KEY_WIDTH, generator=generator)
    keys = torch.randn(1, KV_HEADS, CAPACITY, KEY_WIDTH, generator=generator)
    work = Pass(
        tokens=torch.zeros(3, dtype=torch.int64),
        positions=torch.tensor([4, 5, 5]),
        parents=torch.tensor([-1, 0, 0]),
        slots=[0],
        prefix_lens=[4],
        offsets=[0, 3],
        logit_rows=None,
    )
    right = tree_attention(query, keys, keys, AttentionLayout(work), scale=1.0, window=3)
    if lost == "visible":
        causal = AttentionLayout(replace(work, is_causal=True))
        wrong = tree_attention(query, keys, keys, causal, scale=1.0, window=3)
    else:
        wrong = tree_attention(query, keys, keys, AttentionLayout(work), scale=1.0)
    assert (wrong - right).abs().max() > 0.1
