"""Every pair of options is in a case, and there are few cases."""

from itertools import combinations, product
from typing import Any

import pytest
from pairwise import pairwise, slow_products

AXES = ("abcdefghij", (1, 2, 3), (True, False), ("x", "y", "z"))


def test_every_pair_is_in_a_case() -> None:
    cases = pairwise(*AXES)
    for (i, first), (j, second) in combinations(enumerate(AXES), 2):
        assert {(case[i], case[j]) for case in cases} == set(product(first, second))
    assert 30 <= len(cases) <= 36, "10 x 3 pairs of the two longest axes need 30 cases"


def test_cases_that_cannot_be_run_are_left_out() -> None:
    def is_allowed(letter: str, number: int, flag: bool, other: str) -> bool:
        return not (letter == "a" and number == 2) and not (flag and other == "y")

    cases = pairwise(*AXES, allowed=is_allowed)
    assert all(is_allowed(*case) for case in cases)
    possible = [case for case in product(*AXES) if is_allowed(*case)]
    for i, j in combinations(range(4), 2):
        assert {(case[i], case[j]) for case in cases} == {(case[i], case[j]) for case in possible}


@pytest.mark.parametrize("each", [1, 2])
def test_the_rest_of_a_product_is_slow(each: int) -> None:
    """Values need not be hashable, and of the quick cases each holds one value, or pair, that is new."""
    axes: list[list[Any]] = [[{"a": 1}, {}, [0, 1], "x", 5], [1, 2], [True, False, None]]
    parameters = slow_products(*axes, each=each)
    assert [list(parameter.values) for parameter in parameters] == [list(case) for case in product(*axes)]
    quick = [parameter.values for parameter in parameters if not parameter.marks]
    for places in combinations(range(3), each):
        for values in product(*(axes[place] for place in places)):
            assert any(all(case[p] is v for p, v in zip(places, values, strict=True)) for case in quick)
    assert len(quick) <= {1: 5, 2: 17}[each]
    assert {mark.name for parameter in parameters for mark in parameter.marks} == {"slow"}
    assert len({parameter.id for parameter in parameters}) == len(parameters)


def test_values_that_cannot_meet() -> None:
    parameters = slow_products("abcd", (1, 2, 3), each=1, allowed=lambda letter, number: letter == "a" or number == 1)
    assert {parameter.values for parameter in parameters} == {
        ("a", 1),
        ("a", 2),
        ("a", 3),
        ("b", 1),
        ("c", 1),
        ("d", 1),
    }
    quick = [parameter.values for parameter in parameters if not parameter.marks]
    assert {value for case in quick for value in case} == {*"abcd", 1, 2, 3}
