"""Greedy and coupled acceptance: descends a tree along the tokens that the target chooses.

Both rules take the target's token after a node and descend if a child holds it. They differ in how that token is
chosen. By construction the generated text is that of plain decoding, for any tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foretoken.acceptance.decisions import Acceptance, Decisions, LogProbs
from foretoken.core.backend import has_triton_kernels, reads_are_free

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.core.token_tree import TokenTree


class HostPath(NamedTuple):
    """Accepted nodes of one sequence in order, and the token after them, on the host."""

    nodes: list[int]
    next_token: int


def descend(tree: TokenTree, step: Callable[[Tensor, int], tuple[Tensor, Tensor]]) -> Acceptance:
    """Descends from the root until a step finds no child.

    Args:
        tree: (B, N) candidates.
        step: Maps (nodes (B,) int64, depth) to the child to descend to, (B,) int64, -1 for none, and the target's token
            where there is no child, (B,) int64.

    Returns:
        The path and the token that ended it.
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
    """Returns the first child of a node that holds a token.

    Args:
        tree: (B, N) candidates.
        node: (B,) int64.
        token: (B,) int64.

    Returns:
        (B,) int64, -1 if there is none.
    """
    is_match = (tree.parents == node.unsqueeze(1)) & (tree.tokens == token.unsqueeze(1))
    return torch.where(is_match.any(1), is_match.to(torch.uint8).argmax(1), -1)


def walk(tree: TokenTree, choose: Callable[[Tensor, int], Tensor]) -> Acceptance:
    """Descends while a child holds the chosen token; choose: (nodes (B,), depth) -> (B,) tokens."""
    if reads_are_free(tree.tokens.device):
        return _as_tensors(tree, _walk_on_host(tree, lambda nodes, depth: choose(torch.tensor(nodes), depth).tolist()))
    return _walk_on_device(tree, choose)


def walk_chosen(tree: TokenTree, chosen: Sequence[Sequence[int]]) -> list[HostPath]:
    """Does `walk` on the host, if the host knows the token after every node and reads tensors freely.

    Args:
        tree: (B, N) candidates.
        chosen: Of B sequences, the token after each node, without padding.
    """
    if tree.max_depth == 0:  # plain decoding needs nothing below
        return [HostPath([], row[0]) for row in chosen]
    return _walk_on_host(tree, lambda nodes, _: [row[node] for row, node in zip(chosen, nodes, strict=True)])


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
    """Accepts the path of most probable tokens (Stern et al. 2018, arXiv 1811.03115, with exact match).

    Args:
        tree: Candidates drawn in any way.
        argmax: (B,) int64 nodes -> (B,) int64, the target's most probable token after each.
    """
    return walk(tree, lambda node, _: argmax(node))


def accept_chosen(tree: TokenTree, chosen: Tensor) -> Acceptance:
    """Does `walk` if the chosen token is known after every node: matches all nodes at once.

    Args:
        tree: (B, N) candidates drawn in any way.
        chosen: (B, N) int64, the target's token after each node.
    """
    if has_triton_kernels(chosen.device):
        from foretoken.acceptance import triton_walk

        walked = triton_walk.walk_chosen(
            tree.tokens.contiguous(), tree.parents.contiguous(), chosen.contiguous(), tree.max_depth
        )
        return Acceptance(
            **walked._asdict(), lossy_tv=torch.zeros(len(chosen), dtype=torch.float32, device=chosen.device)
        )
    if reads_are_free(chosen.device):
        return _as_tensors(tree, walk_chosen(tree, chosen.tolist()))
    return _walk_on_device(tree, lambda nodes, _: chosen.gather(1, nodes.unsqueeze(1))[:, 0])


def accept_coupled(tree: TokenTree, log_probs: LogProbs, decisions: Decisions) -> Acceptance:
    """Draws the target's token after each node and accepts the path of drawn tokens.

    With position-keyed decisions the text is that of plain Gumbel-max sampling with the same seed, for every drafter,
    tree and batch (Daliri et al. 2024, arXiv 2408.07978). Lossless if the tree depends on the target's decisions only
    through the shared noise.

    Args:
        tree: Candidates drawn in any way.
        log_probs: The target distribution after each node.
        decisions: Source of the draws.
    """
    return walk(tree, lambda node, depth: decisions.target_token(log_probs(node), depth))
