"""Several drafters on a simulated machine: who is asked, what is selected, and that nothing slower lasts."""

import random
from dataclasses import replace

import pytest
import torch
from drafters.drafting_contexts import record, step

from foretoken.core.token_tree import PROBE, DraftDistributions, DrawKind, TokenTree, TreeRow
from foretoken.drafting.base import Leaf
from foretoken.drafting.goodput import Goodput
from foretoken.runner.costs import CostCurve

FLAT, STEEP = ((1, 64), (1.0, 1.2)), ((1, 64), (1.0, 1.0 + 63 * 0.4))
DEPTH = 6


class World:
    """A target of cost 1, a lookup that is free, and a model; what each is right about is drawn, not learned."""

    def __init__(
        self, curve: tuple, *, level_s: float, lookup: float, model: float, hits: float, batch: int = 1
    ) -> None:
        """A world.

        Args:
            curve: Of passes.
            level_s: Seconds of a level of the model's draft.
            lookup: P(a lookup's next token is right) where it has a match.
            model: P(the model's next token is right).
            hits: Share of the text in which the lookup has matches, in stretches.
            batch: Sequences.
        """
        self.curve, self.level_s, self.batch = CostCurve(*curve), level_s, batch
        self.lookup, self.model, self.hits = lookup, model, hits
        self.random, self.places = random.Random(3), [37 * row for row in range(batch)]
        self.seconds = self.tokens = 0.0
        self.num_asked = [0, 0]

    def run(self, made: Goodput | None, iterations: int, always: tuple[int, ...] = ()) -> float:
        """Tokens a second; without a controller those of `always`, verified whole."""
        self.seconds = self.tokens = 0.0
        self.num_asked = [0, 0]
        for _ in range(iterations):
            self.iterate(made, always)
        return self.tokens / self.seconds

    def iterate(self, made: Goodput | None, always: tuple[int, ...]) -> None:
        """One iteration. The target's text is 1, 2, 3, …; tokens above 100 and 200 are wrong ones of either."""
        batch = self.batch
        drafts = [
            [self._draft(self.lookup, 100) if self._has_match(row) else [] for row in range(batch)],
            [self._draft(self.model, 200) for _ in range(batch)],
        ]
        trees: dict[int, TokenTree] = {}
        asked: list[tuple[int, int, float]] = []

        def took(i: int, depth: int) -> float:
            self.num_asked[i] += 1
            return 0.001 if i == 0 else self.level_s * depth

        def ask(i: int, depth: int) -> None:
            depth = min(depth, DEPTH)
            rows = [TreeRow([0, *each[:depth]], range(-1, len(each[:depth]))) for each in drafts[i]]
            trees[i] = TokenTree.from_rows(rows)
            asked.append((i, trees[i].max_depth, took(i, depth)))

        draft_s = 0.0
        if made is None:
            draft_s = sum(took(i, DEPTH) for i in always)
            paths = [[[0, *drafts[i][b]] for i in always] for b in range(batch)]
            width = batch + sum(len(path) - 1 for each in paths for path in each)
        else:
            allotment = made.allot(batch)
            ask_now = allotment.first
            while ask_now is not None:
                for i in ask_now.drafters:
                    ask(i, ask_now.depth)
                ask_now = made.further(dict(trees))
            tree = made.select(trees) if trees else TokenTree.roots([0] * batch)
            width = int(tree.num_nodes.sum())
            paths = [_paths(row) for row in tree.rows()]
        accepted = [max((_agreeing(path[1:]) for path in each), default=0) for each in paths]
        draft_s, verify = draft_s + sum(seconds for _, _, seconds in asked), self.curve(width)
        self.seconds += draft_s + verify
        self.tokens += batch + sum(accepted)
        self.places = [place + n + 1 for place, n in zip(self.places, accepted, strict=True)]
        if made is not None:
            steps = [step(range(1, n + 2), width, tree_depth=DEPTH) for n in accepted]
            made.learn_step(record(steps, width, *asked, verify=verify))

    def _has_match(self, row: int) -> bool:
        """Whether the text of a sequence is one of those that were there before, for a stretch."""
        return (self.places[row] % 300) < 300 * self.hits

    def _draft(self, right: float, wrong: int) -> list[int]:
        """Tokens of a draft: right ones up to the first that is not."""
        tokens = []
        for depth in range(1, DEPTH + 1):
            if self.random.random() >= right:
                return [*tokens, *range(wrong + depth, wrong + DEPTH + 1)]
            tokens.append(depth)
        return tokens


def _agreeing(tokens: list[int]) -> int:
    """Leading tokens that are 1, 2, 3, …"""
    return next((i for i, token in enumerate(tokens) if token != i + 1), len(tokens))


def _paths(row: TreeRow) -> list[list[int]]:
    """Tokens of every path from the root."""
    paths = [[row.tokens[0]]]
    for node in range(1, len(row.tokens)):
        paths.append([*paths[row.parents[node]], row.tokens[node]])
    return paths


