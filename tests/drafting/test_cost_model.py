"""The cost model against made machines: curves that were told wrong, interruptions, and a machine that slows down."""

import random

import numpy as np
import pytest
from drafters.drafting_contexts import record, step

from foretoken.drafters.base import READ_SHARE
from foretoken.drafting.costs import CostModel, FadingLine
from foretoken.runner.costs import WIDTHS, CostCurve


def told(slope: float) -> CostCurve:
    return CostCurve(WIDTHS, [1 + slope * (width - 1) for width in WIDTHS])


def model(slope: float) -> CostModel:
    return CostModel(told(slope), [8], [[(1, 0.1), (4, 0.4)]])


def learn(costs: CostModel, batch: int, width: int, seconds: float, *drafts: tuple[int, int, float]) -> None:
    """One iteration; drafts: index, depth and seconds of each drafter that was asked."""
    costs.learn(record([step([1])] * batch, width, *drafts, verify=seconds))


@pytest.mark.parametrize(("believed", "true"), [(0.2, 0.3), (0.1, 0.05), (0.08, 0.1), (0.1, 0.1)])
def test_a_few_passes_correct_a_curve_also_where_nothing_was_seen(believed: float, true: float) -> None:
    """Passes of 1 and 3 tokens say what 8 take, to three tenths; what was told did not."""
    costs = model(believed)
    for _ in range(12):
        for width in (1, 3):
            learn(costs, 1, width, 1 + true * (width - 1))
    known = np.array(costs.passes(1, 16))
    assert known[[1, 3]] == pytest.approx([1, 1 + 2 * true], rel=0.06)
    assert known[8] == pytest.approx(1 + 7 * true, rel=0.3)
    assert (np.diff(known) >= 0).all()


def test_a_slow_machine_has_the_stairs_that_were_told() -> None:
    costs = CostModel(CostCurve((1, 8, 9, 16), (1.0, 1.0, 2.0, 2.0)), [8], [[]])
    for _ in range(40):
        for width in (1, 4):
            learn(costs, 1, width, 2.0)
    assert costs.machine * np.array(costs.passes(1, 16))[[1, 8, 9]] == pytest.approx([2, 2, 4], rel=0.15)


def test_one_interruption_says_little_and_many_are_followed() -> None:
    costs = model(0.0)
    for _ in range(20):
        learn(costs, 1, 1, 1.0)
    learn(costs, 1, 1, 500.0)
    assert costs.machine * costs.plain(1) < 1.15
    for _ in range(100):
        learn(costs, 1, 1, 3.0)
    assert costs.machine * costs.plain(1) == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_a_noisy_clock_is_averaged(seed: int) -> None:
    chance, costs = random.Random(seed), model(0.1)
    for _ in range(150):
        for width in (1, 5):
            slow = 5.0 if chance.random() < 0.05 else 1.0
            learn(costs, 1, width, slow * (1 + 0.1 * (width - 1)) * chance.lognormvariate(0, 0.2))
    known = costs.passes(1, 8)
    assert known[5] / known[1] == pytest.approx(1.4, rel=0.15)


@pytest.mark.parametrize("slow", [0.2, 5.0])
def test_a_busy_machine_changes_no_decision(slow: float) -> None:
    """A machine slows passes and drafts alike, while nobody makes a pass of another width, and then is quiet again."""
    costs = model(0.1)

    def run(times: int, width: int, speed: float) -> None:
        for _ in range(times):
            learn(costs, 1, width, speed * (1 + 0.1 * (width - 1)), (0, 4, speed * 0.4))

    for _ in range(50):
        run(1, 1, 1.0)
        run(1, 4, 1.0)
    before, draft = np.array(costs.passes(1, 8))[[1, 4, 8]], costs.draft(0)[4]
    run(80, 4, slow)
    assert costs.machine == pytest.approx(slow, rel=0.25)
    assert costs.draft(0)[4] == pytest.approx(draft, rel=0.2)
    run(80, 4, 1.0)
    assert costs.machine * np.array(costs.passes(1, 8))[[1, 4, 8]] == pytest.approx(before, rel=0.2)
    assert costs.machine * costs.draft(0)[4] == pytest.approx(draft, rel=0.2)


