"""Sampling parameters of a batch as tensors, and temperature, top-k, top-p and min-p."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.sampling.noise import KeyedNoise
from foretoken.sampling.processors import Processor, build_processors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.sampling_params import SamplingParams


def warp(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Applies temperature and truncation.

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
    """Returns the target distribution of greedy decoding: 0 at the first largest logit, -inf elsewhere; (B, V) float32.

    A row without a possible token is -inf throughout.
    """
    best = best_possible(logits).unsqueeze(1)
    certain = torch.zeros_like(logits[:, :1]).masked_fill(best < 0, -inf)
    return torch.full_like(logits, -inf).scatter(1, best.clamp_min(0), certain)


def best_possible(scores: Tensor) -> Tensor:
    """Returns the index of the largest score of each row, or -1 if the row has no finite score.

    Args:
        scores: (B, V) logits or noisy log-probabilities; -inf for impossible tokens. A NaN or +inf anywhere in a row
            makes the whole row impossible.

    Returns:
        (B,) int64, the lowest index among equals.
    """
    best = scores.max(1)
    return torch.where(best.values.isfinite(), best.indices, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """One request's sampling, resolved against its tokenizer.

    Attributes:
        params: Of the request.
        seed: Its own seed, or a drawn one; an int64, as `derive_seed` returns.
        terminators: Token ids that `min_tokens` holds back: end-of-sequence and stop token ids.
        bad_words: Forbidden token sequences.
    """

    params: SamplingParams
    seed: int
    terminators: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """Parameters of B requests; a field is None if no request of the batch uses it.

    Attributes:
        noise: The requests' random numbers.
        vocab_size: V.
        greedy: (B,) bool.
        is_all_greedy: Host copy of `greedy.all()`.
        is_any_greedy: Host copy of `greedy.any()`.
        temperature: (B, 1) float32, 1 for greedy rows.
        top_k: (B, 1) int64, V if unlimited.
        largest_top_k: Upper bound of `top_k`, known on the host.
        top_p: (B, 1) float32.
        min_p: (B, 1) float32.
        processors: Applied before temperature and truncation, in order; each over the B rows.
    """

    noise: KeyedNoise
    vocab_size: int
    greedy: Tensor
    is_all_greedy: bool
    is_any_greedy: bool
    temperature: Tensor
    top_k: Tensor | None
    largest_top_k: int
    top_p: Tensor | None
    min_p: Tensor | None
    processors: tuple[Processor, ...]

    @property
    def needs_counts(self) -> bool:
        """Whether a processor reads how often tokens occurred."""
        return any(processor.reads_counts for processor in self.processors)

    @property
    def tail_len(self) -> int:
        """Most last tokens that a processor reads."""
        return max((processor.tail_len for processor in self.processors), default=0)

    def select(self, rows: Tensor) -> SamplingBatch:
        """Returns the parameters of some requests; rows: (R,) int64."""

        def pick(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[rows]

        return SamplingBatch(
            noise=self.noise.select(rows),
            vocab_size=self.vocab_size,
            greedy=self.greedy[rows],
            is_all_greedy=self.is_all_greedy,
            is_any_greedy=self.is_any_greedy,
            temperature=self.temperature[rows],
            top_k=pick(self.top_k),
            largest_top_k=self.largest_top_k,
            top_p=pick(self.top_p),
            min_p=pick(self.min_p),
            processors=tuple(processor.select(rows) for processor in self.processors),
        )

    @classmethod
    def build(
        cls, requests: Sequence[SamplingRequest], vocab_size: int, device: torch.device | str = "cpu"
    ) -> SamplingBatch:
        """Stacks requests into tensors."""
        params = [request.params for request in requests]

        def column(values: Sequence[float], neutral: float, dtype: torch.dtype = torch.float32) -> Tensor | None:
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

        top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
        greedy = [p.is_greedy for p in params]
        return cls(
            noise=KeyedNoise(torch.tensor([r.seed for r in requests], dtype=torch.int64, device=device)),
            vocab_size=vocab_size,
            greedy=torch.tensor(greedy, device=device),
            is_all_greedy=all(greedy),
            is_any_greedy=any(greedy),
            temperature=torch.tensor(
                [1.0 if p.is_greedy else p.temperature for p in params], dtype=torch.float32, device=device
            )[:, None],
            top_k=column(top_k, vocab_size, torch.int64),
            largest_top_k=max(top_k),
            top_p=column([p.top_p for p in params], 1.0),
            min_p=column([p.min_p for p in params], 0.0),
            processors=build_processors(requests, vocab_size, device),
        )
