"""Trees merged of several drafters, pruned, with probes, or asked for by draws have exactly the target distribution."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from drafting import Proposal, best, best_and_one, drafts, independent, random_table, tables, without_replacement
from enumeration import EXACT, Drafts, exact_distribution
from lossless_rules import OF_TREES, laws, worst
from torch import Tensor

from foretoken.acceptance.rules import accept_coupled
from foretoken.acceptance.sampled_rules import accept_sequential, accept_traversal
from foretoken.core.token_tree import PROBE, TokenTree
from foretoken.drafting.goodput import Goodput
from foretoken.runner.costs import CostCurve
from foretoken.trees import merge
from foretoken.trees.merge import Continuation, merge_trees, prune, with_continuations
from tests.tree_checks import check_tree

VOCAB = 3


def contexts_of(tree: TokenTree) -> Tensor:
    """(B, N), the context that each node ends."""
    contexts = torch.zeros_like(tree.tokens)
    rows = torch.arange(tree.batch_size)
    for node in range(1, tree.width):
        parent = tree.parents[:, node].clamp_min(0)
        contexts[:, node] = contexts[rows, parent] * VOCAB + 1 + tree.tokens[:, node]
    return torch.where(tree.parents >= 0, contexts, 0)


def merged(first: Drafts, second: Drafts, *, changed: object = None) -> Drafts:
    """Every pair of drafts of two drafters that know nothing of each other, as one tree."""
    one, two = len(first.probs), len(second.probs)
    left, right = torch.arange(one).repeat_interleave(two), torch.arange(two).repeat(one)
    tree = merge_trees([first.tree.select(left), second.tree.select(right)])
    if changed is not None:
        tree = changed(tree)  # type: ignore[operator]
    tree = replace(tree.narrowed(), scores=None)
    if tree.source is None or not bool((tree.source & PROBE).any()):
        check_tree(tree)
    return Drafts(tree=tree, contexts=contexts_of(tree), probs=first.probs[left] * second.probs[right])


def pairs(q: Tensor, r: Tensor) -> dict[str, tuple[list[Proposal], list[Proposal]]]:
    """Levels of two drafters."""
    return {
        "lookup and draws": ([best(r, 1), best(r, 1)], [without_replacement(q, 2), independent(q, 1)]),
        "draws and draws": ([independent(q, 1), independent(q, 1)], [without_replacement(r, 2)]),
        "both choose": ([best(q, 2), best(q, 1)], [best(r, 2), best(r, 2)]),
        "mixed and chosen": ([best_and_one(q, 2)], [best(r, 2), best(r, 1)]),
        "chosen, then drawn": ([best(q, 1), independent(q, 1)], [best(r, 2)]),
    }


PAIRS = tuple(pairs(torch.ones(1, VOCAB), torch.ones(1, VOCAB)))


@cache
def merged_cases() -> dict[str, tuple[Drafts, Tensor]]:
    """Every pair of drafters in four cases."""
    cases = {}
    for case, pair in product(("dense", "zeros in p", "zeros in q", "one-hot q"), PAIRS):
        target, q = tables(case, VOCAB, 2)
        first, second = pairs(q, random_table(VOCAB, 2, seed=7))[pair]
        cases[f"{pair}, {case}"] = merged(drafts(first, VOCAB), drafts(second, VOCAB)), target
    return cases


@pytest.mark.parametrize("rule", OF_TREES)
def test_merged_trees(rule: str) -> None:
    error, where = worst(rule, merged_cases())
    assert error <= EXACT, where


@cache
def pruned_cases() -> dict[str, tuple[Drafts, Tensor]]:
    """Trees cut by what was drafted."""
    target, q = tables("dense", VOCAB, 2)

    def pruned(tree: TokenTree) -> TokenTree:
        return prune(tree, (tree.tokens.sum(1, keepdim=True) + tree.tokens) % 2 == 0)

    cases = {}
    for pair in ("lookup and draws", "mixed and chosen", "both choose", "chosen, then drawn"):
        first, second = pairs(q, random_table(VOCAB, 2, seed=7))[pair]
        cases[pair] = merged(drafts(first, VOCAB), drafts(second, VOCAB), changed=pruned), target
    return cases


@pytest.mark.parametrize("rule", OF_TREES)
def test_pruned_trees(rule: str) -> None:
    """What is cut may depend on everything that was drafted, since drawn nodes stay."""
    error, where = worst(rule, pruned_cases())
    assert error <= EXACT, where


@cache
def continued_cases() -> tuple[dict[str, tuple[Drafts, Tensor]], dict[str, tuple[Drafts, Tensor]]]:
    """Trees with chains below their leaves, and the same trees without."""
    target, q = tables("dense", VOCAB, 3)

    def with_chains(tree: TokenTree) -> TokenTree:
        continuations = []
        for row, (tokens, parents) in enumerate(tree.rows()):
            leaves = [node for node in range(1, len(tokens)) if node not in parents]
            for leaf in leaves[::2]:
                depth = int(tree.depths[row, leaf])
                continuations.append(Continuation(row, leaf, depth, [(sum(tokens) + leaf) % VOCAB], [0.0], 1))
        return with_continuations(tree, continuations, max_nodes=64)

    found = pairs(q, random_table(VOCAB, 3, seed=7)).items()
    with_chains, plain = (
        {
            pair: (merged(drafts(first, VOCAB), drafts(second, VOCAB), changed=changed), target)
            for pair, (first, second) in found
        }
        for changed in (with_chains, None)
    )
    return with_chains, plain


@pytest.mark.parametrize("rule", OF_TREES)
def test_continued_trees(rule: str) -> None:
    """Chosen chains below leaves, also drawn ones, whose tokens depend on all that was drawn."""
    with_chains, plain = (laws(rule, cases) for cases in continued_cases())
    for pair in PAIRS:
        assert with_chains[pair].error <= EXACT, pair
        assert with_chains[pair].num_accepted > plain[pair].num_accepted, pair


@pytest.mark.parametrize("rule", [accept_sequential, accept_coupled, accept_traversal], ids=lambda rule: rule.__name__)
def test_probes_are_walked_past(rule: object) -> None:
    target, q = tables("dense", VOCAB, 2)
    first, second = pairs(q, random_table(VOCAB, 2, seed=7))["both choose"]

    def with_probes(tree: TokenTree) -> TokenTree:
        assert tree.source is not None
        probes = torch.where(tree.tokens % 2 == 0, tree.source | PROBE, tree.source)
        return replace(tree, source=probes).without_probes()

    every_draft = merged(drafts(first, VOCAB), drafts(second, VOCAB), changed=with_probes)
    result = exact_distribution(rule, every_draft, target)  # type: ignore[arg-type]
    assert result.error <= EXACT
    whole = exact_distribution(rule, merged(drafts(first, VOCAB), drafts(second, VOCAB)), target)  # type: ignore[arg-type]
    assert result.num_accepted < whole.num_accepted - 0.05


@pytest.mark.parametrize("rule", OF_TREES)
def test_a_cut_by_drawn_tokens_would_be_seen(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test can fail: a rule that leaves out drawn nodes by their tokens is biased."""
    target, q = tables("dense", VOCAB, 2)
    first, second = pairs(q, random_table(VOCAB, 2, seed=7))["lookup and draws"]
    monkeypatch.setattr(merge, "_drawn", lambda tree: torch.zeros_like(tree.tokens, dtype=torch.bool))

    def pruned(tree: TokenTree) -> TokenTree:
        return prune(tree, tree.tokens != 1)

    every_draft = merged(drafts(first, VOCAB), drafts(second, VOCAB), changed=pruned)
    assert worst(rule, {"": (every_draft, target)})[0] > 1e-3


