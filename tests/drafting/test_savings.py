"""What drafts may lose, and when they may be made again; in iterations of plain decoding."""

from __future__ import annotations

import math

import pytest

from foretoken.drafting.measured_gain import CREDIT, MOST, SHARE, Savings


def test_drafts_end_with_the_credit_and_begin_again_with_savings() -> None:
    savings = Savings()
    savings.spend(CREDIT - 0.5, math.inf)
    assert not savings.is_spent
    savings.spend(1.0, math.inf)
    assert savings.is_spent
    waited = 0
    while savings.is_spent:
        savings.save()
        waited += 1
    assert waited == pytest.approx(2.5 / SHARE, abs=2), "more than the debt: one draft would end it again"


def test_gains_are_saved_up_to_a_limit() -> None:
    savings = Savings()
    for _ in range(100):
        savings.spend(-1.0, 0.0)
    assert savings.amount == MOST
    savings.save(most=MOST + 1)
    assert savings.amount == pytest.approx(MOST + SHARE)
    savings.spend(-1.0, 0.0)
    assert savings.amount == pytest.approx(MOST + SHARE), "what was saved beyond the limit stays"


def test_a_debt_is_limited() -> None:
    savings = Savings()
    savings.spend(1000.0, 4.0)
    assert savings.amount == -4.0
    savings.spend(1000.0, 4.0)
    assert savings.amount == -4.0
    savings.spend(6.0, 20.0)
    assert savings.amount == -10.0
    savings.spend(1.0, 4.0)
    assert savings.amount == -10.0, "a smaller limit forgives nothing"
