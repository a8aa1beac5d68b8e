"""The cost curve and the depth that pays, against the closed form of Leviathan et al. (arXiv 2211.17192, theorem 3.8).

With acceptance alpha, a draft level that costs c target passes and verification as cheap as one token, a chain of depth
g earns (1 - alpha^(g+1)) / (1 - alpha) tokens in g c + 1 passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from end_to_end.tiny_llms import llm

from foretoken import SamplingParams
from foretoken.core.records import AskedDrafter, Declined, SequenceStep, StageSeconds, StepRecord
from foretoken.drafting.adaptive_depth import AdaptiveDepth
from foretoken.drafting.draft_costs import FadingLine
from foretoken.drafting.measured_gain import MeasuredGain
from foretoken.runner.costs import CostCurve, PassCosts

FLAT = (1, 64), (1.0, 1.0)


def chain(depth: int) -> range:
    """Nodes of chains by their depth."""
    return range(1, depth + 2)


def speed_up(alpha: float, depth: int, cost: float) -> float:
    """Theorem 3.8."""
    return (1 - alpha ** (depth + 1)) / ((1 - alpha) * (depth * cost + 1))


def record(depth: int, accepted: list[int], *, level: float, verify: float = 1.0, seconds: float = 0.0) -> StepRecord:
    """An iteration over chains of one depth; `seconds` are added to the draft's time."""
    return StepRecord(
        sequences=[
            SequenceStep(
                request_id=str(i),
                num_drafted=depth,
                tree_depth=depth,
                num_accepted=n,
                num_emitted=n + 1,
                accepted_by={},
            )
            for i, n in enumerate(accepted)
        ],
        num_tokens=(depth + 1) * len(accepted),
        seconds=StageSeconds(draft=depth * level + seconds, verify=verify),
    )


def live(budget: AdaptiveDepth, alpha: float, level: float, iterations: int, *, batch: int = 1) -> list[int]:
    """Lets a budget decide, and tells it what happened; acceptance is geometric, spread evenly instead of drawn."""
    depths = []
    for i in range(iterations):
        depth = budget.depth(batch)
        depths.append(depth)
        even = [((i * batch + row) * 0.6180339887) % 1 for row in range(batch)]
        accepted = [min(depth, int(math.log(1 - u) / math.log(alpha))) for u in even]
        budget.learn_step(record(depth, accepted, level=level))
    return depths


@pytest.mark.parametrize(
    ("alpha", "level", "best", "gain"),
    [  # the table of optimal depths in methods/sampling.md 10.2
        (0.5, 0.01, 5, 1.88), (0.7, 0.02, 8, 2.76), (0.6, 0.05, 4, 1.92), (0.8, 0.05, 8, 3.09), (0.9, 0.05, 13, 4.67),
        (0.7, 0.1, 4, 1.98), (0.9, 0.1, 10, 3.43), (0.8, 0.2, 4, 1.87), (0.95, 0.2, 10, 2.87), (0.5, 0.2, 1, 1.25),
    ],
)  # fmt: skip
def test_depth_is_the_closed_forms_optimum(alpha: float, level: float, best: int, gain: float) -> None:
    assert max(range(40), key=lambda depth: speed_up(alpha, depth, level)) == best
    assert speed_up(alpha, best, level) == pytest.approx(gain, abs=0.006)
    depths = live(AdaptiveDepth(CostCurve(*FLAT), chain(40)), alpha, level, 1200)[-300:]
    # Acceptance is estimated from recent drafts: the optimum is flat, so what counts is the speed lost.
    mean = sum(speed_up(alpha, depth, level) for depth in depths) / len(depths)
    assert mean >= 0.98 * gain


@pytest.mark.parametrize(("alpha", "level"), [(0.3, 2.0), (0.3, 0.8), (0.05, 8.0), (0.7, 3.0)])
def test_where_nothing_pays_a_percent_is_lost(alpha: float, level: float) -> None:
    """Two drafts to learn what they take, then probes, whose loss is bounded whatever they cost."""
    depths = live(AdaptiveDepth(CostCurve(*FLAT), chain(8)), alpha, level, 6000)
    assert sum(depth > 0 for depth in depths[:300]) <= 12
    later = [depth for depth in depths[300:] if depth]
    assert later, "probes go on"
    assert set(later) == {1}
    assert sum(depth > 0 for depth in depths) * (level - alpha) <= 4 + 0.012 * 6000 + 2 * level


