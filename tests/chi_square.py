"""How well counts fit a distribution."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def chi_square_p_value(counts: Sequence[int] | Tensor, probs: Tensor | None = None) -> float:
    """P(a chi-square as large or larger); cells expected below 5 are pooled. Without `probs` all are equally likely."""
    observed = torch.as_tensor(counts, dtype=torch.float64)
    probs = torch.full_like(observed, 1 / len(observed)) if probs is None else probs.double()
    expected = probs * observed.sum()
    is_small = expected < 5
    pooled = expected[is_small].sum()
    observed, expected = (
        torch.cat([each[~is_small], each[is_small].sum().view(1)[: int(pooled >= 5)]]) for each in (observed, expected)
    )
    statistic = ((observed - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(observed) - 1) / 2).double(), statistic / 2).item()


def chi_square_level(texts: Counter[tuple[int, ...]], distribution: Mapping[tuple[int, ...], float]) -> float:
    """`chi_square_p_value` of counted texts."""
    assert all(distribution[text] > 0 for text in texts), "a text the target cannot write"
    probs = torch.tensor(list(distribution.values()), dtype=torch.float64)
    return chi_square_p_value([texts[text] for text in distribution], probs)