def test_a_draft_that_was_timed_too_fast_is_found_dear() -> None:
    costs = model(0.1)
    for _ in range(40):
        learn(costs, 1, 4, 1.3, (0, 4, 4.0))
    assert np.array(costs.draft(0))[[1, 4, 8]] == pytest.approx([1.0, 4.0, 8.0], rel=0.25)


def test_other_numbers_of_sequences_start_from_the_nearest() -> None:
    costs = model(0.0)
    for _ in range(20):
        learn(costs, 4, 4, 2.0)
    assert costs.machine * costs.passes(5, 8)[5] == pytest.approx(2.0, rel=0.1)
    assert (costs.num_passes(5), costs.num_passes(4)) == (0.0, 20)


def test_costs_that_were_not_measured_are_scaled_by_the_first_pass() -> None:
    costs = CostModel(None, [4], [[]])
    learn(costs, 1, 1, 0.003)
    assert costs.machine * np.array(costs.passes(1, 8))[[1, 5]] == pytest.approx([0.003, 0.003], rel=0.1)


def test_drafts_have_fixed_work_and_levels() -> None:
    costs = CostModel(told(0.1), [8, 8, 8], [[(4, 0.8), (1, 0.5), (4, 0.9)], [(1, 0.2)], []])
    assert np.array(costs.draft(0))[[1, 4, 8]] == pytest.approx([0.5, 0.8, 1.2], rel=0.01)
    assert np.array(costs.draft(1))[[1, 8]] == pytest.approx([0.2, 1.6], rel=0.01)
    assert costs.draft(2) == [0.0] * 9
    learn(costs, 1, 1, 1.0, (2, 2, 500.0))
    assert not any(costs.draft(2)), "the first one also reads the prompt"
    learn(costs, 1, 1, 1.0, (2, 2, 0.2))
    assert costs.draft(2)[4] == pytest.approx(0.4)


def test_a_level_takes_a_part_of_the_shortest_draft() -> None:
    """Even where a busy machine made the deep drafts as fast as the shallow ones."""
    costs = CostModel(told(0.1), [8], [[(1, 1.0), (4, 0.9)]])
    assert costs.draft(0)[8] == pytest.approx(1.0 + 7 * 0.06, rel=0.01)


def test_asking_in_vain_has_seconds_of_its_own() -> None:
    costs = model(0.1)
    for _ in range(60):
        learn(costs, 1, 1, 1.0, (0, 0, 0.02))
        learn(costs, 1, 5, 1.4, (0, 4, 0.4))
    assert np.array(costs.draft(0))[[0, 4]] == pytest.approx([0.02, 0.4], rel=0.05)


def test_what_the_host_takes_is_a_line_by_tokens() -> None:
    line = FadingLine()
    assert line(3.0) == 0.0
    for n in range(1, 30):
        line.add(n % 5 + 1, 2.0 + 0.5 * (n % 5 + 1))
    assert [line(x) for x in (1.0, 4.0)] == pytest.approx([2.5, 4.0])
    falling = FadingLine()
    for n in range(1, 30):
        falling.add(n % 5 + 1, 10.0 - n % 5)
    assert falling(1.0) == falling(5.0) > 0, "more tokens never take less"
    before = falling(3.0)
    falling.add(5, 1000.0)
    assert falling(3.0) < 1.1 * before, "an interruption says little"
    nothing = FadingLine()
    nothing.add(0, 2.0)
    assert nothing(3.0) == 2.0


def test_what_reading_takes_before_any_was_seen_depends_on_the_drafter() -> None:
    timed = [[(1, 0.1), (4, 0.4)]] * 3
    costs = CostModel(told(0.1), [8] * 3, timed, [READ_SHARE, 0.1 * READ_SHARE, 0.0])
    assert costs.reading(0) == CostModel(told(0.1), [8] * 3, timed).reading(0) > 0
    assert costs.reading(1) == pytest.approx(0.1 * costs.reading(0))
    assert costs.reading(2) == 0
