"""Whether a drafter is asked may depend on what others drew; the tokens generated keep the target distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from drafting import drafts, independent, random_table, tables, without_replacement
from enumeration import EXACT, Drafts, Rule, exact_distribution
from torch import Tensor

from foretoken.acceptance.rules import accept_kseq, accept_sequential
from foretoken.acceptance.traversal import accept_traversal
from foretoken.core.token_tree import TokenTree
from foretoken.drafting.goodput import Goodput
from foretoken.runner.costs import CostCurve

VOCAB = 3


def selected(asked: Sequence[int], trees: Sequence[TokenTree]) -> TokenTree:
    """What the controller verifies of the trees of drafters asked one after another; width costs nothing."""
    controller = Goodput(CostCurve((1,), (1.0,)), nodes_by_depth=[(1, 3, 7)] * len(trees), max_nodes=64)
    controller.allot(len(trees[0].tokens))
    so_far: dict[int, TokenTree] = {}
    for drafter in asked:
        so_far[drafter] = trees[drafter]
        controller.further(so_far)
    return replace(controller.select(so_far), scores=None)


def distribution(
    rule: Rule, asked: Sequence[int], pairs: tuple[Drafts, Drafts], rows: Sequence[Tensor], target: Tensor
) -> Tensor:
    """(V ** 3,) share of what is generated that falls to some pairs of drafts; rows: of each drafter's drafts."""
    tree = selected(asked, [each.tree.select(row) for each, row in zip(pairs, rows, strict=True)])
    contexts = torch.zeros_like(tree.tokens)
    index = torch.arange(tree.batch_size)
    for node in range(1, tree.width):
        parent = tree.parents[:, node].clamp_min(0)
        contexts[:, node] = contexts[index, parent] * VOCAB + 1 + tree.tokens[:, node]
    contexts = torch.where(tree.parents >= 0, contexts, 0)
    probs = pairs[0].probs[rows[0]] * pairs[1].probs[rows[1]]
    return exact_distribution(rule, Drafts(tree=tree, contexts=contexts, probs=probs), target).tokens


@pytest.mark.parametrize("rule", [accept_sequential, accept_traversal, accept_kseq], ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("first", [0, 1])
def test_asked_by_what_another_drew(first: int, rule: Rule) -> None:
    """The second drafter is asked where the first one's root has a certain child, and in no other case."""
    target, q = tables("dense", VOCAB, 2)
    r = random_table(VOCAB, 2, seed=7)
    pairs = (
        drafts([without_replacement(q, 2), independent(q, 1)], VOCAB),
        drafts([independent(r, 1), independent(r, 1)], VOCAB),
    )
    every = torch.cartesian_prod(*[torch.arange(len(each.probs)) for each in pairs])
    is_asked = pairs[first].tree.tokens[every[:, first], 1] == 1
    total = sum(
        distribution(rule, asked, pairs, list(every[mask].T), target)
        for asked, mask in [((first, 1 - first), is_asked), ((first,), ~is_asked)]
    )
    assert isinstance(total, Tensor)
    assert (total - exact_distribution(accept_sequential, pairs[0], target).target).abs().max() <= EXACT
