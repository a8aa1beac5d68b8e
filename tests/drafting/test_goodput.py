"""The controller: depths against the closed form of Leviathan et al. (arXiv 2211.17192, theorem 3.8), and its rule.

With acceptance alpha, a draft level that costs c target passes and verification as cheap as one token, a chain of depth
g earns (1 - alpha^(g+1)) / (1 - alpha) tokens in g c + 1 passes.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from drafters.drafting_contexts import record, step
from end_to_end.tiny_llms import llm

from foretoken import SamplingParams
from foretoken.core.records import AskedDrafter, StageSeconds, StepRecord
from foretoken.core.token_tree import DraftDistributions, TokenTree, TreeRow
from foretoken.drafting.exploration import CREDIT, SHARE, Exploration
from foretoken.drafting.goodput import Goodput
from foretoken.runner.costs import WIDTHS, CostCurve, PassCosts

FLAT = (1, 64), (1.0, 1.0)


def one(curve: Any = FLAT, deepest: int = 8, level: float = 0.0, **keys: Any) -> Goodput:
    """The controller of one chain drafter, whose drafts were timed."""
    cost = CostCurve(WIDTHS, CostCurve(*curve).seconds(WIDTHS))
    timed = [[(1, level), (min(4, deepest), level * min(4, deepest))]] if level else []
    nodes = [range(1, deepest + 2)]
    return Goodput(
        cost, **{"nodes_by_depth": nodes, "max_nodes": deepest + 1, "is_read": False, "timed": timed, **keys}
    )


def chains(depth: int, accepted: list[int], *, draft: float = 0.0, verify: float = 1.0) -> StepRecord:
    """An iteration over chains of one depth."""
    steps = [step(range(1, n + 2), depth, num_proposed=depth or None) for n in accepted]
    return record(steps, (depth + 1) * len(accepted), *[(0, depth, draft)] * bool(depth), verify=verify)


def live(made: Goodput, alpha: float, level: float, iterations: int, *, batch: int = 1, curve: Any = FLAT) -> list[int]:
    """Lets a controller decide, and tells it what happened; acceptance is geometric, spread evenly instead of drawn."""
    depths, cost = [], CostCurve(*curve)
    for i in range(iterations):
        depth = made.allot(batch).allowances[0].depth
        depths.append(depth)
        even = [((i * batch + row) * 0.6180339887) % 1 for row in range(batch)]
        accepted = [min(depth, int(math.log(1 - u) / math.log(alpha))) for u in even]
        made.learn_step(chains(depth, accepted, draft=depth * level, verify=cost((depth + 1) * batch)))
    return depths


@pytest.mark.parametrize(
    ("alpha", "level", "best", "gain"),
    [  # the table of optimal depths: theory of speculative decoding, c = level
        (0.5, 0.01, 5, 1.88), (0.7, 0.02, 8, 2.76), (0.6, 0.05, 4, 1.92), (0.8, 0.05, 8, 3.09), (0.9, 0.05, 13, 4.67),
        (0.7, 0.1, 4, 1.98), (0.9, 0.1, 10, 3.43), (0.8, 0.2, 4, 1.87), (0.95, 0.2, 10, 2.87), (0.5, 0.2, 1, 1.25),
    ],
)  # fmt: skip
def test_depth_is_the_closed_forms_optimum(alpha: float, level: float, best: int, gain: float) -> None:
    def speed_up(depth: int) -> float:
        return (1 - alpha ** (depth + 1)) / ((1 - alpha) * (depth * level + 1))

    assert max(range(40), key=speed_up) == best
    depths = live(one(deepest=40, level=level), alpha, level, 800)[-300:]
    # Acceptance is estimated from recent drafts: the optimum is flat, so what counts is the speed lost.
    drafted = [depth for depth in depths if depth]
    assert sum(map(speed_up, drafted)) / len(drafted) >= 0.975 * gain
    assert len(drafted) >= 0.93 * len(depths), "the others measure plain decoding"


@pytest.mark.parametrize(("alpha", "level"), [(0.3, 2.0), (0.3, 0.8), (0.05, 8.0), (0.7, 3.0)])
def test_where_nothing_pays_a_percent_is_lost(alpha: float, level: float) -> None:
    depths = live(one(level=level), alpha, level, 3000)
    later = [depth for depth in depths[300:] if depth]
    assert later, "drafts are tried again"
    assert sum(depth * level - (1 - alpha**depth) * alpha / (1 - alpha) for depth in depths) <= CREDIT + 0.012 * 3000


def test_costs_that_were_timed_spare_the_first_drafts() -> None:
    assert not any(live(one(level=2.0), 0.9, 2.0, 200))
    assert all(live(one(level=0.05), 0.9, 0.05, 70)[:8])


def test_measured_acceptance_says_how_deep_the_first_drafts_are() -> None:
    def first(expected: list[float]) -> int:
        return one(level=0.2, expected=expected).allot(1).allowances[0].depth

    assert first([0.95] * 8) > first([]) > first([0.3] * 8) == 1
    assert first([0.95, 0.95]) == first([0.95] * 8), "further levels are held for what is known of the first"
    assert 2 <= first([0.95, 0.95, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]) <= 4


def test_a_change_of_text_is_found() -> None:
    """After thousands of iterations in which a draft was hardly ever right: a few tries of the new text are enough."""
    made = one(level=0.3)
    assert sum(depth > 0 for depth in live(made, 0.05, 0.3, 3000)) < 200
    depths = live(made, 0.95, 0.3, 600)
    assert next(i for i in range(600) if sum(depth > 0 for depth in depths[i : i + 20]) > 17) <= 200


def test_asking_in_vain_is_part_of_the_price() -> None:
    """A drafter that is right but seldom has anything to say must not be asked when asking is dear."""

    def asked(seconds: float) -> int:
        made, count = one(deepest=4), 0
        for i in range(1000):
            depth = made.allot(1).allowances[0].depth
            count += depth > 0
            found = depth if i % 10 == 0 else 0
            told = chains(found, [found], verify=1.0)
            step = replace(told.sequences[0], num_proposed=found)
            calls = [AskedDrafter(index=0, name="d", depth=found, seconds=seconds)] if depth else []
            spent = StageSeconds(draft=seconds * (depth > 0), verify=1.0)
            made.learn_step(replace(told, sequences=[step if depth else told.sequences[0]], asked=calls, seconds=spent))
        return count

    assert asked(0.01) > 850
    assert asked(0.8) < 200


def test_one_slow_draft_is_forgiven() -> None:
    """The first draft of a draft model reads the whole prompt: its time says nothing of the next one's."""
    made = one()
    depth = made.allot(1).allowances[0].depth
    made.learn_step(chains(depth, [depth], draft=500.0))
    assert min(filter(None, live(made, 0.8, 0.05, 100)[-40:])) >= 4


