"""Tree attention over the slot cache, sequence by sequence.

Each sequence attends to exactly its own rows of the cache. Nothing past them is read, so whatever stands in uncommitted
rows, NaN included, cannot matter, and a sequence's result does not depend on its neighbours' lengths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from foretoken.attention.reference import reference_attention

if TYPE_CHECKING:
    from foretoken.attention.layout import AttentionLayout


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: AttentionLayout,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of every query of a pass.

    Args:
        query: (B, H, T, Dk).
        keys: (slots, Hk, capacity, Dk), one layer of the cache, this pass's rows already written.
        values: (slots, Hk, capacity, Dv).
        layout: Who sees what.
        scale: Factor of the dot products.
        window: Sliding window of the layer, or None.
        softcap: Soft cap of the scores, or None.
        sinks: (H,) attention sinks, or None.

    Returns:
        (B, T, H, Dv).
    """
    outputs = []
    for row, slot in enumerate(layout.slots):
        end = layout.num_keys(row)
        key, value = keys[slot, :, :end], values[slot, :, :end]
        mask = layout.mask(row, window)
        if softcap is None and sinks is None:
            output = scaled_dot_product_attention(
                query[row : row + 1],
                key[None],
                value[None],
                mask,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[0],
            )
        else:
            output = reference_attention(query[row], key, value, mask, scale=scale, softcap=softcap, sinks=sinks)[None]
        outputs.append(output)
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return joined.transpose(1, 2)
