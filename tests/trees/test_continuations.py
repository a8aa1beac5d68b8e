"""Chains below leaves: where they hang, what they leave alone, and how many fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foretoken.core.token_tree import DraftDistributions, TokenTree, TreeRow
from foretoken.trees.merge import Continuation, with_continuations
from tests.tree_checks import check_tree

ROWS = [TreeRow([5, 1, 2, 3], [-1, 0, 0, 1]), TreeRow([9, 4], [-1, 0])]


def valued(rows: list[TreeRow]) -> TokenTree:
    """Trees with scores and sources."""
    tree = TokenTree.from_rows(rows)
    source = torch.where((tree.parents >= 0) | (tree.depths.cumsum(1) == 0), 2, 0)
    return replace(tree, scores=-tree.depths.float(), source=source)


def continuation(row: int, leaf: int, depth: int, *tokens: int) -> Continuation:
    scores = [-depth - 1.0 - k for k in range(len(tokens))]
    return Continuation(row, leaf, depth, tokens, scores, 1)


def test_chains_hang_below_their_leaves() -> None:
    tree = with_continuations(
        valued(ROWS), [continuation(0, 3, 2, 6, 7), continuation(1, 1, 1, 8), continuation(0, 2, 1, 6)], max_nodes=64
    )
    check_tree(replace(tree, scores=None))
    assert tree.rows() == [
        TreeRow([5, 1, 2, 3, 6, 7, 6], [-1, 0, 0, 1, 3, 4, 2]), TreeRow([9, 4, 8], [-1, 0, 1]),
    ]  # fmt: skip
    assert tree.max_depth == 4
    assert tree.source is not None
    assert tree.source.tolist() == [[2, 2, 2, 2, 1, 1, 1], [2, 2, 1, 0, 0, 0, 0]]
    assert tree.scores is not None
    assert tree.scores[0].tolist() == [0, -1, -1, -2, -3, -4, -2]


@pytest.mark.parametrize(("max_nodes", "left"), [(4, 4), (5, 5), (6, 6), (7, 7), (8, 7)])
def test_no_tree_becomes_wider_than_allowed(max_nodes: int, left: int) -> None:
    """The most valuable chain comes first, and is cut from its end."""
    tree = with_continuations(
        valued(ROWS), [continuation(0, 3, 2, 6, 7), continuation(0, 2, 1, 6)], max_nodes=max_nodes
    )
    check_tree(replace(tree, scores=None))
    assert tree.width == left
    assert tree.tokens[0].tolist() == [5, 1, 2, 3, 6, 7, 6][:left]


def test_drawn_nodes_stay_drawn_and_chains_are_chosen() -> None:
    tree = valued(ROWS)
    kinds = torch.tensor([[0, 2, 2, 1], [0, 1, 0, 0]])
    drafts = DraftDistributions(
        kinds=kinds, rows=torch.full((2, 2, 10), 0.1), row_of=torch.tensor([[-1, 0, 0, 1], [-1, 0, -1, -1]]),
        max_siblings=2,
    )  # fmt: skip
    result = with_continuations(
        replace(tree, distributions=drafts), [continuation(0, 3, 2, 6), continuation(1, 1, 1, 8)], max_nodes=64
    )
    check_tree(replace(result, scores=None))
    found = result.distributions
    assert found is not None
    assert found.kinds.tolist() == [[0, 2, 2, 1, 0], [0, 1, 0, 0, 0]]
    assert found.row_of.tolist() == [[-1, 0, 0, 1, -1], [-1, 0, -1, -1, -1]]


def test_an_empty_continuation_changes_nothing() -> None:
    tree = valued(ROWS)
    assert with_continuations(tree, [continuation(0, 3, 2)], max_nodes=64) is tree
