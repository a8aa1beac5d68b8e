"""Every pair of options is in a case, and there are few cases."""

from __future__ import annotations

from itertools import combinations, product

from pairwise import pairwise

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
