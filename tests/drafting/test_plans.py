"""Whom to ask pays: against a search through every set of drafters and every depth, by the same estimates."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.core.token_tree import PROBE, TokenTree, TreeRow
from foretoken.drafting.host_trees import HostMerge, HostRow, kept_tree, read_rows
from foretoken.drafting.plans import AtHand, Candidate, Costs, Selection, best_depth, select_nodes, stop
from foretoken.runner.costs import CostCurve
from foretoken.trees.merge import Continuation, merge_trees, prune, with_continuations


def random_case(seed: int, num_drafters: int) -> tuple[AtHand, dict[int, Candidate], Costs]:
    """Costs of a machine, a lookup's tree at hand, and drafters of different speed and acceptance."""
    rng = np.random.default_rng(seed)
    batch = int(rng.choice([1, 4, 8]))
    curve = CostCurve((1, 16, 64, 256), np.cumsum([1.0, *(rng.choice([0.05, 0.3, 1.0, 4.0], 3))]))
    depth = int(rng.integers(0, 9))
    reach = rng.uniform(0.2, 1.0, (batch, depth)).cumprod(1)
    candidates = {}
    for drafter in range(num_drafters):
        deepest = int(rng.integers(1, 9))
        level = float(rng.choice([0.01, 0.05, 0.2, 0.6]))
        candidates[drafter] = Candidate(
            reach=rng.uniform(0.3, 1.0, deepest).cumprod().tolist(),
            widths=rng.choice([1.0, 2.0, 6.0], deepest).tolist(),
            seconds=(float(rng.choice([0.0, 0.1])) + level * np.arange(1, deepest + 1)).tolist(),
        )
    host = 0.0, float(rng.choice([0.0, 0.02]))
    costs = Costs(curve.seconds(np.arange(1000)).tolist(), host, float(rng.choice([0.0, 0.01])))
    at_hand = AtHand(
        batch, int(rng.choice([0, 30])), reach.sum(0).tolist(), sorted(reach.ravel().tolist(), reverse=True), 0.01
    )
    return at_hand, candidates, costs


def rate(at_hand: AtHand, asked: list[tuple[Candidate, int]], costs: Costs, sizes: list[int] | None = None) -> float:
    """Tokens a second with some drafters asked for some levels, in that order; the best number of nodes at hand."""
    batch, others = at_hand.batch, at_hand.num_prompt_tokens
    best = 0.0
    for kept in range(len(at_hand.values) + 1) if sizes is None else sizes:
        tokens, width, seconds = batch + others + sum(at_hand.values[:kept]), batch + others + kept, at_hand.draft_s
        covered = [*at_hand.covered, *[0.0] * 64]
        for index, (candidate, depth) in enumerate(asked):
            for level in range(depth):
                added = (batch - covered[level]) * candidate.reach[level]
                tokens, covered[level] = tokens + added, covered[level] + added
            width += batch * sum(candidate.widths[:depth])
            seconds += candidate.seconds[depth - 1] + costs.merging * (index > 0 or len(at_hand.values) > 0)
        seconds += costs.passes[round(width)] + costs.host[1] * tokens
        best = max(best, tokens / seconds)
    return best


def test_one_drafter_is_asked_as_deep_as_it_pays() -> None:
    """Against all depths and all numbers of nodes at hand."""
    shares = []
    for seed in range(200):
        at_hand, candidates, costs = random_case(seed, 1)
        now, sizes = stop(at_hand, costs), range(len(at_hand.values) + 1)
        assert now.rate == pytest.approx(rate(at_hand, [], costs))
        by_depth = [rate(at_hand, [(candidates[0], d + 1)], costs) for d in range(len(candidates[0].reach))]
        plan = best_depth(now, at_hand, candidates[0], costs)
        asked = [(candidates[0], plan.size)]
        assert any(plan.rate == pytest.approx(rate(at_hand, asked, costs, [size])) for size in sizes)
        shares.append(plan.rate / max(by_depth))
    assert max(shares) == pytest.approx(1.0)
    assert min(shares) > 0.94, "depth and number are chosen by turns"
    assert sum(shares) / len(shares) > 0.999


