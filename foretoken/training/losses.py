"""Distances between a head's distribution and its targets, position by position, with explicit gradients.

Autograd would keep several (M, V) tensors for each distance and read them again for the gradient. Here each block of
rows, small enough for a CPU's cache, gets its losses and its gradient before the next block. On a GPU with Triton the
kernels of `triton_losses` do the same row by row.

Letters: M positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretoken.core.backend import has_triton_kernels, runs_cpu_kernels

# Logits that a thread handles at once, 1 MiB in float32; NOTES, "Other blocks of rows for the losses".
_BLOCK_VALUES = 1 << 18
_LEAST_LOG_PROB = -1e4  # in place of -inf, which times a probability of 0 would be NaN


class LossWeights(NamedTuple):
    """Weights of the distances between p, the target's distribution, and q, the head's.

    `jsd` weighs the Jensen-Shannon divergence `b KL(p || m) + (1 - b) KL(q || m)` with `m = b p + (1 - b) q` and
    b = `jsd_beta`, between 0 and 1 (DistillSpec 2310.08461, A.1).
    """

    token: float = 0.0  # cross-entropy with the text itself
    kl: float = 0.0  # KL(p || q): the extra surprise on the target's own text
    tv: float = 0.0  # total variation: 1 - P(a drawn draft is accepted) (Leviathan 2211.17192, 3.2)
    top: float = 0.0  # -sum of p log q over the `num_top` greatest p, not renormalised (HASS 2408.15766, 3.2)
    num_top: int = 10
    rkl: float = 0.0  # KL(q || p): the head avoids tokens that the target would not write
    jsd: float = 0.0
    jsd_beta: float = 0.5

    @property
    def need_probs(self) -> bool:
        """Whether any weight needs the target's probabilities."""
        return bool(self.kl or self.tv or self.top or self.rkl or self.jsd)


class TargetRows(NamedTuple):
    """The target's distributions at M positions; without `probs` and `entropy` if only `best` is needed."""

    best: Tensor  # (M,) int64, the most probable tokens
    probs: Tensor | None = None  # (M, V), in float32 at least, rows sum to 1
    entropy: Tensor | None = None  # (M,) nats

    def at(self, rows: slice | Tensor) -> TargetRows:
        """Returns some of the positions."""
        probs = None if self.probs is None else self.probs[rows]
        return TargetRows(self.best[rows], probs, None if self.entropy is None else self.entropy[rows])


class Distances(NamedTuple):
    """The result of `distances`."""

    loss: Tensor  # (M,) weighted sums of the distances, in float32 at least
    best: Tensor  # (M,) int64, the head's first candidates
    grad: Tensor | None  # (M, V) in the logits' dtype: gradient of `scale * loss.sum()`; None if every weight is 0


@torch.no_grad()
def target_rows(logits: Tensor, *, has_probs: bool = True) -> TargetRows:
    """Returns the distributions of (M, V) logits of the target; has_probs: whether probabilities are needed."""
    if _has_kernels(logits):
        from foretoken.training.triton_losses import distributions

        return TargetRows(*distributions(logits, has_probs=has_probs))
    exact = _exact(logits)
    best = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    probs = torch.empty_like(logits, dtype=exact) if has_probs else None
    entropy = torch.empty(len(logits), dtype=exact, device=logits.device) if has_probs else None
    with torch.autocast(logits.device.type, enabled=False):
        for rows, block in _blocks(logits):
            best[rows] = _argmax(block)
            if probs is not None and entropy is not None:
                greatest = best[rows].unsqueeze(1)
                own = torch.softmax(block, 1, out=probs[rows])
                block.sub_(block.gather(1, greatest)).clamp_min_(_LEAST_LOG_PROB).mul_(own)
                entropy[rows] = -own.gather(1, greatest).log().squeeze(1) - block.sum(1)
    return TargetRows(best, probs, entropy)


@torch.no_grad()
def distances(
    logits: Tensor, target: TargetRows, labels: Tensor, weights: LossWeights, *, scale: float = 1.0
) -> Distances:
    """Returns weighted distances of a head's distributions, and their gradient.

    The head's (M, V) `logits` have any floating dtype; distances are computed in float32 at least. `target` has
    probabilities if the weights need them. `labels`, (M,) int64, are the text itself. `scale` is a factor of the
    gradient alone.
    """
    if _has_kernels(logits) and not (weights.rkl or weights.jsd):  # which the kernels do not have
        from foretoken.training.triton_losses import losses_and_gradient

        return Distances(*losses_and_gradient(logits, target.probs, target.entropy, labels, weights[:5], scale))
    exact = _exact(logits)
    loss = torch.zeros(len(logits), dtype=exact, device=logits.device)
    best = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    grad = torch.empty_like(logits) if weights.token or weights.need_probs else None
    with torch.autocast(logits.device.type, enabled=False):
        for rows, block in _blocks(logits):
            best[rows] = _argmax(block)
            if grad is not None:
                loss[rows], gradient = _of_block(block, best[rows], target.at(rows), labels[rows], weights, scale)
                grad[rows] = gradient
    return Distances(loss, best, grad)


