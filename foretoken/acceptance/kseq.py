"""The formulas of K-SEQ: its factor rho and its residual distribution. `rules.accept_kseq` walks trees with them."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.acceptance.decisions import residual

_BISECTIONS = 20  # a choice: leaves rho within (k - 1) / 2^20 of the root, on the valid side


def kseq_factor(target_probs: Tensor, draft_probs: Tensor, count: Tensor) -> Tensor:
    """Returns the smallest valid rho of K-SEQ, by bisection on [1, k].

    rho is valid if 1 - (1 - b)^k <= rho b, where b = sum over x of min(q(x), p(x) / rho).

    Args:
        target_probs: (B, V), p.
        draft_probs: (B, V), q.
        count: (B,) int64, k, the number of draws.

    Returns:
        (B,), valid values, above the root by at most (k - 1) / 2^20.

    Source: Sun et al. 2023 (SpecTr, arXiv 2310.15141).
    """
    low = torch.ones_like(target_probs[:, 0])
    high = count.to(low.dtype).clamp_min(1)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        overlap = torch.minimum(draft_probs, target_probs / middle.unsqueeze(1)).sum(1)
        is_valid = 1 - (1 - overlap) ** count <= middle * overlap
        low, high = torch.where(is_valid, low, middle), torch.where(is_valid, middle, high)
    return high


def kseq_residual(target_probs: Tensor, draft_probs: Tensor, factor: Tensor, count: Tensor) -> Tensor:
    """Returns the distribution of the correction token after K-SEQ has rejected all draws.

    norm(p - m (1 - (1 - b)^k) / b), where m = min(q, p / rho) and b = sum m.

    Args:
        target_probs: (B, V), p.
        draft_probs: (B, V), q.
        factor: (B,), rho, see `kseq_factor`.
        count: (B,) int64, k.

    Returns:
        (B, V), rows sum to 1.
    """
    overlap = torch.minimum(draft_probs, target_probs / factor.unsqueeze(1))
    mass = overlap.sum(1, keepdim=True)
    accepted = 1 - (1 - mass) ** count.unsqueeze(1)
    return residual(target_probs, overlap * (accepted / mass.clamp_min(torch.finfo(mass.dtype).tiny)))
