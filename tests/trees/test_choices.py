"""Tree shapes: by choices, by widths, and as users write them."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.core.errors import ConfigError
from foretoken.trees.choices import TreeShape


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


def test_comb() -> None:
    shape = TreeShape.comb(3, 2)
    assert shape.choices == ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
    assert shape.parents == [-1, 0, 0, 1, 1, 3]
    assert all(each.is_comb for each in (shape, shape.truncated(1), TreeShape.chain(4), TreeShape(())))
    assert TreeShape.comb(3, 0) == TreeShape.chain(3)
    assert not TreeShape.cartesian((2, 2)).is_comb


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


def test_largest_shape() -> None:
    assert TreeShape.from_choices([[rank] for rank in range(511)]).num_nodes == 512
