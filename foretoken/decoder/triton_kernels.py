"""Kernels of a decoder block for GPUs: small-batch GEMM, norm, activation, rotation, cache write, recurrent states.

In a captured pass the host costs nothing, but every kernel takes some microseconds to begin and end. torch needs about
thirty kernels a layer; these four and attention make nine. Rows are computed separately: a token's result does not
depend on the width of the pass, except that GEMMs of more than 64 tokens are torch's.

Kernels overlap, see `triton_overlap`. A GEMM fetches its first weights into L2 before it waits for the kernel before
it, so the memory works while small kernels run.

Letters: M tokens of a pass, D hidden size, H query heads, Hk KV heads, E head size, I width of the gated layer, N
outputs and K inputs of a GEMM; of a recurrence: S sequences, I items, L layers, H heads, Hk heads of queries and keys,
Dk and Dv the sizes of keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.attention.triton_overlap import fetch_lines, launch_options, overlaps, start_next, wait_for_previous
from foretoken.core.checks import require

if TYPE_CHECKING:
    from foretoken.core.passes import PassTables

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_BLOCK_ROWS = 8  # paths are rarely longer
_TILE_BYTES = 256
MOST_ROWS = 64  # of a GEMM here; beyond them arithmetic counts too, and cuBLAS has more ways to tile


def commit_rows(store: Tensor, slots: Tensor, prefix: Tensor, path: Tensor, num_accepted: Tensor) -> None:
    """Moves row prefix + path[i] of each sequence's slot to row prefix + 1 + i, for i below num_accepted, in place.

    The root's row is in place already. All other rows keep their bits. The function takes one launch, does not
    synchronise with the host and allocates no memory.

    Args:
        store: (L, S, H, C, W), any dtype, rows contiguous; one store of a slot cache.
        slots: (B,) int32 or int64, contiguous, all different; slots without accepted nodes are not touched.
        prefix: (B,) int32 or int64, contiguous, the row of each root.
        path: (B, D) int64, contiguous, accepted nodes at depth 1.., ascending.
        num_accepted: (B,) int32 or int64, contiguous, 0..D.
    """
    batch, max_depth = path.shape
    if not max_depth:
        return
    words = store.view(_INTEGERS[store.element_size()])  # moves bits, not numbers
    layers, _, heads, _, width = words.shape
    require(words.stride(4) == 1, "a row is moved as one piece")
    block = min(triton.next_power_of_2(width), _TILE_BYTES // words.element_size())
    _commit_kernel[(layers * heads, batch, triton.cdiv(width, block))](
        words, slots, prefix, path, num_accepted, max_depth, heads, width, *words.stride()[:4],
        BLOCK_ROWS=_BLOCK_ROWS, BLOCK_W=block, num_warps=4,
    )  # fmt: skip


# The four tables may begin anywhere in one tensor; without the exception each alignment would compile a kernel.
@triton.jit(
    do_not_specialize=["max_depth", "heads"],
    do_not_specialize_on_alignment=["slots", "prefix", "path", "num_accepted"],
)
def _commit_kernel(
    store, slots, prefix, path, num_accepted, max_depth, heads, width, stride_l, stride_s, stride_h, stride_c,
    BLOCK_ROWS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Moves some columns of the rows of one head and sequence, a block of rows at a time, in order.

    Row i moves from s(i) = path[i] to d(i) = 1 + i, counted from the root's row. A path ascends from at least 1, so
    s(i) >= d(i).

    - A later block never reads a row that an earlier block wrote: for j > i, s(j) >= d(j) > d(i). No store has to be
      waited for.
    - A destination may be an earlier source, d(j) = s(i) for some i <= j. The load of row i is in an earlier block or
      in the same block, before the block's barrier. The store follows the barrier, whichever threads do them.
    - Destinations are all different. Rows with s(i) = d(i) are left alone.

    Programs share nothing: they differ in layer and head, in slot or in columns.
    """
    layer, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    sequence = tl.program_id(1)
    count = tl.load(num_accepted + sequence).to(tl.int32)
    root = tl.load(prefix + sequence).to(tl.int64)
    slot = tl.load(slots + sequence).to(tl.int64)
    column = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
    is_column = (column < width)[None, :]
    # 64-bit: a store has more than 2^31 elements.
    rows = store + layer.to(tl.int64) * stride_l + slot * stride_s + head.to(tl.int64) * stride_h + root * stride_c
    first = tl.full((), 0, tl.int32)
    while first < count:
        index = first + tl.arange(0, BLOCK_ROWS)
        node = tl.load(path + sequence.to(tl.int64) * max_depth + index, mask=index < count, other=0)
        place = index.to(tl.int64) + 1
        is_moved = ((index < count) & (node != place))[:, None] & is_column
        values = tl.load(rows + node[:, None] * stride_c + column[None, :], mask=is_moved)
        tl.debug_barrier()
        tl.store(rows + place[:, None] * stride_c + column[None, :], values, mask=is_moved)
        first += BLOCK_ROWS