def selected(asked: Sequence[int], trees: Sequence[TokenTree]) -> TokenTree:
    """What the controller verifies of the trees of drafters asked one after another; width costs nothing."""
    controller = Goodput(CostCurve((1,), (1.0,)), nodes_by_depth=[(1, 3, 7)] * len(trees), max_nodes=64)
    controller.allot(len(trees[0].tokens))
    so_far: dict[int, TokenTree] = {}
    for drafter in asked:
        so_far[drafter] = trees[drafter]
        controller.further(so_far)
    return replace(controller.select(so_far), scores=None)


def part(asked: Sequence[int], pairs: tuple[Drafts, Drafts], rows: Sequence[Tensor]) -> Drafts:
    """Some pairs of drafts as the controller verifies them; rows: of each drafter's drafts."""
    tree = selected(asked, [each.tree.select(row) for each, row in zip(pairs, rows, strict=True)])
    return Drafts(tree=tree, contexts=contexts_of(tree), probs=pairs[0].probs[rows[0]] * pairs[1].probs[rows[1]])


@pytest.mark.parametrize("first", [0, 1])
def test_asked_by_what_another_drew(first: int) -> None:
    """The second drafter is asked where the first one's root has a certain child, and in no other case."""
    target, q = tables("dense", VOCAB, 2)
    r = random_table(VOCAB, 2, seed=7)
    pairs = (
        drafts([without_replacement(q, 2), independent(q, 1)], VOCAB),
        drafts([independent(r, 1), independent(r, 1)], VOCAB),
    )
    every = torch.cartesian_prod(*[torch.arange(len(each.probs)) for each in pairs])
    is_asked = pairs[first].tree.tokens[every[:, first], 1] == 1
    parts = [
        part(asked, pairs, list(every[mask].T))
        for asked, mask in [((first, 1 - first), is_asked), ((first,), ~is_asked)]
    ]
    for rule in OF_TREES:
        both = laws(rule, {str(index): (each, target) for index, each in enumerate(parts)})
        total = sum((law.tokens for law in both.values()), torch.zeros(()))
        assert (total - both["0"].target).abs().max() <= EXACT, rule
