"""What every acceptance rule has: its random choices, its result, the walk down a tree; and the rules of exact match.

Greedy and coupled acceptance take the target's token after a node and descend if a child holds it: for any tree the
text is that of plain decoding. Rules that test drafts by their probabilities are in
`foretoken.acceptance.sampled_rules`.

Rules ask a `Decisions` object instead of drawing numbers. Tests can therefore enumerate every outcome with its exact
probability, while the engine answers from position-keyed noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from foretoken.core.backend import has_triton_kernels, reads_are_free
from foretoken.sampling.batch import best_possible
from foretoken.sampling.noise import KeyedNoise, Purpose

if TYPE_CHECKING:
    from foretoken.core.token_tree import TokenTree

LogProbs = Callable[[Tensor], Tensor]
"""(B,) int64 nodes -> (B, V) log-probabilities of the token after each node, warped by the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """The result of an acceptance rule.

    Attributes:
        path: (B, D) int64, accepted nodes at depth 1.., -1 past the last.
        num_accepted: (B,) int64.
        next_token: (B,) int64, the correction or bonus token.
        lossy_tv: (B,) total-variation distance spent by a lossy rule, summed over tested positions; 0 when lossless.
    """

    path: Tensor
    num_accepted: Tensor
    next_token: Tensor
    lossy_tv: Tensor


class Decisions(Protocol):
    """Makes the three kinds of random choice; `lane` tells apart choices of one kind within one iteration."""

    def target_token(self, log_probs: Tensor, depth: int) -> Tensor:
        """Returns (B,) int64 target tokens, drawn from `log_probs`, (B, V); -1 if none is possible.

        The draw belongs to position `depth + 1` after the root and is the same in every iteration.
        """

    def accept(self, target_prob: Tensor, draft_prob: Tensor, lane: int) -> Tensor:
        """Returns (B,) bool, true with probability min(1, target / draft), both (B,); never if target_prob is 0."""

    def token(self, probs: Tensor, lane: int) -> Tensor:
        """Draws from a residual or bonus distribution, (B, V) summing to 1; (B,) int64, -1 if none is possible."""


@dataclass(frozen=True, slots=True)
class KeyedDecisions:
    """Decisions from position-keyed noise.

    Target tokens are keyed by their absolute position, so they do not depend on drafter or tree. Everything else is
    keyed by the root's position. No two iterations of a sequence share a root position, so no number is used twice.

    Attributes:
        noise: The requests' random numbers.
        root_positions: (B,) int64, absolute position of the root.
    """

    noise: KeyedNoise
    root_positions: Tensor

    def target_token(self, log_probs: Tensor, depth: int) -> Tensor:
        """Draws with the noise of the token's absolute position."""
        positions = self.root_positions + (depth + 1)
        return best_possible(log_probs + self.noise.gumbel(positions, Purpose.TARGET, log_probs.shape[1]))

    def accept(self, target_prob: Tensor, draft_prob: Tensor, lane: int) -> Tensor:
        """Tests u q < p, u keyed by root position and lane. Strict: u <= p/q would accept p = 0 at u = 0."""
        return self.noise.uniform(self.root_positions, Purpose.ACCEPT, lane) * draft_prob < target_prob

    def token(self, probs: Tensor, lane: int) -> Tensor:
        """Draws with the noise of root position and lane."""
        noise = self.noise.gumbel(self.root_positions, Purpose.RESIDUAL, probs.shape[1], lane)
        return best_possible(probs.log() + noise)


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Returns the distribution of the correction token after a rejection.

    Args:
        target_probs: (B, V), rows sum to 1, or to less if the caller has scaled them.
        draft_probs: (B, V), rows sum to 1.

    Returns:
        (B, V), norm(max(p - q, 0)); norm(p) where that is 0 throughout: a branch that rounding alone can reach.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), section 2.3.
    """
    rest = (target_probs - draft_probs).clamp_min(0)
    return normalised(torch.where((rest > 0).any(1, keepdim=True), rest, target_probs))


def normalised(weights: Tensor) -> Tensor:
    """Returns weights, (B, V) and not negative, divided by their sum; rows of zeros stay zero.

    There is no lower bound on the sum: a bound would leave rows of small weights with a sum below 1.
    """
    total = weights.sum(1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)


class ChosenPath(NamedTuple):
    """Accepted nodes of one sequence in order, and the tokens after the root and after each node, on the host."""

    nodes: list[int]
    tokens: list[int]


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


def _walk_on_host(tree: TokenTree, choose: Callable[[list[int], int], list[int]]) -> list[ChosenPath]:
    """Does `walk` in plain Python: on a CPU reading a tensor is cheaper than an operation on it."""
    rows = list(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True))
    nodes, walking = [0] * len(rows), list(range(len(rows)))
    paths = [ChosenPath([], []) for _ in rows]
    for depth in range(tree.max_depth + 1):
        chosen = choose(nodes, depth)
        for row in list(walking):
            paths[row].tokens.append(chosen[row])
            child = _child_of(*rows[row], nodes[row], chosen[row]) if depth < tree.max_depth else None
            if child is None:
                walking.remove(row)
            else:
                nodes[row] = child
                paths[row].nodes.append(child)
        if not walking:
            break
    return paths


def _as_tensors(tree: TokenTree, paths: list[ChosenPath]) -> Acceptance:
    packed = torch.tensor([
        [len(nodes), tokens[-1], *nodes, *[-1] * (tree.max_depth - len(nodes))] for nodes, tokens in paths
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
        return _as_tensors(tree, walk_chosen(tree, chosen.flatten().tolist(), starts))
    return _walk_on_device(tree, lambda nodes, _: chosen.gather(1, nodes.unsqueeze(1))[:, 0])


def accept_coupled(tree: TokenTree, log_probs: LogProbs, decisions: Decisions) -> Acceptance:
    """Draws the target's token after each node and accepts the path of drawn tokens.

    With position-keyed decisions the text is that of plain Gumbel-max sampling with the same seed, for every drafter,
    tree and batch (Daliri et al. 2024, arXiv 2408.07978). Lossless if the tree depends on the target's decisions only
    through the shared noise.
    """
    return walk(tree, lambda node, depth: decisions.target_token(log_probs(node), depth))
