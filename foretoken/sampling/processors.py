"""Logits processors and warpers, row-wise.

Order: held-back and forbidden tokens, logit bias, repetition, presence and frequency penalties (all of which read the
row's own history), then temperature, top-k, top-p, min-p. Everything is float32 and pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from foretoken.sampling.batch import SamplingBatch
    from foretoken.sampling.history import History

_NEVER = float("-inf")


def process(logits: Tensor, batch: SamplingBatch, history: History) -> Tensor:
    """Applies every processor that reads the history or single tokens.

    Args:
        logits: (B, V) float32, the target's.
        batch: Parameters of the same B requests.
        history: Tokens before the one that is decided, path included.

    Returns:
        (B, V) float32.
    """
    if batch.terminators is not None and batch.min_tokens is not None:
        is_early = (history.num_output < batch.min_tokens).unsqueeze(1)
        logits = logits.masked_fill(batch.terminators & is_early, _NEVER)
    if batch.bad_words is not None:
        logits = _forbid_bad_words(logits, batch.bad_words, history.tail)
    if batch.bias is not None:
        logits = logits + batch.bias
    if history.output_counts is None or history.prompt_seen is None:
        return logits
    counts = history.output_counts
    if batch.repetition is not None:
        scaled = torch.where(logits > 0, logits / batch.repetition, logits * batch.repetition)
        logits = torch.where(history.prompt_seen | (counts > 0), scaled, logits)
    if batch.presence is not None:
        logits = logits - batch.presence * (counts > 0)
    if batch.frequency is not None:
        logits = logits - batch.frequency * counts
    return logits


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
        logits = logits.masked_fill(logits < largest.gather(1, batch.top_k - 1), _NEVER)
    if batch.top_p is not None:
        ranked, order = logits.sort(dim=1, descending=True, stable=True)
        probs = ranked.softmax(1)
        is_cut = (probs.cumsum(1) - probs >= batch.top_p) & (batch.top_p < 1.0)  # mass before the token
        is_cut[:, 0] = False  # also where float32 rounds top_p to 0
        logits = logits.masked_fill(torch.zeros_like(is_cut).scatter(1, order, is_cut), _NEVER)
    if batch.min_p is not None:
        logits = logits.masked_fill(logits < logits.amax(1, keepdim=True) + batch.min_p.log(), _NEVER)
    return logits.log_softmax(1)


def one_hot_log_probs(logits: Tensor) -> Tensor:
    """The law of greedy decoding: 0 at the first largest logit, -inf elsewhere; (B, V) float32.

    A row without a possible token is -inf throughout.
    """
    best = best_possible(logits).unsqueeze(1)
    certain = torch.where(best < 0, _NEVER, 0.0)
    return torch.full_like(logits, _NEVER).scatter(1, best.clamp_min(0), certain)


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


def _forbid_bad_words(logits: Tensor, bad_words: Tensor, tail: Tensor) -> Tensor:
    """Rules out the last token of every forbidden sequence whose beginning was just emitted.

    Args:
        logits: (B, V) float32.
        bad_words: (B, W, L) int64, right-aligned, -1 where a word is shorter.
        tail: (B, L - 1) int64, the last tokens.
    """
    beginnings, last = bad_words[:, :, :-1], bad_words[:, :, -1]
    matches = ((beginnings == tail.unsqueeze(1)) | (beginnings < 0)).all(2) & (last >= 0)
    forbidden = torch.zeros_like(logits, dtype=torch.int32)
    forbidden.scatter_add_(1, last.clamp_min(0), matches.to(torch.int32))
    return logits.masked_fill(forbidden > 0, _NEVER)
