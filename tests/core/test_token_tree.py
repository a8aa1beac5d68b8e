"""The token tree: building, padding, picking rows, drawing, validation, ancestors and paths up to 512 nodes."""

import doctest
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.core import token_tree
from foretoken.core.errors import TreeError
from foretoken.core.token_tree import (
    MAX_NODES,
    DraftDistributions,
    DrawKind,
    TokenTree,
    TreeRow,
    ancestor_mask,
    ancestor_words,
)
from tests.tree_checks import check_tree

SMALL = TreeRow([7, 1, 2, 3], [-1, 0, 0, 1])
SINGLE = TreeRow([9], [-1])


@st.composite
def rows(draw: st.DrawFn, *, max_nodes: int = 12) -> TreeRow:
    count = draw(st.integers(0, max_nodes - 1))
    parents = [draw(st.integers(0, node)) for node in range(count)]
    return TreeRow([draw(st.integers(0, 99)) for _ in range(count + 1)], [-1, *parents])


def plain(row: TreeRow) -> tuple[list[int], list[int]]:
    return list(row.tokens), list(row.parents)


def test_padding() -> None:
    tree = TokenTree.from_rows([SMALL, SINGLE])
    assert tree.tokens.tolist() == [[7, 1, 2, 3], [9, 0, 0, 0]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1], [-1, -1, -1, -1]]
    assert tree.depths.tolist() == [[0, 1, 1, 2], [0, 0, 0, 0]]
    assert tree.num_nodes.tolist() == [4, 1]
    assert (tree.max_depth, tree.width, tree.batch_size) == (2, 4, 2)


def test_roots() -> None:
    tree = TokenTree.roots([3, 4])
    assert tree.rows() == [TreeRow([3], [-1]), TreeRow([4], [-1])]
    assert tree.max_depth == 0


@given(batch=st.lists(rows(), max_size=4), tokens=st.lists(st.integers(0, 99), max_size=3), is_known=st.booleans())
def test_roots_that_follow(batch: list[TreeRow], tokens: list[int], is_known: bool) -> None:
    tree = TokenTree.from_rows(batch) if batch else TokenTree.roots([])
    tree = tree if is_known else replace(tree, host_facts=None)
    both = tree.with_roots(tokens)
    assert [plain(row) for row in both.rows()] == [
        plain(row) for row in [*batch, *(TreeRow([t], [-1]) for t in tokens)]
    ]
    assert both.batch_size == len(batch) + len(tokens)
    if both.batch_size:
        check_tree(both)
    if batch and tokens and is_known:
        known = TokenTree.from_rows(both.rows()).host_facts
        assert known is not None
        assert both.host_facts == known._replace(nodes=None)
    if not is_known and tokens:
        assert both.host_facts is None


def test_roots_that_follow_were_not_drawn() -> None:
    tree = with_extras(TokenTree.from_rows([SMALL, SINGLE]))
    both = tree.with_roots([5, 6])
    for name in ("scores", "source"):
        assert getattr(both, name)[:2].tolist() == getattr(tree, name).tolist()
        assert not getattr(both, name)[2:].any()
    assert both.distributions is not None
    assert tree.distributions is not None
    assert torch.equal(both.distributions.rows[:2], tree.distributions.rows)
    assert both.distributions.kinds[2:].tolist() == [[DrawKind.ONE_HOT] * 4] * 2
    assert both.distributions.row_of[2:].tolist() == [[-1] * 4] * 2


@given(batch=st.lists(rows(), min_size=1, max_size=4))
def test_round_trip(batch: list[TreeRow]) -> None:
    tree = TokenTree.from_rows(batch)
    check_tree(tree)
    assert [plain(row) for row in tree.rows()] == [plain(row) for row in batch]
    for index, row in enumerate(batch):
        for node, parent in enumerate(row.parents):
            depth, above = 0, parent
            while above >= 0:
                depth, above = depth + 1, row.parents[above]
            assert tree.depths[index, node] == depth


