"""The sequential test of speculative sampling, for chains and trees with sampled and one-hot children; lossless.

At a node with target distribution P, each sampled child x with exact conditional draft distribution Q is accepted with
probability min(1, P[x] / Q[x]); after a rejection P becomes norm(max(P - Q, 0)). One-hot children come last, all at
once: draw y from what is left of P and descend if a child holds y. On a chain this is speculative sampling (Leviathan
et al., arXiv 2211.17192; Chen et al., 2302.01318, who swap p and q); with children drawn without replacement it is the
rule of Sequoia (2402.12374); with independent ones, SpecInfer's (2305.09781); with one-hot ones, sample and match.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.acceptance.decisions import Acceptance, Decisions, LogProbs, residual
from foretoken.acceptance.walk import child_with_token, descend
from foretoken.core.token_tree import MAX_NODES, DrawKind, TokenTree


def accept_sequential(tree: TokenTree, log_probs: LogProbs, decisions: Decisions) -> Acceptance:
    """Tests each child in draw order, sampled ones first.

    Args:
        tree: Candidates; `tree.distributions` says how sampled ones were drawn, all are one-hot when it is None.
        log_probs: The target distribution after each node.
        decisions: Source of the tests and draws.

    Returns:
        Path and correction or bonus token; lossless.
    """
    batch_index = torch.arange(tree.batch_size, device=tree.tokens.device)
    table = sampled_children(tree)
    siblings = table.shape[2]

    def step(node: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        probs = log_probs(node).exp()
        child = torch.full_like(node, -1)
        for slot in range(siblings):
            candidate = table[batch_index, node, slot]
            is_tested = (candidate >= 0) & (child < 0)
            draft_probs = conditional_draft_probs(tree, table, node, slot, probs)
            token = tree.tokens.gather(1, candidate.clamp_min(0).unsqueeze(1))
            p, q = probs.gather(1, token)[:, 0], draft_probs.gather(1, token)[:, 0]
            # Not `depth * siblings`: that bound is the batch's, and draws must not depend on other sequences.
            survives = decisions.accept(torch.where(is_tested, p, 0.0), q, depth * MAX_NODES + slot)
            child = torch.where(survives, candidate, child)
            is_rejected = (is_tested & ~survives).unsqueeze(1)
            probs = torch.where(is_rejected, residual(probs, draft_probs), probs)
        drawn = decisions.token(probs, depth)
        return torch.where(child < 0, child_with_token(tree, node, drawn), child), drawn

    return descend(tree, step)


def sampled_children(tree: TokenTree) -> Tensor:
    """The sampled children of every node in draw order.

    Returns:
        (B, N, C) int64, node indices, -1 past the last; C is `max_siblings`, or 0 where nothing was sampled.
    """
    batch, width = tree.tokens.shape
    if tree.distributions is None:
        return tree.parents.new_full((batch, width, 0), -1)
    is_sampled = (tree.distributions.kinds != DrawKind.ONE_HOT) & (tree.parents >= 0)
    same_parent = tree.parents.unsqueeze(2) == tree.parents.unsqueeze(1)
    earlier = torch.ones(width, width, dtype=torch.bool, device=tree.tokens.device).tril(-1)
    rank = (same_parent & earlier & is_sampled.unsqueeze(1)).sum(2)
    siblings = tree.distributions.max_siblings
    # One spare entry takes the writes of nodes that are not sampled.
    flat = tree.parents.new_full((batch, width * siblings + 1), -1)
    target = torch.where(is_sampled, tree.parents * siblings + rank, width * siblings)
    flat.scatter_(1, target, torch.arange(width, device=flat.device).expand(batch, width))
    return flat[:, :-1].view(batch, width, siblings)


def conditional_draft_probs(tree: TokenTree, table: Tensor, node: Tensor, slot: int, like: Tensor) -> Tensor:
    """The exact distribution that the `slot`-th sampled child of each node was drawn from, given its earlier siblings.

    Args:
        tree: Candidates with draft distributions.
        table: (B, N, C) int64 from `sampled_children`.
        node: (B,) int64, the parents.
        slot: Which child.
        like: Gives dtype.

    Returns:
        (B, V); arbitrary where the child does not exist.
    """
    drafts = tree.distributions
    assert drafts is not None, "sampled children exist only with draft distributions"
    batch_index = torch.arange(tree.batch_size, device=node.device)
    child = table[batch_index, node, slot].clamp_min(0)
    row = drafts.row_of[batch_index, child]
    probs = drafts.rows[batch_index, row.clamp_min(0)].to(like.dtype)
    without = (drafts.kinds[batch_index, child] == DrawKind.WITHOUT_REPLACEMENT).unsqueeze(1)
    earlier = table[batch_index, node, :slot].clamp_min(0)
    is_removed = without & (drafts.row_of.gather(1, earlier) == row.unsqueeze(1))
    taken = torch.zeros_like(probs).scatter_add_(1, tree.tokens.gather(1, earlier), is_removed.to(probs.dtype))
    probs = torch.where(taken > 0, 0.0, probs)
    return torch.where(without, probs / probs.sum(1, keepdim=True).clamp_min(torch.finfo(like.dtype).tiny), probs)
