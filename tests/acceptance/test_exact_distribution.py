"""Every lossless rule has exactly the target distribution: all drafts, all choices, no randomness.

All cases of a rule and a way to draw are enumerated in one batch; a failure names the case.
"""

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from drafting import (
    CASES,
    Child,
    Proposal,
    best,
    best_and_one,
    drafts,
    ending,
    for_all,
    independent,
    joined,
    random_table,
    stopped,
    tables,
    without_improbable,
    without_replacement,
)
from end_to_end.stop_rules import stop_rule
from enumeration import EXACT, Drafts, ExactLaw, exact_distribution
from lossless_rules import OF_TREES, RULES, laws, worst
from torch import Tensor

from foretoken.acceptance.select import LOSSLESS_RULES, AcceptancePolicy
from foretoken.core.token_tree import DrawKind
from foretoken.trees.stopping import STOP_CONTROLS

SHAPES = ((1,), (1, 1), (1, 1, 1), (2,), (2, 2), (1, 2), (2, 1, 1))
ProposalMaker = Callable[[torch.Tensor, int], Proposal]
DRAWS: dict[str, ProposalMaker] = {
    "independent": independent,
    "without replacement": without_replacement,
    "one-hot": best,
    "best and one": best_and_one,
}


def vocab_for(shape: Sequence[int]) -> int:
    """4 where the number of drafts allows it: V = 4 on (2, 2) has 4096 drafts, on (2, 1, 1) as many and deeper."""
    return 4 if sum(shape) <= 3 else 3


@cache
def case_of(draw: str, shape: tuple[int, ...], vocab: int, case: str) -> tuple[Drafts, Tensor]:
    """Every draft of a shape, and the target."""
    target, draft = tables(case, vocab, len(shape))
    return drafts([DRAWS[draw](draft, width) for width in shape], vocab), target


def law(rule: str, every_draft: Drafts, target: Tensor) -> ExactLaw:
    """What a rule does."""
    return laws(rule, {"": (every_draft, target)})[""]


def test_every_lossless_rule_is_tested() -> None:
    assert set(RULES) == set(LOSSLESS_RULES)


def cases_for(rule: str, draw: str) -> tuple[str, ...]:
    """Two of `CASES` for the widest trees: with four kinds of draws, every rule meets every case."""
    first = 2 * list(DRAWS).index(draw) + OF_TREES.index(rule)
    return tuple(CASES[(first + step) % len(CASES)] for step in range(2))


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("rule", OF_TREES)
def test_trees(rule: str, draw: str) -> None:
    for vocab in (3, 4):
        names = CASES if vocab == 4 else cases_for(rule, draw)
        shapes = [shape for shape in SHAPES if vocab_for(shape) == vocab]
        cases = {f"{shape}, {case}": case_of(draw, shape, vocab, case) for shape in shapes for case in names}
        error, where = worst(rule, cases)
        assert error <= EXACT, where


def test_every_rule_meets_every_case() -> None:
    for rule in OF_TREES:
        assert {case for draw in DRAWS for case in cases_for(rule, draw)} == set(CASES)


@pytest.mark.parametrize("draw", DRAWS)
def test_coupled(draw: str) -> None:
    cases = {f"{shape}, {case}": case_of(draw, shape, 3, case) for shape in ((1, 1), (2, 2)) for case in CASES}
    error, where = worst("coupled", cases)
    assert error <= EXACT, where


def first_drawn_independently(draft: torch.Tensor) -> Proposal:
    """Two draws without replacement, the first of them marked as what it also is, an independent draw."""
    draw_two = without_replacement(draft, 2)

    def propose(context: int) -> list[tuple[list[Child], float]]:
        return [([first._replace(kind=DrawKind.INDEPENDENT), *rest], p) for (first, *rest), p in draw_two(context)]

    return propose


MIXED: dict[str, Callable[[torch.Tensor, torch.Tensor], Proposal]] = {
    "one drawn, two best": lambda q, r: joined(independent(q, 1), best(r, 2)),
    "one best, then two drawn": lambda q, r: joined(best(r, 1), independent(q, 2)),
    "two sources": lambda q, r: joined(independent(q, 1), without_replacement(r, 2)),
    "two without replacement, one best": lambda q, r: joined(without_replacement(q, 2), best(r, 1)),
    "best and one, and another source": lambda q, r: joined(best_and_one(q, 2), independent(r, 1)),
    "independent, then without replacement": lambda q, _: first_drawn_independently(q),
    "the same one-hot token twice": lambda q, _: joined(best(q, 1), best(q, 1)),
}


@cache
def mixed_cases(depth: int) -> dict[str, tuple[Drafts, Tensor]]:
    """Every mixture in every case, or, two levels deep, some of them in one case."""
    if depth == 1:
        other, mixtures = random_table(4, 1, seed=7), [*MIXED]
        found = {(mixture, case): tables(case, 4, 1) for mixture in mixtures for case in CASES}
        return {f"{m}, {c}": (drafts([MIXED[m](q, other)], 4), p) for (m, c), (p, q) in found.items()}
    (p, q), other = tables("dense", 3, 2), random_table(3, 2, seed=7)
    mixtures = ["one drawn, two best", "two sources", "one best, then two drawn"]
    return {mixture: (drafts([MIXED[mixture](q, other), best_and_one(q, 2)], 3), p) for mixture in mixtures}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("rule", OF_TREES)
