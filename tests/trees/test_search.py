"""The best tree for measured acceptance: by hand, and against every tree there is."""

import math
from collections.abc import Callable
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.core.errors import ConfigError
from foretoken.trees.choices import Choice, TreeShape, best_nodes, best_shape

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
