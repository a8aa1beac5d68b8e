"""The acceptance rules.

Greedy and coupled acceptance take the target's token after a node and descend if a child holds it: for any tree the
text is that of plain decoding. Drafts that were sampled are tested one by one, or as a block if they form a chain. The
lossy rules, lenient and typical acceptance, trade the target's distribution for speed; they are off by default.

Every rule takes a batch of trees, the target's distribution after any node (`log_probs`), and the source of its random
choices (`decisions`). Trees are drawn in any way where a rule does not say otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foretoken.acceptance.decisions import Acceptance, Decisions, LogProbs, normalised, residual
from foretoken.core.backend import has_triton_kernels, reads_are_free
from foretoken.core.token_tree import MAX_NODES, DrawKind, TokenTree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class ChosenPath(NamedTuple):
    """Accepted nodes of one sequence in order, and the tokens after the root and after each node, on the host."""

    nodes: list[int]
    tokens: list[int]


class HostPath(NamedTuple):
    """Accepted nodes of one sequence in order, and the token after them, on the host."""

    nodes: list[int]
    next_token: int


def descend(tree: TokenTree, step: Callable[[Tensor, int], tuple[Tensor, Tensor]]) -> Acceptance:
    """Descends from the root until a step finds no child.

    `step` maps (B,) int64 nodes and a depth to two (B,) int64 tensors: the child to descend to, -1 for none, and the
    target's token where there is no child.
    """
    batch, device = tree.batch_size, tree.tokens.device
    node = torch.zeros(batch, dtype=torch.int64, device=device)
    walking = torch.ones(batch, dtype=torch.bool, device=device)
    path = torch.full((batch, tree.max_depth), -1, dtype=torch.int64, device=device)
    next_token = node
    for depth in range(tree.max_depth + 1):
        child, token = step(node, depth)
        next_token = torch.where(walking & (child < 0), token, next_token)
        if depth == tree.max_depth:
            break
        walking = walking & (child >= 0)
        node = torch.where(walking, child, node)
        path[:, depth] = torch.where(walking, child, -1)
        if reads_are_free(device) and not walking.any():  # elsewhere the read would cost a synchronisation
            break
    return Acceptance(
        path=path,
        num_accepted=(path >= 0).sum(1),
        next_token=next_token,
        lossy_tv=torch.zeros(batch, dtype=torch.float32, device=device),
    )


def child_with_token(tree: TokenTree, node: Tensor, token: Tensor) -> Tensor:
    """Returns the first child of a node that holds a token, -1 if there is none; all (B,) int64."""
    is_match = (tree.parents == node.unsqueeze(1)) & (tree.tokens == token.unsqueeze(1))
    return torch.where(is_match.any(1), is_match.to(torch.uint8).argmax(1), -1)


def walk(tree: TokenTree, choose: Callable[[Tensor, int], Tensor]) -> Acceptance:
    """Descends while a child holds the chosen token; choose: (nodes (B,), depth) -> (B,) tokens."""
    if reads_are_free(tree.tokens.device):
        return _as_tensors(tree, _walk_on_host(tree, lambda nodes, depth: choose(torch.tensor(nodes), depth).tolist()))
    return _walk_on_device(tree, choose)


def walk_chosen(tree: TokenTree, chosen: Sequence[int], starts: Sequence[int]) -> list[ChosenPath]:
    """Does `walk` on the host; the tokens after sequence b's nodes begin at `chosen[starts[b]]`."""
    if tree.max_depth == 0:  # plain decoding needs nothing below
        return [ChosenPath([], [chosen[start]]) for start in starts[: tree.tokens.shape[0]]]
    paths: list[ChosenPath] = []
    for ids, parents, start in zip(tree.tokens.tolist(), tree.parents.tolist(), starts, strict=False):
        node, token = 0, chosen[start]
        path = ChosenPath([], [token])
        for child in range(1, len(ids)):  # parents come before their children
            if parents[child] == node and ids[child] == token and len(path.nodes) < tree.max_depth:
                node, token = child, chosen[start + child]
                path.nodes.append(node)
                path.tokens.append(token)
        paths.append(path)
    return paths


