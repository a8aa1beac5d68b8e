"""The acceptance model: censored counts by depth, and the logistic regression of nodes against made drafters."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from drafters.drafting_contexts import step

from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.drafting import acceptance, costs, exploration, goodput, host_trees
from foretoken.drafting.acceptance import LevelAcceptance, NodeAcceptance
from foretoken.drafting.base import Leaf
from foretoken.drafting.host_trees import LookupChain, learn_chain, learn_followed, log_odds, read_rows


@pytest.mark.parametrize("asked", [1, 2, 6])
def test_a_draft_that_is_right_to_its_end_says_nothing_of_deeper_levels(asked: int) -> None:
    """The rate of the closed form, whatever depth was asked for: accepted over tested, not over drafted."""
    levels, chance = LevelAcceptance(6), np.random.default_rng(1)
    for _ in range(4000):
        right = min(int(chance.geometric(0.3)) - 1, asked)
        levels.learn([0], [right], [asked])
    assert levels.rates()[:asked] == pytest.approx([0.7] * asked, abs=0.17)
    assert levels.rates()[5] == pytest.approx(0.7, abs=0.17), "an untested depth is judged by the others"
    assert levels.num_seen < 160, "older drafts count less"


def test_a_change_of_text_is_followed() -> None:
    levels = LevelAcceptance(4)
    for _ in range(1000):
        levels.learn([0], [0], [4])
    levels.age()
    for _ in range(6):
        levels.learn([0], [4], [4])
    assert levels.rates()[0] > 0.3
    for _ in range(200):
        levels.learn([0], [4], [4])
    assert levels.rates()[0] > 0.85


def test_a_text_begins_with_the_mean_of_the_texts_before_it() -> None:
    """Bad texts in between cost a good one less than the drafts of one text would, and short texts say little."""
    levels = LevelAcceptance(2)
    for text in range(20):
        for _ in range(30):
            levels.learn([0], [2 * (text % 2)], [2])
        within = levels.rates()[0]
        assert within < 0.2 if text % 2 == 0 else within > 0.8
        levels.begin_text()
        assert levels.num_seen == 0
    assert 0.4 < levels.rates()[0] < 0.8
    before = levels.rates()[0]
    levels.learn([0], [0], [2])
    levels.begin_text()
    assert levels.rates()[0] == pytest.approx(before, abs=0.05)


def test_levels_that_earlier_drafters_had_right_are_no_test() -> None:
    levels = LevelAcceptance(4)
    for _ in range(300):
        levels.learn([2, 4], [3, 4], [4, 4])
    assert levels._seen[:2] == [0, 0]
    assert levels.rates()[2] > 0.9
    assert levels.rates()[3] < 0.1


def test_expected_rates_are_a_start_and_no_limit() -> None:
    assert LevelAcceptance(4, [0.95, 0.5]).rates() == pytest.approx([0.95, 0.5, 0.5, 0.5])
    assert LevelAcceptance(4, [0.9, 0.0, 0.0, 0.0]).rates()[1] == pytest.approx(0.45), "a level may be tried"
    levels = LevelAcceptance(4, [0.95] * 4)
    for _ in range(100):
        levels.learn([0], [0], [4])
    assert levels.rates()[0] < 0.15


def judged(nodes: NodeAcceptance, odds: list[float] | None, depths: list[int]) -> list[float]:
    """P(node | its parent) of nodes on paths of their own."""
    parents = [-1, *[0] * len(depths)]
    return nodes.path_values(parents, [0, *depths], None if odds is None else [0.0, *odds])[1:]


@pytest.mark.parametrize(("slope", "shift"), [(1.0, 0.0), (0.4, -1.0), (0.0, 1.0), (1.5, 0.5)])
def test_nodes_are_calibrated(slope: float, shift: float) -> None:
    """A drafter that is wrongly sure of itself is judged right within a few dozen iterations."""
    chance, nodes = np.random.default_rng(2), NodeAcceptance()
    for _ in range(400):
        odds = chance.normal(1.0, 1.5, 3)
        accepted = chance.random(3) < 1 / (1 + np.exp(-slope * odds - shift))
        nodes.learn(list(zip(odds.tolist(), [1, 2, 3], accepted.tolist(), strict=True)))
    at = np.array([-1.0, 1.0, 3.0])
    true = 1 / (1 + np.exp(-slope * at - shift))
    assert judged(nodes, at.tolist(), [1, 2, 3]) == pytest.approx(true, abs=0.12)
    assert judged(nodes, at.tolist(), [9, 9, 9]) == pytest.approx(true, abs=0.12), "depths without labels"


def test_nodes_start_from_vllms_estimator() -> None:
    nodes = NodeAcceptance()
    assert judged(nodes, [2.0], [1])[0] == pytest.approx(1 / (1 + np.exp(-0.8)))
    for _ in range(200):
        nodes.learn([(2.0, 1, False), (-2.0, 1, True)])
    found = judged(nodes, [-2.0, 2.0], [1, 1])
    assert found[0] == pytest.approx(found[1], abs=0.01), "the slope is never negative"


def test_nodes_of_drafters_that_say_nothing_are_counted() -> None:
    """A sure drafter's deep nodes are known to be good after a dozen drafts; a regression was far behind."""
    chance, nodes = np.random.default_rng(0), NodeAcceptance()
    for _ in range(15):
        right = min(int(chance.geometric(0.03)) - 1, 8)
        nodes.learn([(None, depth, depth <= right) for depth in range(1, min(right + 1, 8) + 1)])
    assert nodes.chain_values(8)[-1] == pytest.approx(0.97**8, abs=0.15)