def test_known_costs_spare_the_first_drafts() -> None:
    """A drafter that was timed before and cannot pay is not asked before a probe of it is saved up."""
    timed = AdaptiveDepth(CostCurve(*FLAT), chain(8), timed=[(1, 3.0), (1, 2.0)])
    assert not any(live(timed, 0.9, 2.0, 390))
    assert any(live(timed, 0.9, 2.0, 100))
    cheap = AdaptiveDepth(CostCurve(*FLAT), chain(8), timed=[(1, 3.0), (1, 0.05)])
    assert all(live(cheap, 0.9, 0.05, 300))


def test_what_is_done_once_a_draft_is_no_levels() -> None:
    """Eight levels take 1.2 passes, one takes 0.5: were levels all there is, eight would seem to take four."""
    depths = live_beside_fixed_work(AdaptiveDepth(CostCurve(*FLAT), chain(8), timed=[(4, 0.8), (1, 0.5), (4, 0.8)]))
    assert sum(depths[-100:]) / 100 > 7
    assert min(depths[-100:]) > 0
    # Nothing is known of what is done once where drafts of one depth were timed.
    assert not any(live_beside_fixed_work(AdaptiveDepth(CostCurve(*FLAT), chain(8), timed=[(1, 0.9), (1, 0.9)]), 20))


def live_beside_fixed_work(budget: AdaptiveDepth, iterations: int = 300) -> list[int]:
    """As `live`, for drafts that take 0.4 besides 0.1 a level; nine in ten tokens are right."""
    depths = []
    for i in range(iterations):
        depth = budget.depth(1)
        depths.append(depth)
        accepted = min(depth, int(math.log(1 - (i * 0.6180339887) % 1) / math.log(0.9)))
        budget.learn_step(record(depth, [accepted], level=0.1, seconds=0.4 * (depth > 0)))
    return depths


def test_measured_acceptance_says_how_deep_the_first_drafts_are() -> None:
    def first(expected: list[float]) -> int:
        return AdaptiveDepth(CostCurve(*FLAT), chain(8), timed=[(1, 0.2), (1, 0.2)], expected=expected).depth(1)

    unknown = first([])
    assert first([0.95] * 8) > unknown > first([0.3] * 8) == 1
    assert first([0.95, 0.95, 0.95]) == first([0.95] * 8), "further levels are held for what is known of the first"
    assert 2 <= first([0.95, 0.95, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]) <= 3
    wrong = AdaptiveDepth(CostCurve(*FLAT), chain(8), timed=[(1, 0.2), (1, 0.2)], expected=[0.95] * 8)
    assert max(live(wrong, 0.3, 0.2, 100)[-50:]) <= 2, "what is accepted counts more soon"


@pytest.mark.parametrize("expected", [[0.0] * 8, [0.9, 0.9, *([0.0] * 6)], [0.6, 0.2, 0.05, *([0.01] * 5)]])
def test_what_a_checkpoint_says_of_its_heads_is_no_limit(expected: list[float]) -> None:
    """Depths that are said never to be right are tried once the ones before them are."""
    budget = AdaptiveDepth(CostCurve(*FLAT), chain(8), timed=[(1, 0.05), (1, 0.05)], expected=expected)
    assert sum(live(budget, 0.95, 0.05, 600)[-100:]) / 100 > 4.5


def test_a_change_of_text_is_found() -> None:
    """After thousands of iterations in which a draft was hardly ever right: a few probes of the new text are enough."""
    budget = AdaptiveDepth(CostCurve(*FLAT), chain(8))
    assert sum(depth > 0 for depth in live(budget, 0.05, 0.3, 5000)) < 150
    depths = live(budget, 0.95, 0.3, 2000)
    change = next(i for i in range(2000) if min(depths[i : i + 50], default=0) > 0)
    assert change <= 1100


def test_asking_in_vain_is_part_of_the_price() -> None:
    """A drafter that is right but seldom has anything to say must not be asked when asking is dear."""

    def asked(seconds: float) -> int:
        budget = AdaptiveDepth(CostCurve(*FLAT), chain(4))
        count = 0
        for i in range(1000):
            depth = budget.depth(1)
            count += depth > 0
            found = depth if i % 10 == 0 else 0
            budget.learn_step(
                replace(
                    record(found, [found], level=0.0), seconds=StageSeconds(draft=seconds * (depth > 0), verify=1.0)
                )
            )
        return count

    assert asked(0.01) > 900
    assert asked(0.8) < 200


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


