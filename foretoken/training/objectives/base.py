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

from foretoken.training.losses import kl_loss, token_loss, tv_loss

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
    taught = _TeacherLaws(examples.features.detach(), parts)
    sums = []
    outputs: list[tuple[Tensor, Tensor]] = []
    for index, hidden in enumerate(head.teacher_forced(features, examples.tokens, parts)):
        leaf = hidden.detach().requires_grad_(hidden.requires_grad)
        where = examples.supervised[:, index + 2 :].nonzero()
        scale = weight * objective.head_decay**index / float(counts[index].clamp_min(1))
        sums.append(_one_head(objective, head, index, leaf, where, examples, parts, taught, scale))
        if leaf.grad is not None:
            outputs.append((hidden, leaf.grad))
    if outputs:
        torch.autograd.backward([hidden for hidden, _ in outputs], [grad for _, grad in outputs])
    return HeadSums(*(torch.stack(column) for column in zip(*sums, strict=True)))


def _one_head(  # noqa: PLR0913, PLR0917 - one step of the loop above
    objective: Objective,
    head: Head,
    index: int,
    leaf: Tensor,
    where: Tensor,
    examples: Examples,
    parts: TargetParts,
    taught: _TeacherLaws,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward through the LM head of head i, portion by portion, down to `leaf`; (loss, matches, count)."""
    total = torch.zeros((), dtype=torch.float64, device=leaf.device)
    matches = torch.zeros_like(total)
    for rows in where.split(max(1, _PORTION_VALUES // head.config.vocab_size)):
        sequence, position = rows.unbind(1)
        hidden = leaf[sequence, position]
        logits = head.logits(index, hidden, parts).float()
        teacher = taught(sequence, position + index + 1)
        loss = torch.zeros(len(rows), device=leaf.device)
        if objective.ce_weight:
            loss = loss + objective.ce_weight * token_loss(logits, examples.tokens[sequence, position + index + 2])
        if objective.kl_weight:
            loss = loss + objective.kl_weight * kl_loss(logits, teacher.probs, teacher.entropy)
        if objective.tv_weight:
            loss = loss + objective.tv_weight * tv_loss(logits, teacher.probs)
        if objective.feature_weight:
            aim = examples.features[sequence, position + index + 1].detach()
            loss = loss + objective.feature_weight * smooth_l1_loss(hidden, aim, reduction="none").mean(1)
        if loss.requires_grad:
            (loss.sum() * scale).backward()
        total += loss.detach().double().sum()
        matches += (logits.detach().argmax(1) == teacher.best).sum()
    return total, matches, torch.tensor(len(where), dtype=torch.float64, device=leaf.device)


class _Laws(NamedTuple):
    """The target's distributions: (M, V) probabilities, (M,) entropies in nats and (M,) most probable tokens."""

    probs: Tensor
    entropy: Tensor
    best: Tensor


class _TeacherLaws:
    """The target's distributions, made once where all of them fit and else when they are asked for."""

    def __init__(self, features: Tensor, teacher: TargetParts) -> None:
        self._features, self._teacher = features, teacher
        num_positions = features.shape[0] * features.shape[1]
        fits = num_positions * teacher.lm_head_weight.shape[0] <= 4 * _PORTION_VALUES
        self._all = self._of(features.flatten(0, 1)) if fits else None

    def __call__(self, sequence: Tensor, position: Tensor) -> _Laws:
        """The distributions after some positions."""
        if self._all is None:
            return self._of(self._features[sequence, position])
        rows = sequence * self._features.shape[1] + position
        return _Laws(*(part[rows] for part in self._all))

    @torch.no_grad()
    def _of(self, features: Tensor) -> _Laws:
        """Distributions from (M, E) features."""
        log_probs = self._teacher.lm_head(features).float().log_softmax(-1)
        probs = log_probs.exp()
        return _Laws(probs, -torch.linalg.vecdot(probs, log_probs.clamp_min(-1e4)), log_probs.argmax(1))


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
