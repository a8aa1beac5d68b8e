"""Few cases in which every two options meet: what a test runs instead of a product of many options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*axes: Sequence[Any], allowed: Callable[..., bool] | None = None) -> list[tuple[Any, ...]]:
    """Returns cases, one value of each axis, so that every allowed pair of values of two axes is in a case.

    Greedy: each next case is the one with most pairs that no case has yet. Cases are in the order of the first axis.

    Args:
        axes: The options, distinct values each.
        allowed: Whether a whole case can be run; None if all can. A pair is left out if no allowed case has it.
    """
    cases = [case for case in product(*axes) if allowed is None or allowed(*case)]
    missing = {pair for case in cases for pair in _pairs(case)}
    chosen: list[tuple[Any, ...]] = []
    while missing:
        best = max(cases, key=lambda case: sum(pair in missing for pair in _pairs(case)))
        chosen.append(best)
        missing.difference_update(_pairs(best))
    order = {value: place for place, value in enumerate(axes[0])}
    return sorted(chosen, key=lambda case: order[case[0]])


def _pairs(case: Sequence[Any]) -> list[tuple[Any, ...]]:
    return list(combinations(enumerate(case), 2))
