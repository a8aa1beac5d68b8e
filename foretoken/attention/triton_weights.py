"""Attention weights of a few tokens over the whole cache in Triton, for drafters that choose KV rows by them.

Two launches: the first one writes A H C scores, with the greatest score and the sum of exponentials of each part of the
keys. The second one merges these, and adds up weights. Keys are read once more than by attention itself; values are
not.

Letters: S sequences, M tokens of the pass, A of them with weights, H query heads, Hk KV heads, G = H / Hk, Dk the width
of keys, C cache rows. Logarithms are of base 2.
"""
# The kernels are in Triton's language: its values have no Python types, and what a kernel reads are its arguments.

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.attention.triton_tree import LOG2E, multiprocessors, shared_memory
from foretoken.core.backend import integers_on

if TYPE_CHECKING:
    from foretoken.core.passes import PassTables

_KEYS = 64  # of a tile; a choice
_MOST_PARTS = 64  # of the keys of a sequence; a choice
_PROGRAMS = 4  # for each multiprocessor; a choice


class WeighedTokens(NamedTuple):
    """The tokens whose weights are needed, on the device.

    Attributes:
        tokens: (A,) int32, ascending, of the pass.
        starts: (S + 1,) int32, where each sequence's weighed tokens begin.
        most: The most weighed tokens of a sequence.
        num_keys: C, the most cache rows of a sequence.
    """

    tokens: Tensor
    starts: Tensor
    most: int
    num_keys: int

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int]], num_keys: int, device: torch.device) -> WeighedTokens:
        """Takes each sequence's tokens, as indices in the pass."""
        starts = [0]
        for each in tokens:
            starts.append(starts[-1] + len(each))
        flat = [token for each in tokens for token in each]
        moved = integers_on([*starts, *flat], device).to(torch.int32)
        return cls(moved[len(starts) :], moved[: len(starts)], max(map(len, tokens)), num_keys)


def fits(query: Tensor, keys: Tensor, weighed: WeighedTokens) -> bool:
    """Decides whether the weighed rows of a KV head and a tile of keys fit into a program's shared memory."""
    rows, width = _tile(query, keys, weighed)
    return bool((rows + _KEYS) * width * query.element_size() <= shared_memory(query.device))


