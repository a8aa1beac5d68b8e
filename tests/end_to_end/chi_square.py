"""How well counts fit a distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch


def chi_square_level(texts: Counter[tuple[int, ...]], distribution: Mapping[tuple[int, ...], float]) -> float:
    """P(a chi-square as large or larger), cells below 5 expected pooled."""
    total = sum(texts.values())
    assert all(distribution[text] > 0 for text in texts), "a text the target cannot write"
    cells = [(texts[text], p * total) for text, p in distribution.items() if p * total >= 5]
    pooled_count, pooled_mean = total - sum(n for n, _ in cells), total - sum(mean for _, mean in cells)
    if pooled_mean >= 5:
        cells.append((pooled_count, pooled_mean))
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))