def test_wide_passes_and_large_batches_cost() -> None:
    """Where every token costs a pass nothing pays; a batch reaches the end of a cheap step sooner."""
    stairs = (1, 8, 9, 64), (1.0, 1.0, 2.0, 14.0)
    assert sum(live(one(((1, 2), (1.0, 2.0))), 0.9, 0.01, 100, curve=((1, 2), (1.0, 2.0)))) <= 16
    made = one(stairs, deepest=16)
    assert set(live(made, 0.99, 0.001, 200, curve=stairs)[-9:]) == {7}
    assert set(filter(None, live(made, 0.99, 0.001, 60, batch=4, curve=stairs)[-9:])) == {1}


def test_plain_iterations_teach_no_acceptance() -> None:
    made = one()
    before = made._known[0].after(frozenset()).survival()
    for _ in range(100):
        made._begin(1)
        made.learn_step(chains(0, [0]))
    assert made._known[0].after(frozenset()).survival() == before


def test_the_reason_for_declining_has_the_numbers_of_the_decision() -> None:
    made = one(((1, 2, 3, 64), (1.0, 2.4, 3.9, 150.0)))
    declined = made.allot(1).declined
    assert declined is not None
    assert (declined.width, declined.draft_cost, declined.acceptance, declined.hit_rate) == (2, 0.0, None, 1.0)
    assert declined.pass_cost == pytest.approx(2.4)
    assert made.allot(3).declined is not None
    assert made.allot(3).declined.width == 6, "of the whole batch"
    dear = one(level=2.0)
    live(dear, 0.3, 2.0, 2000)
    declined = dear.allot(1).declined or dear.allot(1).declined or dear.allot(1).declined
    assert declined is not None
    assert declined.draft_cost == pytest.approx(2.0, rel=0.3)
    assert declined.acceptance == pytest.approx(0.3, abs=0.2)


def test_a_decision_holds_for_some_iterations_and_for_its_batch() -> None:
    made = one(((1, 2), (1.0, 2.6)))
    kept = made.allot(1)
    assert made.allot(1) is kept
    assert made.allot(2) is not kept
    assert len(made.allot(2).allowances) == 2


def test_plain_decoding_is_measured_while_drafts_pay() -> None:
    """Twice after about thirty drafts, and then the more seldom the more drafts gain; nothing is declined."""
    made, looks = one(level=0.05), []
    for i in range(1500):
        allotment = made.allot(1)
        if allotment.is_empty:
            looks.append(i)
            assert allotment.declined is None
        depth = allotment.allowances[0].depth
        made.learn_step(chains(depth, [depth * (i % 4 > 0)], draft=0.05 * depth))
    assert looks[:2] == [32, 33]
    assert 3 <= len(looks) <= 30
    assert made.plain_seconds(1) == pytest.approx(1.0, rel=0.05)
    assert made.plain_seconds(2) is None


@pytest.mark.parametrize("loss", [0.05, 0.5, 4.0])
def test_what_is_tried_loses_no_more_than_its_share(loss: float) -> None:
    exploration, tries = Exploration(), []
    for i in range(20000):
        exploration.next()
        if exploration.is_due("drafter", loss):
            tries.append(i)
    assert 0 < len(tries) * loss <= SHARE * 20000 + 2 * loss
    assert tries[1] - tries[0] == 1, "two in a row: the first one catches up with what was missed"


