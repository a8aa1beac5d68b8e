"""Tree shapes, and filling them from a lattice."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.core.errors import ConfigError
from foretoken.core.lattice import DraftLattice
from foretoken.trees.choices import TreeShape, shape_lattice


@st.composite
def shapes(draw: st.DrawFn) -> TreeShape:
    """Prefix-closed sets of choices, given in any order."""
    paths = draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=8))
    closed = {tuple(path[:d]) for path in paths for d in range(1, len(path) + 1)}
    return TreeShape.from_choices(draw(st.permutations(sorted(closed))))


def test_chain() -> None:
    shape = TreeShape.chain(3)
    assert shape.choices == ((0,), (0, 0), (0, 0, 0))
    assert shape.parents == [-1, 0, 1, 2]
    assert (shape.depth, shape.num_nodes) == (3, 4)
    assert TreeShape.chain(0) == TreeShape(())
    assert (TreeShape.chain(0).depth, TreeShape.chain(0).num_nodes) == (0, 1)


def test_cartesian() -> None:
    shape = TreeShape.cartesian((2, 1, 2))
    assert set(shape.choices) == {
        *product(range(2)),
        *product(range(2), range(1)),
        *product(range(2), range(1), range(2)),
    }
    assert shape.parents == [-1, 0, 0, 1, 2, 3, 3, 4, 4]
    assert shape.ranks == [0, 0, 1, 0, 0, 0, 1, 0, 1]
    assert shape.depths == [0, 1, 1, 2, 2, 3, 3, 3, 3]


@given(shape=shapes())
def test_parents_are_prefixes(shape: TreeShape) -> None:
    paths = [(), *shape.choices]
    for node, parent in enumerate(shape.parents):
        if node:
            assert parent < node
            assert paths[parent] == paths[node][:-1]
            assert shape.ranks[node] == paths[node][-1]
    assert shape.depths == [len(path) for path in paths]
    assert shape.depth == max(shape.depths)
    assert len({*shape.choices}) == shape.num_nodes - 1


@given(shape=shapes(), depth=st.integers(0, 5))
def test_truncated(shape: TreeShape, depth: int) -> None:
    cut = shape.truncated(depth)
    assert set(cut.choices) == {choice for choice in shape.choices if len(choice) <= depth}
    assert cut == TreeShape.from_choices(cut.choices)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([[0], []], "tree choice [] is not valid. Expected ranks of 0 to 511."),
        ([[0], [0, -1]], "tree choice [0, -1] is not valid. Expected ranks of 0 to 511."),
        ([[0], [1], [0]], "tree choice [0] stands twice. Leave one out."),
        ([[0], [1, 0]], "tree choice [1, 0] has no parent. Add [1]."),
        ([[0], [0, 2, 1]], "tree choice [0, 2, 1] has no parent. Add [0, 2]."),
        ([[rank] for rank in range(512)], "the tree has 512 choices. Expected fewer than 512."),
    ],
)
def test_choices_that_are_no_shape(choices: list[list[int]], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        TreeShape.from_choices(choices)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[0], [0]], "tree choice [0] stands twice. Leave one out."),
        ([[0], [1, 0]], "tree choice [1, 0] has no parent. Add [1]."),
        ([[-1]], "tree choice [-1] is not valid. Expected ranks of 0 to 511."),
        ([[10**30]], f"tree choice [{10**30}] is not valid. Expected ranks of 0 to 511."),
        ([[0] * 5000], "tree choice"),
        ([[True]], "tree choice [True] is not valid. Expected a list of integers."),
        ([[0], [0, 1.5]], "tree choice [0, 1.5] is not valid. Expected a list of integers."),
        ([[0.0]], "tree choice [0.0] is not valid. Expected a list of integers."),
        ([["0"]], "tree choice ['0'] is not valid. Expected a list of integers."),
        ([[float("nan")]], "tree choice [nan] is not valid. Expected a list of integers."),
        ([[None]], "tree choice [None] is not valid. Expected a list of integers."),
        ([0, 1], "tree choice 0 is not valid. Expected a list of integers."),
        (["00"], "tree choice '00' is not valid. Expected a list of integers."),
        ([{"0": 1}], "tree choice {'0': 1} is not valid. Expected a list of integers."),
        ([], "the tree has no choices. Expected at least one, as [[0]]."),
        ([[]], "tree choice [] is not valid. Expected ranks of 0 to 511."),
        (7, "tree 7 is not valid. Expected choices such as [[0], [1], [0, 0]]."),
        (None, "tree None is not valid. Expected choices such as [[0], [1], [0, 0]]."),
        ("[[0]]", "tree '[[0]]' is not valid. Expected choices such as [[0], [1], [0, 0]]."),
        ({"widths": [0]}, "tree widths [0] are not valid. Expected at least one, each of at least 1."),
        ({"widths": [2, -1]}, "tree widths [2, -1] are not valid. Expected at least one, each of at least 1."),
        ({"widths": []}, "tree widths [] are not valid. Expected at least one, each of at least 1."),
        ({"widths": [True, 2]}, "tree widths [True, 2] is not valid. Expected a list of integers."),
        ({"widths": [1.5]}, "tree widths [1.5] is not valid. Expected a list of integers."),
        ({"widths": 3}, "tree widths 3 is not valid. Expected a list of integers."),
        ({"widths": "31"}, "tree widths '31' is not valid. Expected a list of integers."),
        ({"widths": [10**9, 10**9]}, "give too many nodes. Expected fewer than 512."),
        ({"widths": [2] * 9}, "tree widths [2, 2, 2, 2, 2, 2, 2, 2, …] give too many nodes. Expected fewer than 512."),
        ({"width": [2]}, "tree {'width': [2]} is not valid. Expected {'widths': [3, 2, 1]}."),
        ({}, "tree {} is not valid. Expected {'widths': [3, 2, 1]}."),
    ],
)
def test_what_users_write_that_is_no_tree(value: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        TreeShape.parse(value)
    assert message in str(error.value)


def test_what_users_write() -> None:
    assert TreeShape.parse([[0], (1,), [0, 0]]) == TreeShape.from_choices([(0,), (1,), (0, 0)])
    assert TreeShape.parse({"widths": (3, 2)}) == TreeShape.cartesian([3, 2])
    assert TreeShape.parse({"widths": [2] * 8}).num_nodes == 511


def test_leaves_alone() -> None:
    assert TreeShape.from_leaves([[2, 0, 1], [0, 1], [3]]).choices == ((0,), (2,), (3,), (0, 1), (2, 0), (2, 0, 1))
    assert TreeShape.from_leaves([]) == TreeShape(())


@given(shape=shapes(), keep=st.data())
def test_leaves_with_or_without_some_prefixes(shape: TreeShape, keep: st.DataObject) -> None:
    """Any list between the leaves and all choices gives the same shape, the complete one too."""
    inner = {choice[:-1] for choice in shape.choices}
    listed = [choice for choice in shape.choices if choice not in inner or keep.draw(st.booleans())]
    assert TreeShape.from_leaves(listed) == shape
    assert TreeShape.from_leaves(shape.choices) == shape


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([[0, 1], []], "tree choice [] is not valid. Expected ranks of 0 to 511."),
        ([[0, -1, 2]], "tree choice [0, -1] is not valid. Expected ranks of 0 to 511."),
        ([[0, 1], [1], [0, 1]], "tree choice [0, 1] stands twice. Leave one out."),
        ([[rank, 0] for rank in range(256)], "the tree has 512 choices. Expected fewer than 512."),
    ],
)
def test_leaves_that_give_no_shape(choices: list[list[int]], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        TreeShape.from_leaves(choices)
    assert str(error.value) == message


def test_largest_shape() -> None:
    assert TreeShape.from_choices([[rank] for rank in range(511)]).num_nodes == 512


def lattice(batch: int, depth: int, width: int, *, has_pairs: bool) -> DraftLattice:
    generator = torch.Generator().manual_seed(4)
    pairs = torch.rand(batch, depth, width, width, generator=generator).log() if has_pairs else None
    return DraftLattice(
        ids=torch.randint(1000, (batch, depth, width), generator=generator),
        log_probs=torch.rand(batch, depth, width, generator=generator).log(),
        pair_log_probs=pairs,
    )


@pytest.mark.parametrize("has_pairs", [False, True])
@given(shape=shapes())
def test_shape_lattice(has_pairs: bool, shape: TreeShape) -> None:
    """Token and score of every node by following its choice through the lattice."""
    source = lattice(2, 4, 4, has_pairs=has_pairs)
    tree = shape_lattice(source, shape, torch.tensor([70, 71]))
    tree.validate()
    assert tree.distributions is None
    for row in range(2):
        assert tree.tokens[row, 0] == 70 + row
        assert tree.scores is not None
        assert tree.scores[row, 0] == 0
        for node, choice in enumerate(shape.choices, start=1):
            assert tree.tokens[row, node] == source.ids[row, len(choice) - 1, choice[-1]]
            score, previous = 0.0, 0
            for depth, rank in enumerate(choice):
                if source.pair_log_probs is None:
                    score += source.log_probs[row, depth, rank].item()
                else:
                    score += source.pair_log_probs[row, depth, previous, rank].item()
                previous = rank
            # At most four float32 additions of numbers of order 1.
            assert tree.scores[row, node].item() == pytest.approx(score, abs=1e-5)
