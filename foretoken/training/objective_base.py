"""The objective that all heads share: a weighted sum of distances, head by head, over every position of the text.

At position t, head i (from 0) learns the token t + 2 + i and the target's distribution of that token, which the target
computes at position t + 1 + i. Logits are computed for a portion of positions at a time, so that memory does not grow
with the vocabulary.

Letters: B sequences, S positions, K heads, E hidden size, M positions of one portion, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from foretoken.core.backend import runs_cpu_kernels
from foretoken.heads.base import IN_PLACE, Head, HeadConfig, WindowPositions
from foretoken.training.losses import LossWeights, TargetRows, distances, target_rows

if TYPE_CHECKING:
    from foretoken.models.parts import TargetParts


_PORTION_VALUES = 1 << 24  # logits of one portion; NOTES, "Portions of 170 to 680 positions instead of 2730"
_GPU_PORTION_VALUES = 1 << 26  # a choice: few launches, 256 MiB in float32


class Fed(NamedTuple):
    """The output of a step that is fed the text itself, at Q positions that estimate its loss over all positions."""

    hidden: Tensor  # (B, Q, W), input of the logits
    offset: int = 0  # the first of the positions
    stride: int = 1  # their distance


class Divergences(BaseModel):
    """Weights of the distances between distributions, see `LossWeights`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    ce_weight: float = Field(default=0.0, ge=0)
    kl_weight: float = Field(default=1.0, ge=0)
    tv_weight: float = Field(default=0.0, ge=0)
    rkl_weight: float = Field(default=0.0, ge=0)
    jsd_weight: float = Field(default=0.0, ge=0)
    jsd_beta: float = Field(default=0.5, gt=0, lt=1)

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if not any(value for name, value in self if name.endswith("_weight")):
            raise ValueError("With all weights 0 there is nothing to learn. Expected one above 0")
        return self

    @property
    def distance_weights(self) -> LossWeights:
        """The weights as arguments of `distances`."""
        return LossWeights(
            token=self.ce_weight, kl=self.kl_weight, tv=self.tv_weight, rkl=self.rkl_weight, jsd=self.jsd_weight,
            jsd_beta=self.jsd_beta,
        )  # fmt: skip


class Objective(Divergences):
    """Weights of the terms of a head's loss; a method's own defaults derive from it.

    Features get uniform noise within `noise / sqrt(S E)` (after NEFTune 2310.05914), or within `noise * noise_window /
    S` for methods with a window.
    """

    noise_window: ClassVar[int | None] = None  # tokens of the published training windows

    feature_weight: float = Field(default=0.0, ge=0)  # of the smooth L1 distance between head's and target's feature
    head_decay: float = Field(default=1.0, gt=0, le=1)  # head i has the weight `head_decay ** i`
    noise: float = Field(default=0.0, ge=0)

    def steps(self, config: HeadConfig) -> int:
        """Returns K, the number of trained steps of a head."""
        return config.steps

    def fed(self, head: Head, given: Examples, parts: TargetParts) -> Iterator[Fed]:
        """Yields `Head.teacher_forced` for this objective; `given` has noise on the features that the head reads."""
        for hidden in head.teacher_forced(given.features, given.tokens, parts, given.positions):
            yield Fed(hidden)

    def step_weights(self, config: HeadConfig) -> list[float]:
        """Returns the K weights of the steps' losses."""
        return [self.head_decay**index for index in range(self.steps(config))]

    def divisors(self, counts: Tensor) -> Tensor:
        """Returns (K,) divisors of the sums of losses; counts: (K,) positions of each step in the whole batch."""
        return counts

    def noise_bound(self, num_positions: int, size: int) -> float:
        """Returns the largest noise on a feature, for S positions and features of `size` elements."""
        scale = (num_positions * size) ** -0.5 if self.noise_window is None else self.noise_window / num_positions
        return float(self.noise * scale)


@dataclass(frozen=True, slots=True)
class Examples:
    """One micro-batch, on the device."""

    tokens: Tensor  # (B, S) int64
    supervised: Tensor  # (B, S) bool, tokens that count as labels
    features: Tensor  # (B, S, F E), the target's features that the head reads, side by side
    final: Tensor  # (B, S, E), input of the target's LM head
    progress: float = 0.0  # share of the training that is done
    positions: WindowPositions = IN_PLACE  # for the rotations of the head; the target reads positions 0 … S - 1

    def of_head(self, config: HeadConfig) -> Examples:
        """Splits `features`, the result of `Teacher.read_features`, into what a head reads and `final`."""
        read, size = self.features, config.hidden_size
        return replace(self, features=read[..., : size * len(config.taps)], final=read[..., -size:])