def _tile(query: Tensor, keys: Tensor, weighed: WeighedTokens) -> tuple[int, int]:
    """Returns rows and columns of a program's queries."""
    rows = weighed.most * (query.shape[1] // keys.shape[1])
    return max(triton.next_power_of_2(rows), 16), max(triton.next_power_of_2(query.shape[-1]), 16)  # `tl.dot`'s least


def attention_weights_triton(
    query: Tensor, keys: Tensor, tables: PassTables, weighed: WeighedTokens, *, scale: float
) -> Tensor:
    """Returns (S, Hk, C) float32, see `PassOutput.attention`, of one layer without window, soft cap and sinks.

    Args:
        query: (M, H, Dk) bfloat16, float16 or float32.
        keys: (slots, Hk, capacity, Dk) in the query's dtype, last stride 1, this pass's rows already written.
        scale: Factor of the dot products.
    """
    _, heads, width = query.shape
    sequences, kv_heads = len(tables.slots), keys.shape[1]
    group, tiles = heads // kv_heads, triton.cdiv(weighed.num_keys, _KEYS)
    rows, columns = _tile(query, keys, weighed)
    wanted = triton.cdiv(_PROGRAMS * multiprocessors(query.device), sequences * kv_heads)
    parts = min(triton.next_power_of_2(min(wanted, tiles)), _MOST_PARTS)
    output = query.new_empty((sequences, kv_heads, weighed.num_keys), dtype=torch.float32)
    scores = output.new_empty((len(weighed.tokens), heads, weighed.num_keys))
    tops, sums = (output.new_empty((sequences * kv_heads, rows, parts)) for _ in range(2))
    has_words = tables.words is not None
    words = tables.prefix if tables.words is None else tables.words.contiguous()
    grid, sizes = (parts, sequences * kv_heads), {"ROWS": rows, "BLOCK_N": _KEYS, "TILES": triton.cdiv(tiles, parts)}
    with torch.cuda.device_of(query):
        _scores_kernel[grid](
            query, keys, tables.slots, tables.prefix, tables.starts, tables.node_starts, words,
            weighed.tokens, weighed.starts, scores, tops, sums,
            *query.stride(), *keys.stride()[:3], words.shape[-1], weighed.num_keys, scale * LOG2E.value,
            KV_HEADS=kv_heads, GROUP=group, WIDTH=width, BLOCK_D=columns,
            PARTS=parts, HAS_WORDS=has_words, num_warps=4, **sizes,
        )  # fmt: skip
        _weights_kernel[grid](
            weighed.starts, scores, tops, sums, output, weighed.num_keys,
            KV_HEADS=kv_heads, GROUP=group, PARTS=parts, num_warps=4, **sizes,
        )  # fmt: skip
    return output


@triton.jit
def _score_row(first, rows, kv_head, KV_HEADS: tl.constexpr, GROUP: tl.constexpr):
    """Returns where the scores (A, H, C) of the rows of a tile lie, in units of C."""
    return ((first + rows // GROUP).to(tl.int64) * KV_HEADS + kv_head) * GROUP + rows % GROUP


@triton.jit(do_not_specialize=["num_words", "num_keys"])
def _scores_kernel(
    query, keys, slots, prefix, starts, node_starts, all_words, weighed, weighed_starts, scores, tops, sums,
    query_row_stride, query_head_stride, query_column_stride, key_slot_stride, key_head_stride, key_row_stride,
    num_words, num_keys, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, PARTS: tl.constexpr, TILES: tl.constexpr, HAS_WORDS: tl.constexpr,
):  # fmt: skip
    """Scores one part of the keys of one sequence and KV head; row r is weighed token r // G, head r % G."""
    part, pair = tl.program_id(0), tl.program_id(1)
    sequence, kv_head = pair // KV_HEADS, (pair % KV_HEADS).to(tl.int64)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    first = tl.load(weighed_starts + sequence)
    is_row = rows // GROUP < tl.load(weighed_starts + sequence + 1) - first
    token = tl.load(weighed + first + rows // GROUP, mask=is_row, other=0)
    length = tl.load(prefix + sequence)
    num_nodes = tl.load(node_starts + sequence + 1) - tl.load(node_starts + sequence)
    end = length + num_nodes
    own_node = token - tl.load(starts + sequence + 1) + num_nodes  # tokens are the last nodes
    keys += tl.load(slots + sequence).to(tl.int64) * key_slot_stride + kv_head * key_head_stride
    query_rows = query + token.to(tl.int64) * query_row_stride + (kv_head * GROUP + rows % GROUP) * query_head_stride
    is_column = columns < WIDTH
    query_tile = tl.load(
        query_rows[:, None] + columns[None, :] * query_column_stride, mask=is_row[:, None] & is_column[None, :],
        other=0.0,
    )  # fmt: skip
    score_rows = scores + _score_row(first, rows, kv_head, KV_HEADS, GROUP) * num_keys
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    begin = part * TILES * BLOCK_N
    for start in tl.range(begin, tl.minimum(begin + TILES * BLOCK_N, num_keys), BLOCK_N):
        key_rows = start + tl.arange(0, BLOCK_N)
        node = key_rows - length
        visible = (key_rows < end)[None, :] & is_row[:, None]
        if start + BLOCK_N > length:
            if HAS_WORDS:
                is_node = (node >= 0) & (key_rows < end)
                words = tl.load(
                    all_words + token[:, None] * num_words + node[None, :] // 32,
                    mask=is_row[:, None] & is_node[None, :], other=0,
                )  # fmt: skip
                visible = visible & ((node < 0)[None, :] | ((words >> (node % 32)[None, :]) & 1 == 1))
            else:
                visible = visible & (node[None, :] <= own_node[:, None])
        key = tl.load(
            keys + key_rows.to(tl.int64)[:, None] * key_row_stride + columns[None, :],
            mask=(key_rows < end)[:, None] & is_column[None, :], other=0.0,
        )  # fmt: skip
        tile = tl.dot(query_tile, tl.trans(key), input_precision="ieee") * scale
        tile = tl.where(visible, tile, float("-inf"))
        tl.store(score_rows[:, None] + key_rows[None, :], tile, mask=is_row[:, None] & (key_rows < num_keys)[None, :])
        new_top = tl.maximum(top, tl.max(tile, 1))
        zero = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - zero) + tl.sum(tl.exp2(tile - zero[:, None]), 1)
        top = new_top
    tl.store(tops + (pair * ROWS + rows) * PARTS + part, top)
    tl.store(sums + (pair * ROWS + rows) * PARTS + part, total)


@triton.jit(do_not_specialize=["num_keys"])
def _weights_kernel(
    weighed_starts, scores, tops, sums, output, num_keys,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Adds up the weights of one part of the keys."""
    part, pair = tl.program_id(0), tl.program_id(1)
    sequence = pair // KV_HEADS
    rows, places = tl.arange(0, ROWS), tl.arange(0, PARTS)
    first = tl.load(weighed_starts + sequence)
    is_row = rows // GROUP < tl.load(weighed_starts + sequence + 1) - first
    kept = (pair * ROWS + rows[:, None]) * PARTS + places[None, :]
    every_top = tl.load(tops + kept)
    top = tl.max(every_top, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.load(sums + kept) * tl.exp2(every_top - top[:, None]), 1)
    total = tl.where(is_row, total, 1.0)
    score_rows = scores + _score_row(first, rows, pair % KV_HEADS, KV_HEADS, GROUP) * num_keys
    begin = part * TILES * BLOCK_N
    for start in tl.range(begin, tl.minimum(begin + TILES * BLOCK_N, num_keys), BLOCK_N):
        key_rows = start + tl.arange(0, BLOCK_N)
        is_key = key_rows < num_keys
        tile = tl.load(
            score_rows[:, None] + key_rows[None, :], mask=is_row[:, None] & is_key[None, :], other=float("-inf")
        )  # fmt: skip
        weights = tl.exp2(tile - top[:, None]) / total[:, None]
        tl.store(output + pair.to(tl.int64) * num_keys + key_rows, tl.sum(weights, 0), mask=is_key)
