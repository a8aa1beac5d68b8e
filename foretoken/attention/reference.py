"""Reference attention in plain torch; it defines the result, and also serves soft-capping and attention sinks."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention of one sequence with grouped KV heads.

    Args:
        query: (H, T, Dk).
        key: (Hk, S, Dk), H a multiple of Hk; query head h reads KV head h // (H / Hk).
        value: (Hk, S, Dv).
        mask: (T, S) bool, true where a query sees a key; None for everywhere.
        scale: Factor of the dot products.
        softcap: c in c tanh(score / c), applied before the mask (Gemma 2), or None.
        sinks: (H,) logits that take part in the softmax and have no value (GPT-OSS), or None.

    Returns:
        (H, T, Dv) in the query's dtype; the softmax runs in at least float32.
    """
    heads, queries, width = query.shape
    groups = heads // key.shape[0]
    grouped = query.reshape(key.shape[0], groups * queries, width)
    scores = (grouped @ key.transpose(1, 2)).view(heads, queries, -1) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(heads, 1, 1).expand(-1, queries, 1)], dim=2)
    probs = scores.softmax(-1)[:, :, : key.shape[1]].to(value.dtype)
    return (probs.view(key.shape[0], groups * queries, -1) @ value).view(heads, queries, -1)