def controller(world: World) -> Goodput:
    chain = range(1, DEPTH + 2)
    return Goodput(CostCurve(*zip(*world.curve.points, strict=True)), nodes_by_depth=[chain, chain], max_nodes=64)


@pytest.mark.parametrize(
    ("curve", "keys", "is_model_worth_it"),
    [
        (FLAT, {"level_s": 0.05, "lookup": 0.9, "model": 0.8, "hits": 0.5}, True),
        (FLAT, {"level_s": 0.6, "lookup": 0.9, "model": 0.8, "hits": 0.9}, False),
        (FLAT, {"level_s": 0.05, "lookup": 0.1, "model": 0.8, "hits": 0.9}, True),
        (STEEP, {"level_s": 0.05, "lookup": 0.9, "model": 0.3, "hits": 0.5}, False),
        (FLAT, {"level_s": 0.05, "lookup": 0.9, "model": 0.8, "hits": 0.5, "batch": 4}, True),
        (FLAT, {"level_s": 5.0, "lookup": 0.5, "model": 0.99, "hits": 0.2, "batch": 8}, False),
    ],
)  # fmt: skip
def test_nothing_slower_is_chosen(curve: tuple, keys: dict, is_model_worth_it: bool) -> None:
    """No worse than asking nobody, always one, or always both; better than all of these where it depends."""
    world = World(curve, **keys)
    made = controller(world)
    world.run(made, 200)
    rate = world.run(made, 400)
    asked = world.num_asked[1] / 400
    rigid = [world.run(None, 500, always) for always in ((), (0,), (1,), (0, 1))]
    assert rate >= 0.93 * max(rigid), "the texts are drawn: 400 iterations tell a rate to about 3 %"
    assert asked >= 0.3 if is_model_worth_it else asked <= 0.25


def test_the_model_is_asked_where_the_lookup_has_nothing() -> None:
    world = World(FLAT, level_s=0.25, lookup=0.97, model=0.85, hits=0.6)
    made = controller(world)
    world.run(made, 300)
    rate = world.run(made, 500)
    assert 0.3 < world.num_asked[1] / 500 < 0.8
    assert world.num_asked[0] > 490, "what is free is asked in all iterations that do not measure plain decoding"
    assert rate > 1.1 * max(world.run(None, 500, always) for always in ((0,), (1,), (0, 1)))


def test_a_drafter_that_becomes_good_is_found() -> None:
    world = World(FLAT, level_s=0.2, lookup=0.6, model=0.05, hits=0.5)
    made = controller(world)
    world.run(made, 500)
    assert world.num_asked[1] < 75
    world.model = 0.95
    world.run(made, 600)
    world.run(made, 100)
    assert world.num_asked[1] > 40


def test_without_a_free_drafter_iterations_are_declined() -> None:
    """Two models that do not pay: no drafter is asked, with a reason."""
    cost, chain = CostCurve(*STEEP), range(1, 5)
    made = Goodput(cost, nodes_by_depth=[chain, chain], max_nodes=16, timed=[[(4, 8.0)], [(4, 12.0)]])
    num_asked = 0
    for _ in range(1500):
        allotment = made.allot(2)
        asked = allotment.declined is None
        trees = {}
        took = []
        if asked:
            num_asked += 1
            ask = allotment.first
            while ask is not None:
                for i in ask.drafters:
                    trees[i] = TokenTree.from_rows([TreeRow([5, 1], [-1, 0])] * 2)
                    took.append((i, 1, 2.0))
                ask = made.further(trees)
            made.select(trees)
        else:
            assert allotment.declined is not None
            assert allotment.declined.draft_cost > 1
        made.learn_step(record([step([9])] * 2, 2, *took, verify=1.4))
    assert 0 < num_asked < 30


def test_two_drafters_are_judged_by_themselves() -> None:
    """The same scores, but one drafter is right and the other never."""
    chain = range(1, 3)
    made = Goodput(CostCurve((1, 64), (1.0, 1.0 + 63 * 0.4)), nodes_by_depth=[chain, chain], max_nodes=16)
    scores = torch.tensor([[0.0, 0.6]]).log()
    trees = {i: replace(TokenTree.from_rows([TreeRow([5, i + 1], [-1, 0])]), scores=scores) for i in (0, 1)}
    for _ in range(40):
        made.allot(1)
        assert made.further(trees) is None
        chosen = made.select(trees)
        made.learn_step(record([step([2, 9], 1)], 2))
    assert chosen.rows()[0].tokens == [5, 2]
    assert chosen.source is not None
    assert chosen.source.tolist() == [[0b11, 0b10]]