@given(batch=st.lists(rows(), min_size=1, max_size=4), data=st.data())
def test_select(batch: list[TreeRow], data: st.DataObject) -> None:
    tree = with_extras(TokenTree.from_rows(batch))
    picked = data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=1, max_size=5))
    chosen = tree.select(torch.tensor(picked))
    assert [plain(row) for row in chosen.rows()] == [plain(batch[index]) for index in picked]
    assert chosen.max_depth == tree.max_depth
    assert chosen.distributions is not None
    assert chosen.distributions.max_siblings == 12
    for name in ("scores", "source", "depths"):
        assert torch.equal(getattr(chosen, name), getattr(tree, name)[picked])
    for name in ("kinds", "rows", "row_of"):
        assert torch.equal(getattr(chosen.distributions, name), getattr(tree.distributions, name)[picked])


def test_select_without_extras() -> None:
    chosen = TokenTree.from_rows([SMALL, SINGLE]).select(torch.tensor([1]))
    assert (chosen.scores, chosen.source, chosen.distributions) == (None, None, None)


def with_extras(tree: TokenTree) -> TokenTree:
    """Distinguishable scores, sources and distribution."""
    shape = tree.tokens.shape
    numbers = torch.arange(tree.tokens.numel()).view(shape)
    distribution = DraftDistributions(
        kinds=numbers % 3, rows=torch.rand(shape[0], 2, 5), row_of=numbers % 2, max_siblings=12
    )
    return replace(tree, scores=numbers.float(), source=numbers + 1, distributions=distribution)


def test_doctests_run() -> None:
    results = doctest.testmod(token_tree)
    assert results.attempted > 0
    assert results.failed == 0


def test_format() -> None:
    wide = TreeRow([1, 2, 3, 4, 5, 6, 7], [-1, 0, 0, 0, 2, 2, 4])
    tree = TokenTree.from_rows([SINGLE, wide])
    assert tree.format() == "9"
    assert tree.format(1).splitlines() == [
        "1",
        "├─ 2",
        "├─ 3",
        "│  ├─ 5",
        "│  │  └─ 7",
        "│  └─ 6",
        "└─ 4",
    ]
    assert tree.format(1, decode=lambda token: "\n" * token).splitlines()[1] == "├─ '\\n\\n'"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (TreeRow([], []), "tree 1 is empty. Expected at least the root."),
        (TreeRow([1, 2], [-1]), "tree 1 has 2 tokens and 1 parents. Expected as many."),
        (TreeRow([1, 2], [0, 0]), "tree 1: the root's parent is 0. Expected -1."),
        (TreeRow([1, 2, 3], [-1, 0, 2]), "tree 1: node 2 has parent 2. Expected 0..1."),
        (TreeRow([1, 2, 3], [-1, 2, 0]), "tree 1: node 1 has parent 2. Expected 0..0."),
        (TreeRow([1, 2, 3], [-1, 0, -1]), "tree 1: node 2 has parent -1. Expected 0..1."),
    ],
)
def test_rows_that_are_no_trees(row: TreeRow, message: str) -> None:
    with pytest.raises(TreeError) as error:
        TokenTree.from_rows([SMALL, row])
    assert str(error.value) == message


GOOD = TokenTree.from_rows([SMALL, SINGLE])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depths": GOOD.depths[:, :3]}, "tree tensors differ in shape: {'tokens': (2, 4), 'parents': (2, 4), "),
        ({"num_nodes": torch.tensor([4])}, "num_nodes (1,)."),
        ({"num_nodes": torch.tensor([4, 0])}, "num_nodes is [4, 0]. Expected 1..4, the root included."),
        ({"num_nodes": torch.tensor([5, 1])}, "num_nodes is [5, 1]. Expected 1..4"),
        ({"num_nodes": torch.tensor([4, 2])}, "tree 1: node 1 has parent -1. Expected 0..0."),
        ({"num_nodes": torch.tensor([3, 1])}, "padding nodes must have parent -1 and the widest tree"),
        ({"parents": torch.tensor([[-1, 0, 0, 1], [-1, 0, -1, -1]])}, "padding nodes must have parent -1"),
        ({"depths": torch.tensor([[0, 1, 2, 2], [0, 0, 0, 0]])}, "depths disagree with parents, or max_depth is"),
        ({"depths": torch.tensor([[0, 1, 1, 2], [0, 1, 0, 0]])}, "depths disagree with parents, or max_depth is"),
        ({"max_depth": 1}, "max_depth is below the greatest depth."),
    ],
)
def test_the_check_of_a_tree_names_what_is_wrong(changes: dict[str, object], message: str) -> None:
    with pytest.raises(TreeError) as error:
        check_tree(replace(GOOD, **changes))
    assert message in str(error.value)