def test_drafting_comes_back_when_it_pays_again() -> None:
    budget = AdaptiveDepth(CostCurve(*FLAT), chain(8))
    live(budget, 0.05, 0.3, 300)
    assert live(budget, 0.05, 0.3, 1)[0] == 0
    assert min(live(budget, 0.95, 0.05, 3000)[-100:]) >= 4


def test_one_slow_draft_is_forgiven() -> None:
    """The first draft of a draft model reads the whole prompt: its time says nothing of the next one's."""
    budget = AdaptiveDepth(CostCurve(*FLAT), chain(8))
    depth = budget.depth(1)
    budget.learn_step(record(depth, [depth], level=0.05, seconds=500.0))
    assert min(live(budget, 0.8, 0.05, 100)[-40:]) >= 4


def test_wide_passes_and_large_batches_cost() -> None:
    """Where every token costs as much as a pass nothing pays; a batch reaches the end of a cheap step sooner."""
    linear = AdaptiveDepth(CostCurve((1, 2), (1.0, 2.0)), chain(8))
    stairs = AdaptiveDepth(CostCurve((1, 8, 9, 64), (1.0, 1.0, 2.0, 14.0)), chain(16))
    for _ in range(200):
        linear.learn_step(record(1, [0], level=0.0, verify=2.0))
        stairs.learn_step(record(7, [6], level=0.0))
    assert linear.depth(1) == 0
    assert stairs.depth(1) == 7
    assert stairs.depth(4) == 1


def test_an_untested_depth_is_judged_by_the_others() -> None:
    """Drafts of depth 2 that are always accepted say that deeper ones are worth a try."""
    budget = AdaptiveDepth(CostCurve(*FLAT), chain(16))
    for _ in range(50):
        budget.learn_step(record(2, [2], level=0.02))
    assert budget.depth(1) > 4


def test_plain_iterations_teach_no_acceptance() -> None:
    budget = AdaptiveDepth(CostCurve(*FLAT), chain(8))
    before = budget.depth(1)
    for _ in range(100):
        budget.learn_step(record(0, [0], level=0.0))
    assert budget.depth(1) == before


def test_the_nodes_of_a_tree_are_paid_for() -> None:
    """A second level of 30 nodes is bought where 32 tokens cost what one does, not where each costs a pass."""
    tree = [1, 3, 33]
    flat, linear = AdaptiveDepth(CostCurve(*FLAT), tree), AdaptiveDepth(CostCurve((1, 2), (1.0, 1.1)), tree)
    for budget in (flat, linear):
        for _ in range(100):
            budget.learn_step(replace(record(2, [2], level=0.01), num_tokens=33))
    assert flat.depth(1) == 2
    assert linear.depth(1) == 1


def test_the_reason_for_declining_has_the_numbers_of_the_decision() -> None:
    curve = (1, 2, 3, 64), (1.0, 1.6, 2.4, 60.0)
    budget = AdaptiveDepth(CostCurve(*curve), chain(8))
    assert budget.depth(1) == 0
    assert budget.declined == Declined(width=2, pass_cost=1.6, draft_cost=0.0, acceptance=None, hit_rate=1.0)
    assert "acceptance not known yet" in str(budget.declined)
    cheap = AdaptiveDepth(CostCurve(*FLAT), chain(8))
    assert cheap.depth(1) > 0
    assert cheap.declined is None
    depths = live(budget, 0.3, 0.5, 2000)
    assert budget.declined is not None
    assert depths[-1] == 0
    assert budget.declined.draft_cost == pytest.approx(0.5, rel=0.3)  # verification is said to cost 1.0 all along
    assert budget.declined.acceptance == pytest.approx(0.3, abs=0.15)
    assert budget.declined.width == 2


def test_a_probe_is_no_declined_draft() -> None:
    budget = AdaptiveDepth(CostCurve((1, 64), (1.0, 640.0)), chain(4))
    for _ in range(100):
        assert (budget.depth(1) == 0) == (budget.declined is not None)
        budget.learn_step(record(0, [0], level=0.0))


def test_the_width_is_that_of_the_whole_batch() -> None:
    budget = AdaptiveDepth(CostCurve((1, 64), (1.0, 640.0)), chain(4))
    assert budget.depth(3) == 0
    assert budget.declined is not None
    assert budget.declined.width == 6


