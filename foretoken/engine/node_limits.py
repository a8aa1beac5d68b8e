"""Cuts each tree of a batch to as many nodes as its request allows, whatever the drafters made of that."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from foretoken.core.token_tree import DrawKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.token_tree import TokenTree


def within_node_limits(tree: TokenTree, limits: Sequence[int]) -> TokenTree:
    """The first nodes of each tree, which are a tree too.

    What is left of a tree counts as chosen, not as drawn: which nodes come first may depend on what was drawn, and
    one-hot is true of any token. Other trees of the batch stay what they are.

    Args:
        tree: Of B sequences.
        limits: B, most nodes of each, root included.
    """
    facts = tree.host_facts
    if tree.width <= min(limits) or (facts and all(n <= most for n, most in zip(facts.num_nodes, limits, strict=True))):
        return tree
    tree = tree.first_nodes(max(limits))
    most = torch.tensor(limits, device=tree.tokens.device)
    is_cut = torch.arange(tree.width, device=most.device) >= most.unsqueeze(1)
    drafts = tree.distributions
    if drafts is not None:
        is_shorter = (tree.num_nodes > most).unsqueeze(1)
        drafts = replace(
            drafts,
            kinds=drafts.kinds.masked_fill(is_shorter, DrawKind.ONE_HOT),
            row_of=drafts.row_of.masked_fill(is_shorter, -1),
        )
    return replace(
        tree,
        tokens=tree.tokens.masked_fill(is_cut, 0),
        parents=tree.parents.masked_fill(is_cut, -1),
        depths=tree.depths.masked_fill(is_cut, 0),
        num_nodes=torch.minimum(tree.num_nodes, most),
        distributions=drafts,
        host_facts=None,
    )
