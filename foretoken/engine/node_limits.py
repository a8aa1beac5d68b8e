"""Cuts each tree of a batch to as many nodes as its request allows, whatever the drafters made of that."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from foretoken.core.token_tree import DrawKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.token_tree import TokenTree


def within_node_limits(tree: TokenTree, limits: Sequence[int | None]) -> TokenTree:
    """The first nodes of each tree, which are a tree too.

    The tokens of a tree with a limit count as chosen, not as drawn, whether any is cut or not, because how many there
    are may depend on what was drawn; one-hot is true of any token. Other trees of the batch stay what they are.

    Args:
        tree: Of B sequences.
        limits: B, most nodes of each, root included; None where there can be no more.
    """
    facts, drafts, widest = tree.host_facts, tree.distributions, tree.width
    most_nodes = [widest if most is None else most for most in limits]
    counts = [widest] * len(limits) if facts is None else facts.num_nodes
    fits = all(most is None or count <= most for count, most in zip(counts, limits, strict=True))
    if fits and (drafts is None or not any(limits)):
        return tree
    tree = tree.first_nodes(min(max(most_nodes), widest))
    device, drafts = tree.tokens.device, tree.distributions
    most_of_each = torch.tensor(most_nodes, device=device)
    is_cut = torch.arange(tree.width, device=device) >= most_of_each.unsqueeze(1)
    if drafts is not None:
        is_limited = torch.tensor([[most is not None] for most in limits], device=device)
        drafts = replace(
            drafts,
            kinds=drafts.kinds.masked_fill(is_limited, DrawKind.ONE_HOT),
            row_of=drafts.row_of.masked_fill(is_limited, -1),
        )
    return replace(
        tree,
        tokens=tree.tokens.masked_fill(is_cut, 0),
        parents=tree.parents.masked_fill(is_cut, -1),
        depths=tree.depths.masked_fill(is_cut, 0),
        scores=None if tree.scores is None else tree.scores.masked_fill(is_cut, 0.0),
        source=None if tree.source is None else tree.source.masked_fill(is_cut, 0),
        num_nodes=torch.minimum(tree.num_nodes, most_of_each),
        distributions=drafts,
        host_facts=None,
    )
