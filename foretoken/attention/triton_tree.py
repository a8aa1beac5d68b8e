"""Tree attention without a mask in Triton: one kernel over the slot cache, and one that merges its parts.

Sequences are packed one after another, as in variable-length attention. The queries of a sequence that share a KV head
are the rows of one matrix, so each key is read once for all of them. Key tiles of prefix rows alone need no comparison
without a sliding window: every token of the sequence sees them. They are split among enough programs to keep the GPU
busy. One more program takes the rest of the cache rows, the end of the prefix and the nodes; it looks up visibility in
the bit sets of `PassTables`. Each program writes its weighted mean of values and the log-sum-exp of its scores. A
second kernel merges them. For short contexts one program does everything, without the second kernel.

Lengths are read on the device. The shape of a launch depends on shapes and on the bounds in `PassTables` alone: nothing
waits for the host, and a captured launch stays right when lengths change. A program with a tile past the tokens of
its sequence ends at once.

Letters: S sequences, M tokens of the pass, T tokens of one sequence, H query heads, Hk KV heads, G = H / Hk, Dk and Dv
widths of keys and values. Logarithms are of base 2.
"""
# The kernels are in Triton's language: its values have no Python types, and what a kernel reads are its arguments.

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.attention.triton_overlap import fetch_lines, launch_options, start_next, wait_for_previous
from foretoken.core.backend import has_cuda_runtime
from foretoken.core.checks import require

if TYPE_CHECKING:
    from foretoken.core.passes import PassTables

DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
LOG2E = tl.constexpr(math.log2(math.e))


