"""Whom to ask pays: against a search through every set of drafters and every depth, by the same estimates."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from foretoken.core.token_tree import PROBE, TokenTree, TreeRow
from foretoken.drafting.host_trees import HostTree, kept_nodes, on_host
from foretoken.drafting.plans import AtHand, Candidate, Costs, Purchase, best_depth, buy, stop
from foretoken.runner.costs import CostCurve
from foretoken.trees.merge import prune


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
    costs = Costs(curve.seconds(np.arange(1000)), lambda tokens: host * tokens, float(rng.choice([0.0, 0.01])))
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
        seconds += float(costs.passes[round(width)]) + float(costs.host(np.array([tokens]))[0])
        best = max(best, tokens / seconds)
    return best


@pytest.mark.parametrize("seed", range(40))
def test_one_drafter_is_asked_exactly_where_and_as_deep_as_it_pays(seed: int) -> None:
    at_hand, candidates, costs = random_case(seed, 1)
    depths = range(1, len(candidates[0].reach) + 1)
    by_depth = [rate(at_hand, [(candidates[0], depth)], costs) for depth in depths]
    assert stop(at_hand, costs).rate == pytest.approx(rate(at_hand, [], costs))
    plan = best_depth(at_hand, candidates[0], costs)
    assert plan.rate == pytest.approx(max(by_depth))
    assert by_depth[plan.depth - 1] == pytest.approx(max(by_depth))


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
        while left:
            plans = {i: best_depth(now, candidate, costs) for i, candidate in left.items()}
            best = max(left, key=lambda i: plans[i].rate)
            if plans[best].rate <= stop(now, costs).rate:
                break
            now = with_answer(now, left.pop(best), plans[best].depth, costs)
        assert stop(now, costs).rate >= 0.98 * max(nobody, *one), "nodes of fractional widths are rounded"
        shares.append(stop(now, costs).rate / max(nobody, *one, *two))
    assert min(shares) >= 0.92, "the first one's depth is not chosen for the second one"
    assert sum(shares) / len(shares) >= 0.99


def test_a_long_sure_lookup_makes_a_model_superfluous() -> None:
    """Arctic's rule: who is expected to be accepted as far need not be asked."""
    costs = Costs(CostCurve((1, 64), (1.0, 1.1)).seconds(np.arange(65)), lambda tokens: 0 * tokens)
    model = Candidate(reach=0.8 ** np.arange(1, 5), widths=np.ones(4), seconds=0.1 * np.arange(1, 5))

    def is_asked(values: np.ndarray) -> bool:
        at_hand = AtHand(values, values[0], 0.0)
        return best_depth(at_hand, model, costs).rate > stop(at_hand, costs).rate

    assert not is_asked(np.full((1, 8), 0.95))
    assert is_asked(0.3 ** np.arange(1.0, 9)[None])
    assert best_depth(AtHand.nothing(1), model, costs).depth == 4


FLAT, STEEP = ((1, 64), (1.0, 1.0)), ((1, 64), (1.0, 64.0))
WIDE = TreeRow([5, 1, 2, 3, 4, 6], [-1, 0, 0, 1, 3, 2])
VALUES = [0.9, 0.05, 0.7, 0.4, 0.03]


def costs_of(curve: tuple) -> Costs:
    return Costs(CostCurve(*curve).seconds(np.arange(65)), lambda tokens: 0.0 * tokens)


def scored(rows: list[TreeRow], values: list[list[float]]) -> TokenTree:
    """Trees whose scores are logarithms of probabilities."""
    tree = TokenTree.from_rows(rows)
    padded = torch.zeros(tree.tokens.shape)
    for row, each in enumerate(values):
        padded[row, 1 : len(each) + 1] = torch.tensor(each).log()
    return replace(tree, scores=padded)


def bought(tree: TokenTree, curve: tuple, **keys: Any) -> tuple[Purchase, HostTree]:
    host = on_host(tree)
    values = np.exp(host.scores.astype(np.float64))
    return buy(host, values, costs_of(curve), **{"draft_s": 0.0, "max_nodes": 64, **keys}), host


