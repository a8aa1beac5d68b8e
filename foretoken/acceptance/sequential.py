"""Rules for sampled drafts: the sequential test of speculative sampling, and block verification of a chain."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.acceptance.decisions import Acceptance, Decisions, LogProbs, residual
from foretoken.acceptance.walk import child_with_token, descend
from foretoken.core.token_tree import MAX_NODES, DrawKind, TokenTree


def accept_sequential(tree: TokenTree, log_probs: LogProbs, decisions: Decisions) -> Acceptance:
    """Tests each child in draw order, sampled children first.

    Args:
        tree: Candidates; `tree.distributions` holds how sampled ones were drawn; None if all are one-hot.
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
    """Returns the sampled children of every node in draw order.

    Returns:
        (B, N, C) int64, node indices, -1 past the last; C is `max_siblings`, or 0 without sampled nodes.
    """
    batch, width = tree.tokens.shape
    if tree.distributions is None:
        return tree.parents.new_full((batch, width, 0), -1)
    is_sampled = (tree.distributions.kinds != DrawKind.ONE_HOT) & (tree.parents >= 0)
    same_parent = tree.parents.unsqueeze(2) == tree.parents.unsqueeze(1)
    earlier = torch.ones(width, width, dtype=torch.bool, device=tree.tokens.device).tril(-1)
    rank = (same_parent & earlier & is_sampled.unsqueeze(1)).sum(2)
    siblings = tree.distributions.max_siblings
    # Nodes that are not sampled write to one spare entry.
    flat = tree.parents.new_full((batch, width * siblings + 1), -1)
    target = torch.where(is_sampled, tree.parents * siblings + rank, width * siblings)
    flat.scatter_(1, target, torch.arange(width, device=flat.device).expand(batch, width))
    return flat[:, :-1].view(batch, width, siblings)


def conditional_draft_probs(tree: TokenTree, table: Tensor, node: Tensor, slot: int, like: Tensor) -> Tensor:
    """Returns the draft distribution of the `slot`-th sampled child of each node, given its earlier siblings.

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


def accept_block(tree: TokenTree, log_probs: LogProbs, decisions: Decisions) -> Acceptance:
    """Verifies chains of independently drawn tokens as blocks.

    Args:
        tree: Chains (node i's parent is i - 1) whose nodes were all drawn from `tree.distributions` independently.
        log_probs: The target distribution after each node.
        decisions: Source of the tests and draws.

    Returns:
        Path and correction or bonus token; lossless.
    """
    drafts = tree.distributions
    assert drafts is not None, "block verification needs the draft distributions"
    batch, device = tree.batch_size, tree.tokens.device
    index = torch.arange(batch, device=device)
    gamma = tree.num_nodes - 1
    node = torch.zeros(batch, dtype=torch.int64, device=device)
    accepted = torch.zeros_like(node)
    target_probs = log_probs(node).exp()
    prefix = torch.ones(batch, dtype=target_probs.dtype, device=device)  # P_i
    rest = target_probs  # distribution of the next token if the chain ends at `accepted`
    for i in range(tree.max_depth + 1):
        exists = i <= gamma
        if i:
            token = tree.tokens[:, i : i + 1]
            draft_probs = drafts.rows[index, drafts.row_of[:, i].clamp_min(0)].to(prefix.dtype)
            ratio = target_probs.gather(1, token)[:, 0] / draft_probs.gather(1, token)[:, 0]
            prefix = torch.where(exists, (prefix * ratio).clamp_max(1.0), prefix)
            node = torch.where(exists, i, node)
            target_probs = log_probs(node).exp()
        is_last = gamma == i
        following = drafts.row_of[:, min(i + 1, tree.width - 1)].clamp_min(0)
        next_draft = drafts.rows[index, following].to(prefix.dtype)
        scaled = prefix.unsqueeze(1) * target_probs
        surplus = (scaled - next_draft).clamp_min(0).sum(1)
        # P_i = 1 and S_i = 0 means p = q: position i then never passes. This changes nothing, because i + 1 surely
        # passes.
        passing = torch.where(is_last, prefix, surplus)
        total = torch.where(is_last, 1.0, surplus + (1 - prefix))
        survives = decisions.accept(passing, total, i) if i else torch.ones_like(exists)
        is_accepted = exists & survives
        accepted = torch.where(is_accepted, i, accepted)
        ending = torch.where(is_last.unsqueeze(1), target_probs, residual(scaled, next_draft))
        rest = torch.where(is_accepted.unsqueeze(1), ending, rest)
    path = torch.arange(1, tree.max_depth + 1, device=device).expand(batch, -1)
    return Acceptance(
        path=torch.where(path <= accepted.unsqueeze(1), path, -1),
        num_accepted=accepted,
        next_token=decisions.token(rest, 0),
        lossy_tv=torch.zeros(batch, dtype=torch.float32, device=device),
    )
