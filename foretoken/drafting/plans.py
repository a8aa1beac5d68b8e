"""The formula: expected tokens per second of everything that an iteration may do.

    rate = (B + survival of its nodes) / (pass(B + nodes) + draft(who, depth) + host(tokens))

`best_depth` and `stop` judge what may be asked for, before it is drafted. L_b,d is the probability that the trees at
hand are right down to depth d of sequence b. R_d is the probability that a candidate is right there where they are
wrong. A draft of D levels then adds Σ_b Σ_d≤D (1 - L_b,d) R_d expected tokens.

`buy` judges nodes that were drafted. A node is never worth more than its parent, so the most valuable nodes of all
sequences form trees. The best number of nodes is taken, which may be none.

Letters: B sequences, N nodes, D levels, k nodes at hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from foretoken.core.token_tree import PROBE
from foretoken.drafting.host_trees import with_ancestors

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from foretoken.drafting.host_trees import HostTree


class Costs(NamedTuple):
    """Seconds of everything but drafting.

    Attributes:
        passes: (W,) of passes over 0, 1, … tokens; W - 1 stands for all greater ones.
        host: Of accepting and committing, by the emitted tokens.
        merging: Of merging one more tree.
    """

    passes: NDArray[np.float64]
    host: Callable[[Any], Any]
    merging: float = 0.0

    def without_drafting(self, widths: NDArray[Any], tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the seconds of a pass over some tokens, and of the host."""
        places = np.minimum((widths + 0.5).astype(np.int64), len(self.passes) - 1)
        seconds: NDArray[np.float64] = self.passes[places] + self.host(tokens)
        return seconds


class AtHand(NamedTuple):
    """The trees of the drafters that have answered.

    Attributes:
        reach: (B, D) probability that one of the trees is right down to each depth.
        values: (k,) probabilities of their nodes, falling.
        draft_s: Seconds that the drafters took.
    """

    reach: NDArray[np.float64]
    values: NDArray[np.float64]
    draft_s: float

    @classmethod
    def nothing(cls, batch: int) -> Self:
        """Returns no trees."""
        return cls(np.zeros((batch, 0)), np.zeros(0), 0.0)


class Candidate(NamedTuple):
    """A drafter that was not asked yet; all fields are (D,), by depth.

    Attributes:
        reach: Probability that it is right down to the depth where the trees at hand are wrong.
        widths: Nodes of a sequence that are verified at the depth.
        seconds: Of drafts of the depth.
    """

    reach: NDArray[np.float64]
    widths: NDArray[np.float64]
    seconds: NDArray[np.float64]


class DraftPlan(NamedTuple):
    """What an iteration may do.

    Attributes:
        depth: Levels to draft; 0 for nothing more.
        width: Expected tokens of the pass.
        tokens: Expected tokens of the batch.
        seconds: Expected seconds of the iteration.
    """

    depth: int
    width: float
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds


def stop(at_hand: AtHand, costs: Costs) -> DraftPlan:
    """Returns the plan in which no further drafter is asked."""
    batch = len(at_hand.reach)
    if not len(at_hand.values):
        seconds_now = float(costs.passes[batch]) + at_hand.draft_s + float(costs.host(float(batch)))
        return DraftPlan(0, batch, batch, seconds_now)
    tokens = batch + _sums(at_hand.values)
    widths = batch + np.arange(len(tokens))
    seconds = costs.without_drafting(widths, tokens) + at_hand.draft_s
    best = int((tokens / seconds).argmax())
    return DraftPlan(0, float(widths[best]), float(tokens[best]), float(seconds[best]))


def best_depth(at_hand: AtHand, candidate: Candidate, costs: Costs) -> DraftPlan:
    """Returns the plan with the most tokens per second in which a candidate is asked, for at least one level."""
    batch, deepest = at_hand.reach.shape[0], len(candidate.reach)
    covered = at_hand.reach[:, :deepest]
    added = batch * candidate.reach
    added[: covered.shape[1]] -= covered.sum(0) * candidate.reach[: covered.shape[1]]
    sums = _sums(at_hand.values)[:, None]
    tokens = batch + sums + added.cumsum()
    widths = batch + np.arange(len(sums))[:, None] + batch * candidate.widths.cumsum()
    drafting = at_hand.draft_s + candidate.seconds + costs.merging * (len(at_hand.values) > 0)
    seconds = costs.without_drafting(widths, tokens) + drafting
    best = int((tokens / seconds).argmax())
    depth = best % deepest + 1
    return DraftPlan(depth, float(widths.flat[best]), float(tokens.flat[best]), float(seconds.flat[best]))


_MOST_AT_HAND = 128  # nodes, the most valuable first; the widest tree of several drafters


def _sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """(k + 1,) expected tokens of the first 0, 1, …, k nodes."""
    return np.concatenate([[0.0], values[:_MOST_AT_HAND].cumsum()])


class Purchase(NamedTuple):
    """Nodes that are worth their cost.

    Attributes:
        kept: (B, N) bool, the nodes to verify; entries of roots mean nothing.
        is_everything: Whether all nodes are kept.
        tokens: Expected tokens of the batch.
        width: Tokens of the pass.
    """

    kept: NDArray[np.bool_]
    is_everything: bool
    tokens: float
    width: int


def buy(
    host: HostTree,
    values: NDArray[np.float64],
    costs: Costs,
    *,
    draft_s: float,
    max_nodes: int,
    is_drawn: NDArray[np.bool_] | None = None,
) -> Purchase:
    """Chooses the nodes that are worth their cost.

    Args:
        host: Trees.
        values: (B, N) probability that each node is accepted with its path, at most its parent's.
        costs: Seconds.
        draft_s: Seconds that the drafts took.
        max_nodes: Most nodes of each tree, root included. Drawn nodes and probes are kept beyond this bound.
        is_drawn: (B, N), nodes that were drawn from a draft distribution; None for none.
    """
    batch, width = host.tokens.shape
    # A cut that depends on drawn tokens would bias the output. Probes are always kept: the drafter reads the target's
    # answer there.
    is_fixed = (host.sources & PROBE).astype(bool) & (host.depths > 0)
    if is_drawn is not None:
        is_fixed |= is_drawn & host.is_drafted
    num_fixed = batch
    if is_fixed.any():
        is_fixed = with_ancestors(is_fixed, host)
        num_fixed += int(is_fixed.sum())
    candidates = np.where(host.is_drafted & ~is_fixed, values, -1.0)
    num_candidates = int((candidates > 0).sum())
    if width > max_nodes:
        candidates = _best_of_rows(candidates, max_nodes - 1 - is_fixed.sum(1))
    order = np.argsort(-candidates, axis=None, kind="stable")[:num_candidates]
    worth = candidates.ravel()[order]
    worth = worth[worth > 0]
    tokens = batch + float(values[is_fixed & host.is_drafted].sum()) + np.concatenate([[0.0], worth.cumsum()])
    widths = num_fixed + np.arange(len(tokens))
    best = int((tokens / (costs.without_drafting(widths, tokens) + draft_s)).argmax())
    is_fixed.ravel()[order[:best]] = True
    return Purchase(is_fixed, best == num_candidates, float(tokens[best]), num_fixed + best)


def _best_of_rows(values: NDArray[np.float64], most: NDArray[np.int64]) -> NDArray[np.float64]:
    """(B, N) values; all but the `most` greatest of each row are -1."""
    order = np.argsort(-values, axis=1, kind="stable")
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.arange(values.shape[1])[None], axis=1)
    return np.where(ranks < most[:, None], values, -1.0)
