"""The objective that all heads share: a weighted sum of distances, head by head, over every position of the text.

Head i, counted from 0, learns at position t the token t + 2 + i and the target's distribution over it, which stands at
position t + 1 + i. Logits are made, used and dropped a portion of positions at a time, so that memory does not grow
with the vocabulary.

Letters: B sequences, S positions, K heads, E hidden size, M positions of one portion, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from foretoken.training.losses import TargetRows, Weights, distances, target_rows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from foretoken.heads.base import Head
    from foretoken.hf.parts import TargetParts

_PORTION_VALUES = 1 << 24  # logits of one portion


class Objective(BaseModel):
    """Weights of the parts of a loss; a method's own defaults derive from it.

    Attributes:
        ce_weight: Of the cross-entropy with the text.
        kl_weight: Of KL(target || head).
        tv_weight: Of the total variation between target and head.
        feature_weight: Of the smooth L1 distance between what an LM head reads and the target's feature there.
        head_decay: Head i counts `head_decay ** i`.
        noise: Uniform noise on features, within noise / sqrt(S E) (after NEFTune 2310.05914); 0 for none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    ce_weight: float = Field(default=0.0, ge=0)
    kl_weight: float = Field(default=1.0, ge=0)
    tv_weight: float = Field(default=0.0, ge=0)
    feature_weight: float = Field(default=0.0, ge=0)
    head_decay: float = Field(default=1.0, gt=0, le=1)
    noise: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not (self.ce_weight or self.kl_weight or self.tv_weight or self.feature_weight):
            raise ValueError("With all weights 0 there is nothing to learn. Expected one above 0")
        return self

    @property
    def distance_weights(self) -> Weights:
        """What the distances between distributions count."""
        return Weights(token=self.ce_weight, kl=self.kl_weight, tv=self.tv_weight)


@dataclass(frozen=True, slots=True)
class Examples:
    """One micro-batch.

    Attributes:
        tokens: (B, S) int64.
        supervised: (B, S) bool, tokens that count as labels.
        features: (B, S, E), the target's.
    """

    tokens: Tensor
    supervised: Tensor
    features: Tensor


@dataclass(frozen=True, slots=True)
class HeadSums:
    """Sums over the supervised positions of each head; they add up over micro-batches and processes.

    Attributes:
        loss: (K,) float64, weighted losses before the decay.
        matches: (K,) float64, positions at which the head's first candidate is the target's.
        count: (K,) float64, positions.
    """

    loss: Tensor
    matches: Tensor
    count: Tensor

    def __add__(self, other: HeadSums) -> HeadSums:
        return HeadSums(self.loss + other.loss, self.matches + other.matches, self.count + other.count)


def label_counts(supervised: Tensor, num_heads: int) -> Tensor:
    """(K,) float64, how many positions each head learns from.

    Args:
        supervised: (B, S) bool.
        num_heads: K.
    """
    return torch.stack([supervised[:, index + 2 :].sum() for index in range(num_heads)]).to(torch.float64)


