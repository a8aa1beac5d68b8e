"""How often what does not pay is tried again, and what that loses; in iterations of plain decoding."""

from __future__ import annotations

import itertools

import pytest

from foretoken.drafting.measured_gain import ProbeSchedule

CREDIT = 8.0


def live(schedule: ProbeSchedule, iterations: int, *, loss: float, catch_up: float = 0.0) -> tuple[list[bool], float]:
    """Which iterations were probes, and what they lost: `loss` each, and `catch_up` for every one since the last."""
    probes, missed, lost = [], 0, 0.0
    for _ in range(iterations):
        probes.append(schedule.advance(loss))
        if probes[-1]:
            schedule.spend(loss + catch_up * missed, 1.0)
            lost, missed = lost + loss + catch_up * missed, 0
        else:
            schedule.save()
            missed += 1
    return probes, lost


@pytest.mark.parametrize("catch_up", [0.0, 0.001, 0.02])
@pytest.mark.parametrize("loss", [0.0, 0.05, 0.5, 4.0, 30.0])
def test_probes_lose_no_more_than_a_percent(loss: float, catch_up: float) -> None:
    """But for the credit at the beginning, and for catching up before it is known what that takes."""
    for iterations in (300, 3000, 20000):
        probes, lost = live(ProbeSchedule(), iterations, loss=loss, catch_up=catch_up)
        first = probes.index(True) if any(probes) else 0
        assert lost <= CREDIT + 0.01 * iterations + catch_up * first + 1e-6
    assert any(probes)


def test_cheap_probes_are_made_less_and_less_often() -> None:
    probes = [i for i, is_probe in enumerate(live(ProbeSchedule(), 5000, loss=0.0)[0]) if is_probe]
    gaps = [b - a for a, b in itertools.pairwise(probes)]
    assert gaps[0::2] == [1] * len(gaps[0::2]), "two in a row"
    assert [probes[0] + 1, *gaps[1:10:2]] == [32, 64, 128, 256, 512, 512]


def test_dear_probes_are_rarer_than_cheap_ones() -> None:
    counts = [sum(live(ProbeSchedule(), 20000, loss=loss)[0]) for loss in (0.5, 5.0, 20.0)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] >= 2 * 20000 // 600
    assert 0 < counts[2] <= 2 * 20000 // 2000


@pytest.mark.parametrize(("loss", "longest"), [(0.5, 25), (-0.5, 200)])
def test_accepted_probes_go_on_within_the_savings(loss: float, longest: int) -> None:
    schedule = ProbeSchedule()
    for _ in range(2000):
        schedule.save()
    while not schedule.advance(0.5):
        schedule.save()
    run = 0
    while schedule.advance(0.5) and run < longest:
        schedule.spend(loss, 2.0)
        run += 1
    assert longest - 2 <= run <= longest


def test_drafts_that_lose_are_stopped_whatever_was_expected_of_them() -> None:
    """A method that is judged wrongly over and over loses no more than one that is not."""
    schedule, lost = ProbeSchedule(), 0.0
    for _ in range(5000):
        if not schedule.savings.is_spent:  # expected to pay, always
            schedule.reset()
            schedule.spend(0.3, 1.2)
            lost += 0.3
        elif schedule.advance(0.3):
            schedule.spend(0.3, 1.2)
            lost += 0.3
        else:
            schedule.save()
    assert CREDIT <= lost <= CREDIT + 0.01 * 5000 + 0.3


def test_drafts_that_gain_may_lose_now_and_then() -> None:
    schedule = ProbeSchedule()
    for index in range(3000):
        schedule.spend([1.5, -1.0, 1.5, -2.5][index % 4], 1.0)
        assert not schedule.savings.is_spent


def test_paying_again_starts_anew() -> None:
    schedule = ProbeSchedule()
    live(schedule, 1000, loss=0.0)
    schedule.reset()
    assert schedule.num_idle == 0
    assert live(schedule, 40, loss=0.0)[0].index(True) == 31
