"""Block verification of a sampled chain: lossless, and accepts the most tokens that a rule for chains can.

Source: Sun et al. 2024 (arXiv 2403.10444), algorithm 2. With P_0 = 1, P_i = min(1, P_{i-1} p_i(x_i) / q_i(x_i)) and
S_i = sum_x max(P_i p_{i+1}(x) - q_{i+1}(x), 0), position i < gamma passes with h_i = S_i / (S_i + 1 - P_i), the last
with h_gamma = P_gamma; the longest passing prefix is accepted (a failure does not end the search), and the next token
comes from norm(max(P_i p_{i+1} - q_{i+1}, 0)), or from the target after the whole chain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from foretoken.acceptance.decisions import Acceptance, Decisions, LogProbs, residual

if TYPE_CHECKING:
    from foretoken.core.token_tree import TokenTree


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
        # P_i = 1 and S_i = 0 means p = q: position i then never passes, which changes nothing, as i + 1 surely does.
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
