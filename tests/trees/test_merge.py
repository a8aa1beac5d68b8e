"""Merging trees: the union of their paths, who proposed what, and what a node budget leaves."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.core.errors import TreeError
from foretoken.core.token_tree import DraftDistributions, TokenTree, TreeRow
from foretoken.trees.merge import Trie, merge_trees


@st.composite
def rows(draw: st.DrawFn) -> TreeRow:
    """Trees over few tokens, duplicates among siblings included."""
    count = draw(st.integers(0, 7))
    parents = [draw(st.integers(0, node)) for node in range(count)]
    return TreeRow([50, *(draw(st.integers(0, 2)) for _ in range(count))], [-1, *parents])


def paths(row: TreeRow) -> list[tuple[int, ...]]:
    """Every node's tokens from below the root."""
    found: list[tuple[int, ...]] = [()]
    for node in range(1, len(row.tokens)):
        found.append((*found[row.parents[node]], row.tokens[node]))
    return found


@given(batch=st.lists(st.lists(rows(), min_size=2, max_size=3), min_size=1, max_size=3))
def test_union_and_provenance(batch: list[list[TreeRow]]) -> None:
    count = min(len(drafts) for drafts in batch)
    trees = [TokenTree.from_rows([drafts[i] for drafts in batch]) for i in range(count)]
    merged = merge_trees(trees)
    merged.validate()
    assert merged.distributions is None
    assert merged.source is not None
    for index, row in enumerate(merged.rows()):
        found = paths(row)
        assert len(set(found)) == len(found), "a path stands twice"
        proposed = [set(paths(drafts)) for drafts in batch[index][:count]]
        assert set(found) == set().union(*proposed)
        for node, path in enumerate(found):
            bits = sum(1 << i for i, mine in enumerate(proposed) if path in mine)
            assert merged.source[index, node] == bits
        assert (merged.source[index, len(found) :] == 0).all()


@given(drafts=st.lists(rows(), min_size=1, max_size=3), max_nodes=st.integers(1, 12))
def test_a_budget_keeps_earlier_trees_whole(drafts: list[TreeRow], max_nodes: int) -> None:
    merged = merge_trees([TokenTree.from_rows([row]) for row in drafts], max_nodes=max_nodes)
    found = paths(merged.rows()[0])
    assert len(found) <= max_nodes
    kept: list[tuple[int, ...]] = [()]
    for row in drafts:
        for path in paths(row):
            if path not in kept and path[:-1] in kept and len(kept) < max_nodes:
                kept.append(path)
    assert found == kept


def test_a_full_tree_still_learns_who_else_proposed_a_node() -> None:
    first, second = TreeRow([5, 1, 2], [-1, 0, 1]), TreeRow([5, 3, 1, 2], [-1, 0, 0, 2])
    merged = merge_trees([TokenTree.from_rows([row]) for row in (first, second)], max_nodes=3)
    assert merged.tokens.tolist() == [[5, 1, 2]]
    assert merged.source is not None
    assert merged.source.tolist() == [[0b11, 0b11, 0b11]]


def test_nodes_below_a_cut_node_are_not_attached_elsewhere() -> None:
    """Token 1 below the cut 9 is not the child 1 of the root."""
    first, second = TreeRow([5, 1], [-1, 0]), TreeRow([5, 9, 1, 4], [-1, 0, 1, 2])
    merged = merge_trees([TokenTree.from_rows([row]) for row in (first, second)], max_nodes=2)
    assert merged.source is not None
    assert merged.source.tolist() == [[0b11, 0b01]]


def test_one_tree_is_only_deduplicated() -> None:
    merged = merge_trees([TokenTree.from_rows([TreeRow([5, 1, 1, 2], [-1, 0, 0, 2])])])
    assert merged.rows() == [TreeRow([5, 1, 2], [-1, 0, 1])]


def test_roots_must_agree() -> None:
    trees = [TokenTree.roots([4, 5]), TokenTree.roots([4, 6])]
    with pytest.raises(TreeError, match=r"trees to merge have different roots: \[5, 6\]\."):
        merge_trees(trees)


def test_sampled_trees_cannot_be_merged() -> None:
    tree = TokenTree.roots([4])
    distribution = DraftDistributions(
        kinds=torch.zeros(1, 1), rows=torch.ones(1, 1, 1), row_of=torch.zeros(1, 1), max_siblings=1
    )
    with pytest.raises(TreeError, match=r"cannot be merged without bias\. Mark its nodes one-hot first"):
        merge_trees([tree, replace(tree, distributions=distribution)])


def test_trie() -> None:
    trie = Trie(7)
    trie.add_path([1, 2])
    trie.add_path([1, 3])
    assert trie.row() == TreeRow([7, 1, 2, 3], [-1, 0, 1, 1])
    assert trie.child(1, 3) == 3
    assert trie.child(0, 3) is None
    assert trie.add(1, 3) == 3
    assert trie.add(3, 1) == 4


def test_trie_stops_at_its_budget_but_follows_what_exists() -> None:
    trie = Trie(7)
    trie.add_path([1, 2, 3], max_nodes=3)
    assert trie.row() == TreeRow([7, 1, 2], [-1, 0, 1])
    trie.add_path([1, 2, 9], max_nodes=4)
    assert trie.row().tokens == [7, 1, 2, 9]
    trie.add_path([8], max_nodes=4)
    assert len(trie.row().tokens) == 4