def _of_block(
    logits: Tensor, best: Tensor, target: TargetRows, labels: Tensor, weights: LossWeights, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns (N,) losses and (N, V) gradient of a block; overwrites the logits; best: (N,) their argmax."""
    own = logits.softmax(1)  # becomes the gradient
    best, labels = best.unsqueeze(1), labels.unsqueeze(1)
    # The greatest probability is 1 / sum(exp(logits - greatest)) and at least 1 / V.
    normalizer = (logits.gather(1, best) - own.gather(1, best).log()).squeeze(1)
    loss = torch.zeros_like(normalizer)
    token, kl, top, num_top = weights.token, weights.kl, weights.top, weights.num_top
    given: Any = target  # without probabilities only if no weight needs them
    probs = given.probs
    share: Tensor | float = token + kl  # the weight of the head's own probabilities in the gradient
    if top:
        top_probs, top_tokens = probs.topk(min(num_top, logits.shape[1]), dim=1)
        sums = top_probs.sum(1)
        loss += top * (normalizer * sums - (top_probs * logits.gather(1, top_tokens)).sum(1))
        share = share + top * sums.unsqueeze(1)
    if token:
        loss += token * (normalizer - logits.gather(1, labels).squeeze(1))
    slope = None  # (N, V) derivative by the head's own probabilities, of the distances that depend on them alone
    if weights.rkl or weights.jsd:
        slope = _reverse(logits - normalizer.unsqueeze(1), own, probs, weights, loss)
    if kl:
        loss += kl * (normalizer - logits.mul_(probs).sum(1) - given.entropy)
    if weights.tv:
        gap = torch.sub(own, probs, out=logits)
        loss += weights.tv * gap.abs().sum(1) / 2
        sign = gap.sign_().mul_(weights.tv / 2)
        slope = sign if slope is None else slope.add_(sign)
    if slope is None:
        own.mul_(share * scale)
    else:
        mean = torch.linalg.vecdot(slope, own).unsqueeze(1)
        own.mul_(slope.sub_(mean).add_(share).mul_(scale))
    if kl:
        own.sub_(probs, alpha=kl * scale)
    if token:
        own.scatter_add_(1, labels, own.new_full(labels.shape, -token * scale))
    if top:
        own.scatter_add_(1, top_tokens, top_probs * (-top * scale))
    return loss, own


def _reverse(log_own: Tensor, own: Tensor, probs: Tensor, weights: LossWeights, loss: Tensor) -> Tensor:
    """Adds the reverse KL and Jensen-Shannon divergences to `loss`; returns their (N, V) derivative by `own`.

    A constant of a row is left out of the derivative, because `own` sums to 1. Probabilities of 0 count as the smallest
    normal number.
    """
    tiny = torch.finfo(own.dtype).tiny
    log_own = log_own.clamp_min(_LEAST_LOG_PROB)
    log_probs = probs.clamp_min(tiny).log_()
    slope = (log_own - log_probs).mul_(weights.rkl)
    loss += torch.linalg.vecdot(own, slope)
    if weights.jsd:
        beta = weights.jsd_beta
        log_mean = torch.lerp(own, probs, beta).clamp_min_(tiny).log_()
        apart = log_own.sub_(log_mean)
        of_target = torch.linalg.vecdot(probs, log_probs.sub_(log_mean))
        loss += weights.jsd * (beta * of_target + (1 - beta) * torch.linalg.vecdot(own, apart))
        slope.add_(apart, alpha=weights.jsd * (1 - beta))
    return slope


def _blocks(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yields rows and a copy of their logits, in float32 at least; a block fits a CPU's cache. Copies are reused."""
    count, width = logits.shape
    is_cached = runs_cpu_kernels(logits.device)
    size = max(1, torch.get_num_threads() * _BLOCK_VALUES // width) if is_cached else max(1, count)
    copy = torch.empty_like(logits[:size], dtype=_exact(logits))
    for begin in range(0, count, size):
        rows = slice(begin, begin + size)
        block = copy[: min(size, count - begin)]
        yield rows, block.copy_(logits[rows])


def _has_kernels(logits: Tensor) -> bool:
    return has_triton_kernels(logits.device) and logits.dtype != torch.float64


def _exact(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _argmax(rows: Tensor) -> Tensor:
    """Returns (N,) int64, the lowest id among equals."""
    if runs_cpu_kernels(rows.device):  # numpy's argmax is vectorised along a row, torch's is not
        return torch.from_numpy(rows.numpy().argmax(1))
    return rows.argmax(1)
