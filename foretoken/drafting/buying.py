"""Buys nodes: chooses, of all drafted nodes of a batch, those that are worth their cost.

A node is never worth more than its parent. The most valuable nodes of all sequences therefore form trees. p_1 ≥ p_2 ≥ …
are their values, c(T) the seconds of a pass over T tokens, d those of drafting and h those of the host. The first k
nodes give B + p_1 + … + p_k expected tokens in c(B + k) + d + h seconds. `buy` takes the best k.

Letters: B sequences, N nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from foretoken.core.token_tree import MAX_NODES, PROBE, DrawKind, HostFacts, TokenTree
from foretoken.drafting.host_trees import falling, with_ancestors
from foretoken.trees.merge import prune

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from foretoken.drafting.draft_costs import FadingLine
    from foretoken.drafting.host_trees import HostTree
    from foretoken.runner.costs import CostCurve


class Ranked(NamedTuple):
    """Nodes that may be bought, most valuable first.

    Attributes:
        values: (1 + k,) probability that each node is accepted with its path; the first entry is 0, for no node.
        depths: (1 + k,) int64; the first entry is 0.
        num_fixed: Tokens of a pass without these nodes: roots, and nodes that are always verified.
        tokens: Expected tokens of such a pass.
    """

    values: NDArray[np.float64]
    depths: NDArray[np.int64]
    num_fixed: int
    tokens: float


class Earnings(NamedTuple):
    """Expected result of the best purchase among the nodes down to each depth; all (D,), at depths 1 to D.

    Attributes:
        tokens: Of the batch.
        seconds: Of the pass and of the host, without drafting.
    """

    tokens: NDArray[np.float64]
    seconds: NDArray[np.float64]


class Purchase(NamedTuple):
    """Nodes that are worth their cost.

    Attributes:
        host: The trees that the nodes come from.
        values: (B, N), probability that each node is accepted with its path.
        kept: (B, N) bool, the nodes to verify; entries of roots mean nothing.
        is_everything: Whether all nodes are kept.
        width: Tokens of the pass.
        rate: Expected tokens per second.
        ranked: The nodes that could be bought.
    """

    host: HostTree
    values: NDArray[np.float64]
    kept: NDArray[np.bool_]
    is_everything: bool
    width: int
    rate: float
    ranked: Ranked

    def taken_from(self, tree: TokenTree) -> TokenTree:
        """Returns the kept nodes of a tree; trees without drawn nodes are built on the host."""
        if tree.distributions is None:
            return self.on(tree.tokens.device, has_sources=tree.source is not None)
        if not self.is_everything:
            tree = prune(tree, torch.from_numpy(self.kept).to(tree.tokens.device))
        return tree.narrowed()

    def on(self, device: torch.device, *, has_sources: bool = True) -> TokenTree:
        """Returns the roots and the kept nodes of trees that are wholly on the host, with `source` if `has_sources`."""
        host, kept = self.host, self.kept | (np.arange(self.kept.shape[1]) == 0)
        assert host.scores is not None, "the trees are valued"
        counts, rows = kept.sum(1), np.arange(len(kept))[:, None]
        order = np.argsort(~kept, axis=1, kind="stable")[:, : counts.max()]
        places = kept.cumsum(1) - 1
        parents = np.where(host.parents >= 0, places[rows, np.maximum(host.parents, 0)], -1)
        is_node = np.arange(order.shape[1]) < counts[:, None]
        parts = np.stack([host.tokens, parents, host.depths, host.sources])[:, rows, order]
        parts = np.where(is_node, parts, np.array([0, -1, 0, 0])[:, None, None])
        tokens, new_parents, depths, sources = torch.from_numpy(parts).to(device)
        scores = torch.from_numpy(np.where(is_node, host.scores[rows, order], np.float32(0.0))).to(device)
        deepest, sizes = parts[2].max(1).tolist(), counts.tolist()
        return TokenTree(
            tokens=tokens,
            parents=new_parents,
            depths=depths,
            num_nodes=torch.from_numpy(counts).to(device),
            max_depth=max(deepest),
            scores=scores,
            source=sources if has_sources else None,
            host_facts=HostFacts(
                roots=parts[0, :, 0].tolist(), depths=deepest, num_nodes=sizes, num_tokens=int(parts[0].max()) + 1
            ),
        )


def buy(
    host: HostTree,
    cost: CostCurve,
    host_seconds: FadingLine,
    *,
    draft_s: float,
    max_nodes: int = MAX_NODES,
    is_drawn: NDArray[np.bool_] | None = None,
) -> Purchase:
    """Chooses the nodes that are worth their cost.

    Args:
        host: Trees with calibrated `scores`.
        cost: Seconds of passes.
        host_seconds: Of the host, by emitted tokens.
        draft_s: Seconds of drafting.
        max_nodes: Most nodes of each tree, root included. Drawn nodes and probes are kept beyond this bound.
        is_drawn: (B, N), nodes that were drawn from a draft distribution, see `drawn_nodes`; None for none.
    """
    assert host.scores is not None, "the trees are valued"
    batch = len(host.tokens)
    # A cut that depends on drawn tokens would bias the output. Probes are always kept: the drafter reads the target's
    # answer there.
    is_fixed = (host.sources & PROBE).astype(bool) & (host.depths > 0)
    if is_drawn is not None:
        is_fixed |= is_drawn & host.is_drafted
    is_fixed = with_ancestors(is_fixed, host)
    values = np.exp(falling(host.scores.astype(np.float64), host))
    candidates = np.where(host.is_drafted & ~is_fixed, values, -1.0)
    num_candidates = int((candidates > 0).sum())
    if host.tokens.shape[1] > max_nodes:
        candidates = _best_of_rows(candidates, max_nodes - 1 - is_fixed.sum(1))
    candidates = candidates.ravel()
    order = np.argsort(-candidates, kind="stable")
    worth = candidates[order]
    worth = worth[worth > 0]
    num_fixed = batch + int(is_fixed.sum())
    ranked = Ranked(
        values=np.concatenate([[0.0], worth]),
        depths=np.concatenate([[0], host.depths.ravel()[order[: len(worth)]]]),
        num_fixed=num_fixed,
        tokens=batch + float(values[is_fixed & host.is_drafted].sum()),
    )
    tokens = ranked.tokens + ranked.values.cumsum()
    seconds = cost.seconds(num_fixed + np.arange(len(tokens))) + draft_s + host_seconds(tokens)
    best = int((tokens / seconds).argmax())
    kept = is_fixed.ravel()
    kept[order[:best]] = True
    return Purchase(
        host=host,
        values=values,
        kept=kept.reshape(host.tokens.shape),
        is_everything=best == num_candidates,
        width=num_fixed + best,
        rate=float(tokens[best] / seconds[best]),
        ranked=ranked,
    )


def drawn_nodes(tree: TokenTree) -> NDArray[np.bool_] | None:
    """(B, N) bool, nodes that were drawn from a draft distribution; None for none. Synchronises with the host."""
    if tree.distributions is None:
        return None
    is_drawn: NDArray[np.bool_] = (tree.distributions.kinds != DrawKind.ONE_HOT).cpu().numpy()
    return is_drawn


def earnings_by_depth(
    ranked: Ranked, cost: CostCurve, host_seconds: FadingLine, draft_s: NDArray[np.float64]
) -> Earnings:
    """Returns what shallower drafts would have earned.

    A shallower draft might have more shallow nodes, if the number of nodes bounds these trees.

    Args:
        ranked: The nodes.
        cost: Seconds of passes.
        host_seconds: Of the host, by emitted tokens.
        draft_s: (D,), seconds of drafts of 1 to D levels.
    """
    rows = np.arange(len(draft_s))
    is_there = ranked.depths <= rows[:, None] + 1  # (D, 1 + k)
    tokens = ranked.tokens + (is_there * ranked.values).cumsum(1)
    passes = cost.seconds(ranked.num_fixed + np.arange(len(ranked.values)))
    seconds = passes[is_there.cumsum(1) - 1] + host_seconds(tokens)
    best = (tokens / (seconds + draft_s[:, None])).argmax(1)
    return Earnings(tokens[rows, best], seconds[rows, best])


def _best_of_rows(values: NDArray[np.float64], most: NDArray[np.int64]) -> NDArray[np.float64]:
    """(B, N) values; all but the `most` greatest of each row are -1."""
    order = np.argsort(-values, axis=1, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.arange(values.shape[1])[None], axis=1)
    return np.where(ranks < most[:, None], values, -1.0)
