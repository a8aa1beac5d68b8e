"""Writing the keys and values of a pass into the slot cache, one launch for both: `SlotCache.write` without the host.

Letters: M tokens of the pass, Hk KV heads, Dk and Dv widths of keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.attention.tables import PassTables


def write_rows(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, tables: PassTables) -> None:
    """Writes in place, without a look at the tables on the host; tokens of no sequence write nothing.

    Args:
        keys: (slots, Hk, capacity, Dk), any dtype and strides, one layer of the cache; written.
        values: (slots, Hk, capacity, Dv), likewise.
        key: (M, Hk, Dk) in the dtype of `keys`, any strides.
        value: (M, Hk, Dv), likewise.
        tables: Says which rows.
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
    """One head of one token."""
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
