"""Whom to ask pays: against a search through every set of drafters and every depth, by the same estimates."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from foretoken.drafting.asking import AtHand, Candidate, Costs, best_depth, choose, stop_rate
from foretoken.runner.costs import CostCurve


def random_case(seed: int, num_drafters: int) -> tuple[AtHand, dict[int, Candidate], Costs]:
    """Costs of a machine, a lookup's tree at hand, and drafters of different speed and acceptance."""
    rng = np.random.default_rng(seed)
    batch = int(rng.choice([1, 4, 8]))
    curve = CostCurve((1, 16, 64, 256), np.cumsum([1.0, *(rng.choice([0.05, 0.3, 1.0, 4.0], 3))]))
    depth = int(rng.integers(0, 9))
    reach = rng.uniform(0.2, 1.0, (batch, depth)).cumprod(1)
    values = -np.sort(-reach.ravel())
    candidates = {}
    for drafter in range(num_drafters):
        deepest = int(rng.integers(1, 9))
        level = float(rng.choice([0.01, 0.05, 0.2, 0.6]))
        candidates[drafter] = Candidate(
            reach=rng.uniform(0.3, 1.0, deepest).cumprod(),
            widths=rng.choice([1.0, 2.0, 6.0], deepest),
            seconds=float(rng.choice([0.0, 0.1])) + level * np.arange(1, deepest + 1),
        )
    host = float(rng.choice([0.0, 0.02]))
    costs = Costs(curve.seconds, lambda tokens: host * tokens, float(rng.choice([0.0, 0.01])))
    return AtHand(reach, values, 0.01), candidates, costs


def rate(at_hand: AtHand, asked: list[tuple[Candidate, int]], costs: Costs) -> float:
    """Tokens a second with some drafters asked for some levels, in that order; the best number of nodes at hand."""
    batch = len(at_hand.reach)
    deepest = max([at_hand.reach.shape[1], *(depth for _, depth in asked)])
    best = 0.0
    for kept in range(len(at_hand.values) + 1):
        tokens, width, seconds = float(batch + at_hand.values[:kept].sum()), float(batch + kept), at_hand.draft_s
        for row in range(batch):
            covered = np.zeros(deepest)
            covered[: at_hand.reach.shape[1]] = at_hand.reach[row]
            for candidate, depth in asked:
                for level in range(depth):
                    tokens += (1 - covered[level]) * candidate.reach[level]
                    covered[level] += (1 - covered[level]) * candidate.reach[level]
        for index, (candidate, depth) in enumerate(asked):
            width += batch * candidate.widths[:depth].sum()
            seconds += candidate.seconds[depth - 1] + costs.merging * (index > 0 or len(at_hand.values) > 0)
        seconds += float(costs.passes(np.array([width]))[0]) + float(costs.host(np.array([tokens]))[0])
        best = max(best, tokens / seconds)
    return best


@pytest.mark.parametrize("seed", range(40))
def test_one_drafter_is_asked_exactly_where_and_as_deep_as_it_pays(seed: int) -> None:
    at_hand, candidates, costs = random_case(seed, 1)
    depths = range(1, len(candidates[0].reach) + 1)
    by_depth = [rate(at_hand, [(candidates[0], depth)], costs) for depth in depths]
    stop = rate(at_hand, [], costs)
    assert stop_rate(at_hand, costs) == pytest.approx(stop)
    assert best_depth(at_hand, candidates[0], costs)[1] == pytest.approx(max(by_depth))
    choice = choose(at_hand, candidates, costs)
    assert choice.rate == pytest.approx(max(stop, *by_depth))
    assert (choice.drafter is None) == (stop >= max(by_depth))


def with_answer(at_hand: AtHand, candidate: Candidate, depth: int, costs: Costs) -> AtHand:
    """What is at hand when a drafter's tree turns out as expected."""
    batch = len(at_hand.reach)
    deepest = max(at_hand.reach.shape[1], depth)
    reach = np.pad(at_hand.reach, ((0, 0), (0, deepest - at_hand.reach.shape[1])))
    added = (1 - reach[:, :depth]) * candidate.reach[:depth]
    reach[:, :depth] += added
    nodes = np.concatenate(
        [np.repeat(added[:, d] / candidate.widths[d], int(candidate.widths[d])) for d in range(depth)]
    )
    values = -np.sort(-np.concatenate([at_hand.values, nodes]))
    merging = costs.merging * (len(at_hand.values) > 0)
    assert len(nodes) == batch * candidate.widths[:depth].sum()
    return AtHand(reach, values, at_hand.draft_s + float(candidate.seconds[depth - 1]) + merging)


def test_one_by_one_is_as_good_as_every_set() -> None:
    """Asked again after every answer, against all sets of two drafters at all depths, which are not replanned."""
    shares = []
    for seed in range(100, 125):
        at_hand, candidates, costs = random_case(seed, 2)
        ranges = {i: range(1, len(candidate.reach) + 1) for i, candidate in candidates.items()}
        nobody = rate(at_hand, [], costs)
        one = [rate(at_hand, [(candidates[i], depth)], costs) for i in ranges for depth in ranges[i]]
        two = [
            rate(at_hand, [(candidates[0], first), (candidates[1], second)], costs)
            for first, second in product(ranges[0], ranges[1])
        ]
        left, now = dict(candidates), at_hand
        while (choice := choose(now, left, costs)).drafter is not None:
            now = with_answer(now, left.pop(choice.drafter), choice.depth, costs)
        assert choice.rate >= 0.999 * max(nobody, *one)
        shares.append(choice.rate / max(nobody, *one, *two))
    assert min(shares) >= 0.92, "the first one's depth is not chosen for the second one"
    assert sum(shares) / len(shares) >= 0.99


def test_a_long_sure_lookup_makes_a_model_superfluous() -> None:
    """Arctic's rule: who is expected to be accepted as far need not be asked."""
    costs = Costs(CostCurve((1, 64), (1.0, 1.1)).seconds, lambda tokens: 0 * tokens, 0.0)
    model = Candidate(reach=0.8 ** np.arange(1, 5), widths=np.ones(4), seconds=0.1 * np.arange(1, 5))
    sure = np.full((1, 8), 0.95)
    assert choose(AtHand(sure, sure[0], 0.0), {0: model}, costs).drafter is None
    unsure = 0.3 ** np.arange(1.0, 9)[None]
    assert choose(AtHand(unsure, unsure[0], 0.0), {0: model}, costs).drafter == 0
    assert choose(AtHand(np.zeros((1, 0)), np.zeros(0), 0.0), {0: model}, costs).depth == 4