@pytest.mark.parametrize(("curve", "count"), [(FLAT, 5), (STEEP, 0)])
def test_nodes_are_bought_where_width_is_free_and_not_where_each_costs_a_pass(curve: tuple, count: int) -> None:
    assert bought(scored([WIDE], [VALUES]), curve)[0].kept[:, 1:].sum() == count


@pytest.mark.parametrize("slope", [0.05, 0.2, 0.5, 0.8])
def test_the_bought_nodes_are_the_best_of_all_trees(slope: float) -> None:
    """Against a search through every subtree of two sequences."""
    curve = (1, 64), (1.0, 1.0 + 63 * slope)
    rows, values = [WIDE, TreeRow([7, 8, 9], [-1, 0, 0])], [[0.9, 0.5, 0.7, 0.4, 0.3], [0.6, 0.2]]
    purchase, _ = bought(scored(rows, values), curve)

    def subtrees(row: TreeRow) -> list[set[int]]:
        sets = []
        for bits in product([False, True], repeat=len(row.tokens) - 1):
            kept = {0, *(node for node, bit in enumerate(bits, start=1) if bit)}
            if all(row.parents[node] in kept for node in kept if node):
                sets.append(kept)
        return sets

    def rate_of(sets: list[set[int]]) -> float:
        tokens = 2 + sum(values[row][node - 1] for row in (0, 1) for node in sets[row] if node)
        return tokens / CostCurve(*curve)(sum(map(len, sets)))

    best = max(rate_of([a, b]) for a in subtrees(rows[0]) for b in subtrees(rows[1]))
    found = [{0, *np.flatnonzero(purchase.kept[row]).tolist()} for row in (0, 1)]
    assert rate_of(found) == pytest.approx(best)
    assert purchase.tokens / CostCurve(*curve)(purchase.width) == pytest.approx(best)


def test_probes_and_drawn_nodes_are_never_cut() -> None:
    tree = scored([WIDE], [[1e-9] * 5])
    probes = replace(tree, source=torch.tensor([[0, 0, 0, 0, PROBE, 0]]))
    assert np.flatnonzero(bought(probes, STEEP)[0].kept[0]).tolist() == [1, 3, 4], "with its path"
    drawn = np.array([[False, True, True, False, False, False]])
    assert np.flatnonzero(bought(tree, STEEP, is_drawn=drawn)[0].kept[0]).tolist() == [1, 2]
    assert bought(tree, FLAT, max_nodes=3)[0].kept[:, 1:].sum() == 2


@pytest.mark.parametrize("has_source", [False, True])
@pytest.mark.parametrize("has_cut_node", [False, True])
@pytest.mark.parametrize("slope", [0.0, 0.1, 0.3, 2.0])
def test_what_is_kept_is_put_together_as_pruning_does_it(slope: float, has_cut_node: bool, has_source: bool) -> None:
    """On the host against `prune` on the device."""
    tree = scored([WIDE, TreeRow([7, 8, 9], [-1, 0, 0])], [VALUES, [0.6, 0.2]])
    if has_source:
        source = torch.tensor([[3, 1, 2, PROBE | 1, PROBE | 2, 1], [3, 1, 2, 0, 0, 0]])
        tree = replace(tree, source=source)
    if has_cut_node:
        parents = tree.parents.clone().index_put((torch.tensor(0), torch.tensor(5)), torch.tensor(-1))
        tree = replace(tree, parents=parents)
    purchase, host = bought(tree, ((1, 64), (1.0, 1.0 + 63 * slope)))
    made = kept_nodes(host, purchase.kept, tree.tokens.device, has_sources=has_source)
    expected = prune(tree, torch.from_numpy(purchase.kept)).narrowed()
    for name in ("tokens", "parents", "depths", "num_nodes", "scores", "source"):
        ours, theirs = getattr(made, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        assert ours is None or (torch.equal(ours, theirs) and ours.dtype == theirs.dtype), name
    assert (made.max_depth, made.host_facts) == (expected.max_depth, expected.host_facts)
