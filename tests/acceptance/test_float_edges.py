"""Every lossless rule has the target distribution in the engine's numbers: float32, from logits in float32 or bfloat16.

Every pair of `LOGITS` is a target and a drafter: subnormal probabilities, exact zeros, equal and disjoint ones, and
rows that sum to 1 after rounding only. Then the issue's own numbers, through the engine's drafting and acceptance.
"""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from chi_square import chi_square_p_value
from drafting import Proposal, best, best_and_one, independent, joined, without_replacement
from enumeration import EXACT_32
from float_edges import DTYPES, LOGITS, VOCAB, engine_drafts, rotated, table
from lossless_rules import OF_TREES, worst
from torch import Tensor

from foretoken.acceptance.rules import normalised
from foretoken.acceptance.select import AcceptancePolicy, accept
from foretoken.core.sampling_params import SamplingParams
from foretoken.core.token_tree import DrawKind
from foretoken.sampling.batch import SamplingBatch, SamplingRequest
from foretoken.sampling.draft_draws import DraftDraws, stated_probs
from foretoken.sampling.node_scores import NodeScores
from foretoken.trees.choices import TreeShape
from foretoken.trees.expansion import TreeExpansion

DRAWS: dict[str, Callable[[Tensor], list[Proposal]]] = {
    "two without replacement": lambda q: [without_replacement(q, 2)],
    "all without replacement": lambda q: [without_replacement(q, 4)],
    "two independent": lambda q: [independent(q, 2)],
    "best and one": lambda q: [best_and_one(q, 2)],
    "two drafters": lambda q: [joined(without_replacement(q, 2), independent(q.flip(1), 1))],
    "best": lambda q: [best(q, 2)],
}
TREES: dict[str, Callable[[Tensor], list[Proposal]]] = {
    "chain": lambda q: [independent(q, 1)] * 3,
    "tree": lambda q: [without_replacement(q, 2), independent(q, 1)],
    "second level": lambda q: [independent(q, 1), without_replacement(q, 2)],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("draw", DRAWS)
def test_pairs(draw: str, dtype: torch.dtype) -> None:
    """Every pair for two draws in float32, and every fourth pair elsewhere; coupled acceptance reads no draft rows."""
    proposals = {q: engine_drafts(DRAWS[draw](table([q], dtype))) for q in LOGITS}
    targets = {p: table(rotated(p, 1 + VOCAB), dtype) for p in LOGITS}
    pairs = [*product(LOGITS, LOGITS)][:: 1 if draw.startswith("two w") and dtype == torch.float32 else 4]
    cases = {f"target {p}, draft {q}": (proposals[q], targets[p]) for p, q in pairs}
    for rule in (*OF_TREES, *["coupled"] * (draw == "best")):
        error, where = worst(rule, cases, torch.float32)
        assert error <= EXACT_32, (rule, where)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tree", TREES)
def test_in_depth(tree: str, dtype: torch.dtype) -> None:
    """Every context has another of the distributions, on both sides, so that all of them meet below each other."""
    contexts = sum(VOCAB**d for d in range(1 + len(TREES[tree](torch.ones(1, VOCAB)))))
    names, cases = list(LOGITS), {}
    for shift, name in enumerate(names):
        q = table(rotated(name, contexts), dtype)
        p = table(rotated(names[(7 * shift + 3) % len(names)], contexts), dtype)
        every_draft = engine_drafts(TREES[tree](q))
        cases[f"draft from {name} on"] = every_draft, p
        cases[f"draft and target from {name} on"] = every_draft, q
    for rule in (*OF_TREES, *["block"] * (tree == "chain")):
        error, where = worst(rule, cases, torch.float32)
        assert error <= EXACT_32, (rule, where)


def test_the_logits_are_at_the_edges() -> None:
    """Normal, subnormal and zero probabilities below a leader, and rows whose float32 sum is not 1."""
    rows = torch.tensor(list(LOGITS.values())).log_softmax(1).exp()
    smallest = torch.finfo(torch.float32).tiny
    assert ((rows > 0) & (rows < smallest)).any(1).sum() >= 4
    assert ((rows >= smallest) & (rows < 1e-37)).any()
    assert (rows.double().sum(1) != 1).any()
    assert (stated_probs(rows.log()) == 0).any(1).sum() > (rows == 0).any(1).sum()


@pytest.mark.parametrize("weights", [(0.2, 0.3, 0.1), (1e-40, 3e-40, 0.0), (1e-45, 1e-45, 0.0), (0.0, 0.0, 0.0)])
def test_normalised(weights: tuple[float, ...]) -> None:
    exact = torch.tensor([weights]).double()
    expected = exact / exact.sum() if exact.sum() > 0 else exact
    # One rounding of the sum and one of the quotient, each 2^-24 relative.
    torch.testing.assert_close(normalised(torch.tensor([weights])).double(), expected, rtol=2**-23, atol=0)


# The drafter's best token leads by 90 to 93 nats; without the mend the text had .499, .362, .122, .017.
DRAFT_LOGITS, TARGET, TEMPERATURE = (0.0, -9.0, -9.11, -9.3), (0.5, 0.1, 0.1, 0.3), 0.1
SEQUENCES = 20_000


def first_tokens(rule: str, shape: TreeShape) -> Tensor:
    """(V,) how often each token comes first, of requests without a seed, drafted and verified as the engine does."""
    params, root = SamplingParams(temperature=TEMPERATURE), torch.full((SEQUENCES,), 9)
    # An engine draws a number for each request without a seed.
    batch = SamplingBatch.build([SamplingRequest(params=params, seed=own) for own in range(SEQUENCES)], VOCAB)
    policy = AcceptancePolicy(rule=rule)
    expansion = TreeExpansion(
        shape,
        torch.zeros(SEQUENCES, dtype=torch.int64),
        DraftDraws.build(batch, [policy.is_coupled(is_seeded=False)] * SEQUENCES, root),
    )
    for depth in expansion.levels():
        count = expansion.frontier(depth).tokens.shape[1]
        expansion.grow(depth, torch.tensor(DRAFT_LOGITS).expand(SEQUENCES, count, VOCAB))
    tree = expansion.finish(range(SEQUENCES), [shape.depth] * SEQUENCES, [0] * SEQUENCES)
    scores = NodeScores(
        tree=tree,
        logits=(torch.tensor(TARGET).log() * TEMPERATURE).expand(SEQUENCES * tree.width, VOCAB),
        starts=torch.arange(SEQUENCES) * tree.width,
        has_row_for_each=True,
        batch=batch,
        history=None,
    )
    chosen = policy.rule_for(tree, is_greedy=False, is_seeded=False)
    assert chosen == ("sequential" if rule == "auto" else rule)
    result = accept(scores, [chosen] * SEQUENCES, policy, root)
    drafted = tree.tokens.gather(1, result.path[:, :1].clamp_min(0))[:, 0]
    return torch.where(result.num_accepted > 0, drafted, result.next_token).bincount(minlength=VOCAB)


@pytest.mark.parametrize("widths", [(2,), (2, 2), (4,)], ids=str)
@pytest.mark.parametrize("rule", ["auto", "traversal"])
def test_siblings_far_below_the_best_token(rule: str, widths: tuple[int, ...]) -> None:
    """Chi-square at level 1e-6, three degrees of freedom: 4 n d^2 of total variation d finds all with d > 0.025."""
    assert chi_square_p_value(first_tokens(rule, TreeShape.cartesian(widths)), torch.tensor(TARGET).double()) > 1e-6


@pytest.mark.parametrize("rule", ["auto", "traversal"])
def test_the_former_formula_is_refused(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = torch.finfo(torch.float32).tiny
    monkeypatch.setattr("foretoken.trees.expansion.stated_probs", torch.exp)
    monkeypatch.setattr(
        "foretoken.acceptance.sampled_rules.normalised", lambda left: left / left.sum(1, keepdim=True).clamp_min(tiny)
    )
    counts = first_tokens(rule, TreeShape.cartesian((2, 2)))
    assert chi_square_p_value(counts, torch.tensor(TARGET).double()) < 1e-6


def test_drafts_of_the_enumeration_are_those_of_the_engine() -> None:
    """Rows and kinds: a token without a stated probability is a choice, for the expansion and for `engine_drafts`."""
    for name, logits in LOGITS.items():
        params, many = SamplingParams(), 64
        batch = SamplingBatch.build([SamplingRequest(params=params, seed=own) for own in range(many)], VOCAB)
        draws = DraftDraws.build(batch, [False] * many, torch.full((many,), 3))
        expansion = TreeExpansion(TreeShape.cartesian((3,)), torch.zeros(many, dtype=torch.int64), draws)
        expansion.grow(0, torch.tensor(logits).expand(many, 1, VOCAB))
        tree = expansion.finish(range(many), [1] * many, [0] * many)
        ours = engine_drafts([without_replacement(table([name], torch.float32), 3)])
        assert tree.distributions is not None
        assert ours.tree.distributions is not None
        stated, expected = tree.distributions.rows[0, 0], ours.tree.distributions.rows[0, 0]
        # Two roundings of a log-probability near -87, by 2^-18 each.
        torch.testing.assert_close(stated, expected, rtol=1e-5, atol=0)
        is_drawn = expected[tree.tokens[:, 1:]] > 0
        assert torch.equal(tree.distributions.kinds[:, 1:] == DrawKind.WITHOUT_REPLACEMENT, is_drawn)