def with_answer(at_hand: AtHand, candidate: Candidate, depth: int, costs: Costs) -> AtHand:
    """What is at hand when a drafter's tree turns out as expected."""
    batch = at_hand.batch
    covered = [*at_hand.covered, *[0.0] * (depth - len(at_hand.covered))]
    values = list(at_hand.values)
    for d in range(depth):
        added = (batch - covered[d]) * candidate.reach[d]
        covered[d] += added
        num = int(batch * candidate.widths[d])
        values += [added / num] * num
    merging = costs.merging * (len(at_hand.values) > 0)
    return at_hand._replace(
        covered=covered, values=sorted(values, reverse=True),
        draft_s=at_hand.draft_s + candidate.seconds[depth - 1] + merging,
    )  # fmt: skip


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
            plans = {i: best_depth(stop(now, costs), now, candidate, costs) for i, candidate in left.items()}
            best = max(left, key=lambda i: plans[i].rate)
            if plans[best].rate <= stop(now, costs).rate:
                break
            now = with_answer(now, left.pop(best), plans[best].size, costs)
        assert stop(now, costs).rate >= 0.98 * max(nobody, *one), "nodes of fractional widths are rounded"
        shares.append(stop(now, costs).rate / max(nobody, *one, *two))
    assert min(shares) >= 0.92, "the first one's depth is not chosen for the second one"
    assert sum(shares) / len(shares) >= 0.99


def test_a_long_sure_lookup_makes_a_model_superfluous() -> None:
    """Arctic's rule: who is expected to be accepted as far need not be asked."""
    costs = Costs(CostCurve((1, 64), (1.0, 1.1)).seconds(np.arange(65)).tolist())
    model = Candidate([0.8**d for d in range(1, 5)], [1.0] * 4, [0.1 * d for d in range(1, 5)])

    def is_asked(values: list[float]) -> bool:
        at_hand = AtHand(1, covered=values, values=values)
        now = stop(at_hand, costs)
        return best_depth(now, at_hand, model, costs).rate > now.rate

    assert not is_asked([0.95] * 8)
    assert is_asked([0.3**d for d in range(1, 9)])
    nothing = AtHand(1)
    assert best_depth(stop(nothing, costs), nothing, model, costs).size == 4


FLAT, STEEP = ((1, 64), (1.0, 1.0)), ((1, 64), (1.0, 64.0))
WIDE = TreeRow([5, 1, 2, 3, 4, 6], [-1, 0, 0, 1, 3, 2])
VALUES = [0.9, 0.05, 0.7, 0.4, 0.03]


def costs_of(curve: tuple) -> Costs:
    return Costs(CostCurve(*curve).seconds(np.arange(65)).tolist())


def scored(rows: list[TreeRow], values: list[list[float]]) -> TokenTree:
    """Trees whose scores are logarithms of probabilities."""
    tree = TokenTree.from_rows(rows)
    padded = torch.zeros(tree.tokens.shape)
    for row, each in enumerate(values):
        padded[row, 1 : len(each) + 1] = torch.tensor(each).log()
    return replace(tree, scores=padded)


def selected(tree: TokenTree, curve: tuple, **keys: Any) -> Selection:
    return select_nodes(read_rows(tree, None), costs_of(curve), **{"max_nodes": 64, **keys})


@pytest.mark.parametrize(("curve", "count"), [(FLAT, 5), (STEEP, 0)])
def test_nodes_are_selected_where_width_is_free_and_not_where_each_costs_a_pass(curve: tuple, count: int) -> None:
    assert sum(selected(scored([WIDE], [VALUES]), curve).kept[0]) == count


@pytest.mark.parametrize("slope", [0.05, 0.2, 0.5, 0.8])
def test_the_selected_nodes_are_the_best_of_all_trees(slope: float) -> None:
    """Against a search through every subtree of two sequences."""
    curve = (1, 64), (1.0, 1.0 + 63 * slope)
    rows, values = [WIDE, TreeRow([7, 8, 9], [-1, 0, 0])], [[0.9, 0.5, 0.7, 0.4, 0.3], [0.6, 0.2]]
    selection = selected(scored(rows, values), curve)

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
    found = [{0, *np.flatnonzero(selection.kept[row]).tolist()} for row in (0, 1)]
    assert rate_of(found) == pytest.approx(best)


def test_probes_and_drawn_nodes_are_never_cut() -> None:
    tree = scored([WIDE], [[1e-9] * 5])
    probes = replace(tree, source=torch.tensor([[0, 0, 0, 0, PROBE, 0]]))
    assert np.flatnonzero(selected(probes, STEEP).kept[0]).tolist() == [1, 3, 4], "with its path"
    drawn = [[False, True, True, False, False, False]]
    assert np.flatnonzero(selected(tree, STEEP, drawn=drawn).kept[0]).tolist() == [1, 2]
    assert sum(selected(tree, FLAT, max_nodes=3).kept[0]) == 2


