"""How many drafted tokens a rule keeps, against the closed forms of the papers."""

from collections.abc import Iterable, Sequence

import pytest
import torch
from drafting import best, best_and_one, drafts, independent, random_table, tables, without_replacement
from enumeration import EXACT, Drafts, exact_distribution
from lossless_rules import OF_TREES, laws
from torch import Tensor

from foretoken.acceptance.rules import KeyedDecisions, accept_coupled
from foretoken.acceptance.sampled_rules import accept_block, accept_sequential
from foretoken.sampling.noise import KeyedNoise, Purpose


def chain_length(target: Tensor, draft: Tensor, gamma: int, context: int = 0) -> float:
    """E(c) = sum_x min(p_c(x), q_c(x)) (1 + E(c x)), Leviathan et al. 2211.17192."""
    if gamma == 0:
        return 0.0
    vocab = target.shape[1]
    overlap = torch.minimum(target[context], draft[context]).tolist()
    children = (context * vocab + 1 + x for x in range(vocab))
    return sum(o * (1 + chain_length(target, draft, gamma - 1, c)) for o, c in zip(overlap, children, strict=True))


def best_length(target: Tensor, draft: Tensor, widths: Sequence[int], context: int = 0) -> float:
    """E(c) = sum of p_c(x) (1 + E(c x)) over the children x."""
    if not widths:
        return 0.0
    children = draft[context].topk(widths[0]).indices.tolist()
    below = [best_length(target, draft, widths[1:], context * target.shape[1] + 1 + x) for x in children]
    return sum(target[context, x].item() * (1 + b) for x, b in zip(children, below, strict=True))


def chains(gamma: int, seeds: Iterable[int], vocab: int = 3) -> list[tuple[Drafts, Tensor]]:
    """Chains drawn from random tables, and their targets."""
    found = [tables("dense", vocab, gamma, seed) for seed in seeds]
    return [(drafts([independent(draft, 1)] * gamma, vocab), target) for target, draft in found]


def lengths(rule: str, cases: Sequence[tuple[Drafts, Tensor]]) -> list[float]:
    """Expected accepted tokens of each case."""
    return [law.num_accepted for law in laws(rule, {str(i): case for i, case in enumerate(cases)}).values()]


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_sequential_chain(gamma: int) -> None:
    for seed, length in enumerate(lengths("sequential", chains(gamma, range(3)))):
        assert abs(length - chain_length(*tables("dense", 3, gamma, seed), gamma)) <= EXACT


@pytest.mark.parametrize("rule", [accept_sequential, accept_coupled])
@pytest.mark.parametrize("widths", [(1,), (3,), (2, 2), (2, 1, 1)], ids=str)
def test_one_hot_tree(rule: object, widths: Sequence[int]) -> None:
    target, draft = tables("dense", 4, len(widths))
    distribution = exact_distribution(rule, drafts([best(draft, width) for width in widths], 4), target)
    assert abs(distribution.num_accepted - best_length(target, draft, widths)) <= EXACT


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_best_and_one(count: int, seed: int) -> None:
    """p(T) + sum over the others of min(p, q restricted to them), 2502.18779; needs sampled children tested first."""
    target, draft = tables("dense", 4, 1, seed)
    case = drafts([best_and_one(draft, count)], 4), target
    p, q = target[0], draft[0].clone()
    fixed = q.topk(count - 1).indices
    q[fixed] = 0.0
    expected = p[fixed].sum() + torch.minimum(p, q / q.sum()).sum()
    for rule in OF_TREES:
        assert abs(lengths(rule, [case])[0] - expected.item()) <= EXACT, rule


def test_all_tokens_drawn_without_replacement_are_always_accepted() -> None:
    target, draft = tables("dense", 3, 1)
    distribution = exact_distribution(accept_sequential, drafts([without_replacement(draft, 3)], 3), target)
    assert abs(distribution.num_accepted - 1.0) <= EXACT


def test_draws_without_replacement_beat_independent_ones() -> None:
    """Sampling.md 4.5 measured 0.910 against 0.860 on average."""
    found = [tables("dense", 4, 1, seed) for seed in range(10)]
    without, repeated = (
        lengths("sequential", [(drafts([draw(draft, 2)], 4), target) for target, draft in found])
        for draw in (without_replacement, independent)
    )
    assert min(more - less for more, less in zip(without, repeated, strict=True)) > 0


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_block_and_traversal_of_chains(gamma: int) -> None:
    """Both keep as much as each other, and at least as much as the sequential test; of one token all keep as much."""
    cases = chains(gamma, range(10))
    rules = ("block", "traversal", "sequential")
    for block, traversal, sequential in zip(*(lengths(rule, cases) for rule in rules), strict=True):
        assert abs(traversal - block) <= EXACT
        assert block >= sequential - EXACT
        assert gamma > 1 or abs(block - sequential) <= EXACT


@pytest.mark.parametrize(("widths", "seeds"), [((2,), 10), ((2, 2), 10), ((1, 2), 10), ((2, 1, 1), 3)], ids=str)
def test_traversal_keeps_at_least_as_much_as_sequential(widths: Sequence[int], seeds: int) -> None:
    """Equal at one level, where the first tests are the same; strictly more on deeper trees."""
    found = [tables("dense", 3, len(widths), seed) for seed in range(seeds)]
    cases = [(drafts([without_replacement(draft, width) for width in widths], 3), target) for target, draft in found]
    for more, less in zip(lengths("traversal", cases), lengths("sequential", cases), strict=True):
        assert more - less > 1e-6 if len(widths) > 1 else abs(more - less) <= EXACT


def test_example_of_the_block_paper() -> None:
    """Two tokens, p = (1/3, 2/3), q = (2/3, 1/3), gamma 2: 10/9 token by token, 11/9 as a block (2403.10444)."""
    target = torch.tensor([1.0, 2.0], dtype=torch.float64).expand(7, 2) / 3
    every_draft = drafts([independent(target.flip(1), 1)] * 2, 2)
    assert abs(exact_distribution(accept_sequential, every_draft, target).num_accepted - 10 / 9) <= EXACT
    assert abs(exact_distribution(accept_block, every_draft, target).num_accepted - 11 / 9) <= EXACT


@pytest.mark.parametrize("seed", range(3))
def test_drafts_coupled_through_shared_noise_match_as_often_as_predicted(seed: int) -> None:
    """P(match) = sum_x 1 / sum_y max(p_y / p_x, q_y / q_x), Daliri et al. 2408.07978; five standard deviations."""
    p, q = random_table(4, 0, seed)[0], random_table(4, 0, seed + 50)[0]
    num = 50_000
    positions = torch.arange(num)
    noise = KeyedNoise(torch.full((num,), seed))
    guess = (q.log() + noise.gumbel(positions + 1, Purpose.TARGET, 4)).argmax(1)
    drawn = KeyedDecisions(noise, positions).target_token(p.log().expand(num, 4), 0)
    expected = sum((1 / torch.maximum(p / p[x], q / q[x]).sum()).item() for x in range(4))
    assert abs((guess == drawn).double().mean().item() - expected) < 5 * (expected * (1 - expected) / num) ** 0.5