def test_lookups_go_on_below_the_leaves_of_others() -> None:
    """A chain that the lookup knows after a drafted path is selected as long as such chains are right."""
    chain, curve = range(1, 9), ((1, 64), (1.0, 1.0 + 63 * 0.2))
    tree = replace(TokenTree.from_rows([TreeRow([5, 1, 2], [-1, 0, 1])]), scores=torch.tensor([[0.9, 0.9, 0.8]]).log())
    leaves: list[Leaf] = []

    def continued(leaf: Leaf) -> list[tuple[int, list[int]]]:
        leaves.append(leaf)
        return [(0, [3, 4, 5, 6])]

    def live(tokens: list[int]) -> TokenTree:
        made = Goodput(CostCurve(*curve), nodes_by_depth=[chain, chain], max_nodes=16)
        for _ in range(60):
            made.allot(1)
            trees = {0: TokenTree.roots([5]), 1: tree}
            made.further(trees)
            chosen = made.select(trees, continued)
            made.learn_step(record([step(tokens, 2)], 3))
        return chosen

    good = live([1, 2, 3, 4, 5, 6, 7])
    assert good.rows()[0].tokens == [5, 1, 2, 3, 4, 5, 6]
    assert good.source is not None
    assert good.source[0, 1:].tolist() == [2, 2, 1, 1, 1, 1], "credited to the lookup"
    assert leaves[0] == Leaf(0, [1, 2])
    assert live([1, 2, 9]).rows()[0].tokens == [5, 1, 2]


def drawn(token: int) -> TokenTree:
    """A token drawn from a draft distribution over ten."""
    rows = torch.full((1, 1, 10), 0.1)
    kinds = torch.tensor([[DrawKind.ONE_HOT.value, DrawKind.INDEPENDENT.value]])
    drafts = DraftDistributions(kinds=kinds, rows=rows, row_of=torch.tensor([[-1, 0]]), max_siblings=1)
    return replace(TokenTree.from_rows([TreeRow([0, token], [-1, 0])]), distributions=drafts)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_draws_are_tested_in_the_order_in_which_drafters_were_asked(order: tuple[int, int]) -> None:
    """Whether the second is asked may depend on what the first drew: tested before the first, that is biased."""
    made = Goodput(CostCurve(*FLAT), nodes_by_depth=[range(1, 3)] * 2, max_nodes=8)
    trees = {i: drawn(3 + i) for i in order}
    made.allot(1)
    made.further({order[0]: trees[order[0]]})
    assert made.select(trees).tokens[0, 1:].tolist() == [3 + i for i in order]


def test_of_several_lookups_the_one_that_is_right_goes_on() -> None:
    """The longer answer, and the one listed first, is chosen only until it is known to be wrong."""
    tree = replace(TokenTree.from_rows([TreeRow([5, 1, 2], [-1, 0, 1])]), scores=torch.tensor([[0.9, 0.9, 0.8]]).log())
    made = Goodput(CostCurve((1, 64), (1.0, 1.1)), nodes_by_depth=[range(1, 9)] * 3, max_nodes=16)
    chosen = []
    for _ in range(30):
        made.allot(1)
        trees = {0: TokenTree.roots([5]), 1: TokenTree.roots([5]), 2: tree}
        made.further(trees)
        chosen.append(made.select(trees, lambda leaf: [(0, [9, 9, 9, 9, 9]), (1, [3, 4, 5])]))
        made.learn_step(record([step([1, 2, 3, 4, 5, 6], 2)], 3))
    assert chosen[0].rows()[0].tokens == [5, 1, 2, 9, 9, 9, 9, 9]
    assert chosen[-1].rows()[0].tokens == [5, 1, 2, 3, 4, 5]
    assert chosen[-1].source is not None
    assert chosen[-1].source[0, 1:].tolist() == [4, 4, 2, 2, 2], "credited to the second lookup"


@pytest.mark.parametrize("kind", ["drawn", "probes"])
def test_trees_that_are_verified_whole_fit_the_cache(kind: str) -> None:
    """Of three such trees those asked last are left out, by how large they could have been."""
    row = TreeRow([0, *range(1, 11)], range(-1, 10))
    tree = TokenTree.from_rows([row] * 2)
    if kind == "drawn":
        rows = torch.full((2, 1, 64), 1 / 64)
        kinds = torch.full_like(tree.tokens, DrawKind.INDEPENDENT.value)
        drafts = DraftDistributions(kinds=kinds, rows=rows, row_of=torch.zeros_like(kinds), max_siblings=1)
        trees = [replace(tree, distributions=drafts)] * 3
    else:  # of other tokens each, so that none joins another's
        source = torch.full_like(tree.tokens, PROBE)
        trees = [
            replace(tree, tokens=tree.tokens + 11 * (tree.depths > 0) * i, source=source, host_facts=None)
            for i in range(3)
        ]  # fmt: skip
    made = Goodput(CostCurve((1,), (1.0,)), nodes_by_depth=[(1, *[16] * 10)] * 3, max_nodes=32)
    made.allot(2)
    made.further({2: trees[2]})
    merged = made.select({2: trees[2], 0: trees[0], 1: trees[1]})
    assert merged.source is not None
    assert int(merged.num_nodes.max()) == 21
    assert (merged.source & ~PROBE)[0, 1:].unique().tolist() == [0b001, 0b100]
