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
    stopped,
    tables,
    without_improbable,
    without_replacement,
)
from end_to_end.stop_rules import stop_rule
from enumeration import EXACT, Drafts, ExactLaw, Rule, exact_distribution

from foretoken.acceptance.rules import accept_block, accept_coupled, accept_greedy, accept_kseq, accept_sequential
from foretoken.acceptance.select import LOSSLESS_RULES, AcceptancePolicy
from foretoken.acceptance.traversal import accept_traversal
from foretoken.core.token_tree import DrawKind
from foretoken.trees.stopping import STOP_CONTROLS

RULES: dict[str, Rule] = {
    "greedy": lambda tree, log_probs, _: accept_greedy(tree, lambda nodes: log_probs(nodes).argmax(1)),
    "coupled": accept_coupled,
    "sequential": accept_sequential,
    "block": accept_block,
    "traversal": accept_traversal,
    "kseq": accept_kseq,
}
OF_TREES = ("sequential", "traversal", "kseq")

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


def law(rule: str, every_draft: Drafts, target: torch.Tensor) -> ExactLaw:
    """What a rule does; block and traversal verification look at nodes in another order than a walk does."""
    return exact_distribution(RULES[rule], every_draft, target, walks=rule not in ("block", "traversal"))


def test_every_lossless_rule_is_tested() -> None:
    assert set(RULES) == set(LOSSLESS_RULES)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rule", OF_TREES)
def test_trees(rule: str, shape: Sequence[int], draw: str, case: str) -> None:
    vocab = vocab_for(shape)
    target, draft = tables(case, vocab, len(shape))
    every_draft = drafts([DRAWS[draw](draft, width) for width in shape], vocab)
    assert law(rule, every_draft, target).error <= EXACT


SIZES = [  # rule, draws, widths, vocabulary: what `vocab_for` leaves out
    *(
        ("traversal", "without replacement", widths, v)
        for widths, v in (((2,), 3), ((1, 2), 3), ((2, 2), 4), ((2, 1, 1), 4))
    ),
    *(("kseq", "independent", widths, v) for widths, v in (((2,), 3), ((1, 2), 3), ((3,), 4), ((4,), 3), ((2, 2), 4))),
]
FEW = ("zeros in q", "one-hot p", "one-hot q")  # the others take ten seconds each for 4096 drafts


@pytest.mark.parametrize(
    ("rule", "draw", "widths", "vocab", "case"),
    [(*each, case) for each in SIZES for case in (FEW if each == SIZES[-1] else CASES)],
)
def test_trees_and_other_vocabularies(rule: str, draw: str, widths: Sequence[int], vocab: int, case: str) -> None:
    target, draft = tables(case, vocab, len(widths))
    every_draft = drafts([DRAWS[draw](draft, width) for width in widths], vocab)
    assert law(rule, every_draft, target).error <= EXACT


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
@pytest.mark.parametrize("rule", OF_TREES)
def test_mixed_kinds(rule: str, mixture: str, case: str) -> None:
    target, draft = tables(case, 4, 1)
    other = random_table(4, 1, seed=7)
    every_draft = drafts([MIXED[mixture](draft, other)], 4)
    assert law(rule, every_draft, target).error <= EXACT


@pytest.mark.parametrize("mixture", ["one drawn, two best", "two sources", "one best, then two drawn"])
@pytest.mark.parametrize("rule", OF_TREES)
def test_mixed_kinds_in_depth(rule: str, mixture: str) -> None:
    target, draft = tables("dense", 3, 2)
    other = random_table(3, 2, seed=7)
    every_draft = drafts([MIXED[mixture](draft, other), best_and_one(draft, 2)], 3)
    assert law(rule, every_draft, target).error <= EXACT


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("vocab", [3, 4])
@pytest.mark.parametrize("rule", ["block", "traversal", "kseq"])
def test_chains(rule: str, vocab: int, gamma: int, case: str) -> None:
    target, draft = tables(case, vocab, gamma)
    every_draft = drafts([independent(draft, 1)] * gamma, vocab)
    assert law(rule, every_draft, target).error <= EXACT


@pytest.mark.parametrize("case", ["dense", "equal"])
@pytest.mark.parametrize(
    "rule", ["sequential", "sequential, tree", "block", "traversal", "traversal, tree", "kseq, tree"]
)
def test_drafts_that_end_below_improbable_draws(rule: str, case: str) -> None:
    """Pruning of sampled requests: a draw stays, and whether anything follows it depends on its probability."""
    shape, draw = ((2, 1), without_replacement) if rule.endswith("tree") else ((1, 1, 1), independent)
    draw = independent if rule.startswith("kseq") else draw
    target, draft = tables(case, 3, len(shape))
    every_draft = drafts([ending(draw(draft, width), draft, 0.3) for width in shape], 3)
    assert len(set(every_draft.tree.num_nodes.tolist())) > 1, "some drafts end early"
    assert law(rule.split(",")[0], every_draft, target).error <= EXACT


@pytest.mark.parametrize("control", STOP_CONTROLS)
@pytest.mark.parametrize(
    "rule", ["sequential", "sequential, tree", "block", "traversal", "traversal, tree", "kseq, tree"]
)
def test_drafts_that_end_by_a_stop_rule(rule: str, control: str) -> None:
    """The token that ends a draft is verified, and each path decides alone whether anything follows."""
    shape, draw = ((2, 1), without_replacement) if rule.endswith("tree") else ((1, 1, 1), independent)
    draw = independent if rule.startswith("kseq") else draw
    target, draft = tables("dense", 3, len(shape))
    levels = [stopped(draw(draft, width), draft, stop_rule(control)) for width in shape]
    every_draft = drafts(levels, 3)
    assert len(set(every_draft.tree.num_nodes.tolist())) > 1, "some drafts end early"
    assert law(rule.split(",")[0], every_draft, target).error <= EXACT


@pytest.mark.parametrize("rule", [*OF_TREES, "coupled"])
def test_chosen_nodes_may_be_left_out_by_their_probability(rule: str) -> None:
    target, draft = tables("dense", 3, 2)
    every_draft = drafts([without_improbable(best(draft, 2), draft, 0.3)] * 2, 3)
    assert law(rule, every_draft, target).error <= EXACT


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


@pytest.mark.parametrize("rule", [*OF_TREES, "coupled"])
def test_root_alone_is_a_plain_step(rule: str) -> None:
    target = random_table(4, 0, seed=3)
    distribution = exact_distribution(RULES[rule], drafts([], 4), target)
    assert distribution.error <= EXACT
    assert distribution.num_accepted == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_chains_of_other_random_tables(seed: int) -> None:
    target, draft = tables("dense", 3, 3, seed)
    every_draft = drafts([independent(draft, 1)] * 3, 3)
    for rule in (accept_sequential, accept_block, accept_traversal, accept_kseq):
        assert exact_distribution(rule, every_draft, target).error <= EXACT


@pytest.mark.parametrize("seed", range(5))
def test_trees_of_other_random_tables(seed: int) -> None:
    target, draft = tables("dense", 3, 2, seed)
    for rule, draw in (("traversal", without_replacement), ("traversal", independent), ("kseq", independent)):
        assert law(rule, drafts([draw(draft, 2), draw(draft, 2)], 3), target).error <= EXACT


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
