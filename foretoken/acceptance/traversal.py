"""Traversal verification: tests a tree from its leaves to its root.

The sequential test rejects a path at its first rejected node. Here the whole path down to a leaf is tested first, then
the path without the leaf, and so on. A likely continuation therefore helps the nodes above it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.acceptance.decisions import Acceptance, Decisions, LogProbs, residual
from foretoken.acceptance.rules import draft_distributions
from foretoken.core.token_tree import DrawKind, TokenTree


def accept_traversal(tree: TokenTree, log_probs: LogProbs, decisions: Decisions) -> Acceptance:
    """Accepts paths from the leaves up, first-drawn children first, drawn children before chosen ones; lossless.

    Every node v has a weight a(v) and a distribution P(v) of the token after it, at first the target's. The root has
    weight 1. A child c with token x has weight min(1, a(v) P(v)[x] / Q(c)[x]), where Q(c) is its draft distribution,
    see `draft_distributions`. The path that ends at the first leaf is accepted with the leaf's weight, and the token
    after it comes from P. Otherwise the leaf c is deleted, and its parent v may become the next leaf. With
    r = max(a(v) P(v) - Q(c), 0) and s = sum r, the parent gets a(v) = s / (s + 1 - a(v)) and P(v) = r / s.

    On a chain this is block verification. Synchronises with the host at every leaf: most trees end after a few of them.

    Source: Weng et al. 2025 (arXiv 2505.12398).
    """
    (batch, width), device = tree.tokens.shape, tree.tokens.device
    index = torch.arange(batch, device=device)
    next_child, next_sibling = _test_order(tree)
    node = torch.zeros(batch, dtype=torch.int64, device=device)
    probs = log_probs(node).exp()
    tiny = torch.finfo(probs.dtype).tiny
    weights = probs.new_ones(batch, width)
    path_probs = probs.new_zeros(batch, tree.max_depth + 1, probs.shape[1])  # P of the nodes down to `node`, by depth
    path_probs[:, 0] = probs
    path_drafts = torch.zeros_like(path_probs)  # Q of the same nodes
    walking = torch.ones(batch, dtype=torch.bool, device=device)
    for step in range(2 * width - 1):
        child = next_child[index, node]
        is_leaf = walking & (child < 0)
        if is_leaf.any():
            weight = weights[index, node]
            is_accepted = decisions.accept(torch.where(is_leaf, weight, 0.0), torch.ones_like(weight), step)
            walking = walking & ~is_accepted
            if not walking.any():
                break
            is_deleted = is_leaf & ~is_accepted
            parent = tree.parents[index, node].clamp_min(0)
            depth, weight = tree.depths[index, parent], weights[index, parent]
            scaled = weight.unsqueeze(1) * path_probs[index, depth]
            draft_probs = path_drafts[index, tree.depths[index, node]]
            surplus = (scaled - draft_probs).clamp_min(0).sum(1)
            # The sum is 0 only if the weight is 1 and P = Q. The deleted leaf then had weight 1 too: probability 0.
            raised = surplus / (surplus + (1 - weight)).clamp_min(tiny)
            weights[index, parent] = torch.where(is_deleted & (parent > 0), raised, weight)
            path_probs[index, depth] = torch.where(
                is_deleted.unsqueeze(1), residual(scaled, draft_probs), path_probs[index, depth]
            )
            next_child[index, parent] = torch.where(is_deleted, next_sibling[index, node], next_child[index, parent])
            node = torch.where(is_deleted, parent, node)
            child = next_child[index, node]
        descends = walking & (child >= 0)
        if descends.any():
            scaled = weights[index, node].unsqueeze(1) * path_probs[index, tree.depths[index, node]]
            node = torch.where(descends, child, node)
            token, depth = tree.tokens[index, node], tree.depths[index, node]
            path_drafts[index, depth] = draft_probs = draft_distributions(tree, node, probs)
            weight = (scaled[index, token] / draft_probs[index, token].clamp_min(tiny)).clamp_max(1.0)
            weights[index, node] = torch.where(descends, weight, weights[index, node])
            path_probs[index, depth] = torch.where(
                descends.unsqueeze(1), log_probs(node).exp(), path_probs[index, depth]
            )
    accepted = tree.depths[index, node]
    return Acceptance(
        path=tree.path_nodes(node),
        num_accepted=accepted,
        next_token=decisions.token(path_probs[index, accepted], 0),
        lossy_tv=torch.zeros(batch, dtype=torch.float32, device=device),
    )


def _test_order(tree: TokenTree) -> tuple[Tensor, Tensor]:
    """Returns the first child of every node and every node's next sibling, drawn children first; -1 for none.

    Both (B, N) int64.
    """
    batch, width = tree.tokens.shape
    is_chosen = torch.ones_like(tree.parents)
    if tree.distributions is not None:
        is_chosen = (tree.distributions.kinds == DrawKind.ONE_HOT).to(torch.int64)
    index = torch.arange(width, device=is_chosen.device)
    order = ((tree.parents * 2 + is_chosen) * width + index).argsort(1)
    parents = torch.nn.functional.pad(tree.parents.gather(1, order), (1, 1), value=-2)
    is_first, is_last = (parents[:, 1:-1] != parents[:, other] for other in (slice(None, -2), slice(2, None)))
    has_parent = parents[:, 1:-1] >= 0
    none = tree.parents.new_full((batch, width + 1), -1)  # nodes that are no first child write to one spare entry
    first = none.scatter(1, torch.where(is_first & has_parent, parents[:, 1:-1], width), order)[:, :width]
    following = torch.nn.functional.pad(order[:, 1:], (0, 1), value=-1)
    return first, torch.zeros_like(order).scatter_(1, order, torch.where(is_last | ~has_parent, -1, following))
