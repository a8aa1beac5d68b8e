"""Temperature, top-k, top-p and min-p over rows of logits.

Everything is float32, row-wise and pure.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from foretoken.sampling.batch import SamplingBatch


def warp(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Temperature and truncation, which read nothing but the row.

    Args:
        logits: (B, V) float32.
        batch: Parameters of the same B requests; the temperature of greedy rows counts as 1.

    Returns:
        (B, V) float32 log-probabilities, -inf for tokens cut off.
    """
    logits = logits / batch.temperature
    if batch.top_k is not None:
        largest = logits.topk(batch.largest_top_k, dim=1).values
        logits = logits.masked_fill(logits < largest.gather(1, batch.top_k - 1), -inf)
    if batch.top_p is not None:
        ranked, order = logits.sort(dim=1, descending=True, stable=True)
        probs = ranked.softmax(1)
        is_cut = (probs.cumsum(1) - probs >= batch.top_p) & (batch.top_p < 1.0)  # mass before the token
        is_cut[:, 0] = False  # also where float32 rounds top_p to 0
        logits = logits.masked_fill(torch.zeros_like(is_cut).scatter(1, order, is_cut), -inf)
    if batch.min_p is not None:
        logits = logits.masked_fill(logits < logits.amax(1, keepdim=True) + batch.min_p.log(), -inf)
    return logits.log_softmax(1)


def one_hot_log_probs(logits: Tensor) -> Tensor:
    """The target distribution of greedy decoding: 0 at the first largest logit, -inf elsewhere; (B, V) float32.

    A row without a possible token is -inf throughout.
    """
    best = best_possible(logits).unsqueeze(1)
    certain = torch.zeros_like(logits[:, :1]).masked_fill(best < 0, -inf)
    return torch.full_like(logits, -inf).scatter(1, best.clamp_min(0), certain)


def best_possible(scores: Tensor) -> Tensor:
    """The place of the largest score of each row, or -1 where the row has none that is finite.

    Args:
        scores: (B, V) logits or noisy log-probabilities; -inf for impossible tokens. A NaN anywhere in a row makes the
            whole row impossible, and so does +inf.

    Returns:
        (B,) int64, the lowest index among equals.
    """
    best = scores.max(1)
    return torch.where(best.values.isfinite(), best.indices, -1)
