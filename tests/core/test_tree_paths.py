"""Ancestor masks, ancestor bit sets and paths against walking up parent by parent, up to 512 nodes and 511 deep."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.core.token_tree import TokenTree, TreeRow, ancestor_mask, ancestor_words


def ancestors(row: TreeRow, node: int) -> list[int]:
    """From the node up to the root."""
    chain = [node]
    while row.parents[chain[-1]] >= 0:
        chain.append(row.parents[chain[-1]])
    return chain


def random_row(count: int, seed: int, window: int) -> TreeRow:
    """`window` 1 makes a chain, larger ones bushier trees."""
    source = random.Random(seed)
    parents = [-1, *(source.randrange(max(0, node - window), node) for node in range(1, count))]
    return TreeRow([source.randrange(1000) for _ in range(count)], parents)


def assert_masks_and_paths(rows: list[TreeRow], *, slack: int = 0) -> None:
    tree = TokenTree.from_rows(rows)
    if slack:
        tree = TokenTree(
            tokens=tree.tokens,
            parents=tree.parents,
            depths=tree.depths,
            num_nodes=tree.num_nodes,
            max_depth=tree.max_depth + slack,
        )
    mask, words = ancestor_mask(tree.parents), ancestor_words(tree.parents).tolist()
    assert len(words[0][0]) == -(-tree.width // 64)
    for index, row in enumerate(rows):
        for node in range(tree.width):
            expected = set(ancestors(row, node)) if node < len(row.tokens) else {node}
            assert set(mask[index, node].nonzero()[:, 0].tolist()) == expected
            bits = {64 * w + b for w, word in enumerate(words[index][node]) for b in range(64) if word >> b & 1}
            assert bits == expected
    for node in range(tree.width):
        nodes = torch.tensor([min(node, len(row.tokens) - 1) for row in rows])
        paths, path_tokens = tree.path_nodes(nodes).tolist(), tree.path_tokens(nodes).tolist()
        for index, row in enumerate(rows):
            path = ancestors(row, int(nodes[index]))[-2::-1]
            end = [-1] * (tree.max_depth - len(path))
            assert paths[index] == path + end
            assert path_tokens[index] == [row.tokens[node] for node in path] + end


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 24), min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
    window=st.integers(1, 24),
    slack=st.integers(0, 2),
)
def test_small_batches(sizes: list[int], seed: int, window: int, slack: int) -> None:
    assert_masks_and_paths([random_row(n, seed + i, window) for i, n in enumerate(sizes)], slack=slack)


@pytest.mark.parametrize("count", [63, 64, 65, 127, 128, 129])
@pytest.mark.parametrize("window", [1, 4, 200])
def test_word_boundaries(count: int, window: int) -> None:
    """Bit 63 is the sign of an int64; chains here are deeper than one word."""
    assert_masks_and_paths([random_row(count, count, window), random_row(1, 0, 1)])


@pytest.mark.parametrize("window", [pytest.param(2, marks=pytest.mark.slow), 500])
def test_largest_trees(window: int) -> None:
    assert_masks_and_paths([random_row(512, 3, window)])


def test_largest_chain() -> None:
    """Node i sees exactly 0..i: a full lower triangle, and words of all ones below the diagonal's."""
    tree = TokenTree.from_rows([random_row(512, 0, 1)])
    assert torch.equal(ancestor_mask(tree.parents)[0], torch.ones(512, 512, dtype=torch.bool).tril())
    assert ancestor_words(tree.parents)[0, 511].tolist() == [-1] * 8
    assert ancestor_words(tree.parents)[0, 127].tolist() == [-1, -1, 0, 0, 0, 0, 0, 0]
    assert tree.path_nodes(torch.tensor([511]))[0].tolist() == list(range(1, 512))


def test_mask_of_the_picture() -> None:
    tree = TokenTree.from_rows([TreeRow([0, 1, 2, 3], [-1, 0, 0, 1])])
    assert ancestor_mask(tree.parents)[0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    assert ancestor_words(tree.parents)[0, :, 0].tolist() == [0b1, 0b11, 0b101, 0b1011]


def test_nothing_reaches_padding() -> None:
    tree = TokenTree.from_rows([TreeRow([0, 1, 2], [-1, 0, 1]), TreeRow([0], [-1])])
    mask = ancestor_mask(tree.parents)[1].int().tolist()
    assert mask == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
