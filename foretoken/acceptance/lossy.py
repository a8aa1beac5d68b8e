"""Lossy rules: lenient and typical acceptance trade the target's distribution for speed. Off by default."""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.acceptance.decisions import Acceptance, Decisions, LogProbs, residual
from foretoken.core.token_tree import DrawKind, TokenTree


def accept_lenient(
    tree: TokenTree,
    log_probs: LogProbs,
    unwarped_log_probs: LogProbs,
    greedy: Tensor,
    decisions: Decisions,
    *,
    lenience: float,
) -> Acceptance:
    """Speculative sampling on a chain with a lenience factor l: accepts a token with probability min(1, p / (l q)).

    The correction token comes from norm(max(p - q, 0)), which only fills deficits. The total-variation distance of one
    position is therefore exactly sum min(p / l, q) - sum min(p, q), reported in `lossy_tv`. A greedy request accepts
    the most probable token, and any token whose probability at temperature 1 is above l times the largest.

    Args:
        tree: Chains (node i's parent is i - 1), sampled or one-hot.
        log_probs: The target distribution after each node.
        unwarped_log_probs: The same at temperature 1.
        greedy: (B,) bool, requests at temperature 0.
        decisions: Source of the tests and draws.
        lenience: l in (0, 1]; 1 is lossless.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), appendix A.5; the greedy inequality printed there is reversed.
    """
    batch, device = tree.batch_size, tree.tokens.device
    index = torch.arange(batch, device=device)
    node = torch.zeros(batch, dtype=torch.int64, device=device)
    walking = torch.ones(batch, dtype=torch.bool, device=device)
    probs = log_probs(node).exp()
    rest = probs
    spent = torch.zeros(batch, dtype=probs.dtype, device=device)
    for i in range(1, tree.max_depth + 1):
        is_tested = walking & (i < tree.num_nodes)
        token = tree.tokens[:, i : i + 1]
        draft_probs = _draft_probs(tree, i, probs)
        p, q = probs.gather(1, token)[:, 0], draft_probs.gather(1, token)[:, 0]
        raw = unwarped_log_probs(node).exp()
        # Strictly above, or the argmax itself: at l = 1 a tie that plain decoding breaks differently is not accepted.
        is_near_best = (p > 0) | (raw.gather(1, token)[:, 0] > lenience * raw.amax(1))
        survives = torch.where(greedy, is_near_best, decisions.accept(p, lenience * q, i - 1))
        tv = (torch.minimum(probs / lenience, draft_probs) - torch.minimum(probs, draft_probs)).sum(1)
        tv = torch.where(greedy, (is_near_best & (p == 0)).to(tv.dtype), tv)
        spent = spent + torch.where(is_tested, tv, 0.0)
        walking = is_tested & survives
        node = torch.where(walking, i, node)
        kept_probs = log_probs(node).exp()
        is_rejected = is_tested & ~survives
        rest = torch.where(is_rejected.unsqueeze(1), residual(probs, draft_probs), rest)
        rest = torch.where(walking.unsqueeze(1), kept_probs, rest)
        probs = kept_probs
    depth = torch.arange(1, tree.max_depth + 1, device=device).expand(batch, -1)
    return Acceptance(
        path=torch.where(depth <= node.unsqueeze(1), depth, -1),
        num_accepted=tree.depths[index, node],
        next_token=decisions.token(rest, 0),
        lossy_tv=spent,
    )


def accept_typical(
    tree: TokenTree,
    log_probs: LogProbs,
    decisions: Decisions,
    *,
    epsilon: float,
    delta: float,
    is_end_drawn: bool = True,
) -> Acceptance:
    """Accepts the longest path of typical tokens: p(x) > min(epsilon, delta exp(-H(p))).

    The sum of log p decides among equal lengths. The token after the path is drawn, so a text whose drafts are all
    refused has the target's distribution. Medusa's code takes the argmax instead: it draws nothing, and such a text is
    greedy at any temperature.

    Args:
        tree: Candidates drawn in any way.
        log_probs: The target distribution after each node.
        decisions: Source of the draw.
        epsilon: Posterior threshold, published 0.09.
        delta: Posterior alpha, published 0.3 (the square root of epsilon).
        is_end_drawn: Whether the token after the path is drawn from the target's distribution; otherwise its argmax.

    Returns `lossy_tv` = NaN: the distance is unknown for this rule.

    Source: Cai et al. 2024 (arXiv 2401.10774), section 2.3.1.
    """
    batch, width = tree.tokens.shape
    index = torch.arange(batch, device=tree.tokens.device)
    root_log_probs = log_probs(torch.zeros_like(tree.num_nodes))
    is_kept = torch.zeros(batch, width, dtype=torch.bool, device=tree.tokens.device)
    is_kept[:, 0] = True
    path_score = torch.zeros(batch, width, dtype=root_log_probs.dtype, device=tree.tokens.device)
    for i in range(1, width):
        parent = tree.parents[:, i].clamp_min(0)
        parent_log_probs = log_probs(parent)
        probs = parent_log_probs.exp()
        entropy = -(probs * (probs + 1e-5).log()).sum(1)
        score = parent_log_probs.gather(1, tree.tokens[:, i : i + 1])[:, 0]
        is_typical = score.exp() > (delta * (-entropy).exp()).clamp_max(epsilon)
        is_kept[:, i] = is_kept[index, parent] & is_typical & (tree.parents[:, i] >= 0)
        path_score[:, i] = path_score[index, parent] + score
    depths = torch.where(is_kept, tree.depths, -1)
    longest = depths == depths.amax(1, keepdim=True)
    best = torch.where(longest, path_score, float("-inf")).argmax(1)
    end = log_probs(best)
    return Acceptance(
        path=tree.path_nodes(best),
        num_accepted=tree.depths[index, best],
        next_token=decisions.token(end.exp(), 0) if is_end_drawn else end.argmax(1),
        lossy_tv=torch.full((batch,), float("nan"), dtype=torch.float32, device=tree.tokens.device),
    )


def _draft_probs(tree: TokenTree, node: int, like: Tensor) -> Tensor:
    """(B, V), the draft distribution of a chain's node; one-hot for chosen nodes."""
    one_hot = torch.zeros_like(like).scatter_(1, tree.tokens[:, node : node + 1], 1.0)
    if tree.distributions is None:
        return one_hot
    index = torch.arange(tree.batch_size, device=like.device)
    rows = tree.distributions.rows[index, tree.distributions.row_of[:, node].clamp_min(0)].to(like.dtype)
    is_one_hot = tree.distributions.kinds[:, node : node + 1] == DrawKind.ONE_HOT
    return torch.where(is_one_hot, one_hot, rows)