def accumulate(
    objective: Objective,
    head: Head,
    examples: Examples,
    parts: TargetParts,
    *,
    counts: Tensor,
    weight: float = 1.0,
) -> HeadSums:
    """Adds the gradients of one micro-batch to the head's, in place.

    Args:
        objective: What to learn.
        head: In training mode or not; gradients are only computed where it has any.
        examples: The micro-batch.
        parts: What the head shares with the target.
        counts: (K,) positions of the whole batch: each head's loss is a mean over them.
        weight: Of the whole objective beside others.

    Returns:
        Sums for reports.
    """
    features = _noisy(examples.features, objective.noise)
    sequence, place, num_rows = _labelled(examples.supervised, head.config.steps)
    losses = []
    for index, hidden in enumerate(head.teacher_forced(features, examples.tokens, parts)):
        count = num_rows[index]
        read = hidden[sequence[:count], place[:count] - (index + 1)]
        scale = weight * objective.head_decay**index / float(counts[index].clamp_min(1))
        losses.append(_HeadLoss(objective, head, index, read, scale))
    size = max(1, _PORTION_VALUES // head.config.vocab_size)
    for begin in range(0, num_rows[0], size):
        rows = sequence[begin : begin + size], place[begin : begin + size]
        portion = _portion(objective, examples, rows, parts)
        for of_head in losses:
            of_head.add(begin, portion, parts)
    learned = [(of_head.read, of_head.grad) for of_head in losses if of_head.grad is not None]
    if learned:
        torch.autograd.backward([read for read, _ in learned], [grad for _, grad in learned])
    return HeadSums(*(torch.stack(column) for column in zip(*(of_head.sums() for of_head in losses), strict=True)))


def _labelled(supervised: Tensor, num_heads: int) -> tuple[Tensor, Tensor, list[int]]:
    """Where the target's distributions are learned, late places first: each head has a position for the first of them.

    Args:
        supervised: (B, S) bool.
        num_heads: K.

    Returns:
        (N,) sequences and (N,) places p, at which the label is the token p + 1 and head i learns at position p - 1 - i;
        and for how many of them each head has one.
    """
    sequence, column = supervised[:, 2:].nonzero().unbind(1)
    order = column.argsort(descending=True, stable=True)
    heads = torch.arange(num_heads, device=column.device)
    return sequence[order], column[order] + 1, (column >= heads.unsqueeze(1)).sum(1).tolist()


class _Portion(NamedTuple):
    """What N places teach: (N, E) features, the target's distributions and (N,) labels of the text."""

    features: Tensor
    target: TargetRows
    labels: Tensor


@torch.no_grad()
def _portion(objective: Objective, examples: Examples, rows: tuple[Tensor, Tensor], parts: TargetParts) -> _Portion:
    """What some places teach all heads; rows: (N,) sequences and (N,) places."""
    sequence, place = rows
    features = examples.features[sequence, place]
    target = target_rows(parts.lm_head(features), has_probs=bool(objective.kl_weight or objective.tv_weight))
    return _Portion(features, target, examples.tokens[sequence, place + 1])


class _HeadLoss:
    """What one head learns from a micro-batch, a portion of places at a time.

    Attributes:
        read: (N, W), what its `logits` reads at its positions, with a graph.
        grad: (N, W), the loss's gradient there; None where it has none.
    """

    def __init__(self, objective: Objective, head: Head, index: int, read: Tensor, scale: float) -> None:
        """Nothing learned so far; scale: of the gradient."""
        self._objective, self._head, self._index, self._scale = objective, head, index, scale
        self.read = read
        self.grad: Tensor | None = None
        self._loss = torch.zeros((), dtype=torch.float64, device=read.device)
        self._matches = torch.zeros_like(self._loss)

    def add(self, begin: int, portion: _Portion, parts: TargetParts) -> None:
        """Backward through the LM head down to what it reads; begin: of the portion's rows among all."""
        rows = slice(begin, begin + len(portion.labels))
        hidden = self.read[rows].detach().requires_grad_(self.read.requires_grad)
        count = len(hidden)
        if not count:
            return
        target = portion.target.at(slice(count))
        logits = self._head.logits(self._index, hidden, parts)
        found = distances(
            logits.detach(), target, portion.labels[:count], self._objective.distance_weights, scale=self._scale
        )
        loss, ends = found.loss, []
        if logits.requires_grad and found.grad is not None:
            ends.append((logits, found.grad))
        if self._objective.feature_weight:
            apart = smooth_l1_loss(hidden, portion.features[:count], reduction="none").mean(1)
            loss = loss + self._objective.feature_weight * apart.detach()
            if apart.requires_grad:
                ends.append((apart, torch.full_like(apart, self._objective.feature_weight * self._scale)))
        if ends:
            torch.autograd.backward([end for end, _ in ends], [grad for _, grad in ends])
        if hidden.grad is not None:
            self.grad = torch.zeros_like(self.read) if self.grad is None else self.grad
            self.grad[rows] = hidden.grad
        self._loss += loss.double().sum()
        self._matches += (found.best == target.best).sum()

    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, matches and count, float64 scalars."""
        return self._loss, self._matches, torch.full_like(self._loss, len(self.read))


def _noisy(features: Tensor, noise: float) -> Tensor:
    """Features with uniform noise."""
    if not noise:
        return features
    bound = noise / (features.shape[1] * features.shape[2]) ** 0.5
    return features + torch.empty_like(features).uniform_(-bound, bound)


def mean_by_head(values: Tensor, counts: Tensor) -> Sequence[float]:
    """(K,) sums over (K,) counts, as numbers."""
    means: list[float] = (values / counts.clamp_min(1)).tolist()
    return means
