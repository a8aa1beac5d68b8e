"""Pareto fronts against their definition, pair by pair."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from foretoken.bench.sweep import pareto_front

_NUMBER = st.integers(0, 4).map(float) | st.floats(-1e6, 1e6)  # few values, so that points tie


def slow_front(points: list[tuple[float, float]]) -> set[int]:
    """Points that no other one beats."""

    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one[0] <= other[0] and one[1] >= other[1] and one != other

    return {i for i, own in enumerate(points) if not any(beats(other, own) for other in points)}


@given(st.lists(st.tuples(_NUMBER, _NUMBER), max_size=12))
@example([(1.0, 2.0), (1.0, 2.0), (1.0, 1.0), (2.0, 2.0), (0.0, 1.0)])
@example([(0.0, 0.0), (-0.0, 0.0)])
def test_against_brute_force(points: list[tuple[float, float]]) -> None:
    front = pareto_front(points)
    assert len(front) == len(set(front))
    assert set(front) == slow_front(points)
    assert [points[index] for index in front] == sorted(points[index] for index in front)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_numbers_that_have_no_order_are_refused(number: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        pareto_front([(0.0, 1.0), (number, 1.0)])