def test_the_check_of_a_tree_limits_the_width() -> None:
    chain = TreeRow([0] * (MAX_NODES + 1), list(range(-1, MAX_NODES)))
    with pytest.raises(TreeError, match=r"a tree has 513 nodes\. Expected at most 512\. Lower max_nodes\."):
        check_tree(TokenTree.from_rows([chain]))
    check_tree(TokenTree.from_rows([TreeRow(chain.tokens[1:], chain.parents[:-1])]))


def test_a_looser_depth_bound_is_valid() -> None:
    check_tree(replace(GOOD, max_depth=9))


def distribution(**changes: object) -> DraftDistributions:
    """A distribution of GOOD: nodes 1 and 2 drawn without replacement from row 0, node 3 one-hot."""
    distinct, one_hot = DrawKind.WITHOUT_REPLACEMENT.value, DrawKind.ONE_HOT.value
    fields = {
        "kinds": torch.tensor([[one_hot, distinct, distinct, one_hot], [0, 0, 0, 0]]),
        "rows": torch.tensor([[[0.0, 0.5, 0.25, 0.25]], [[0.0, 0.0, 0.0, 0.0]]]),
        "row_of": torch.tensor([[-1, 0, 0, -1], [-1, -1, -1, -1]]),
        "max_siblings": 2,
    }
    return DraftDistributions(**fields | changes)


def at(values: list[int]) -> torch.Tensor:
    """Values of the first tree, nothing in the second."""
    return torch.tensor([values, [0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kinds": torch.zeros(2, 3)},
            "draft distributions {'kinds': (2, 3), 'row_of': (2, 4)} do not fit the tree (2, 4).",
        ),
        ({"kinds": at([0, 2, 3, 0])}, "tree 0: sampled node 2 has kind 3. Expected 0..2."),
        ({"row_of": at([-1, 0, -1, -1])}, "tree 0: sampled node 2 has row_of -1. Expected 0..0."),
        ({"row_of": at([-1, 1, 0, -1])}, "tree 0: sampled node 1 has row_of 1. Expected 0..0."),
        ({"max_siblings": 1}, "a node has 2 sampled children. Expected at most max_siblings, 1."),
        (
            {"rows": torch.tensor([[[0.0, 0.5, 0.5]], [[0, 0, 0]]])[:, :, :2]},
            "sampled node 2 has token 2. Expected 0..1",
        ),
        ({"rows": torch.full((2, 1, 4), 0.5)}, "tree 0: node 1 was not drawn from its draft distribution."),
        ({"rows": torch.full((2, 1, 4), float("nan"))}, "tree 0: node 1 was not drawn from its draft distribution."),
        ({"rows": torch.tensor([[[-0.5, 0.5, 0.5, 0.5]]] * 2)}, "tree 0: node 1 was not drawn from"),
        ({"rows": torch.tensor([[[0.5, 0.5, 0.0, 0.0]]] * 2)}, "tree 0: node 2 was not drawn from"),
    ],
)
def test_the_check_of_a_tree_looks_at_the_distribution(changes: dict[str, object], message: str) -> None:
    """A distribution that is wrong in any of these ways would bias sampling in silence."""
    check_tree(replace(GOOD, distributions=distribution()))
    with pytest.raises(TreeError) as error:
        check_tree(replace(GOOD, distributions=distribution(**changes)))
    assert message in str(error.value)


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
