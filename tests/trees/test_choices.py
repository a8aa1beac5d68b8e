"""Tree shapes: by choices, by widths, as users write them, as published, and the best one for measured acceptance."""

import math
from collections.abc import Callable
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.core.errors import ConfigError
from foretoken.trees.choices import PUBLISHED, Choice, TreeShape, best_nodes, best_shape


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


TABLE = ((0.5, 0.25, 0.125), (0.5, 0.25), (0.75,))  # products are exact in binary
BY_HAND: list[tuple[Choice, float]] = [
    ((0,), 0.5),
    ((1,), 0.25),  # shorter before (0, 0), which is worth the same
    ((0, 0), 0.25),
    ((0, 0, 0), 0.1875),
    ((2,), 0.125),
    ((0, 1), 0.125),
    ((1, 0), 0.125),
    ((0, 1, 0), 0.09375),
    ((1, 0, 0), 0.09375),
    ((1, 1), 0.0625),
    ((2, 0), 0.0625),
    ((1, 1, 0), 0.046875),
    ((2, 0, 0), 0.046875),
    ((2, 1), 0.03125),
    ((2, 1, 0), 0.0234375),
]

tables = st.lists(
    st.lists(st.sampled_from([0.0, 0.125, 0.25, 0.5, 0.5, 0.75, 1.0]), min_size=1, max_size=3), min_size=1, max_size=3
)


def value(table: list[list[float]], choice: Choice) -> float:
    """The probability that a node is accepted."""
    return math.prod(table[depth][rank] for depth, rank in enumerate(choice))


def all_shapes(table: list[list[float]], most: int) -> list[set[Choice]]:
    """Every prefix-closed set of 1 to `most` choices."""
    choices = [c for d in range(1, len(table) + 1) for c in product(*(range(len(row)) for row in table[:d]))]
    found = []
    for size in range(1, most + 1):
        for picked in map(set, combinations(choices, size)):
            if all(len(choice) == 1 or choice[:-1] in picked for choice in picked):
                found.append(picked)
    return found


def test_best_first_by_hand() -> None:
    assert best_nodes(TABLE, 100) == BY_HAND
    for max_nodes in range(2, 16):
        assert best_nodes(TABLE, max_nodes) == BY_HAND[: max_nodes - 1]


def test_a_rank_that_is_never_right_is_left_out() -> None:
    """Measured acceptance need not fall with the rank: shapes may have gaps."""
    assert [choice for choice, _ in best_nodes([[0.2, 0.0, 0.3], [0.0, 0.9]], 5)] == [(2,), (2, 1), (0,), (0, 1)]


def test_ties_go_to_the_shorter_then_to_the_smaller_choice() -> None:
    assert [choice for choice, _ in best_nodes([[1.0, 1.0], [1.0, 1.0]], 99)] == [
        (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1),
    ]  # fmt: skip


@given(table=tables)
def test_every_beginning_is_a_tree_and_values_fall(table: list[list[float]]) -> None:
    selected = best_nodes(table, 40)
    known: set[Choice] = {()}
    for choice, worth in selected:
        assert choice[:-1] in known
        assert worth == value(table, choice)
        known.add(choice)
    values = [worth for _, worth in selected]
    assert values == sorted(values, reverse=True)
    assert len(known) == len(selected) + 1 == 1 + sum(math.prod(map(len, table[:d])) for d in range(1, len(table) + 1))


@given(table=tables, most=st.integers(1, 4))
def test_no_tree_of_the_same_size_accepts_more(table: list[list[float]], most: int) -> None:
    """Products and sums of these probabilities are exact, so equality is."""
    selected = best_nodes(table, most + 1)
    shapes = all_shapes(table, most)
    for size in range(1, len(selected) + 1):
        best = max(sum(value(table, choice) for choice in shape) for shape in shapes if len(shape) == size)
        assert sum(worth for _, worth in selected[:size]) == best


@given(
    table=tables,
    node_cost=st.sampled_from([0.0, 0.125, 0.5]),
    step=st.sampled_from([0.0, 1.0]),
    level_seconds=st.sampled_from([0.0, 0.125, 0.5, 2.0]),
)
def test_no_shape_earns_more(table: list[list[float]], node_cost: float, step: float, level_seconds: float) -> None:
    """Among all prefix-closed sets, with costs by node, by level and a jump in the cost of a pass."""

    def pass_seconds(nodes: int) -> float:
        return 1.0 + node_cost * nodes + step * (nodes > 3)

    def rate(shape: set[Choice]) -> float:
        tokens = 1 + sum(value(table, choice) for choice in shape)
        return tokens / (pass_seconds(len(shape) + 1) + level_seconds * max(map(len, shape)))

    found = best_shape(table, pass_seconds, level_seconds=level_seconds, max_nodes=5)
    rates = {frozenset(shape): rate(shape) for shape in all_shapes(table, 4)}
    assert 2 <= found.num_nodes <= 5
    assert rates[frozenset(found.choices)] == max(rates.values())
    fewest = min(len(shape) for shape, r in rates.items() if r == max(rates.values()))
    assert found.num_nodes == fewest + 1, "among equals the smallest"


@pytest.mark.parametrize(
    ("pass_seconds", "drafted"),
    [
        (lambda _: 1.0, 15),  # passes of any width cost the same: everything pays
        (float, 1),  # nothing pays, and still one node is drafted
        (lambda nodes: 1.0 if nodes <= 8 else 2.0, 7),
    ],
    ids=["free", "dear", "step"],
)
def test_shape_by_the_cost_of_passes(pass_seconds: Callable[[int], float], drafted: int) -> None:
    shape = best_shape(TABLE, pass_seconds, max_nodes=99)
    assert shape == TreeShape.from_choices(choice for choice, _ in BY_HAND[:drafted])


