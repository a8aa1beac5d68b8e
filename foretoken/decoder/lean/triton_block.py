"""Fused element-wise kernels of a decoder block for GPUs: norm, activation, rotation and cache write.

In a captured pass the host costs nothing, but every kernel takes some microseconds to begin and end. torch needs about
thirty kernels a layer; these three and attention make six. Rows are computed separately: a token's result does not
depend on the width of the pass.

Letters: M tokens of a pass, D hidden size, H query heads, Hk KV heads, E head size, I width of the gated layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from foretoken.decoder.lean.elementwise import Projected, TorchOps

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.attention.layout import PassTables
    from foretoken.decoder.blocks import Activation, Block, Norm
    from foretoken.decoder.slot_cache import SlotCache


class TritonOps(TorchOps):
    """The kernels of this module if they know the operation, else torch's, as for layer norms."""

    def add_and_norm(self, x: Tensor, delta: Tensor | None, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """See `TorchOps`."""
        if norm is None or norm.kind != "rms":
            return super().add_and_norm(x, delta, norm)
        return add_and_norm(x, delta, norm.weight, norm.epsilon)

    def activate(self, up: Tensor, activation: Activation, *, is_gated: bool) -> Tensor:
        """See `TorchOps`."""
        if activation != "silu" or not is_gated:
            return super().activate(up, activation, is_gated=is_gated)
        return gated_silu(up)

    def rotate_and_write(self, projected: Projected, block: Block, cache: SlotCache) -> Tensor:
        """See `TorchOps`."""
        norms, rotary = (block.query_norm, block.key_norm), block.rotary
        is_known = rotary is not None and 2 * rotary.cos.shape[1] == block.spec.head_dim and not block.norms_all_heads
        if not is_known or any(norm is not None and norm.kind != "rms" for norm in norms):
            return super().rotate_and_write(projected, block, cache)
        assert rotary is not None, "it is known"
        weights = [norm.weight for norm in norms if norm is not None]
        return rotate_and_write(
            projected.joined, rotary.cos, rotary.sin, projected.turns.positions, cache.keys[projected.layer],
            cache.values[projected.layer], projected.layout.tables(),
            (weights[0], weights[1]) if weights else None,
            0.0 if block.query_norm is None else block.query_norm.epsilon,
        )  # fmt: skip


def add_and_norm(x: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Returns x + delta and its RMS norm, both in the dtype of `x`.

    Args:
        x: (..., D), contiguous.
        delta: (..., D), contiguous, or None.
        weight: (D,) of the norm.
        epsilon: Of the norm.
    """
    width = x.shape[-1]
    total = x if delta is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _norm_kernel[(x.numel() // width,)](
        x, x if delta is None else delta, weight, total, normed, width, epsilon,
        HAS_DELTA=delta is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return total, normed


def gated_silu(gate_up: Tensor) -> Tensor:
    """Computes silu(gate) * up, (..., I), of `gate_up` (..., 2 I), contiguous, gate first."""
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    block = min(triton.next_power_of_2(width), 1024)
    _gate_kernel[(gate_up.numel() // (2 * width), triton.cdiv(width, block))](
        gate_up, out, width, BLOCK=block, num_warps=4
    )
    return out


def rotate_and_write(  # noqa: PLR0913, PLR0917 - one launch reads all of it
    joined: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: PassTables,
    norms: tuple[Tensor, Tensor] | None,
    epsilon: float,
) -> Tensor:
    """Applies norms, if any, and rotation to queries and keys, and writes keys and values into the cache.

    Args:
        joined: (M, (H + 2 Hk) E), contiguous: queries, keys, values.
        cos: (P, E / 2) float32, contiguous.
        sin: (P, E / 2) float32, contiguous.
        positions: (M,) int64, contiguous.
        keys: (slots, Hk, capacity, E), one layer of the cache; written.
        values: As `keys`.
        tables: Rows of the tokens; padding tokens write nothing.
        norms: (E,) weights of the queries' and the keys' RMS norm, or None.
        epsilon: Of these norms.

    Returns:
        (M, H, E) queries.
    """
    tokens = len(joined)
    kv_heads, size = keys.shape[1], keys.shape[3]
    heads = joined.shape[1] // size - 2 * kv_heads
    query = joined.new_empty(tokens, heads, size)
    query_norm, key_norm = norms or (cos, cos)
    _rotate_kernel[(tokens, heads + 2 * kv_heads)](
        joined, cos, sin, positions, query, keys, values, tables.written_slots, tables.written_rows,
        query_norm, key_norm, epsilon, *keys.stride()[:3], *values.stride()[:3],
        HEADS=heads, KV_HEADS=kv_heads, SIZE=size, BLOCK=triton.next_power_of_2(size // 2), HAS_NORMS=norms is not None,
        num_warps=1,
    )  # fmt: skip
    return query


@triton.jit
def _norm_kernel(  # noqa: PLR0913, PLR0917 - a kernel takes all that it reads
    x, delta, weight, total, normed, width, epsilon, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Computes one token."""
    first = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    is_column = column < width
    value = tl.load(x + first + column, mask=is_column, other=0.0)
    if HAS_DELTA:
        value = (value.to(tl.float32) + tl.load(delta + first + column, mask=is_column, other=0.0).to(tl.float32)).to(
            value.dtype
        )
        tl.store(total + first + column, value, mask=is_column)
    exact = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(exact * exact, 0) / width + epsilon)
    scaled = exact * factor * tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(normed + first + column, scaled.to(value.dtype), mask=is_column)


@triton.jit
def _gate_kernel(gate_up, out, width, BLOCK: tl.constexpr):
    """Computes some columns of one token."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=is_column, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=is_column, other=0.0)
    exact = gate.to(tl.float32)
    silu = (exact / (1.0 + tl.exp(-exact))).to(gate.dtype)  # rounded like torch's silu before the product
    tl.store(out + row * width + column, (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=is_column)


@triton.jit
def _rotate_kernel(  # noqa: PLR0913, PLR0917 - a kernel takes all that it reads
    joined, cos, sin, positions, query, keys, values, slots, rows, query_norm, key_norm, epsilon,
    key_slot_stride, key_head_stride, key_row_stride, value_slot_stride, value_head_stride, value_row_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_NORMS: tl.constexpr,
):  # fmt: skip
    """Computes one head of one token; `head` counts queries, then keys, then values. Halves are paired."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = SIZE // 2
    column = tl.arange(0, BLOCK)
    is_column = column < half
    source = joined + (token * (HEADS + 2 * KV_HEADS) + head) * SIZE + column
    a = tl.load(source, mask=is_column, other=0.0)
    b = tl.load(source + half, mask=is_column, other=0.0)
    slot, row = tl.load(slots + token), tl.load(rows + token)
    is_written = is_column & (row >= 0)
    if head >= HEADS + KV_HEADS:
        kv_head = head - HEADS - KV_HEADS
        target = values + slot * value_slot_stride + kv_head * value_head_stride + row * value_row_stride + column
        tl.store(target, a, mask=is_written)
        tl.store(target + half, b, mask=is_written)
    else:
        if HAS_NORMS:
            x, y = a.to(tl.float32), b.to(tl.float32)
            factor = tl.rsqrt((tl.sum(x * x, 0) + tl.sum(y * y, 0)) / SIZE + epsilon)
            weight = query_norm if head < HEADS else key_norm
            a = (x * factor * tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)).to(a.dtype)
            b = (y * factor * tl.load(weight + half + column, mask=is_column, other=0.0).to(tl.float32)).to(b.dtype)
        place = tl.load(positions + token) * half + column
        c = tl.load(cos + place, mask=is_column, other=0.0)
        s = tl.load(sin + place, mask=is_column, other=0.0)
        x, y = a.to(tl.float32), b.to(tl.float32)
        if head < HEADS:
            target = query + (token * HEADS + head) * SIZE + column
            is_written = is_column
        else:
            target = keys + slot * key_slot_stride + (head - HEADS) * key_head_stride + row * key_row_stride + column
        tl.store(target, (x * c - y * s).to(a.dtype), mask=is_written)
        tl.store(target + half, (y * c + x * s).to(a.dtype), mask=is_written)
