"""Acceptance rules that test drafts by their probabilities under target and drafter.

The sequential, block and traversal rules are lossless: drafts that were sampled are tested one by one, as a block if
they form a chain, or from the leaves to the root. The sequential test rejects a path at its first rejected node. The
traversal rule tests the whole path down to a leaf first, then the path without the leaf, and so on, so that a likely
continuation helps the nodes above it. The lossy rules, lenient and typical acceptance, trade the target's distribution
for speed; they are off by default.

Every rule takes a batch of trees, the target's distribution after any node (`log_probs`), and the source of its random
choices (`decisions`). Trees are drawn in any way where a rule does not say otherwise.
"""

import torch
from torch import Tensor

from foretoken.acceptance.rules import Acceptance, Decisions, LogProbs, child_with_token, descend, normalised, residual
from foretoken.core.token_tree import MAX_NODES, DrawKind, TokenTree


def accept_sequential(tree: TokenTree, log_probs: LogProbs, decisions: Decisions) -> Acceptance:
    """Tests each child in draw order, sampled children first (speculative sampling on trees); lossless."""
    batch_index = torch.arange(tree.batch_size, device=tree.tokens.device)
    table = sampled_children(tree)
    siblings = table.shape[2]

    def step(node: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        probs = log_probs(node).exp()
        child = torch.full_like(node, -1)
        for slot in range(siblings):
            candidate = table[batch_index, node, slot]
            is_tested = (candidate >= 0) & (child < 0)
            draft_probs = drawn_distributions(tree, candidate.clamp_min(0), probs)
            token = tree.tokens.gather(1, candidate.clamp_min(0).unsqueeze(1))
            p, q = probs.gather(1, token)[:, 0], draft_probs.gather(1, token)[:, 0]
            # Not `depth * siblings`: that bound is the batch's, and draws must not depend on other sequences.
            survives = decisions.accept(torch.where(is_tested, p, 0.0), q, depth * MAX_NODES + slot)
            child = torch.where(survives, candidate, child)
            is_rejected = is_tested & ~survives
            probs = torch.where(is_rejected.unsqueeze(1), residual(probs, draft_probs), probs)
        drawn = decisions.token(probs, depth)
        return torch.where(child < 0, child_with_token(tree, node, drawn), child), drawn

    return descend(tree, step)


def sampled_children(tree: TokenTree) -> Tensor:
    """Returns (B, N, C) int64, the sampled children of every node in draw order, -1 past the last.

    C is `max_siblings`, or 0 without sampled nodes.
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


def drawn_distributions(tree: TokenTree, nodes: Tensor, like: Tensor) -> Tensor:
    """Returns the draft distributions of drawn nodes, given their earlier siblings.

    Every rule reads draft distributions here.

    Args:
        tree: Candidates with draft distributions.
        nodes: (B,) int64, one node of each sequence.
        like: (B, V), gives dtype.

    Returns:
        (B, V); arbitrary for roots, chosen nodes and padding.
    """
    drafts, nodes = tree.distributions, nodes.unsqueeze(1)
    assert drafts is not None, "only draft distributions have drawn nodes"
    row = drafts.row_of.gather(1, nodes)
    probs = drafts.rows[torch.arange(tree.batch_size, device=nodes.device), row[:, 0].clamp_min(0)].to(like.dtype)
    if drafts.max_siblings > 1:
        # A draw without replacement excludes the tokens that were drawn before from the same distribution.
        is_removed = torch.arange(tree.width, device=nodes.device) < nodes
        is_removed &= (tree.parents == tree.parents.gather(1, nodes)) & (drafts.row_of == row)
        is_removed &= drafts.kinds.gather(1, nodes) == DrawKind.WITHOUT_REPLACEMENT
        taken = torch.zeros_like(probs).scatter_add_(1, tree.tokens, is_removed.to(probs.dtype))
        probs = torch.where(taken > 0, 0.0, probs)
    return normalised(probs)


def draft_distributions(tree: TokenTree, nodes: Tensor, like: Tensor) -> Tensor:
    """Returns `drawn_distributions` of drawn nodes and one-hot distributions of chosen nodes; arguments as there.

    Trees need no draft distributions. The rows of roots and padding are arbitrary.
    """
    token, drafts = tree.tokens.gather(1, nodes.unsqueeze(1)), tree.distributions
    if drafts is None:
        return torch.zeros_like(like).scatter_(1, token, 1.0)
    is_chosen = drafts.kinds.gather(1, nodes.unsqueeze(1)) == DrawKind.ONE_HOT
    drawn = torch.where(is_chosen, 0.0, drawn_distributions(tree, nodes, like))
    return drawn.scatter_add_(1, token, is_chosen.to(drawn.dtype))


def accept_block(tree: TokenTree, log_probs: LogProbs, decisions: Decisions) -> Acceptance:
    """Verifies chains of independently drawn tokens as blocks; lossless.

    Node i's parent is i - 1, and all nodes were drawn from `tree.distributions` independently.
    """
    batch, device = tree.batch_size, tree.tokens.device
    gamma = tree.num_nodes - 1
    node = torch.zeros(batch, dtype=torch.int64, device=device)
    accepted = torch.zeros_like(node)
    target_probs = log_probs(node).exp()
    prefix = torch.ones(batch, dtype=target_probs.dtype, device=device)  # P_i
    rest = target_probs  # distribution of the next token if the chain ends at `accepted`
    next_draft = target_probs  # read from i = 1 on
    for i in range(tree.max_depth + 1):
        exists = i <= gamma
        if i:
            token = tree.tokens[:, i : i + 1]
            ratio = target_probs.gather(1, token)[:, 0] / next_draft.gather(1, token)[:, 0]
            prefix = torch.where(exists, (prefix * ratio).clamp_max(1.0), prefix)
            node = torch.where(exists, i, node)
            target_probs = log_probs(node).exp()
        is_last = gamma == i
        next_draft = drawn_distributions(tree, torch.full_like(node, min(i + 1, tree.width - 1)), target_probs)
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
    the most probable token, and any token with a probability at temperature 1 above l times the largest.

    Args:
        tree: Chains (node i's parent is i - 1), sampled or one-hot.
        unwarped_log_probs: The target distribution after each node at temperature 1.
        greedy: (B,) bool, requests at temperature 0.
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
        draft_probs = draft_distributions(tree, torch.full_like(node, i), probs)
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

    The sum of log p decides among equal lengths. The token after the path is drawn, so a text with drafts that are all
    refused has the target's distribution. Medusa's code takes the argmax instead: it draws nothing, and such a text is
    greedy at any temperature. `lossy_tv` is NaN: the distance is unknown for this rule.

    Args:
        epsilon: Posterior threshold, published 0.09.
        delta: Posterior alpha, published 0.3 (the square root of epsilon).
        is_end_drawn: Whether the token after the path is drawn from the target's distribution; otherwise its argmax.

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