def tree_attention_triton(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: PassTables,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Computes attention of every token of a pass; never synchronises with the host.

    Rows of a slot past the nodes of its sequence, and slots of no sequence, are not read.

    Args:
        query: (M, H, Dk) bfloat16, float16 or float32, of any strides.
        keys: (slots, Hk, capacity, Dk) in the query's dtype, last stride 1, this pass's rows already written.
        values: (slots, Hk, capacity, Dv), as `keys`.
        tables: Visibility of the keys, on the query's device.
        scale: Factor of the dot products, above 0.
        num_splits: Programs that share a tile of rows: 1, or one for the nodes and the others for the prefix. None for
            the fastest.

    Returns:
        (M, H, Dv) in the query's dtype. A token that sees nothing gets 0. Padding tokens of no sequence get arbitrary
        values.
    """
    tokens, heads, key_width = query.shape
    kv_heads, value_width = keys.shape[1], values.shape[3]
    require(query.dtype in DTYPES, f"the dtype is {query.dtype}")
    require(query.dtype == keys.dtype == values.dtype, "queries and cache have one dtype")
    require(keys.stride(3) == values.stride(3) == 1, "rows of the cache are contiguous")
    require(scale > 0, "the scale of the scores must be above 0")
    sequences, group = len(tables.slots), heads // kv_heads
    tiling = choose_tiling(key_width, value_width, tables.max_tokens * group, query.dtype)
    tiling = tiling.fitted(_padded(key_width) + _padded(value_width), query.element_size(), shared_memory(query.device))
    tiles = triton.cdiv(tables.max_tokens * group, tiling.rows)
    if num_splits is None:
        prefix_tiles = tables.max_prefix // tiling.keys
        if window is not None:
            prefix_tiles = min(prefix_tiles, window // tiling.keys + 1)
        num_splits = choose_num_splits(
            kv_heads * min(sequences * tiles, tokens * group // tiling.rows + sequences),  # others end at once
            prefix_tiles,
            triton.cdiv(tables.max_nodes, tiling.keys) + 1,
            multiprocessors(query.device) * tiling.resident,
            tokens * heads,
        )
    is_split = num_splits > 1
    output = query.new_empty(tokens, heads, value_width)
    means = log_sums = output  # not used without splits
    if is_split:
        means = output.new_empty((tokens, heads, num_splits, value_width), dtype=torch.float32)
        log_sums = means.new_empty(means.shape[:3])
    has_words = tables.words is not None
    words = tables.words.contiguous() if tables.words is not None else tables.prefix
    with torch.cuda.device_of(query):
        _attend_kernel[tiles, num_splits, sequences * kv_heads](
            query, keys, values, query if sinks is None else sinks,
            tables.slots, tables.prefix, tables.starts, tables.node_starts, tables.positions, words,
            output, means, log_sums,
            *query.stride(), *keys.stride()[:2], *values.stride()[:2],
            words.shape[-1], num_splits, window or 0,
            # With a soft cap the scores are scaled before it, in the argument of its tanh, and again after it.
            (scale if softcap is None else softcap) * LOG2E.value,
            0.0 if softcap is None else 2 * scale / softcap * LOG2E.value,
            KV_HEADS=kv_heads, GROUP=group,
            KEY_WIDTH=key_width, KEY_BLOCK=_padded(key_width), KEY_STRIDE=keys.stride(2),
            VALUE_WIDTH=value_width, VALUE_BLOCK=_padded(value_width), VALUE_STRIDE=values.stride(2),
            BLOCK_M=tiling.rows, BLOCK_N=tiling.keys,
            IS_SPLIT=is_split, HAS_WORDS=has_words, HAS_WINDOW=window is not None, HAS_SOFTCAP=softcap is not None,
            HAS_SINKS=sinks is not None, num_warps=tiling.warps, num_stages=tiling.stages,
            **launch_options(query.device),
            # Register spills here lie around the loop over the prefix, not in it.
            maxnreg=65536 // (32 * tiling.warps * tiling.resident) // 8 * 8 if tiling.warps == 8 else None,
        )  # fmt: skip
        if is_split:
            all_splits = triton.next_power_of_2(num_splits)
            _merge_kernel[(tokens * heads,)](
                means, log_sums, query if sinks is None else sinks, output, num_splits,
                HEADS=heads, VALUE_WIDTH=value_width, VALUE_BLOCK=_padded(value_width), ALL_SPLITS=all_splits,
                BLOCK_SPLITS=min(all_splits, max(4096 // _padded(value_width), 1)), HAS_SINKS=sinks is not None,
                num_warps=4, **launch_options(query.device),
            )  # fmt: skip
    return output


class Tiling(NamedTuple):
    """The shape of a program's work.

    Attributes:
        rows: Packed queries of a tile; `tl.dot` takes 16 or more, the widest tensor-core instructions 64 or more.
        keys: Keys of a tile, a multiple of 32.
        stages: Depth of the pipeline of key tiles.
        resident: Programs that should share a multiprocessor; no more than its shared memory and registers hold.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    resident: int

    def fitted(self, widths: int, item_size: int, limit: int) -> Tiling:
        """Returns the tiling with fewer stages, then fewer rows, that fits `limit` bytes of shared memory.

        widths: of a key and a value together; item_size: bytes of a number.
        """
        tiling = self
        while tiling._shared_bytes(widths, item_size) > limit and (tiling.stages > 1 or tiling.rows > 16):
            if tiling.stages > 1:
                tiling = tiling._replace(stages=tiling.stages - 1)
            else:
                tiling = tiling._replace(rows=tiling.rows // 2, warps=4)
        return tiling

    def _shared_bytes(self, widths: int, item_size: int) -> int:
        """Returns the bytes of a program's queries, of its key and value tiles in flight, and a small reserve."""
        return (self.rows * widths // 2 + self.stages * self.keys * widths) * item_size + 4096


def choose_tiling(key_width: int, value_width: int, num_rows: int, dtype: torch.dtype) -> Tiling:
    """Returns the tiling for a Hopper multiprocessor: 227 KiB of shared memory, 65536 registers.

    Few rows are bound by memory: two programs per multiprocessor with their next key tiles in flight. Many rows are
    bound by arithmetic: 128 rows, and again two programs, so that one multiplies while the other exponentiates.

    `num_rows`: T G, the queries of a KV head in the longest sequence.
    """
    width = max(_padded(key_width), _padded(value_width))
    if dtype == torch.float32:  # exact products run outside the tensor cores and hold their operands in registers
        return Tiling(rows=16, keys=32, warps=4, stages=2 if width <= 64 else 1, resident=2)
    rows = min(max(triton.next_power_of_2(num_rows), 16), 128)
    warps = 8 if rows == 128 else 4
    if width <= 64:
        return Tiling(rows=rows, keys=64, warps=warps, stages=4 if rows <= 64 else 3, resident=2)
    if width <= 128:
        return Tiling(rows=rows, keys=64, warps=warps, stages=3 if rows <= 32 else 2, resident=2)
    if rows <= 64:
        return Tiling(rows=rows, keys=32, warps=4, stages=3 if rows <= 32 else 2, resident=2)
    return Tiling(rows=rows, keys=64, warps=8, stages=2, resident=1)


@lru_cache(maxsize=4096)
def choose_num_splits(programs: int, prefix_tiles: int, node_tiles: int, places: int, num_means: int) -> int:
    """Returns how many programs should share a tile of rows, by estimated time from host values.

    Time is counted in key tiles. A program costs about two more to begin and end. Merging costs about three, and one
    for every 2,500 means that it reads: on an H100, 8 trees of 64 nodes behind 2,048 rows took 127 us in 4 splits and
    76 us in one.

    Args:
        programs: Programs without splits; an upper bound.
        prefix_tiles: Most key tiles of prefix that a program may have to read.
        node_tiles: Key tiles of nodes.
        places: Programs that the GPU runs at a time.
        num_means: Weighted means of values that each split writes, one a token and query head.

    Returns:
        1, or 2 and more: the last program reads the nodes.
    """

    def time(splits: int) -> float:
        rounds = -(-programs * splits // places)
        if splits == 1:
            return rounds * (prefix_tiles + node_tiles + 2)
        return rounds * (max(-(-prefix_tiles // (splits - 1)), node_tiles) + 2) + 3 + splits * num_means / 2500

    return min(range(1, min(prefix_tiles, 127) + 2), key=time)


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Returns the bytes of shared memory that a program may have; those of an H200 if the device is no GPU."""
    properties = torch.cuda.get_device_properties(device) if has_cuda_runtime(device) else None
    return int(getattr(properties, "shared_memory_per_block_optin", 232_448))


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Returns the multiprocessors of a GPU; those of an H200 if the device is no GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if has_cuda_runtime(device) else 132


def _padded(width: int) -> int:
    """Returns the block size of a head's width: a power of two, at least the 16 that `tl.dot` takes."""
    return max(1 << (width - 1).bit_length(), 16)


@triton.jit
def _load_rows(base, STRIDE: tl.constexpr, rows, end, WIDTH: tl.constexpr, BLOCK: tl.constexpr, IS_FULL: tl.constexpr):
    """(rows, BLOCK) cache rows below `end`, and 0 in place of other rows, which may hold NaN."""
    columns = tl.arange(0, BLOCK)
    pointers = base + rows[:, None] * STRIDE + columns[None, :]
    if IS_FULL and WIDTH == BLOCK:
        tile = tl.load(pointers)
    elif IS_FULL:
        tile = tl.load(pointers, mask=columns[None, :] < WIDTH, other=0.0)
    else:
        tile = tl.load(pointers, mask=(rows < end)[:, None] & (columns < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def _add_tile(
    sums, weight, top, query, key, value, visible, score_scale, bend,
    IS_MASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Adds one key tile to the running softmax: weighted values, sum of weights, greatest score so far."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if HAS_SOFTCAP:
        scores = 1.0 - 2.0 / (tl.exp2(scores * bend) + 1.0)  # tanh
    if IS_MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * score_scale)
    zero = new_top
    if IS_MASKED:
        zero = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen no key yet
    weights = tl.exp2(scores * score_scale - zero[:, None])
    decay = tl.exp2(top - zero)
    weight = weight * decay + tl.sum(weights, 1)
    sums = tl.dot(weights.to(value.dtype), value, sums * decay[:, None], input_precision="ieee")
    return sums, weight, new_top


@triton.jit
def _seen_in_words(
    words, num_words, is_row, first, node, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """(BLOCK_M, BLOCK_N) whether queries see nodes `first`, first + 1, …; `words` points to each query's first word."""
    bits = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for place in tl.static_range(BLOCK_N // 32 + 1):
        index = (first >> 5) + place
        word = tl.load(words + index, mask=is_row & (index >= 0) & (index < num_words), other=0)
        bits = tl.where((node >> 5 == index)[None, :], word[:, None], bits)
    return ((bits >> (node & 31)[None, :]) & 1) != 0


@triton.jit
def _seen_nodes(
    words, num_words, is_row, own_node, position, positions, length, limit, start, window,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WORDS: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """(BLOCK_M, BLOCK_N) whether queries see cache rows `start`, start + 1, … below `limit`."""
    key_rows = start + tl.arange(0, BLOCK_N)
    node = key_rows - length
    if HAS_WORDS:
        visible = _seen_in_words(words, num_words, is_row, start - length, node, BLOCK_M, BLOCK_N) | (node < 0)[None, :]
    else:
        visible = node[None, :] <= own_node[:, None]
    visible &= (key_rows < limit)[None, :]
    if HAS_WINDOW:
        is_node = (node >= 0) & (key_rows < limit)
        key_position = tl.load(positions + node, mask=is_node, other=0)
        key_position = tl.where(is_node, key_position, key_rows)
        visible &= position[:, None] - key_position[None, :] < window
    return visible


@triton.jit
def _key_range(
    positions, own_node, is_row, length, window, num_splits,
    BLOCK_N: tl.constexpr, IS_SPLIT: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Positions of the queries, which are read with a window alone, and this split's first and end tile of prefix.

    Tiles 0 … length // BLOCK_N - 1 hold prefix rows alone. The last split gets none of them.
    """
    full = length // BLOCK_N
    position, first = own_node, 0
    if HAS_WINDOW:
        position = tl.load(positions + own_node, mask=is_row, other=2147483647)
        first = tl.minimum(tl.maximum(tl.min(position, 0) - window + 1, 0) // BLOCK_N, full)
    begin, end = first, full
    if IS_SPLIT:
        share = tl.cdiv(full - first, num_splits - 1)
        begin = first + tl.program_id(1) * share
        end = tl.minimum(begin + share, full)
    return position, begin, end


@triton.jit
def _store_tile(
    sums, weight, top, output, means, log_sums, sinks, target, head, is_row, num_splits,
    VALUE_WIDTH: tl.constexpr, VALUE_BLOCK: tl.constexpr, IS_SPLIT: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Stores the weighted mean of a tile, with the log-sum-exp of its scores if other splits are to be merged."""
    if HAS_SINKS and not IS_SPLIT:
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        zero = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = weight * tl.exp2(top - zero) + tl.exp2(sink - zero)
        sums *= tl.exp2(top - zero)[:, None]
    has_seen = weight != 0  # NaN from the model counts as seen
    weight = tl.where(has_seen, weight, 1.0)
    sums /= weight[:, None]
    columns = tl.arange(0, VALUE_BLOCK)
    is_out = is_row[:, None] & (columns < VALUE_WIDTH)[None, :]
    if IS_SPLIT:
        target = target * num_splits + tl.program_id(1)
        tl.store(log_sums + target, tl.where(has_seen, top + tl.log2(weight), float("-inf")), mask=is_row)
        tl.store(means + target[:, None] * VALUE_WIDTH + columns[None, :], sums, mask=is_out & has_seen[:, None])
    else:
        tl.store(output + target[:, None] * VALUE_WIDTH + columns[None, :], sums, mask=is_out)


@triton.jit
def _fetch_tiles(
    keys, KEY_STRIDE: tl.constexpr, KEY_BLOCK: tl.constexpr,
    values, VALUE_STRIDE: tl.constexpr, VALUE_BLOCK: tl.constexpr, begin, end, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fetches up to two tiles of prefix rows into L2, tiles `begin` … `end` - 1; 64 numbers are a line or two."""
    rows = begin * BLOCK_N + tl.arange(0, 2 * BLOCK_N)
    rows = tl.where(rows < end * BLOCK_N, rows, 0)
    fetch_lines(keys + rows[:, None] * KEY_STRIDE + 64 * tl.arange(0, (KEY_BLOCK + 63) // 64)[None, :])
    fetch_lines(values + rows[:, None] * VALUE_STRIDE + 64 * tl.arange(0, (VALUE_BLOCK + 63) // 64)[None, :])


@triton.jit(do_not_specialize=["num_words", "num_splits", "window"])
def _attend_kernel(
    query, keys, values, sinks, slots, prefix, starts, node_starts, positions, all_words, output, means, log_sums,
    query_row_stride, query_head_stride, query_column_stride,
    key_slot_stride, key_head_stride, value_slot_stride, value_head_stride,
    num_words, num_splits, window, score_scale, bend,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    KEY_WIDTH: tl.constexpr, KEY_BLOCK: tl.constexpr, KEY_STRIDE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, VALUE_BLOCK: tl.constexpr, VALUE_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_SPLIT: tl.constexpr, HAS_WORDS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Computes one tile of rows of one sequence and KV head over one split of the keys.

    The grid is (row tiles, splits, S Hk): neighbouring programs read the same keys.
    """
    if OVERLAPS:
        start_next()
    sequence = tl.program_id(2) // KV_HEADS
    kv_head = (tl.program_id(2) % KV_HEADS).to(tl.int64)
    first_token = tl.load(starts + sequence)
    num_tokens = tl.load(starts + sequence + 1) - first_token
    if tl.program_id(0) * BLOCK_M >= num_tokens * GROUP:
        return
    first_node = tl.load(node_starts + sequence)
    num_nodes = tl.load(node_starts + sequence + 1) - first_node
    num_earlier = num_nodes - num_tokens
    slot = tl.load(slots + sequence).to(tl.int64)
    length = tl.load(prefix + sequence)
    keys += slot * key_slot_stride + kv_head * key_head_stride
    values += slot * value_slot_stride + kv_head * value_head_stride

    # Row r is token r // G at head r % G: the memory of a sequence's queries is in row order.
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token = rows // GROUP
    is_row = token < num_tokens
    at = first_token.to(tl.int64) + token
    own_node = num_earlier + token
    head = kv_head * GROUP + rows % GROUP
    position, begin, end = _key_range(
        positions + first_node, own_node, is_row, length, window, num_splits, BLOCK_N, IS_SPLIT, HAS_WINDOW
    )  # fmt: skip
    if OVERLAPS:
        _fetch_tiles(keys, KEY_STRIDE, KEY_BLOCK, values, VALUE_STRIDE, VALUE_BLOCK, begin, end, BLOCK_N)
        wait_for_previous()
    columns = tl.arange(0, KEY_BLOCK)
    query_rows = query + at * query_row_stride + head * query_head_stride
    query_tile = tl.load(
        query_rows[:, None] + columns[None, :] * query_column_stride,
        mask=is_row[:, None] & (columns < KEY_WIDTH)[None, :], other=0.0,
    )  # fmt: skip

    sums = tl.zeros((BLOCK_M, VALUE_BLOCK), dtype=tl.float32)
    weight = tl.zeros((BLOCK_M,), dtype=tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    for start in tl.range(begin * BLOCK_N, end * BLOCK_N, BLOCK_N):
        key_rows = start + tl.arange(0, BLOCK_N)
        key = _load_rows(keys, KEY_STRIDE, key_rows, length, KEY_WIDTH, KEY_BLOCK, IS_FULL=True)
        value = _load_rows(values, VALUE_STRIDE, key_rows, length, VALUE_WIDTH, VALUE_BLOCK, IS_FULL=True)
        visible = is_row[:, None]
        if HAS_WINDOW:
            visible = position[:, None] - key_rows[None, :] < window
        sums, weight, top = _add_tile(
            sums, weight, top, query_tile, key, value, visible, score_scale, bend, HAS_WINDOW, HAS_SOFTCAP
        )  # fmt: skip

    # The end of the prefix, then the nodes; nodes with a negative number are prefix rows.
    limit = length + num_nodes
    if not HAS_WORDS:
        limit = length + num_earlier + tl.minimum((tl.program_id(0) * BLOCK_M + BLOCK_M - 1) // GROUP + 1, num_tokens)
    stop = limit
    if IS_SPLIT:
        stop = tl.where(tl.program_id(1) == num_splits - 1, limit, 0)
    for start in tl.range(length // BLOCK_N * BLOCK_N, stop, BLOCK_N):
        key_rows = start + tl.arange(0, BLOCK_N)
        key = _load_rows(keys, KEY_STRIDE, key_rows, limit, KEY_WIDTH, KEY_BLOCK, IS_FULL=False)
        value = _load_rows(values, VALUE_STRIDE, key_rows, limit, VALUE_WIDTH, VALUE_BLOCK, IS_FULL=False)
        visible = _seen_nodes(
            all_words + at * num_words, num_words, is_row, own_node, position, positions + first_node, length, limit,
            start, window, BLOCK_M, BLOCK_N, HAS_WORDS, HAS_WINDOW,
        )  # fmt: skip
        sums, weight, top = _add_tile(
            sums, weight, top, query_tile, key, value, visible, score_scale, bend, True, HAS_SOFTCAP
        )  # fmt: skip

    _store_tile(
        sums, weight, top, output, means, log_sums, sinks, at * (KV_HEADS * GROUP) + head, head, is_row, num_splits,
        VALUE_WIDTH, VALUE_BLOCK, IS_SPLIT, HAS_SINKS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    means, log_sums, sinks, output, num_splits,
    HEADS: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    ALL_SPLITS: tl.constexpr, BLOCK_SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Merges one query head of one query: the means of its splits, each weighted by its sum of exponentials."""
    if OVERLAPS:
        start_next()
        wait_for_previous()
    row = tl.program_id(0).to(tl.int64)
    log_sums += row * num_splits
    means += row * num_splits * VALUE_WIDTH
    every = tl.arange(0, ALL_SPLITS)
    log_sum = tl.load(log_sums + every, mask=every < num_splits, other=float("-inf"))
    top = tl.max(log_sum, 0)
    sink = float("-inf")
    if HAS_SINKS:
        sink = tl.load(sinks + row % HEADS).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.sum(tl.exp2(log_sum - top), 0)
    if HAS_SINKS:
        weight += tl.exp2(sink - top)

    columns = tl.arange(0, VALUE_BLOCK)
    result = tl.zeros((VALUE_BLOCK,), dtype=tl.float32)
    for first in tl.range(0, num_splits, BLOCK_SPLITS):
        split = first + tl.arange(0, BLOCK_SPLITS)
        is_split = split < num_splits
        part = tl.load(log_sums + split, mask=is_split, other=float("-inf"))
        # A split that saw nothing wrote no mean. Its mean is read anyway, so that the load need not wait for `part`.
        mean = tl.load(
            means + split[:, None] * VALUE_WIDTH + columns[None, :],
            mask=is_split[:, None] & (columns < VALUE_WIDTH)[None, :], other=0.0,
        )  # fmt: skip
        mean = tl.where((part == float("-inf"))[:, None], 0.0, mean)
        result += tl.sum(mean * tl.exp2(part - top)[:, None], 0)
    result /= tl.where(weight == 0, 1.0, weight)
    tl.store(output + row * VALUE_WIDTH + columns, result, mask=columns < VALUE_WIDTH)