def test_an_account_bounds_what_drafts_lose() -> None:
    exploration, lost = Exploration(), 0.0
    for _ in range(5000):
        exploration.next()
        loss = 0.0 if exploration.drafts.is_spent else 0.3
        exploration.charge(loss)
        lost += loss
    assert CREDIT <= lost <= CREDIT + SHARE * 5000 + 0.3
    for _ in range(1000):
        exploration.charge(-5.0)
    assert exploration.drafts.amount <= 12, "what was gained long ago pays for nothing"


@pytest.mark.parametrize("drafter", ["chain", "tree"])
def test_trees_that_are_read_are_cut_and_others_are_not(drafter: str) -> None:
    is_read = drafter == "tree"
    made = one(((1, 64), (1.0, 64.0)), is_read=is_read)
    tree = TokenTree.from_rows([TreeRow([5, 1, 2], [-1, 0, 1])])
    made.allot(1)
    chosen = made.select({0: tree})
    assert (chosen is tree) != is_read
    assert chosen.num_nodes.tolist() == [1 if is_read else 3]


def test_drawn_nodes_are_verified_whatever_they_cost() -> None:
    made = one(((1, 64), (1.0, 64.0)), is_read=True)
    tree = TokenTree.from_rows([TreeRow([5, 1, 2, 3], [-1, 0, 0, 1])])
    kinds = torch.tensor([[0, 2, 2, 0]])
    drawn = DraftDistributions(kinds=kinds, rows=torch.full((1, 1, 7), 1 / 7), row_of=kinds // 2 - 1, max_siblings=2)
    made.allot(1)
    assert made.select({0: replace(tree, distributions=drawn)}).tokens[0].tolist() == [5, 1, 2]


def test_a_record_of_another_batch_is_left_out() -> None:
    """As after a batch that failed and was decoded again one by one."""
    made = one(is_read=True)
    made.allot(2)
    made.select({0: TokenTree.from_rows([TreeRow([5, 1], [-1, 0])] * 2)})
    made.learn_step(chains(1, [1]))
    assert made._known[0].after(frozenset()).num_seen == 0


@pytest.mark.parametrize(("curve", "is_dear"), [(((1, 64), (5e-4, 5e-4)), False), (((1, 64), (5e-4, 3.2)), True)])
def test_metrics_count_declined_drafts(curve: Any, is_dear: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the real loop: what is found is verified or not, and passes are declined while the account is empty."""
    monkeypatch.setattr("foretoken.drafting.choice.time_drafts", lambda drafter, target: [(1, 1e-7), (4, 1e-7)])
    cost = CostCurve(WIDTHS, CostCurve(*curve).seconds(WIDTHS))
    monkeypatch.setattr("foretoken.entrypoints.llm.pass_costs", lambda model, name: PassCosts(*[cost] * 3))
    records: list[StepRecord] = []
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
    drafting = llm({"speculative_config": {"method": "ngram", "prompt_lookup_min": 1}}, on_step=records.append)
    metrics = drafting.generate([5, 6, 5, 6], params)[0].metrics
    assert (metrics.num_drafted == 0) == is_dear
    exploration = drafting._engine._drafting._usual.controller._exploration  # type: ignore[union-attr]
    exploration.drafts.amount, exploration.drafts.is_spent = -9.0, True
    records.clear()
    metrics = drafting.generate([5, 6, 5, 6], params)[0].metrics
    assert metrics.as_dict()["num_declined"] == sum(record.declined is not None for record in records) > 20
    assert (metrics.num_drafted, metrics.num_declined <= metrics.steps) == (0, True)
    assert llm({}).generate([5], params)[0].metrics.num_declined == 0


# A pass of up to 16 tokens takes 10 ms, and every further one half a millisecond.
@pytest.mark.parametrize(
    ("batch", "num_prompt_tokens", "is_drafted"),
    [(1, 0, True), (1, 3, True), (4, 8, True), (8, 20, False), (1, 40, False), (4, 400, False)],
)
def test_drafts_take_room_from_prompts_only_where_it_is_cheap(
    batch: int, num_prompt_tokens: int, is_drafted: bool
) -> None:
    """Prompt tokens are work too: where a pass is as long as it is wide, a guess is worth less than a certain token."""
    made = one(((1, 16, 1016), (0.010, 0.010, 0.510)), level=1e-4)
    assert (not made.allot(batch, num_prompt_tokens).is_empty) == is_drafted


def test_beside_prompts_nothing_is_tried_and_a_decision_does_not_hold() -> None:
    made = one(((1, 2), (1.0, 2.0)), level=2.0)
    declined = made.allot(1)
    assert made.allot(1) is declined
    for _ in range(1000):
        beside = made.allot(1, 4)
        assert beside.is_empty
        assert beside.declined is None
    assert made.allot(1) is not declined


def test_another_text_is_not_judged_by_the_last_one() -> None:
    """As predictions of two requests: the second one is drafted from its first iteration."""
    made = one(level=0.3)
    live(made, 0.05, 0.3, 12)
    assert made.allot(1).declined is not None
    made.forget(0)
    assert made.allot(1).allowances[0].depth > 0