def test_beside_prompts_a_node_must_bring_more_than_a_prompt_token() -> None:
    tree, curve = scored([WIDE], [VALUES]), ((1, 16, 64), (1.0, 1.0, 2.5))
    assert sum(selected(tree, curve).kept[0]) == 5
    assert sum(selected(tree, curve, num_prompt_tokens=40).kept[0]) == 1, "only the node that is as good as certain"


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
        tree = replace(tree, parents=parents, host_facts=None)
    kept = selected(tree, ((1, 64), (1.0, 1.0 + 63 * slope))).kept
    made = kept_tree(read_rows(tree, None), kept, tree.tokens.device, has_sources=has_source)
    expected = prune(tree, torch.tensor(kept)).narrowed()
    for name in ("tokens", "parents", "depths", "num_nodes", "scores", "source"):
        ours, theirs = getattr(made, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        assert ours is None or (torch.allclose(ours, theirs) and ours.dtype == theirs.dtype), name
    assert made.host_facts is not None
    assert made.host_facts.nodes is not None
    assert made.host_facts.nodes.tolist() == torch.stack([made.tokens, made.parents, made.depths]).tolist()
    assert (made.max_depth, made.host_facts._replace(nodes=None)) == (expected.max_depth, expected.host_facts)


@st.composite
def batches(draw: st.DrawFn, *, size: int = 2) -> TokenTree:
    """Trees over few tokens, with scores, some nodes probes, perhaps with repeated siblings."""
    rows = []
    for row in range(size):
        tokens, parents = [50 + row], [-1]
        for _ in range(draw(st.integers(0, 7))):
            parents.append(draw(st.integers(0, len(tokens) - 1)))
            tokens.append(draw(st.integers(0, 2)))
        rows.append(TreeRow(tokens, parents))
    tree = TokenTree.from_rows(rows)
    values = draw(st.lists(st.integers(-9, 0), min_size=tree.tokens.numel(), max_size=tree.tokens.numel()))
    is_node = tree.parents >= 0
    scores = torch.tensor(values, dtype=torch.float32).reshape(tree.tokens.shape) * is_node
    is_probe = (scores == -9) & is_node
    return replace(tree, scores=scores, source=torch.where(is_probe, PROBE, 0), host_facts=None)


def united(trees: list[TokenTree], drafters: list[int], max_nodes: int) -> HostMerge:
    """The union on the host; scores are logarithms of values."""
    union = HostMerge(trees[0].tokens[:, 0].tolist(), max_nodes)
    for tree, drafter in zip(trees, drafters, strict=True):
        union.unite(read_rows(tree, None), drafter)
    return union


def same(found: list[HostRow], expected: TokenTree) -> None:
    """Checks that two trees are the same."""
    for row, other, count in zip(found, read_rows(expected, None), expected.num_nodes.tolist(), strict=True):
        for name in ("tokens", "parents", "depths", "sources"):
            assert getattr(row, name) == getattr(other, name)[:count], name
        assert row.values == pytest.approx(other.values[:count])


@given(
    trees=st.lists(batches(), min_size=1, max_size=3), max_nodes=st.integers(8, 20), places=st.permutations([0, 2, 5])
)
def test_the_union_is_that_of_tensors(trees: list[TokenTree], max_nodes: int, places: list[int]) -> None:
    """Of chosen nodes, whatever is repeated, meant as a probe, or cut off."""
    drafters = places[: len(trees)]
    expected = merge_trees(trees, max_nodes=max_nodes, drafters=drafters)
    same(united(trees, drafters, max_nodes).rows, expected)


@pytest.mark.parametrize("max_nodes", [4, 5, 6, 64])
def test_chains_hang_where_tensors_have_them(max_nodes: int) -> None:
    tree = TokenTree.from_rows([TreeRow([5, 1, 2, 3], [-1, 0, 0, 1]), TreeRow([9, 4, 6, 7], [-1, 0, 1, 0])])
    tree = replace(tree, scores=-tree.depths.float())
    chains = [
        Continuation(0, 3, 2, [6, 7], [-3.0, -4.0], 1),
        Continuation(1, 2, 2, [8], [-3.0], 1),
        Continuation(0, 2, 1, [6], [-2.0], 1),
    ]
    union = united([tree], [1], max_nodes)
    for chain in chains:
        union.extend(chain)
    same(union.rows, with_continuations(merge_trees([tree], drafters=[1]), chains, max_nodes=max_nodes))


def test_what_was_cut_off_is_left_out() -> None:
    """Nodes without a parent are none, and nothing joins them."""
    tree = TokenTree.from_rows([TreeRow([5, 1, 2], [-1, 0, 1])])
    cut = replace(tree, parents=torch.tensor([[-1, 0, -1]]), scores=torch.zeros(1, 3), host_facts=None)
    whole = replace(tree, scores=-tree.depths.float())
    (found,) = united([cut, whole], [0, 1], 64).rows
    assert (found.tokens, found.parents, found.sources) == ([5, 1, 2], [-1, 0, 1], [3, 3, 2])