def _walk_on_device(tree: TokenTree, choose: Callable[[Tensor, int], Tensor]) -> Acceptance:
    """Does `walk` without reading any tensor on the host."""

    def step(node: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        chosen = choose(node, depth)
        return child_with_token(tree, node, chosen), chosen

    return descend(tree, step)


def _walk_on_host(tree: TokenTree, choose: Callable[[list[int], int], list[int]]) -> list[HostPath]:
    """Does `walk` in plain Python: on a CPU reading a tensor is cheaper than an operation on it."""
    rows = list(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True))
    nodes, next_token = [0] * len(rows), [0] * len(rows)
    paths: list[list[int]] = [[] for _ in rows]
    walking = list(range(len(rows)))
    for depth in range(tree.max_depth + 1):
        chosen = choose(nodes, depth)
        for row in list(walking):
            next_token[row] = token = chosen[row]
            child = _child_of(*rows[row], nodes[row], token) if depth < tree.max_depth else None
            if child is None:
                walking.remove(row)
            else:
                nodes[row] = child
                paths[row].append(child)
        if not walking:
            break
    return list(map(HostPath, paths, next_token))


def _as_tensors(tree: TokenTree, paths: list[HostPath]) -> Acceptance:
    packed = torch.tensor([
        [len(nodes), token, *nodes, *[-1] * (tree.max_depth - len(nodes))] for nodes, token in paths
    ])  # fmt: skip
    return Acceptance(
        path=packed[:, 2:],
        num_accepted=packed[:, 0],
        next_token=packed[:, 1],
        lossy_tv=torch.zeros(len(paths), dtype=torch.float32),
    )


def _child_of(tokens: list[int], parents: list[int], node: int, token: int) -> int | None:
    later = range(node + 1, len(tokens))  # parents come before their children
    return next((child for child in later if parents[child] == node and tokens[child] == token), None)


def accept_greedy(tree: TokenTree, argmax: Callable[[Tensor], Tensor]) -> Acceptance:
    """Accepts the path of most probable tokens; `argmax` returns them, (B,) int64, for (B,) int64 nodes.

    Source: Stern et al. 2018 (arXiv 1811.03115), with exact match.
    """
    return walk(tree, lambda node, _: argmax(node))


def accept_chosen(tree: TokenTree, chosen: Tensor) -> Acceptance:
    """Does `walk` for `chosen`, (B, N) int64, the target's token after each node; matches all nodes at once."""
    if has_triton_kernels(chosen.device):
        from foretoken.acceptance import triton_walk

        walked = triton_walk.walk_chosen(
            tree.tokens.contiguous(), tree.parents.contiguous(), chosen.contiguous(), tree.max_depth
        )
        return Acceptance(
            **walked._asdict(), lossy_tv=torch.zeros(len(chosen), dtype=torch.float32, device=chosen.device)
        )
    if reads_are_free(chosen.device):
        starts = range(0, chosen.numel(), chosen.shape[1])
        paths = walk_chosen(tree, chosen.flatten().tolist(), starts)
        return _as_tensors(tree, [HostPath(path.nodes, path.tokens[-1]) for path in paths])
    return _walk_on_device(tree, lambda nodes, _: chosen.gather(1, nodes.unsqueeze(1))[:, 0])


def accept_coupled(tree: TokenTree, log_probs: LogProbs, decisions: Decisions) -> Acceptance:
    """Draws the target's token after each node and accepts the path of drawn tokens.

    With position-keyed decisions the text is that of plain Gumbel-max sampling with the same seed, for every drafter,
    tree and batch (Daliri et al. 2024, arXiv 2408.07978). Lossless if the tree depends on the target's decisions only
    through the shared noise.
    """
    return walk(tree, lambda node, depth: decisions.target_token(log_probs(node), depth))


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
