"""Whether a drafter is asked may depend on what others drew; the tokens generated keep the target distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from drafting import drafts, independent, random_table, tables, without_replacement
from enumeration import EXACT, Drafts
from lossless_rules import OF_TREES, laws
from torch import Tensor

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


def part(asked: Sequence[int], pairs: tuple[Drafts, Drafts], rows: Sequence[Tensor]) -> Drafts:
    """Some pairs of drafts as the controller verifies them; rows: of each drafter's drafts."""
    tree = selected(asked, [each.tree.select(row) for each, row in zip(pairs, rows, strict=True)])
    contexts = torch.zeros_like(tree.tokens)
    index = torch.arange(tree.batch_size)
    for node in range(1, tree.width):
        parent = tree.parents[:, node].clamp_min(0)
        contexts[:, node] = contexts[index, parent] * VOCAB + 1 + tree.tokens[:, node]
    contexts = torch.where(tree.parents >= 0, contexts, 0)
    return Drafts(tree=tree, contexts=contexts, probs=pairs[0].probs[rows[0]] * pairs[1].probs[rows[1]])


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