def test_levels_that_cost_make_shallow_trees() -> None:
    """One level brings 1.875 tokens in 2 seconds, two 2.34375 in 3, three 2.84… in 4."""
    assert best_shape(TABLE, lambda _: 1.0, level_seconds=1.0, max_nodes=99) == TreeShape.cartesian((3,))
    drafting = best_shape(TABLE, lambda _: 1.0, level_seconds=lambda shape: 1.0 * shape.depth, max_nodes=99)
    assert drafting == TreeShape.cartesian((3,))
    flat = best_shape(TABLE, lambda _: 1.0, level_seconds=lambda shape: float((0, 1) in shape.choices), max_nodes=99)
    assert (0, 1) not in flat.choices


def test_among_equals_the_fewest_nodes() -> None:
    """Three nodes of one level and two of two bring two tokens in a second each; the wider one is tried first."""
    wide, narrow = TreeShape.cartesian((3,)), TreeShape.chain(2)
    found = best_shape(
        [[0.5, 0.25, 0.25], [1.0]],
        lambda _: 1.0,
        level_seconds=lambda shape: 0.0 if shape in (wide, narrow) else 9.0,
        max_nodes=9,
    )
    assert found == narrow


@pytest.mark.parametrize(
    ("table", "max_nodes", "message"),
    [
        ([[0.5]], 1, "max_nodes is 1. Expected at least 2: the root and a drafted node."),
        ([], 9, "acceptance table with rows of []. Expected at least one entry at every depth."),
        ([[0.5], []], 9, "acceptance table with rows of [1, 0]. Expected at least one entry at every depth."),
        (
            [[0.5], [0.1, 1.5]], 9, "acceptance of candidate 1 at depth 2 is 1.5. Expected a probability: hits by the "
            "number of times its parent was right.",
        ),
        (
            [[math.nan]], 9, "acceptance of candidate 0 at depth 1 is nan. Expected a probability: hits by the number "
            "of times its parent was right.",
        ),
    ],
)  # fmt: skip
def test_what_is_no_table(table: list[list[float]], max_nodes: int, message: str) -> None:
    for search in (
        lambda: best_nodes(table, max_nodes),
        lambda: best_shape(table, float, level_seconds=1.0, max_nodes=max_nodes),
    ):
        with pytest.raises(ConfigError) as error:
            search()
        assert str(error.value) == message


# Recorded from the published lists as their authors lay them out in buffers; the test computes the numbers from paths
# alone. Nodes of each depth, leaves, ones of the mask, sums of tree indices, positions and retrieve indices, first of
# their rows.
GOLDEN = {
    "mc_sim_7b_63": ([10, 28, 23, 2], 42, 207, 1029, 143, 2211, [0, 1, 11, 39, 63]),
    "vicuna_7b_stage2": ([10, 23, 23, 7], 42, 217, 1117, 153, 2320, [0, 1, 12, 43, 63]),
    "vicuna_7b_stage1_ablation": ([10, 21, 25, 7], 42, 219, 1142, 155, 2325, [0, 1, 12, 42, 63]),
    "vicuna_7b_stage1": ([10, 32, 20, 1], 44, 202, 976, 138, 2157, [0, 1, 11, 43, 63]),
    "vicuna_13b_stage2": ([10, 19, 25, 9], 42, 223, 1182, 159, 2360, [0, 2, 21, 49, 63]),
    "vicuna_13b_stage1": ([10, 29, 23, 1], 44, 205, 1015, 141, 2174, [0, 1, 11, 40, 63]),
    "vicuna_33b_stage2": ([10, 24, 24, 5], 43, 214, 1095, 150, 2287, [0, 1, 12, 45, 63]),
    "vicuna_33b_stage1": ([10, 34, 19], 46, 199, 957, 135, 2202, [0, 3, 29, 63]),
    "zephyr_stage2": ([10, 27, 23, 3], 44, 209, 1050, 145, 2224, [0, 1, 11, 39, 63]),
}
CANDIDATES_OF_A_HEAD = 10


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_numbers(name: str) -> None:
    paths = sorted(PUBLISHED[name], key=lambda path: (len(path), path))
    numbers = {(): 0} | {path: number for number, path in enumerate(paths, start=1)}
    deepest = max(map(len, paths))
    leaves = [path for path in reversed(paths) if not any(other[:-1] == path for other in paths)]
    # From the root to each leaf, -1 past its end.
    retrieve = [
        [numbers[leaf[:depth]] if depth <= len(leaf) else -1 for depth in range(deepest + 1)] for leaf in leaves
    ]
    found = (
        [sum(len(path) == depth for path in paths) for depth in range(1, deepest + 1)],
        len(leaves),
        sum(len(path) + 1 for path in paths) + 1,
        sum(CANDIDATES_OF_A_HEAD * (len(path) - 1) + path[-1] + 1 for path in paths),
        sum(map(len, paths)),
        sum(map(sum, retrieve)),
        retrieve[0],
    )
    assert found == GOLDEN[name]


def test_all_are_pinned() -> None:
    assert PUBLISHED.keys() == GOLDEN.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_beginning_is_a_tree(name: str) -> None:
    choices = PUBLISHED[name]
    for size in range(1, len(choices) + 1):
        assert TreeShape.from_choices(choices[:size]).num_nodes == size + 1
