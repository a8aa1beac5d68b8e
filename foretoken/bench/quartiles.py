"""The median of a sample between its quartiles: what a figure is over prompts, and how far it spreads."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import quantiles
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Quartiles:
    """A median between the first and the third quartile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Quartiles:
        """Of at least one value; between two values of the sample, quartiles lie on the line that joins them."""
        known = list(values)
        if len(known) == 1:
            return cls(known[0], known[0], known[0])
        low, middle, high = quantiles(known, n=4, method="inclusive")
        return cls(middle, low, high)