@pytest.mark.parametrize(("curve", "is_dear"), [(FLAT, False), (((1, 64), (1.0, 6400.0)), True)])
def test_metrics_count_declined_drafts(curve: Any, is_dear: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the real loop: passes are declined or drafted for, and an engine without a drafter declines nothing."""
    monkeypatch.setattr("foretoken.entrypoints.llm.pass_costs", lambda model, name: PassCosts(*[CostCurve(*curve)] * 3))
    records: list[StepRecord] = []
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    drafting = llm({"speculative_config": {"method": "ngram", "prompt_lookup_min": 1}}, on_step=records.append)
    metrics = drafting.generate([5, 6, 5, 6], params)[0].metrics
    assert metrics.as_dict()["num_declined"] == sum(record.declined is not None for record in records)
    assert (metrics.num_declined > 20) == is_dear
    assert metrics.num_declined <= metrics.steps
    assert llm({}).generate([5], params)[0].metrics.num_declined == 0


def test_a_line_through_nothing_emitted_is_level() -> None:
    line = FadingLine()
    line.add(0, 2.0)
    assert line(3.0) == 2.0
    line.add(4, 6.0)
    assert 2.0 < line(4.0) <= 6.5


def test_iterations_that_emit_nothing_leave_the_budget_working() -> None:
    """The first request had no possible token; every later one then failed, dividing by zero tokens."""
    budget = AdaptiveDepth(CostCurve(*FLAT), chain(4))
    failed = record(0, [0], level=0.01)
    budget.learn_step(replace(failed, sequences=[replace(failed.sequences[0], num_emitted=0)]))
    assert budget.depth(1) > 0


def test_a_draft_stakes_at_most_half_of_what_was_saved() -> None:
    """Thirty tokens would pay as long as all are accepted; a few drafts that fail must not end all drafting."""
    budget = AdaptiveDepth(CostCurve((1, 31), (1.0, 16.0)), chain(30))
    depths = []
    for is_accepted in (*[True] * 100, *[False] * 3):
        depth = budget.depth(1)
        depths.append(depth)
        budget.learn_step(record(depth, [depth * is_accepted], level=0.0, verify=1.0 + depth / 2))
    assert depths[99] == 20, "loses 10 iterations, half of the most that is saved"
    assert depths[102] < depths[101] < depths[100]
    assert budget.depth(1)


def test_a_disturbed_iteration_does_not_end_drafting() -> None:
    budget = AdaptiveDepth(CostCurve((1, 4), (1.0, 1.5)), chain(3))
    live(budget, 0.8, 0.01, 60)
    depth = budget.depth(1)
    budget.learn_step(record(depth, [depth], level=0.01, verify=500.0))
    assert all(live(budget, 0.8, 0.01, 20))


@pytest.mark.parametrize("level", [0.2, 0.3])
@pytest.mark.parametrize(
    "slowness",
    [
        lambda i: 5.0 if i % 8 == 7 else 1.0,
        lambda i: 5.0,  # from the first iteration on: costs were measured while the machine was idle
        lambda i: 5.0 if i > 60 else 1.0,
        lambda i: 8.0 if (i // 30) % 2 else 1.0,
    ],
    ids=["every eighth iteration", "all", "later ones", "by turns"],
)
def test_a_busy_machine_does_not_end_drafting(slowness: Callable[[int], float], level: float) -> None:
    """Drafts and passes take several times as long alike, so drafts gain what they did."""
    budget = AdaptiveDepth(CostCurve(*FLAT), chain(8), timed=[(1, level), (1, level), (4, 4 * level), (4, 4 * level)])
    controller, depths = MeasuredGain(budget), []
    for i in range(800):
        (allowance,) = controller.allot(1).allowances
        depths.append(allowance.depth)
        accepted = min(allowance.depth, int(math.log(1 - (i * 0.6180339887) % 1) / math.log(0.8)))
        made = record(allowance.depth, [accepted], level=level * slowness(i), verify=slowness(i))
        asked = [AskedDrafter(index=0, name="d", depth=allowance.depth, seconds=made.seconds.draft)]
        controller.learn_step(replace(made, asked=asked if allowance.depth else []))
    for begin in range(0, 800, 100):  # some iterations measure plain decoding
        assert sum(depth > 0 for depth in depths[begin : begin + 100]) >= 94
