"""Attention under a dense mask in one plain Triton kernel, to compare the mask-free kernel with.

It shares no code with that kernel. The mask has one byte per (query, key) pair.

Letters: B sequences, T tokens fed, S keys, H query heads, Hk KV heads, G = H / Hk, Dk and Dv widths of keys and values.
"""
# The kernel is in Triton's language: its values have no Python types, and what a kernel reads are its arguments.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor


def masked_attention_triton(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    num_keys: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes attention of every query of a pass; never synchronises with the host.

    Args:
        query: (B, H, T, Dk) bfloat16, float16 or float32, of any strides.
        keys: (slots, Hk, capacity, Dk) in the query's dtype.
        values: (slots, Hk, capacity, Dv) in the query's dtype.
        slots: (B,) int32, cache slots.
        num_keys: (B,) int32, rows of each slot that may be read, at most S.
        mask: (B, T, S) bool, true where a query sees a row.
        scale: Factor of the dot products.
        softcap: Soft cap of the scores, or None.
        sinks: (H,) attention sinks, or None.

    Returns:
        (B, T, H, Dv) in the query's dtype. A query that sees nothing gets 0.
    """
    batch, heads, queries, key_width = query.shape
    kv_heads, value_width = keys.shape[1], values.shape[3]
    rows = queries * (heads // kv_heads)
    is_narrow = query.dtype != torch.float32
    block_m = 64 if is_narrow and rows > 16 else 16
    output = query.new_empty(batch, queries, heads, value_width)
    with torch.cuda.device_of(query):
        _masked_kernel[triton.cdiv(rows, block_m), batch * kv_heads](
            query, keys, values, query if sinks is None else sinks, slots, num_keys, mask, output,
            *query.stride(), *keys.stride(), *values.stride(), *mask.stride(), queries, scale, softcap or 1.0,
            KV_HEADS=kv_heads, GROUP=heads // kv_heads, KEY_WIDTH=key_width, VALUE_WIDTH=value_width,
            KEY_BLOCK=max(triton.next_power_of_2(key_width), 16),
            VALUE_BLOCK=max(triton.next_power_of_2(value_width), 16),
            BLOCK_M=block_m, BLOCK_N=32, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None,
            num_warps=4, num_stages=2 if is_narrow else 1,
        )  # fmt: skip
    return output


@triton.jit(do_not_specialize=["num_queries"])
def _masked_kernel(
    query, keys, values, sinks, slots, num_keys, mask, output,
    query_batch_stride, query_head_stride, query_row_stride, query_column_stride,
    key_slot_stride, key_head_stride, key_row_stride, key_column_stride,
    value_slot_stride, value_head_stride, value_row_stride, value_column_stride,
    mask_batch_stride, mask_row_stride, mask_column_stride, num_queries, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one KV head over all keys; row r is query r // G at head r % G of the group."""
    batch = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    kv_head = (tl.program_id(1) % KV_HEADS).to(tl.int64)
    slot = tl.load(slots + batch).to(tl.int64)
    count = tl.load(num_keys + batch)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    node = (rows // GROUP).to(tl.int64)
    head = kv_head * GROUP + rows % GROUP
    is_row = node < num_queries
    key_columns, value_columns = tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    is_key, is_value = key_columns < KEY_WIDTH, value_columns < VALUE_WIDTH
    query_rows = query + batch * query_batch_stride + node * query_row_stride + head * query_head_stride
    query_tile = tl.load(
        query_rows[:, None] + key_columns[None, :] * query_column_stride, is_row[:, None] & is_key[None, :], 0.0
    )
    keys += slot * key_slot_stride + kv_head * key_head_stride + key_columns[None, :] * key_column_stride
    values += slot * value_slot_stride + kv_head * value_head_stride + value_columns[None, :] * value_column_stride
    mask += batch * mask_batch_stride + node[:, None] * mask_row_stride

    sums = tl.zeros((BLOCK_M, VALUE_BLOCK), dtype=tl.float32)
    weight = tl.zeros((BLOCK_M,), dtype=tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    for start in tl.range(0, count, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        is_read = at < count
        key = tl.load(keys + at[:, None] * key_row_stride, is_read[:, None] & is_key[None, :], 0.0)
        value = tl.load(values + at[:, None] * value_row_stride, is_read[:, None] & is_value[None, :], 0.0)
        visible = tl.load(mask + at[None, :] * mask_column_stride, is_row[:, None] & is_read[None, :], 0)
        scores = tl.dot(query_tile, tl.trans(key), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # tanh
        scores = tl.where(visible != 0, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        zero = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(scores - zero[:, None])
        decay = tl.exp(top - zero)
        weight = weight * decay + tl.sum(weights, 1)
        sums = tl.dot(weights.to(value.dtype), value, sums * decay[:, None], input_precision="ieee")
        top = new_top

    if HAS_SINKS:
        sink = tl.load(sinks + head, is_row, 0.0).to(tl.float32)
        new_top = tl.maximum(top, sink)
        zero = tl.where(new_top == float("-inf"), 0.0, new_top)
        sums *= tl.exp(top - zero)[:, None]
        weight = weight * tl.exp(top - zero) + tl.exp(sink - zero)
    sums /= tl.where(weight == 0, 1.0, weight)[:, None]
    target = (batch * num_queries + node) * (KV_HEADS * GROUP) + head
    tl.store(output + target[:, None] * VALUE_WIDTH + value_columns[None, :], sums, is_row[:, None] & is_value[None, :])