def test_mixed_kinds(rule: str, depth: int) -> None:
    error, where = worst(rule, mixed_cases(depth))
    assert error <= EXACT, where


@pytest.mark.parametrize("rule", OF_TREES)
def test_rows_that_serve_a_whole_level(rule: str) -> None:
    """The children of two siblings are drawn from one row: none excludes what was drawn below the other node."""
    cases = {}
    for case in CASES:
        target, draft = tables(case, 3, 2)
        levels = [for_all(without_replacement(each, 2)) for each in (draft, draft[1:])]
        cases[case] = drafts(levels, 3), target
    assert worst(rule, cases)[0] <= EXACT, worst(rule, cases)


@pytest.mark.parametrize("vocab", [3, 4])
@pytest.mark.parametrize("rule", ["block", "traversal"])
def test_chains(rule: str, vocab: int) -> None:
    shapes = ((1,), (1, 1), (1, 1, 1))
    cases = {f"{shape}, {case}": case_of("independent", shape, vocab, case) for shape in shapes for case in CASES}
    error, where = worst(rule, cases)
    assert error <= EXACT, where


@cache
def ending_drafts(form: str) -> dict[str, tuple[Drafts, Tensor]]:
    """Drafts that end by what was drawn: below improbable draws, or by a stop rule."""
    shape, draw = {
        "chain": ((1, 1, 1), independent),
        "tree": ((2, 1), without_replacement),
    }[form]
    cases = {}
    for case in ("dense", "equal"):
        p, q = tables(case, 3, len(shape))
        cases[f"below 0.3, {case}"] = drafts([ending(draw(q, width), q, 0.3) for width in shape], 3), p
    p, q = tables("dense", 3, len(shape))
    for control in STOP_CONTROLS:
        levels = [stopped(draw(q, width), q, stop_rule(control)) for width in shape]
        cases[f"{control}"] = drafts(levels, 3), p
    return cases


@pytest.mark.parametrize(
    ("rule", "form"),
    [
        ("sequential", "chain"), ("sequential", "tree"), ("block", "chain"), ("traversal", "chain"),
        ("traversal", "tree"),
    ],
)  # fmt: skip
def test_drafts_that_end_by_what_was_drawn(rule: str, form: str) -> None:
    """A draw stays, and whether anything follows it depends on its probability, or on a stop rule for its path."""
    cases = ending_drafts(form)
    assert all(len(set(each.tree.num_nodes.tolist())) > 1 for each, _ in cases.values()), "some drafts end early"
    error, where = worst(rule, cases)
    assert error <= EXACT, where


@pytest.mark.parametrize("rule", [*OF_TREES, "coupled"])
def test_chosen_nodes_may_be_left_out_by_their_probability(rule: str) -> None:
    target, draft = tables("dense", 3, 2)
    every_draft = drafts([without_improbable(best(draft, 2), draft, 0.3)] * 2, 3)
    assert law(rule, every_draft, target).error <= EXACT


@pytest.mark.parametrize("draw", DRAWS)
def test_greedy(draw: str) -> None:
    cases = {f"{shape}": case_of(draw, shape, 3, "one-hot p") for shape in SHAPES}
    error, where = worst("greedy", cases)
    assert error <= EXACT, where


@pytest.mark.parametrize("rule", [*OF_TREES, "coupled"])
def test_root_alone_is_a_plain_step(rule: str) -> None:
    target = random_table(4, 0, seed=3)
    distribution = exact_distribution(RULES[rule], drafts([], 4), target)
    assert distribution.error <= EXACT
    assert distribution.num_accepted == 0.0


@pytest.mark.parametrize("rule", ["block", "traversal"])
def test_a_rule_that_draws_choose_would_be_seen(rule: str) -> None:
    """Both rules are lossless. One of them where the second node holds token 0, and the other elsewhere, is not."""
    target, draft = tables("dense", 3, 2)
    every_draft = drafts([independent(draft, 1)] * 2, 3)
    is_first = every_draft.tree.tokens[:, 2] == 0
    total = torch.zeros(27, dtype=torch.float64)
    for name, rows in ((rule, is_first), ("sequential", ~is_first)):
        part = Drafts(every_draft.tree.select(rows), every_draft.contexts[rows], every_draft.probs[rows])
        total += law(name, part, target).tokens
    assert abs(total.sum().item() - 1) <= EXACT
    assert (total - law(rule, every_draft, target).target).abs().max() > 1e-3


def test_the_rule_of_a_tree_that_pruning_made_a_chain_does_not_depend_on_draws() -> None:
    """Two single draws, then two siblings unless an earlier draw was improbable: some of these trees are chains."""
    target, draft = random_table(3, 3, 0), random_table(3, 2, 1000)
    levels = [independent(draft, 1), independent(draft, 1), without_replacement(draft, 2)]
    every_draft = drafts([ending(level, draft, 0.3) for level in levels], 3)
    num_trees = len(every_draft.probs)
    rules = [
        AcceptancePolicy().rule_for(every_draft.tree, is_greedy=False, is_seeded=False, row=row)
        for row in range(num_trees)
    ]
    total = torch.zeros(())
    for name in set(rules):
        rows = torch.tensor([rule == name for rule in rules])
        part = Drafts(every_draft.tree.select(rows), every_draft.contexts[rows], every_draft.probs[rows])
        total = total + law(name, part, target).tokens
    assert (total - law("sequential", every_draft, target).target).abs().max() <= EXACT
    assert (every_draft.tree.num_nodes == 3).any()