@dataclass(frozen=True, slots=True)
class HeadSums:
    """(K,) float64 sums over the supervised positions of each head, to be added over micro-batches and processes."""

    loss: Tensor  # weighted losses before the decay
    matches: Tensor  # positions at which the head's first candidate is the target's
    count: Tensor

    def __add__(self, other: HeadSums) -> HeadSums:
        return HeadSums(self.loss + other.loss, self.matches + other.matches, self.count + other.count)


def label_counts(supervised: Tensor, num_heads: int) -> Tensor:
    """Returns (K,) float64, the number of positions each head learns from; supervised: (B, S) bool."""
    return torch.stack([supervised[:, index + 2 :].sum() for index in range(num_heads)]).to(torch.float64)


def accumulate(
    objective: Objective, head: Head, examples: Examples, parts: TargetParts, *, counts: Tensor, weight: float = 1.0
) -> HeadSums:
    """Adds the gradients of one micro-batch to the head's, in place; returns sums for reports.

    Without parameters that need a gradient, none is computed. `counts` are (K,) positions of the whole batch, see
    `Objective.divisors`. `weight` is that of the whole objective among others.
    """
    given = replace(examples, features=_noisy(examples.features, objective))
    sequence, place, num_rows = _labelled(examples.supervised, len(counts))
    losses, divisors = [], objective.divisors(counts).clamp_min(1)
    zero = torch.zeros((), dtype=torch.float64, device=sequence.device)
    fed = islice(objective.fed(head, given, parts), len(counts))
    for index, step in enumerate(fed):
        position = place[: num_rows[index]] - (index + 1)
        behind = position - step.offset
        known = None if step.stride == 1 else ((behind >= 0) & (behind % step.stride == 0)).nonzero()[:, 0]
        where = slice(len(position)) if known is None else known
        read = step.hidden[sequence[where], behind[where] // step.stride]
        scale = weight * objective.head_decay**index / float(divisors[index]) * step.stride
        losses.append(_StepLoss(objective, head, index, read, known, scale, step.stride, zero, zero))
    num_logits = head.config.vocab_size if parts.head_rows is None else len(parts.head_rows.tokens)
    for part in portions(num_rows[0], num_logits, sequence.device):
        portion = _portion(objective, examples, (sequence[part], place[part]), parts, head.token_map)
        for of_step in losses:
            of_step.add_portion(part.start, portion, parts)
    learned = [(of_step.read, of_step.grad) for of_step in losses if of_step.grad is not None]
    if learned:
        torch.autograd.backward([read for read, _ in learned], [grad for _, grad in learned])
    return HeadSums(*(torch.stack(column) for column in zip(*(of_step.sums() for of_step in losses), strict=True)))


def _labelled(supervised: Tensor, num_heads: int) -> tuple[Tensor, Tensor, list[int]]:
    """Returns (N,) sequences and (N,) places with labels, and the number of places for each head.

    At place p the label is the token p + 1, and head i learns at position p - 1 - i. Late places come first, since
    every head has a position for them.
    """
    sequence, column = supervised[:, 2:].nonzero().unbind(1)
    order = column.argsort(descending=True, stable=True)
    heads = torch.arange(num_heads, device=column.device)
    return sequence[order], column[order] + 1, (column >= heads.unsqueeze(1)).sum(1).tolist()


class _Portion(NamedTuple):
    """The labels and distributions of N places.

    `is_drafted` tells whether the draft vocabulary has the target's choice and the label (if it counts): only there the
    head learns. Where the target's LM head has its rows alone, the label stands for the choice. None for all places.
    """

    features: Tensor  # (N, E), input of the target's LM head
    target: TargetRows  # over the draft vocabulary if there is one
    labels: Tensor  # (N,) of the text, over the same vocabulary
    is_drafted: Tensor | None  # (N,) bool


@torch.no_grad()
def _portion(
    objective: Objective, examples: Examples, rows: tuple[Tensor, Tensor], parts: TargetParts, token_map: Tensor | None
) -> _Portion:
    """Returns the portion of some places for all steps; rows: (N,) sequences and (N,) places."""
    sequence, place = rows
    features = examples.final[sequence, place]
    weights, labels = objective.distance_weights, examples.tokens[sequence, place + 1]
    logits = parts.lm_head(features)
    has_probs = weights.need_probs
    vocabulary = token_map if parts.head_rows is None else parts.head_rows.tokens
    if vocabulary is None:
        return _Portion(features, target_rows(logits, has_probs=has_probs), labels, None)
    is_drafted = None
    if parts.head_rows is None:
        whole, logits = logits, logits[:, vocabulary]
        is_drafted = logits.amax(1) == whole.amax(1)
    if weights.token or is_drafted is None:
        index = torch.full((parts.lm_head_weight.shape[0],), -1, device=logits.device)
        index[vocabulary] = torch.arange(len(vocabulary), device=logits.device)
        labels = index[labels]
        is_drafted = labels >= 0 if is_drafted is None else is_drafted & (labels >= 0)
    return _Portion(features, target_rows(logits, has_probs=has_probs), labels.clamp_min(0), is_drafted)


@dataclass(slots=True)
class _StepLoss:
    """The loss of one step, and its gradient at the input of the logits."""

    objective: Objective
    head: Head
    index: int
    read: Tensor  # (N, W), input of the logits
    known: Tensor | None  # (N,) ascending, indices of these places; None for the first N
    scale: float
    stride: int  # see `Fed`
    loss: Tensor  # () float64
    matches: Tensor  # () float64
    grad: Tensor | None = None  # of `read`

    def add_portion(self, begin: int, portion: _Portion, parts: TargetParts) -> None:
        """Computes the backward pass through the LM head to `read`; begin: first row of the portion among all."""
        end = begin + len(portion.labels)
        rows, known = slice(begin, end), self.known
        places: slice | Tensor = slice(max(min(end, len(self.read)) - begin, 0))
        if known is not None:
            first, last = torch.searchsorted(known, torch.tensor([begin, end], device=known.device)).tolist()
            rows, places = slice(first, last), known[first:last] - begin
        hidden = self.read[rows].detach().requires_grad_(self.read.requires_grad)
        if not len(hidden):
            return
        target = portion.target.at(places)
        logits = self.head.draft_logits(self.index, hidden, parts)
        found = distances(
            logits.detach(), target, portion.labels[places], self.objective.distance_weights, scale=self.scale
        )
        loss, matches, ends = found.loss, found.best == target.best, []
        if portion.is_drafted is not None:
            is_drafted = portion.is_drafted[places]
            loss, matches = loss * is_drafted, matches & is_drafted
            if found.grad is not None:
                found.grad.mul_(is_drafted.unsqueeze(1))
        if logits.requires_grad and found.grad is not None:
            ends.append((logits, found.grad))
        if self.objective.feature_weight:
            apart = smooth_l1_loss(hidden, portion.features[places], reduction="none").mean(1)
            loss = loss + self.objective.feature_weight * apart.detach()
            if apart.requires_grad:
                ends.append((apart, torch.full_like(apart, self.objective.feature_weight * self.scale)))
        if ends:
            torch.autograd.backward([end for end, _ in ends], [grad for _, grad in ends])
        if hidden.grad is not None:
            self.grad = torch.zeros_like(self.read) if self.grad is None else self.grad
            self.grad[rows] = hidden.grad
        self.loss = self.loss + loss.double().sum()
        self.matches = self.matches + matches.sum()

    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        count = torch.full_like(self.loss, len(self.read))
        return self.loss * self.stride, self.matches * self.stride, count * self.stride


def _noisy(features: Tensor, objective: Objective) -> Tensor:
    bound = objective.noise_bound(features.shape[1], features.shape[2])
    return features + torch.empty_like(features).uniform_(-bound, bound) if bound else features


def first_candidates(logits: Callable[[Tensor], Tensor], rows: Tensor, vocab_size: int) -> Tensor:
    """Returns (M,) int64, the most probable tokens of (M, W) inputs of `logits`, a portion at a time."""
    return torch.cat([logits(part).argmax(-1) for part in rows.split(_portion_rows(vocab_size, rows.device))])


def portions(count: int, vocab_size: int, device: torch.device) -> Iterator[slice]:
    """Yields slices of `count` rows, each small enough for its logits."""
    size = _portion_rows(vocab_size, device)
    for begin in range(0, count, size):
        yield slice(begin, begin + size)


def _portion_rows(vocab_size: int, device: torch.device) -> int:
    return max(1, (_PORTION_VALUES if runs_cpu_kernels(device) else _GPU_PORTION_VALUES) // vocab_size)


def mean_by_head(values: Tensor, counts: Tensor) -> list[float]:
    """Returns (K,) sums divided by (K,) counts, as numbers."""
    means: list[float] = (values / counts.clamp_min(1)).tolist()
    return means
