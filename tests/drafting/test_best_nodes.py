"""Nodes are bought by what they are likely to bring, for what they cost, over the whole batch."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from foretoken.core.records import SequenceStep, StageSeconds, StepRecord
from foretoken.core.token_tree import PROBE, DraftDistributions, DrawKind, TokenTree, TreeRow
from foretoken.drafting.best_nodes import BestNodes
from foretoken.drafting.buying import buy, earnings_by_depth
from foretoken.drafting.calibration import Calibration
from foretoken.drafting.draft_costs import FadingLine
from foretoken.drafting.host_trees import on_host
from foretoken.runner.costs import CostCurve
from foretoken.trees.merge import prune

FLAT, STEEP = ((1, 64), (1.0, 1.0)), ((1, 64), (1.0, 64.0))


def record(*texts: list[int], draft: float = 0.0) -> StepRecord:
    """An iteration that generated some tokens for each sequence."""
    steps = [
        SequenceStep(
            request_id=str(i), num_drafted=1, tree_depth=1, num_accepted=len(text) - 1, num_emitted=len(text),
            tokens=text, accepted_by={},
        )
        for i, text in enumerate(texts)
    ]  # fmt: skip
    return StepRecord(sequences=steps, num_tokens=2 * len(texts), seconds=StageSeconds(draft=draft, verify=1.0))


def controller(curve: Any, max_nodes: int = 64) -> BestNodes:
    return BestNodes(CostCurve(*curve), max_nodes=max_nodes)


def scored(rows: list[TreeRow], scores: list[list[float]]) -> TokenTree:
    """Trees whose scores are logarithms of probabilities."""
    tree = TokenTree.from_rows(rows)
    padded = torch.zeros(tree.tokens.shape)
    for row, values in enumerate(scores):
        padded[row, 1 : len(values) + 1] = torch.tensor(values).log()
    return replace(tree, scores=padded)


WIDE = TreeRow([5, 1, 2, 3, 4, 6], [-1, 0, 0, 1, 3, 2])
VALUES = [0.9, 0.05, 0.7, 0.4, 0.03]


def test_where_width_is_free_everything_is_verified() -> None:
    chosen = controller(FLAT).select({0: scored([WIDE], [VALUES])})
    assert chosen.rows() == [WIDE]


def test_where_every_token_costs_a_pass_nothing_is() -> None:
    chosen = controller(STEEP).select({0: scored([WIDE], [VALUES])})
    assert chosen.num_nodes.tolist() == [1]


@pytest.mark.parametrize("slope", [0.05, 0.2, 0.5, 0.8])
def test_the_bought_nodes_are_the_best_of_all_trees(slope: float) -> None:
    """Against a search through every subtree of two sequences, by the same estimates."""
    curve = CostCurve((1, 64), (1.0, 1.0 + 63 * slope))
    rows, values = [WIDE, TreeRow([7, 8, 9], [-1, 0, 0])], [VALUES, [0.6, 0.2]]
    made = BestNodes(curve, max_nodes=64)
    chosen = made.select({0: scored(rows, values)})
    calibration = Calibration()

    def estimate(row: TreeRow, value: list[float]) -> list[float]:
        depths = [0]
        for parent in row.parents[1:]:
            depths.append(depths[parent] + 1)
        found = calibration.probabilities(np.array(depths[1:]), np.log(np.array(value, dtype=np.float32)))
        result = [1.0]
        for node, p in enumerate(found, start=1):
            parent = row.parents[node]
            result.append(min(p, result[parent]) if parent else p)
        return result

    estimates = [estimate(row, value) for row, value in zip(rows, values, strict=True)]

    def subtrees(row: TreeRow) -> list[set[int]]:
        sets = []
        for bits in product([False, True], repeat=len(row.tokens) - 1):
            kept = {0, *(node for node, bit in enumerate(bits, start=1) if bit)}
            if all(row.parents[node] in kept for node in kept if node):
                sets.append(kept)
        return sets

    def rate(first: set[int], second: set[int]) -> float:
        tokens = 2 + sum(estimates[0][n] for n in first if n) + sum(estimates[1][n] for n in second if n)
        return tokens / curve(len(first) + len(second))

    best = max(rate(a, b) for a in subtrees(rows[0]) for b in subtrees(rows[1]))
    found = []
    for row, kept in zip(rows, chosen.rows(), strict=True):
        nodes = {0}
        for token, parent in zip(kept.tokens[1:], kept.parents[1:], strict=True):
            at = next(
                n for n in range(1, len(row.tokens))
                if row.tokens[n] == token and row.tokens[row.parents[n]] == kept.tokens[parent]
            )  # fmt: skip
            nodes.add(at)
        found.append(nodes)
    assert rate(*found) == pytest.approx(best)


def test_drawn_nodes_and_probes_are_never_cut() -> None:
    tree = scored([WIDE], [[1e-9] * 5])
    kinds = torch.tensor([[0, 2, 2, 0, 0, 0]])
    drawn = DraftDistributions(kinds=kinds, rows=torch.full((1, 1, 7), 1 / 7), row_of=kinds // 2 - 1, max_siblings=2)
    assert controller(STEEP).select({0: replace(tree, distributions=drawn)}).num_nodes.tolist() == [3]
    assert int(DrawKind.ONE_HOT) == 0
    probes = torch.tensor([[0, PROBE, 0, PROBE, 0, 0]])
    assert controller(STEEP).select({0: replace(tree, source=probes)}).tokens[0].tolist()[:3] == [5, 1, 3]
    deep = torch.tensor([[0, 0, 0, 0, PROBE, 0]])
    assert controller(STEEP).select({0: replace(tree, source=deep)}).tokens[0].tolist() == [5, 1, 3, 4], "with its path"


def test_what_was_accepted_changes_what_is_bought() -> None:
    """A lookup that is always right at depth 1 and never at 2 is soon cut to one token."""
    made = controller(((1, 64), (1.0, 1.0 + 63 * 0.3)))
    chain = TokenTree.from_rows([TreeRow([5, 1, 2, 3], [-1, 0, 1, 2])])
    for _ in range(30):
        made.allot(1)
        chosen = made.select({0: chain})
        made.learn_step(record([1, 9]))
    assert chosen.rows()[0].tokens == [5, 1]


def test_nodes_that_were_cut_are_learned_from_too() -> None:
    """What is never verified would never be found to pay."""
    made = controller(((1, 64), (1.0, 1.0 + 63 * 0.3)))
    chain = TokenTree.from_rows([TreeRow([5, 1, 2, 3], [-1, 0, 1, 2])])
    for _ in range(30):
        made.allot(1)
        made.select({0: chain})
        made.learn_step(record([1, 9]))
    for _ in range(120):
        made.allot(1)
        chosen = made.select({0: chain})
        made.learn_step(record([1, 2, 3, 4][: chosen.width + 1]))
    assert chosen.width == 4


def test_drafts_that_do_not_pay_are_given_up_and_tried_again() -> None:
    made = controller(FLAT)
    chain = TokenTree.from_rows([TreeRow([5, 1], [-1, 0])])
    asked, reasons = [], []
    for _ in range(3000):
        allotment = made.allot(1)
        asked.append(allotment.allowances[0].depth > 0)
        if asked[-1]:
            made.select({0: chain})
        else:
            reasons.append(allotment.declined)
        made.learn_step(record([9], draft=5.0 if asked[-1] else 0.0))
    assert 0 < sum(asked[50:]) * 5.0 <= 0.01 * 3000 + 5.0
    assert all(reason is not None and reason.draft_cost > 1 for reason in reasons)


def test_drafters_that_find_nothing_are_given_up_too() -> None:
    """A call that takes long and proposes roots alone costs as much as one with a draft."""
    made, asked = controller(FLAT), []
    for _ in range(3000):
        asked.append(made.allot(1).allowances[0].depth > 0)
        if asked[-1]:
            assert made.select({0: TokenTree.roots([5])}).width == 1
        made.learn_step(record([9], draft=5.0 if asked[-1] else 0.0))
    assert 0 < sum(asked[50:]) * 5.0 <= 0.01 * 3000 + 5.0


def test_drafts_come_back_when_they_pay_again() -> None:
    """What drafts were given up for is not held against them for longer than two good probes."""
    made = controller(((1, 64), (1.0, 1.0 + 63 * 0.1)))
    chain = TokenTree.from_rows([TreeRow([5, 1, 2, 3], [-1, 0, 1, 2])])

    def live(text: list[int], draft: float, iterations: int) -> list[bool]:
        asked = []
        for _ in range(iterations):
            asked.append(made.allot(1).allowances[0].depth > 0)
            width = made.select({0: chain}).width if asked[-1] else 1
            made.learn_step(record(text[:width], draft=draft if asked[-1] else 0.0))
        return asked

    assert sum(live([9], 0.3, 5000)) < 200
    assert all(live([1, 2, 3, 4], 0.3, 2000)[-500:])


@pytest.mark.parametrize("slope", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("draft_s", [0.0, 0.1, 0.4])
def test_what_smaller_depths_would_have_earned_is_what_is_bought_of_such_drafts(slope: float, draft_s: float) -> None:
    """Of every depth: the earnings that a draft of all depths tells against the purchase from a draft cut there."""
    curve, host = CostCurve((1, 64), (1.0, 1.0 + 63 * slope)), FadingLine()
    host.add(2.0, 0.1)
    rows, values = [WIDE, TreeRow([7, 8, 9], [-1, 0, 0])], [VALUES, [0.6, 0.2]]
    tree = scored(rows, values)
    drafts = draft_s * np.arange(1, 4)
    whole = buy(on_host(tree), curve, host, draft_s=float(drafts[-1]))
    earned = earnings_by_depth(whole.ranked, curve, host, drafts)
    for depth in (1, 2, 3):
        cut = prune(tree, tree.depths <= depth)
        bought = buy(on_host(cut), curve, host, draft_s=float(drafts[depth - 1]))
        seconds = earned.seconds[depth - 1] + drafts[depth - 1]
        assert earned.tokens[depth - 1] / seconds == pytest.approx(bought.rate)


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
        tree = replace(
            tree, parents=tree.parents.clone().index_put((torch.tensor(0), torch.tensor(5)), torch.tensor(-1))
        )
    bought = buy(on_host(tree), CostCurve((1, 64), (1.0, 1.0 + 63 * slope)), FadingLine(), draft_s=0.0)
    made, expected = bought.taken_from(tree), prune(tree, torch.from_numpy(bought.kept)).narrowed()
    for name in ("tokens", "parents", "depths", "num_nodes", "scores", "source"):
        ours, theirs = getattr(made, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        assert ours is None or (torch.equal(ours, theirs) and ours.dtype == theirs.dtype), name
    assert (made.max_depth, made.host_facts) == (expected.max_depth, expected.host_facts)


def test_dynamic_trees_are_drafted_as_deep_as_pays() -> None:
    """Two levels are always right, a third one never is."""
    made = BestNodes(CostCurve((1, 64), (1.0, 1.0 + 63 * 0.05)), max_nodes=64, deepest=3)
    chain, asked = TreeRow([5, 1, 2, 3], [-1, 0, 1, 2]), []
    for _ in range(60):
        asked.append(made.allot(1).allowances[0].depth)
        cut = TreeRow(chain.tokens[: asked[-1] + 1], chain.parents[: asked[-1] + 1])
        width = made.select({0: scored([cut], [[0.9] * asked[-1]])}).width
        made.learn_step(record([1, 2, 9][:width], draft=0.1 * asked[-1]))
    assert asked[0] == 3
    assert set(asked[-20:]) == {2, 3}
    assert asked[-20:].count(2) >= 16


def test_a_record_of_another_batch_is_left_out() -> None:
    """As after a batch that failed and was decoded again one by one."""
    made = controller(FLAT)
    made.allot(2)
    made.select({0: TokenTree.from_rows([TreeRow([5, 1], [-1, 0])] * 2)})
    made.learn_step(record([1, 9]))
    assert not made._calibration._seen.any()


def test_scores_that_are_no_numbers() -> None:
    tree = replace(TokenTree.from_rows([WIDE]), scores=torch.tensor([[0.0, float("nan"), float("inf"), -1e30, 0.1, 7]]))
    made = controller(FLAT)
    for _ in range(3):
        made.allot(1)
        assert made.select({0: tree}).num_nodes.tolist() == [6]
        made.learn_step(record([1, 3, 9]))


def test_calibration_starts_from_the_drafters_own_word() -> None:
    calibration = Calibration()
    depths, scores = np.array([1, 1, 2]), np.log(np.array([0.99, 0.3, 0.001], dtype=np.float32))
    first = calibration.probabilities(depths, scores)
    assert first[0] > 0.9
    assert 0.2 < first[1] < 0.4
    assert first[2] < 0.02
    assert calibration.probabilities(depths, None).tolist() == [0.5, 0.5, 0.25]
    for _ in range(100):
        calibration.learn_nodes([1], [float(scores[0])], [False])
    assert calibration.probabilities(depths, scores)[0] < 0.1


def test_a_better_score_never_counts_less_before_anything_is_learned() -> None:
    """Also within a bin: which of two nodes is bought first is for their scores to say."""
    scores = np.log(np.linspace(0.001, 1.0, 200, dtype=np.float32))
    estimates = Calibration().probabilities(np.ones(200, dtype=np.int64), scores)
    assert (np.diff(estimates) >= 0).all()
    assert len(np.unique(estimates)) > 150


def test_what_is_known_of_a_score_holds_at_depths_that_were_not_seen() -> None:
    """Before they have evidence of their own, which then outweighs it."""
    calibration, scores = Calibration(), np.log(np.array([0.15], dtype=np.float32))
    assert calibration.probabilities(np.array([3]), scores)[0] == pytest.approx(0.15)
    for _ in range(60):
        calibration.learn_nodes([1], [float(scores[0])], [True])
    assert calibration.probabilities(np.array([3]), scores)[0] > 0.8
    for _ in range(60):
        calibration.learn_nodes([3], [float(scores[0])], [False])
    assert calibration.probabilities(np.array([3]), scores)[0] < 0.1
    assert calibration.probabilities(np.array([1]), scores)[0] > 0.8
