"""Chains that end by the probability of their path: what that gains over a depth, and what is learned from them."""

import random
from math import exp, log
from typing import Any

import pytest
from drafters.drafting_contexts import record, step

from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.drafting.goodput import Goodput
from foretoken.runner.costs import CostCurve
from foretoken.trees.stopping import PathFloors

DEEPEST, ROW = 12, 0.1  # levels; seconds that a token adds to a pass of one second


class Text:
    """Positions with the probabilities of the tokens that are drafted there, which are right as often as they say."""

    def __init__(self, seed: int, *, is_sure: float = 0.6, length: int = 3000) -> None:
        chance = random.Random(seed)
        self.probabilities = [0.97 if chance.random() < is_sure else 0.35 for _ in range(length)]
        self.are_right = [chance.random() < p for p in self.probabilities]

    def right(self, place: int, depth: int) -> int:
        return next((d for d in range(depth) if not self.are_right[place + d]), depth)


def pass_s(width: int) -> float:
    return 1 + ROW * (width - 1)


def speed_of_depth(text: Text, depth: int, level: float) -> float:
    place, seconds = 0, 0.0
    while place < len(text.are_right) - DEEPEST - 1:
        place += 1 + text.right(place, depth)
        seconds += level * depth + pass_s(depth + 1)
    return place / seconds


def length_by(floors: PathFloors, probabilities: list[float]) -> int:
    path = 0.0
    for depth, p in enumerate(probabilities, start=1):
        odds = log(p / (1 - p))
        path -= log(1 + exp(-floors.slope * odds - floors.intercepts[depth - 1]))
        if path < floors.floors[depth - 1]:
            return depth
    return len(probabilities)


def controller(level: float, **keys: Any) -> Goodput:
    curve = CostCurve(range(1, 20), [pass_s(width) for width in range(1, 20)])
    timed = [[(1, level), (4, 4 * level)]]
    return Goodput(curve, nodes_by_depth=[range(1, DEEPEST + 2)], max_nodes=16, ends_early=[True], timed=timed, **keys)


def speed_of(made: Goodput, text: Text, level: float) -> tuple[float, list[int]]:
    """Tokens a second, and the levels of each draft."""
    place, seconds, levels = 0, 0.0, list[int]()
    while place < len(text.are_right) - DEEPEST - 1:
        allotment, drafted, accepted, width = made.allot(1), 0, 0, 1
        if not allotment.is_empty:
            ask = allotment.first
            assert ask is not None
            assert ask.floors is not None
            drafted = length_by(ask.floors, text.probabilities[place : place + ask.depth])
            scores = [sum(map(log, text.probabilities[place : place + d])) for d in range(drafted + 1)]
            tokens = [0, *(d if text.right(place, d) == d else 1000 + d for d in range(1, drafted + 1))]
            tree = TokenTree.from_rows([TreeRow(tokens, range(-1, drafted))], scores=[scores])
            assert made.further({0: tree}) is None
            width = made.select({0: tree}).width
            accepted = text.right(place, width - 1)
        levels.append(drafted)
        seconds += level * drafted + pass_s(width)
        written = step([*range(1, accepted + 1), 7777], width - 1, num_proposed=drafted or None)
        drafts = [(0, drafted, level * drafted)] if drafted else []
        made.learn_step(record([written], width, *drafts, verify=pass_s(width)))
        place += accepted + 1
    return place / seconds, levels


@pytest.mark.parametrize("level", [0.05, 0.3])
@pytest.mark.parametrize("seed", range(2))
def test_they_beat_every_depth(level: float, seed: int) -> None:
    text = Text(seed)
    best = max(speed_of_depth(text, depth, level) for depth in range(1, DEEPEST + 1))
    speed, levels = speed_of(controller(level), text, level)
    assert speed > 1.03 * best
    assert len(set(levels)) > 3


def test_cheap_levels_go_on_after_less_probable_tokens() -> None:
    text = Text(3)
    cheap, dear = (speed_of(controller(level), text, level)[1][-100:] for level in (0.02, 0.4))
    assert sum(cheap) > 1.1 * sum(dear)
    assert cheap.count(1) < dear.count(1)


def test_useless_drafts_are_given_up() -> None:
    text = Text(4, is_sure=0.0)
    text.are_right = [False] * len(text.are_right)
    speed, levels = speed_of(controller(0.3), text, 0.3)
    assert speed > 0.97
    assert sum(map(bool, levels)) < 0.1 * len(levels)


def test_levels_that_were_not_drafted_teach_nothing() -> None:
    """A chain that ended at its second level, right to there, says nothing of the third."""
    made = controller(0.3)
    made.allot(1)
    tree = TokenTree.from_rows([TreeRow([0, 1, 2], range(-1, 2))], scores=[[0.0, -0.1, -0.2]])
    made.further({0: tree})
    made.select({0: tree})
    made.learn_step(record([step([1, 2, 9], 2, num_proposed=2)], 3, (0, 2, 0.6), verify=1.2))
    seen = made._known[0].after(frozenset())._seen
    assert seen[:3] == pytest.approx([1, 1, 0])


@pytest.mark.parametrize(("token_s", "width"), [(0.01, 3), (0.4, 2)])
def test_a_second_candidate_is_verified_where_it_costs_little(token_s: float, width: int) -> None:
    curve = CostCurve(range(1, 20), [1 + token_s * (width - 1) for width in range(1, 20)])
    made = Goodput(
        curve, nodes_by_depth=[range(1, 14)], max_nodes=16, ends_early=[True], timed=[[(1, 0.1), (4, 0.4)]]
    )  # fmt: skip
    made.allot(1)
    row, scores = TreeRow([7, 8, 9], [-1, 0, 0]), [0.0, log(0.6), log(0.3)]
    assert made.select({0: TokenTree.from_rows([row], scores=[scores], device="cpu")}).width == width
