"""Few cases in which every two options meet: what a test runs instead of a product of many options."""

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


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


def slow_products(*axes: Sequence[Any], each: int = 2, allowed: Callable[..., bool] | None = None) -> list[Any]:
    """Returns all allowed cases as parameters of a test; those that few cases can do without are marked slow.

    Args:
        axes: The options.
        each: What the cases that are not slow hold: 2, every pair of values of two axes; 1, every value.
        allowed: Whether a whole case can be run; None if all can.
    """

    def is_allowed(*places: int) -> bool:
        return allowed is None or allowed(*(axis[place] for axis, place in zip(axes, places, strict=True)))

    every = [case for case in product(*(range(len(axis)) for axis in axes)) if is_allowed(*case)]
    if each == 2:
        quick = set(pairwise(*(range(len(axis)) for axis in axes), allowed=is_allowed))
    else:
        quick = set[tuple[int, ...]]()
        lengths = [len(axis) for axis in axes]
        longest = lengths.index(max(lengths))
        for case in sorted(every, key=lambda case: case != tuple(case[longest] % length for length in lengths)):
            if any(all(other[axis] != place for other in quick) for axis, place in enumerate(case)):
                quick.add(case)
    parameters = []
    for case in every:
        values = [axis[place] for axis, place in zip(axes, case, strict=True)]
        marks = () if case in quick else pytest.mark.slow
        parameters.append(
            pytest.param(*values, marks=marks, id="-".join(getattr(value, "__name__", str(value)) for value in values))
        )
    return parameters


def _pairs(case: Sequence[Any]) -> list[tuple[Any, ...]]:
    return list(combinations(enumerate(case), 2))
