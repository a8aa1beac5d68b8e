"""Attention written a second time: one query, one key and one number after the other, in Python's float64."""

import math

import torch
from torch import Tensor


def loop_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sees: list[list[bool]],
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """What `reference_attention` should give.

    Args:
        query: (H, T, Dk).
        key: (Hk, S, Dk).
        value: (Hk, S, Dv).
        sees: T lists of S entries; hidden keys are never looked at.
        scale: Factor of the dot products.
        softcap: Soft cap of the scores, or None.
        sinks: (H,) or None.

    Returns:
        (H, T, Dv) float64.
    """
    heads, kv_heads = query.shape[0], key.shape[0]
    q, k, v = query.tolist(), key.tolist(), value.tolist()
    result = torch.zeros(heads, query.shape[1], value.shape[2], dtype=torch.float64)
    for head in range(heads):
        kv_head = head * kv_heads // heads  # consecutive query heads share a KV head
        for at, q_row in enumerate(q[head]):
            seen = [index for index, visible in enumerate(sees[at]) if visible]
            scores = []
            for index in seen:
                score = scale * sum(x * y for x, y in zip(q_row, k[kv_head][index], strict=True))
                scores.append(score if softcap is None else softcap * math.tanh(score / softcap))
            weights = [math.exp(score) for score in scores]
            total = sum(weights) + (0.0 if sinks is None else math.exp(float(sinks[head])))
            for weight, index in zip(weights, seen, strict=True):
                for column, number in enumerate(v[kv_head][index]):
                    result[head, at, column] += weight / total * number
    return result
