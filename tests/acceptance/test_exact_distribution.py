"""Every lossless rule has exactly the target distribution: all drafts, all choices, no randomness."""

from collections.abc import Callable, Sequence

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
    independent,
    joined,
    random_table,
    tables,
    without_improbable,
    without_replacement,
)
from enumeration import EXACT, Rule, exact_distribution

from foretoken.acceptance.rules import accept_block, accept_coupled, accept_greedy, accept_sequential
from foretoken.acceptance.select import LOSSLESS_RULES
from foretoken.core.token_tree import DrawKind

RULES: dict[str, Rule] = {
    "greedy": lambda tree, log_probs, _: accept_greedy(tree, lambda nodes: log_probs(nodes).argmax(1)),
    "coupled": accept_coupled,
    "sequential": accept_sequential,
    "block": accept_block,
}

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


def test_every_lossless_rule_is_tested() -> None:
    assert set(RULES) == set(LOSSLESS_RULES)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sequential(shape: Sequence[int], draw: str, case: str) -> None:
    vocab = vocab_for(shape)
    target, draft = tables(case, vocab, len(shape))
    every_draft = drafts([DRAWS[draw](draft, width) for width in shape], vocab)
    assert exact_distribution(accept_sequential, every_draft, target, walks=True).error <= EXACT


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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mixture", MIXED)
def test_sequential_with_mixed_kinds(mixture: str, case: str) -> None:
    target, draft = tables(case, 4, 1)
    other = random_table(4, 1, seed=7)
    every_draft = drafts([MIXED[mixture](draft, other)], 4)
    assert exact_distribution(accept_sequential, every_draft, target, walks=True).error <= EXACT


@pytest.mark.parametrize("mixture", ["one drawn, two best", "two sources"])
def test_sequential_with_mixed_kinds_in_depth(mixture: str) -> None:
    target, draft = tables("dense", 3, 2)
    other = random_table(3, 2, seed=7)
    every_draft = drafts([MIXED[mixture](draft, other), best_and_one(draft, 2)], 3)
    assert exact_distribution(accept_sequential, every_draft, target, walks=True).error <= EXACT


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("vocab", [3, 4])
def test_block(vocab: int, gamma: int, case: str) -> None:
    target, draft = tables(case, vocab, gamma)
    every_draft = drafts([independent(draft, 1)] * gamma, vocab)
    assert exact_distribution(accept_block, every_draft, target).error <= EXACT


@pytest.mark.parametrize("case", ["dense", "equal"])
@pytest.mark.parametrize("rule", ["sequential", "sequential, tree", "block"])
def test_drafts_that_end_below_improbable_draws(rule: str, case: str) -> None:
    """Pruning of sampled requests: a draw stays, and whether anything follows it depends on its probability."""
    shape, draw = ((2, 1), without_replacement) if rule.endswith("tree") else ((1, 1, 1), independent)
    target, draft = tables(case, 3, len(shape))
    every_draft = drafts([ending(draw(draft, width), draft, 0.3) for width in shape], 3)
    assert len(set(every_draft.tree.num_nodes.tolist())) > 1, "some drafts end early"
    distribution = exact_distribution(RULES[rule.split(",")[0]], every_draft, target, walks=rule != "block")
    assert distribution.error <= EXACT


@pytest.mark.parametrize("rule", ["sequential", "coupled"])
def test_chosen_nodes_may_be_left_out_by_their_probability(rule: str) -> None:
    target, draft = tables("dense", 3, 2)
    every_draft = drafts([without_improbable(best(draft, 2), draft, 0.3)] * 2, 3)
    assert exact_distribution(RULES[rule], every_draft, target, walks=True).error <= EXACT


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("shape", [(1, 1), (2, 2)], ids=str)
def test_coupled(shape: Sequence[int], draw: str, case: str) -> None:
    target, draft = tables(case, 3, len(shape))
    every_draft = drafts([DRAWS[draw](draft, width) for width in shape], 3)
    assert exact_distribution(accept_coupled, every_draft, target, walks=True).error <= EXACT


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_greedy(shape: Sequence[int], draw: str) -> None:
    target, draft = tables("one-hot p", 3, len(shape))
    every_draft = drafts([DRAWS[draw](draft, width) for width in shape], 3)
    assert exact_distribution(RULES["greedy"], every_draft, target).error <= EXACT


@pytest.mark.parametrize("rule", ["coupled", "sequential"])
def test_root_alone_is_a_plain_step(rule: str) -> None:
    target = random_table(4, 0, seed=3)
    distribution = exact_distribution(RULES[rule], drafts([], 4), target)
    assert distribution.error <= EXACT
    assert distribution.num_accepted == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_chains_of_other_random_tables(seed: int) -> None:
    target, draft = tables("dense", 3, 3, seed)
    every_draft = drafts([independent(draft, 1)] * 3, 3)
    for rule in (accept_sequential, accept_block):
        assert exact_distribution(rule, every_draft, target).error <= EXACT
