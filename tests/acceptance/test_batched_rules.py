"""A batch gives every sequence what it would get alone, whatever pads it and whoever sits beside it."""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_trees import Batch, batches, chains, trees
from torch import Tensor

from foretoken.acceptance.rules import Acceptance, KeyedDecisions, accept_coupled, accept_greedy
from foretoken.acceptance.sampled_rules import (
    accept_block,
    accept_lenient,
    accept_sequential,
    accept_traversal,
    accept_typical,
)
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.sampling.noise import KeyedNoise

BatchRule = Callable[[Batch, KeyedDecisions], Acceptance]

TREE_RULES: dict[str, BatchRule] = {
    "greedy": lambda b, _: accept_greedy(b.tree, lambda nodes: b.at(b.log_probs)(nodes).argmax(1)),
    "coupled": lambda b, d: accept_coupled(b.tree, b.at(b.log_probs), d),
    "sequential": lambda b, d: accept_sequential(b.tree, b.at(b.log_probs), d),
    "traversal": lambda b, d: accept_traversal(b.tree, b.at(b.log_probs), d),
    "typical": lambda b, d: accept_typical(b.tree, b.at(b.log_probs), d, epsilon=0.09, delta=0.3),
    "typical, argmax": lambda b, d: accept_typical(
        b.tree, b.at(b.log_probs), d, epsilon=0.09, delta=0.3, is_end_drawn=False
    ),
}
CHAIN_RULES: dict[str, BatchRule] = {
    "block": lambda b, d: accept_block(b.tree, b.at(b.log_probs), d),
    "lenient": lambda b, d: accept_lenient(b.tree, b.at(b.log_probs), b.at(b.unwarped), b.greedy, d, lenience=0.7),
    **TREE_RULES,
}

quick = settings(max_examples=12)


class RecordedDecisions(KeyedDecisions):
    """Notes which numbers are asked for."""

    asked: ClassVar[list[tuple[str, int]]] = []

    def target_token(self, log_probs: Tensor, depth: int) -> Tensor:
        self.asked.append(("target", depth))
        return KeyedDecisions.target_token(self, log_probs, depth)

    def accept(self, target_prob: Tensor, draft_prob: Tensor, lane: int) -> Tensor:
        self.asked.append(("accept", lane))
        return KeyedDecisions.accept(self, target_prob, draft_prob, lane)

    def token(self, probs: Tensor, lane: int) -> Tensor:
        self.asked.append(("token", lane))
        return KeyedDecisions.token(self, probs, lane)


def run(rule: BatchRule, batch: Batch) -> Acceptance:
    """What a rule does; no number may be used twice."""
    RecordedDecisions.asked.clear()
    result = rule(batch, RecordedDecisions(KeyedNoise(batch.seeds), batch.root_positions))
    assert len(set(RecordedDecisions.asked)) == len(RecordedDecisions.asked)
    return result


def assert_row_is(result: Acceptance, row: int, alone: Acceptance) -> None:
    depth = alone.path.shape[1]
    assert result.path[row, :depth].tolist() == alone.path[0].tolist()
    assert (result.path[row, depth:] == -1).all()
    assert result.num_accepted[row] == alone.num_accepted[0]
    assert result.next_token[row] == alone.next_token[0]
    # Sums over other shapes may round differently: float64 to 1e-9, which no wrong row would meet.
    torch.testing.assert_close(
        result.lossy_tv[row : row + 1].double(), alone.lossy_tv.double(), rtol=0, atol=1e-9, equal_nan=True
    )


def assert_path_descends(batch: Batch, result: Acceptance) -> None:
    for row in range(batch.tree.batch_size):
        nodes = [0, *(node for node in result.path[row].tolist() if node >= 0)]
        parents = batch.tree.parents[row, nodes].tolist()
        assert parents == [-1, *nodes[:-1]]
        assert len(nodes) - 1 == result.num_accepted[row]


def assert_rows_are_independent(rule: BatchRule, batch: Batch, padding: int) -> None:
    together = run(rule, batch)
    with_padding = run(rule, batch.padded(padding))
    for row in range(batch.tree.batch_size):
        alone = run(rule, batch.alone(row))
        assert_row_is(together, row, alone)
        assert_row_is(with_padding, row, alone)
    assert_path_descends(batch, together)
    backwards = torch.arange(batch.tree.batch_size).flip(0)
    reordered = Batch(
        batch.tree.select(backwards),
        batch.log_probs[backwards],
        batch.unwarped[backwards],
        batch.greedy[backwards],
        batch.seeds[backwards],
        batch.root_positions[backwards],
    )
    assert run(rule, reordered).next_token.flip(0).tolist() == together.next_token.tolist()


@pytest.mark.parametrize("name", TREE_RULES)
@quick
@given(batch=batches(), padding=st.integers(1, 30))
def test_trees(name: str, batch: Batch, padding: int) -> None:
    assert_rows_are_independent(TREE_RULES[name], batch, padding)


@pytest.mark.parametrize("name", CHAIN_RULES)
@quick
@given(batch=chains(), padding=st.integers(1, 30))
def test_chains(name: str, batch: Batch, padding: int) -> None:
    assert_rows_are_independent(CHAIN_RULES[name], batch, padding)


def without_subtree(batch: Batch, cut: int) -> tuple[Batch, Batch, list[int]]:
    """The first tree with a node cut off as the engine does it (no parent), and built anew without its subtree.

    Both one-hot; the list says which nodes of the first the nodes of the second are.
    """
    tokens, parents = batch.tree.tokens[0].tolist(), batch.tree.parents[0].tolist()
    gone = {cut}
    for node, parent in enumerate(parents):
        gone |= {node} if parent in gone else set()
    kept = [node for node in range(len(parents)) if node not in gone]
    marked = batch.tree.parents[:1].clone()
    marked[0, cut] = -1
    anew = TreeRow([tokens[n] for n in kept], [kept.index(parents[n]) if n else -1 for n in kept])
    return (
        replace(batch, tree=replace(batch.tree, parents=marked, distributions=None)),
        replace(batch, tree=TokenTree.from_rows([anew]), log_probs=batch.log_probs[:, kept]),
        kept,
    )


@pytest.mark.parametrize("name", TREE_RULES)
@quick
@given(batch=batches(max_rows=1, max_nodes=12), data=st.data())
def test_cut_nodes_are_not_there(name: str, batch: Batch, data: st.DataObject) -> None:
    """The engine takes a node out by taking its parent away; its depth, children and tokens stay behind."""
    assume(batch.tree.width > 1)
    cut_off, anew, kept = without_subtree(batch, data.draw(st.integers(1, batch.tree.width - 1)))
    result, expected = run(TREE_RULES[name], cut_off), run(TREE_RULES[name], anew)
    assert result.next_token.tolist() == expected.next_token.tolist()
    nodes = [node for node in expected.path[0].tolist() if node >= 0]
    assert [node for node in result.path[0].tolist() if node >= 0] == [kept[node] for node in nodes]


def test_random_trees_reach_every_outcome() -> None:
    """The inputs above would prove little if nothing were ever accepted: paths of 0 to 3 nodes occur."""
    results = (run(TREE_RULES["sequential"], trees([1, 7, 20, 33, 40], seed)) for seed in range(20))
    assert {0, 1, 2, 3} <= {length for result in results for length in result.num_accepted.tolist()}