def test_scores_of_paths_become_odds_of_nodes() -> None:
    """Also scores that are no numbers."""
    scores = [*np.log([1.0, 0.8, 0.4, 0.2]), float("nan"), float("inf"), float("-inf")]
    odds = log_odds([-1, 0, 1, 0, 0, 0, 5], scores)
    assert odds[1:4] == pytest.approx(np.log([4.0, 1.0, 0.25]), abs=1e-5)
    assert np.isfinite(odds).all()
    assert odds[4:] == pytest.approx([-9, 9, -9], abs=0.01)


def test_the_value_of_a_node_is_the_product_of_its_path() -> None:
    tree = TokenTree.from_rows([TreeRow([5, 1, 2, 3, 4, 6], [-1, 0, 0, 1, 3, 2])])
    p = 1 / (1 + np.exp(0.2))  # before any label
    assert read_rows(tree, NodeAcceptance())[0].values == pytest.approx([1, p, p, p**2, p**3, p**2])


class Labels(NodeAcceptance):
    def learn(self, labels: Sequence[tuple[float | None, int, bool]]) -> None:
        self.found = [(depth, is_accepted) for _, depth, is_accepted in labels]


@pytest.mark.parametrize(
    ("tokens", "labels", "depth"),
    [
        ([1, 3, 9], [(1, True), (1, False), (2, True), (3, False)], 2),
        ([2, 9], [(1, False), (1, True), (2, False)], 1),
        ([9], [(1, False), (1, False)], 0),
        ([1], [(1, True), (1, False)], 1),  # the text ended there
    ],
)
def test_only_children_of_right_nodes_have_labels(tokens: list[int], labels: list[Any], depth: int) -> None:
    """Nodes that were cut before the pass are learned from too: what is never verified would never be found to pay."""
    nodes = Labels()
    rows = read_rows(TokenTree.from_rows([TreeRow([5, 1, 2, 3, 4, 6], [-1, 0, 0, 1, 3, 2])]), nodes)
    assert learn_followed(rows, nodes, [step(tokens, 1)]) == [depth]
    assert nodes.found == labels


@pytest.mark.parametrize(
    ("written", "labels"),
    [([1, 2, 3, 4, 9], [(1, True), (2, True), (3, False)]), ([1, 2, 3], [(1, True)]), ([1, 9], None), ([1, 2], None)],
)
def test_a_chain_below_a_leaf_is_judged_where_the_text_went_there(written: list[int], labels: Any) -> None:
    nodes = Labels()
    learn_chain(nodes, LookupChain(0, Leaf(0, [1, 2]), [3, 4, 5, 6]), written)
    assert getattr(nodes, "found", None) == labels


SET = [
    (costs, {"LONGEST": 1.4, "_RATE": 0.03, "_MACHINE_RATE": 0.2, "_RIDGE": 0.3, "_LEAST_LEVEL": 0.06, "_SHAPE": 0.02}),
    (acceptance, {"_FADE": 0.5**0.02, "_PRIOR": 2.0, "_GUESS": 0.7, "_TEXT_RATE": 0.5, "_POOLED": 8.0}),
    (exploration, {"SHARE": 0.01, "CREDIT": 4.0, "_MOST": 12.0, "_ENOUGH": 1.0, "GAP": 32}),
    (goodput, {"_FREE": 0.03, "_WIDTH_RATE": 0.1, "_DECIDE_EVERY": 8}),
    (host_trees, {"_LEAVES": 4, "_LEAST_VALUE": 0.1}),
]


@pytest.mark.parametrize(("module", "numbers"), SET)
def test_numbers_are_those_of_the_experiment(module: Any, numbers: dict[str, float]) -> None:
    assert {name: getattr(module, name) for name in numbers} == numbers


def test_the_logistic_starts_as_vllms_does() -> None:
    assert (acceptance._SLOPE, acceptance._INTERCEPT) == (0.5, -0.2)


def test_few_numbers_are_enough() -> None:
    assert sum(len(numbers) for _, numbers in SET) <= 21
