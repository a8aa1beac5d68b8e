"""Losses between a head's distribution and its targets, position by position.

Letters: M positions, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with the text itself.

    Args:
        logits: (M, V).
        labels: (M,) int64.

    Returns:
        (M,) nats.
    """
    return cross_entropy(logits, labels, reduction="none")


def kl_loss(logits: Tensor, target_probs: Tensor, target_entropy: Tensor) -> Tensor:
    """KL(target || head): what costs least extra surprise on the target's own text.

    Args:
        logits: (M, V).
        target_probs: (M, V), the target's; rows sum to 1.
        target_entropy: (M,) nats, theirs.

    Returns:
        (M,) nats.
    """
    cross_entropy_: Tensor = _SoftCrossEntropy.apply(logits, target_probs)
    return cross_entropy_ - target_entropy


class _SoftCrossEntropy(torch.autograd.Function):
    """Cross-entropy with given distributions: training spends half of its time here, so the gradient is written out."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, probs: Tensor) -> Tensor:
        """(M, V) logits and probabilities to (M,) nats."""
        normalizer = logits.logsumexp(1)
        ctx.save_for_backward(logits, probs, normalizer)
        result: Tensor = normalizer - torch.linalg.vecdot(logits, probs)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """softmax(logits) - probs."""
        logits, probs, normalizer = ctx.saved_tensors
        result = (logits - normalizer.unsqueeze(1)).exp_().sub_(probs)
        return result.mul_(grad.unsqueeze(1)), None


def tv_loss(logits: Tensor, target_probs: Tensor) -> Tensor:
    """Total-variation distance: one minus the probability that a drawn draft survives (Leviathan 2211.17192, 3.2).

    Args:
        logits: (M, V).
        target_probs: (M, V), the target's; rows sum to 1.

    Returns:
        (M,) in [0, 1].
    """
    return (target_probs - logits.softmax(1)).abs().sum(1) / 2