def write_rows(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, tables: PassTables) -> None:
    """Writes keys and values in place; the host reads no tables. Padding tokens write nothing.

    Args:
        keys: (slots, Hk, capacity, Dk), any dtype and strides, one layer of the cache; written.
        values: (slots, Hk, capacity, Dv), any strides; written.
        key: (M, Hk, Dk) in the dtype of `keys`, any strides.
        value: (M, Hk, Dv), any strides.
    """
    tokens, kv_heads, key_width = key.shape
    value_width = value.shape[2]
    _write_kernel[(tokens, kv_heads)](
        keys, values, key, value, tables.written_slots, tables.written_rows, key_width, value_width,
        *keys.stride(), *values.stride(), *key.stride(), *value.stride(),
        BLOCK=triton.next_power_of_2(max(key_width, value_width)), num_warps=1,
    )  # fmt: skip


@triton.jit
def _write_kernel(
    keys, values, key, value, slots, rows, key_width, value_width,
    keys_slot_stride, keys_head_stride, keys_row_stride, keys_column_stride,
    values_slot_stride, values_head_stride, values_row_stride, values_column_stride,
    key_token_stride, key_head_stride, key_column_stride,
    value_token_stride, value_head_stride, value_column_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes one head of one token."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot, row = tl.load(slots + token), tl.load(rows + token)
    column = tl.arange(0, BLOCK)
    is_key, is_value = (column < key_width) & (row >= 0), (column < value_width) & (row >= 0)
    source = key + token * key_token_stride + head * key_head_stride + column * key_column_stride
    target = keys + slot * keys_slot_stride + head * keys_head_stride + row * keys_row_stride
    tl.store(target + column * keys_column_stride, tl.load(source, mask=is_key), mask=is_key)
    source = value + token * value_token_stride + head * value_head_stride + column * value_column_stride
    target = values + slot * values_slot_stride + head * values_head_stride + row * values_row_stride
    tl.store(target + column * values_column_stride, tl.load(source, mask=is_value), mask=is_value)


def add_and_norm(x: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Returns x + delta and its RMS norm, both in the dtype of `x`.

    Args:
        x: (..., D), contiguous.
        delta: (..., D), or (P, ..., D) to be summed over P, contiguous; or None.
        weight: (D,) of the norm.
    """
    width = x.shape[-1]
    num_parts = 0 if delta is None else delta.numel() // x.numel()
    total = x if delta is None else torch.empty_like(x)
    normed = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _norm_kernel[(x.numel() // width,)](
        x, x if delta is None else delta, weight, total, normed, width, epsilon, x.numel(),
        PARTS=num_parts, BLOCK=block, num_warps=min(max(block // 512, 1), 16), **launch_options(x.device),
    )  # fmt: skip
    return total, normed


def gated_silu(gate_up: Tensor) -> Tensor:
    """Computes silu(gate) * up, (..., I), of `gate_up` (..., 2 I), contiguous, gate first."""
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    block = min(triton.next_power_of_2(width), 1024)
    _gate_kernel[(gate_up.numel() // (2 * width), triton.cdiv(width, block))](
        gate_up, out, width, BLOCK=block, num_warps=4, **launch_options(out.device)
    )
    return out


def rotate_and_write(
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
        num_warps=1, **launch_options(query.device),
    )  # fmt: skip
    return query


@triton.jit
def _norm_kernel(
    x, delta, weight, total, normed, width, epsilon, part_size, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Computes one token."""
    if OVERLAPS:
        start_next()
        wait_for_previous()
    first = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    is_column = column < width
    value = tl.load(x + first + column, mask=is_column, other=0.0)
    if PARTS > 0:
        change = tl.zeros((BLOCK,), dtype=tl.float32)
        for part in tl.static_range(PARTS):
            place = delta + tl.full((), part, tl.int64) * part_size + first + column
            change += tl.load(place, mask=is_column, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) + change).to(value.dtype)
        tl.store(total + first + column, value, mask=is_column)
    exact = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(exact * exact, 0) / width + epsilon)
    scaled = exact * factor * tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(normed + first + column, scaled.to(value.dtype), mask=is_column)


