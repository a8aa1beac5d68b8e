"""Merged trees and chains below leaves: the union of paths, who proposed what, what a bound leaves, what was drawn."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.core.errors import TreeError
from foretoken.core.token_tree import PROBE, DraftDistributions, DrawKind, TokenTree, TreeRow
from foretoken.trees.merge import Continuation, Trie, merge_trees, prune, with_continuations
from tests.tree_checks import check_tree


@st.composite
def rows(draw: st.DrawFn) -> TreeRow:
    """Trees over few tokens in which siblings differ."""
    tokens, parents = [50], [-1]
    for _ in range(draw(st.integers(0, 7))):
        parent, token = draw(st.integers(0, len(tokens) - 1)), draw(st.integers(0, 2))
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
    return TreeRow(tokens, parents)


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
    assert merged.distributions is None
    assert merged.source is not None
    for index, row in enumerate(merged.rows()):
        found = paths(row)
        assert len(set(found)) == len(found), "a path stands twice"
        assert merged.depths[index, : len(found)].tolist() == list(map(len, found))
        proposed = [set(paths(drafts)) for drafts in batch[index][:count]]
        assert set(found) == set().union(*proposed)
        for node, path in enumerate(found):
            bits = sum(1 << i for i, mine in enumerate(proposed) if path in mine)
            assert merged.source[index, node] == bits
        assert (merged.source[index, len(found) :] == 0).all()
        assert (merged.parents[index, len(found) :] == -1).all()
        assert (merged.tokens[index, len(found) :] == 0).all()


@given(drafts=st.lists(rows(), min_size=1, max_size=3), more=st.integers(0, 6))
def test_a_bound_keeps_earlier_trees_whole(drafts: list[TreeRow], more: int) -> None:
    max_nodes = max(len(row.tokens) for row in drafts) + more
    merged = merge_trees([TokenTree.from_rows([row]) for row in drafts], max_nodes=max_nodes)
    found = paths(merged.rows()[0])
    assert len(found) <= max_nodes
    assert merged.width <= max_nodes
    kept: list[tuple[int, ...]] = [()]
    for row in drafts:
        for path in paths(row):
            if path not in kept and path[:-1] in kept and len(kept) < max_nodes:
                kept.append(path)
    assert found == kept


def test_a_full_tree_still_learns_who_else_proposed_a_node() -> None:
    first, second = TreeRow([5, 1, 2], [-1, 0, 1]), TreeRow([5, 1, 2], [-1, 0, 1])
    merged = merge_trees([TokenTree.from_rows([row]) for row in (first, second)], max_nodes=3)
    assert merged.tokens.tolist() == [[5, 1, 2]]
    assert merged.source is not None
    assert merged.source.tolist() == [[0b11, 0b11, 0b11]]


def test_trees_that_cannot_be_merged() -> None:
    wide, two = TokenTree.from_rows([TreeRow([5, 1, 2], [-1, 0, 1])]), TokenTree.roots([4, 5])
    with pytest.raises(TreeError, match=r"a tree of 1 sequences and 3 nodes cannot be merged\. Expected .* at most 2"):
        merge_trees([wide], max_nodes=2)
    with pytest.raises(TreeError, match=r"a tree of 2 sequences .* Expected 1 sequences"):
        merge_trees([wide, two])


def scored(tree: TokenTree, *scores: float) -> TokenTree:
    """A tree of one sequence with scores."""
    return replace(tree, scores=torch.tensor([scores]))


def test_a_node_of_several_drafters_has_the_best_of_their_scores() -> None:
    first = scored(TokenTree.from_rows([TreeRow([5, 1, 2], [-1, 0, 0])]), 0.0, -1.0, -2.0)
    second = scored(TokenTree.from_rows([TreeRow([5, 2, 1, 7], [-1, 0, 0, 1])]), 0.0, -0.5, -3.0, -0.7)
    merged = merge_trees([first, second])
    assert merged.tokens.tolist()[0][:4] == [5, 1, 2, 7]
    assert merged.scores is not None
    torch.testing.assert_close(merged.scores[0, :4], torch.tensor([0.0, -1.0, -0.5, -0.7]))


def test_a_probe_that_another_drafter_means_is_none() -> None:
    row = TreeRow([5, 1, 2], [-1, 0, 1])
    probes = replace(TokenTree.from_rows([row]), source=torch.tensor([[0, PROBE, PROBE]]))
    plain = TokenTree.from_rows([TreeRow([5, 1], [-1, 0])])
    for place, trees in enumerate(((probes, plain), (plain, probes))):
        merged = merge_trees(trees)
        assert merged.source is not None
        assert merged.source[0, :3].tolist() == [0b11, 0b11, PROBE | 1 << place]
        assert merged.without_probes().parents[0, :3].tolist() == [-1, 0, -1]


def drawn(tokens: list[int], parents: list[int], seed: int = 0) -> TokenTree:
    """A tree whose nodes were all drawn, siblings without replacement, from one distribution a parent."""
    tree = TokenTree.from_rows([TreeRow(tokens, parents)])
    rows = torch.rand(1, max(parents) + 1, 60, generator=torch.Generator().manual_seed(seed))
    kinds = torch.full_like(tree.tokens, DrawKind.WITHOUT_REPLACEMENT.value)
    row_of = tree.parents.clone()
    return replace(
        tree,
        distributions=DraftDistributions(kinds=kinds, rows=rows / rows.sum(2, True), row_of=row_of, max_siblings=3),
    )


def test_draws_stay_trials_of_their_own() -> None:
    """Drawn nodes come first, keep what they were drawn from, and are joined by chosen nodes but not by each other."""
    chosen = TokenTree.from_rows([TreeRow([5, 3, 1, 9], [-1, 0, 0, 2])])
    first, second = drawn([5, 1, 2], [-1, 0, 0]), drawn([5, 1, 4], [-1, 0, 1], seed=1)
    merged = merge_trees([chosen, first, second])
    count = int(merged.num_nodes)
    assert merged.tokens[0, :count].tolist() == [5, 1, 2, 1, 4, 3, 9]
    assert merged.parents[0, :count].tolist() == [-1, 0, 0, 0, 3, 0, 1]
    assert merged.source is not None
    assert merged.source[0, :count].tolist() == [0b111, 0b011, 0b010, 0b100, 0b100, 0b001, 0b001]
    drafts = merged.distributions
    assert drafts is not None
    is_drawn = [True, True, True, True, True, False, False]
    assert (drafts.kinds[0, :count] != DrawKind.ONE_HOT).tolist() == is_drawn
    for node, (tree, own) in {1: (first, 1), 2: (first, 2), 3: (second, 1), 4: (second, 2)}.items():
        theirs = tree.distributions
        assert theirs is not None
        assert torch.equal(drafts.rows[0, drafts.row_of[0, node]], theirs.rows[0, theirs.row_of[0, own]])
    assert drafts.max_siblings == 6


def test_a_drawn_tree_is_never_cut() -> None:
    """A cut that depends on how many nodes join depends on what was drawn."""
    first, second = drawn([5, 1, 2], [-1, 0, 0]), drawn([5, 1, 4], [-1, 0, 1], seed=1)
    for max_nodes, count in ((4, 3), (5, 5)):
        assert int(merge_trees([first, second], max_nodes=max_nodes).num_nodes) == count


def test_what_pruned_trees_could_have_had_tells_whether_they_fit() -> None:
    """How much pruning left of a tree depends on what was drawn."""
    first, second, third = (drawn([5, 1, 2], [-1, 0, 0], seed=seed) for seed in (0, 1, 2))
    merged = merge_trees([first, second, third], max_nodes=8, most_nodes=[3, 7, 3])
    assert merged.source is not None
    assert merged.source[0, : int(merged.num_nodes)].tolist() == [0b111, 0b001, 0b001, 0b100, 0b100]


@given(row=rows(), seed=st.integers(0, 9))
def test_pruned_trees_are_what_is_kept_of_them(row: TreeRow, seed: int) -> None:
    tree = TokenTree.from_rows([row, TreeRow([50, 1], [-1, 0])])
    kept = torch.rand(tree.tokens.shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    pruned = prune(tree, kept)
    for index, (before, after) in enumerate(zip(tree.rows(), pruned.rows(), strict=True)):
        stays = [True]
        for node in range(1, len(before.tokens)):
            stays.append(stays[before.parents[node]] and bool(kept[index, node]))
        assert paths(after) == [path for path, does in zip(paths(before), stays, strict=True) if does]
        assert pruned.depths[index, : len(after.tokens)].tolist() == list(map(len, paths(after)))


def test_what_was_drawn_is_not_pruned() -> None:
    tree = drawn([5, 1, 2], [-1, 0, 0])
    assert int(prune(tree, torch.zeros(1, 3, dtype=torch.bool)).num_nodes) == 3


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
