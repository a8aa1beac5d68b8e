"""Pareto fronts: which points no other point beats at both what it costs and what it brings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The points that no other one beats.

    A point beats another when it costs no more and brings no less, and is better in one of the two. Points that are
    equal in both do not beat each other.

    Args:
        points: (cost, value) pairs: cost is better the lower, value the higher. All finite.

    Returns:
        Indices into `points`, by ascending cost; equal points in their order.

    Raises:
        ValueError: For a number that is not finite.
    """
    if not all(math.isfinite(number) for point in points for number in point):
        raise ValueError("points of a Pareto front must be finite")
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if not front or points[index][1] > points[front[-1]][1] or points[index] == points[front[-1]]:
            front.append(index)
    return front