@triton.jit
def _gate_kernel(gate_up, out, width, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """Computes some columns of one token."""
    if OVERLAPS:
        start_next()
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=is_column, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=is_column, other=0.0)
    exact = gate.to(tl.float32)
    silu = (exact / (1.0 + tl.exp(-exact))).to(gate.dtype)  # rounded like torch's silu before the product
    tl.store(out + row * width + column, (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=is_column)


@triton.jit
def _rotate_kernel(
    joined, cos, sin, positions, query, keys, values, slots, rows, query_norm, key_norm, epsilon,
    key_slot_stride, key_head_stride, key_row_stride, value_slot_stride, value_head_stride, value_row_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_NORMS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Computes one head of one token; `head` counts queries, then keys, then values. Halves are paired."""
    if OVERLAPS:
        start_next()
        wait_for_previous()
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


class GemmTiling(NamedTuple):
    """The shape of a program's work in a small-batch GEMM.

    Attributes:
        outputs: Rows of the weight in a tile.
        inputs: Columns of the weight in a tile.
        stages: Tiles in flight.
        fetched: Tiles fetched into L2 before the kernel waits for the one before it.
        parts: Programs that share the inputs of a tile, if the caller sums over them.
    """

    outputs: int
    inputs: int
    warps: int
    stages: int
    fetched: int
    parts: int = 1


def gemm_tiling(num_tokens: int, num_outputs: int) -> GemmTiling:
    """Returns the tiling of a GEMM with few rows for a Hopper GPU.

    Set on an H100 with the matrices of an 8B-shaped Llama, see "Small-batch GEMM on a GPU" in benchmarks/NOTES.md.
    """
    if num_outputs < 64 * 96:  # fewer tiles than multiprocessors
        return GemmTiling(64, 128, 4, 6, 3, parts=2)
    if num_tokens > 16 and num_outputs >= 128 * 132:
        return GemmTiling(128, 128, 8, 4, 3)
    return GemmTiling(64, 128, 4, 6 if num_tokens <= 16 else 5, 3)


def fits_gemm(weight: Tensor, bias: Tensor | None) -> bool:
    """Decides whether `small_batch_gemm` takes a linear layer: float16 or bfloat16, no bias, on Hopper or newer."""
    num_outputs, num_inputs = weight.shape
    return (
        overlaps(weight.device) and bias is None and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.is_contiguous() and num_outputs % 128 == 0 and num_inputs % 128 == 0
    )  # fmt: skip


def small_batch_gemm(
    x: Tensor, weight: Tensor, dtype: torch.dtype | None = None, *, in_parts: bool = False
) -> Tensor:  # fmt: skip
    """Returns x @ weight.T of few rows; sums are float32 in an order that does not depend on the number of rows.

    Args:
        x: (M, K) in the dtype of `weight`, contiguous, at most `MOST_ROWS` rows.
        weight: (N, K) bfloat16 or float16, see `fits_gemm`.
        dtype: Dtype of the result; None for that of `weight`.
        in_parts: Whether the caller sums over the parts of `GemmTiling`.

    Returns:
        (M, N), or (P, M, N) float32 in parts.
    """
    tokens, outputs = len(x), len(weight)
    tiling = gemm_tiling(tokens, outputs)
    num_parts = tiling.parts if in_parts and weight.shape[1] % (tiling.parts * tiling.inputs) == 0 else 1
    if num_parts > 1:
        out = x.new_empty(num_parts, tokens, outputs, dtype=torch.float32)
    else:
        out = x.new_empty(tokens, outputs, dtype=dtype)
    _gemm_kernel[(outputs // tiling.outputs, num_parts)](
        x, weight, out, tokens, outputs, weight.shape[1], weight.shape[1] // num_parts,
        BLOCK_M=max(triton.next_power_of_2(tokens), 16), BLOCK_N=tiling.outputs, BLOCK_K=tiling.inputs,
        FETCHED=min(tiling.fetched, weight.shape[1] // num_parts // tiling.inputs), num_warps=tiling.warps,
        num_stages=tiling.stages, **launch_options(x.device),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _gemm_kernel(
    x, weight, out, num_tokens, num_outputs, num_inputs, part_inputs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FETCHED: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Computes some outputs of all tokens. Weights are the rows of each product, so that few tokens waste little."""
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_K)
    first = tl.program_id(1) * part_inputs
    weight_rows = weight + output.to(tl.int64)[:, None] * num_inputs + first
    if OVERLAPS:
        start_next()
        line = 64 * tl.arange(0, BLOCK_K // 64)  # 128 bytes
        for tile in tl.static_range(FETCHED):
            fetch_lines(weight_rows + (tile * BLOCK_K + line)[None, :])
        wait_for_previous()
    weight_tile = weight_rows + column[None, :]
    x_tile = x + token[None, :] * num_inputs + first + column[:, None]
    is_token = (token < num_tokens)[None, :]
    sums = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for _ in tl.range(0, part_inputs, BLOCK_K):
        sums = tl.dot(tl.load(weight_tile), tl.load(x_tile, mask=is_token, other=0.0), sums)
        weight_tile += BLOCK_K
        x_tile += BLOCK_K
    row = tl.program_id(1) * num_tokens + token
    target = out + row.to(tl.int64)[None, :] * num_outputs + output[:, None]
    tl.store(target, sums, mask=is_token)


_STATE_COLUMNS = 8  # of a state in a program of one warp; a choice, not measured


def walk_states(
    layer: int, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor,
    sequences: Tensor, moves: Tensor, scratch: Tensor, *, is_delta: bool,
) -> Tensor:  # fmt: skip
    """Returns what the items of a pass read from their recurrent states, see `Levels.read` in `torch_mixers`.

    The launch depends on S and the sizes of a layer alone. The bits of an item depend on its own path alone.

    Args:
        layer: Its number among L.
        query: (I, Hk, Dk) float32, heads side by side.
        key: As `query`.
        value: (I, H, Dv) float32, heads side by side.
        decay: (I, H) float32, contiguous.
        rate: (I, H) float32, contiguous.
        sequences: (5 S,) integers. Of each sequence, its first item, the end of its items, the address of the state
            that it begins with, 0 for zeros, the item whose state is kept, and the address where. The item before the
            first keeps the state before the sequence, -2 keeps none. Addresses are of (L, H, Dk, Dv) float32.
        moves: (2 I,) integers. Of each item, the state of `scratch` that it begins with, and where its own is stored
            for later items. The first is -1 behind the item before, -2 for the state before the sequence; the second is
            -1 if no later item needs it.
        scratch: (N, H, Dk, Dv) float32, contiguous, written.
        is_delta: Whether the rule is the delta rule.

    Returns:
        (I, H, Dv) float32.
    """
    (_, key_heads, keys), (_, heads, values) = key.shape, value.shape
    out = value.new_empty(value.shape)
    tile = min(triton.next_power_of_2(values), _STATE_COLUMNS)
    _states_kernel[(triton.cdiv(values, tile), heads, len(sequences) // 5)](
        query, key, value, decay, rate, out, sequences, moves, scratch, layer,
        query.stride(0), key.stride(0), value.stride(0), HEADS=heads, SHARED=heads // key_heads, KEYS=keys,
        VALUES=values, BLOCK=triton.next_power_of_2(keys), TILE=tile, IS_DELTA=is_delta, num_warps=1,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["sequences", "moves", "scratch"])
def _states_kernel(
    query, key, value, decay, rate, out, sequences, moves, scratch, layer, query_stride, key_stride, value_stride,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, IS_DELTA: tl.constexpr,
):  # fmt: skip
    """Takes some columns of the state of one head through all items of one sequence."""
    head, sequences = tl.program_id(1), sequences + 5 * tl.program_id(2)
    row, column = tl.arange(0, BLOCK), tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_row, is_column = row < KEYS, column < VALUES
    is_state = is_row[:, None] & is_column[None, :]
    place = (head * KEYS + row[:, None]) * VALUES + column[None, :]
    size: tl.constexpr = HEADS * KEYS * VALUES
    first, end, begin = tl.load(sequences), tl.load(sequences + 1), tl.load(sequences + 2)
    last, kept = tl.load(sequences + 3), tl.load(sequences + 4)
    before = begin.to(tl.pointer_type(tl.float32)) + layer.to(tl.int64) * size + place
    after = kept.to(tl.pointer_type(tl.float32)) + layer.to(tl.int64) * size + place
    state = tl.load(before, mask=is_state & (begin != 0), other=0.0)
    if last == first - 1:
        tl.store(after, state, mask=is_state)
    for item in tl.range(first, end):
        k = tl.load(key + item * key_stride + head // SHARED * KEYS + row, mask=is_row, other=0.0)
        q = tl.load(query + item * query_stride + head // SHARED * KEYS + row, mask=is_row, other=0.0)
        added = tl.load(value + item * value_stride + head * VALUES + column, mask=is_column, other=0.0)
        source, target = tl.load(moves + 2 * item), tl.load(moves + 2 * item + 1)
        if source == -2:
            state = tl.load(before, mask=is_state & (begin != 0), other=0.0)
        if source >= 0:
            state = tl.load(scratch + source * size + place, mask=is_state, other=0.0)
        state *= tl.load(decay + item * HEADS + head)
        if IS_DELTA:
            added -= tl.sum(state * k[:, None], 0)
        state += k[:, None] * (added * tl.load(rate + item * HEADS + head))[None, :]
        read = tl.sum(state * q[:, None], 0)
        tl.store(out + (item * HEADS + head) * VALUES + column, read, mask=is_column)
        if item == last:
            tl.store(after, state, mask=is_state)
        if target >= 0:
            tl.store(scratch + target * size + place, state, mask=is_state)
            tl.debug_barrier()  # another thread may load what this one stored
