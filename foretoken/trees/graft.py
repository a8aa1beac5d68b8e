"""Grafting: chains that a lookup or a grammar proposes after a path that is not committed, below its last node.

Letters: B sequences, N nodes, K grafted nodes of one sequence at most.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from foretoken.core.backend import integers_on
from foretoken.core.token_tree import DrawKind
from foretoken.trees.merge import compacted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.token_tree import TokenTree


class Graft(NamedTuple):
    """A chain below a node.

    Attributes:
        row: Of the tree in the batch.
        node: One without a child that holds the chain's first token.
        depth: Of the node.
        tokens: Of the chain, the one below the node first.
        scores: Log-probabilities that the whole path down to each of them is accepted.
        source: Of its nodes, see `TokenTree`.
    """

    row: int
    node: int
    depth: int
    tokens: Sequence[int]
    scores: Sequence[float]
    source: int


def grafted(tree: TokenTree, grafts: Sequence[Graft], *, max_nodes: int) -> TokenTree:
    """A tree with chains of chosen (one-hot) nodes below some of its nodes. No synchronisation.

    Args:
        tree: With scores and sources.
        grafts: The most valuable first; at most one a node.
        max_nodes: Most nodes of a tree and its chains, root included: what is beyond is left out from the chains' ends.

    Returns:
        Nodes stand where they did, then the chains.
    """
    room = [max_nodes - tree.width] * tree.batch_size
    # (tokens, parents, depths, sources) and scores of each sequence's new nodes
    new: list[list[tuple[int, int, int, int]]] = [[] for _ in room]
    scores: list[list[float]] = [[] for _ in room]
    deepest = tree.max_depth
    for graft in grafts:
        nodes, parent = new[graft.row], graft.node
        for index, (token, score) in enumerate(zip(graft.tokens, graft.scores, strict=True)):
            if len(nodes) >= room[graft.row]:
                break
            depth = graft.depth + index + 1
            nodes.append((token, parent, depth, graft.source))
            scores[graft.row].append(score)
            parent, deepest = tree.width + len(nodes) - 1, max(deepest, depth)
    width, device = max(map(len, new)), tree.tokens.device
    if not width or tree.scores is None or tree.source is None:
        return tree
    padded = [nodes + [(0, -1, 0, 0)] * (width - len(nodes)) for nodes in new]
    tokens, parents, depths, sources = integers_on(padded, device).permute(2, 0, 1)
    more = torch.tensor([each + [0.0] * (width - len(each)) for each in scores], device=device)
    drafts = tree.distributions
    if drafts is not None:
        kinds = torch.full_like(tokens, DrawKind.ONE_HOT.value)
        drafts = replace(
            drafts, kinds=torch.cat([drafts.kinds, kinds], dim=1),
            row_of=torch.cat([drafts.row_of, torch.full_like(tokens, -1)], dim=1),
        )  # fmt: skip
    longer = replace(
        tree,
        tokens=torch.cat([tree.tokens, tokens], dim=1),
        parents=torch.cat([tree.parents, parents], dim=1),
        depths=torch.cat([tree.depths, depths], dim=1),
        max_depth=deepest,
        scores=torch.cat([tree.scores, more], dim=1),
        source=torch.cat([tree.source, sources], dim=1),
        distributions=drafts,
        host_facts=None,
    )
    is_node = (longer.parents >= 0) | (torch.arange(longer.width, device=device) == 0)
    return compacted(longer, is_node)
