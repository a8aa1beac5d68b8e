"""Merging and continuing on the host against tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.core.token_tree import PROBE, TokenTree, TreeRow
from foretoken.drafting.host_trees import HostMerge, HostRow, read_rows
from foretoken.trees.merge import Continuation, merge_trees, with_continuations


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
