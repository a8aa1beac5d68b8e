"""Numbers of the controller as they were set, see NOTES. Changing one asks for that experiment again."""

from __future__ import annotations

from typing import Any

import pytest

from foretoken.drafting import acceptance, costs, exploration, goodput, host_trees

SET = [
    (costs, {"LONGEST": 1.4, "_RATE": 0.03, "_MACHINE_RATE": 0.2, "_RIDGE": 0.3, "_LEAST_LEVEL": 0.06, "_SHAPE": 0.02}),
    (acceptance, {"_FADE": 0.5**0.02, "_PRIOR": 2.0, "_GUESS": 0.7, "_TEXT_RATE": 0.5, "_POOLED": 8.0}),
    (exploration, {"SHARE": 0.01, "CREDIT": 4.0, "_MOST": 12.0, "_ENOUGH": 1.0, "GAP": 32}),
    (goodput, {"_FREE": 0.03, "_WIDTH_RATE": 0.1, "_DECIDE_EVERY": 8}),
    (host_trees, {"_LEAVES": 4, "_LEAST_VALUE": 0.1}),
]


@pytest.mark.parametrize(("module", "numbers"), SET)
def test_numbers_are_those_of_the_experiment(module: Any, numbers: dict[str, float]) -> None:
    assert {name: getattr(module, name) for name in numbers} == numbers


def test_the_logistic_starts_as_vllms_does() -> None:
    assert (acceptance._SLOPE, acceptance._INTERCEPT) == (0.5, -0.2)


def test_few_numbers_are_enough() -> None:
    assert sum(len(numbers) for _, numbers in SET) <= 21
