"""Whom to ask for a draft: where the tokens that a drafter is expected to add come faster than passes bring them.

With L_b,d the probability that the trees at hand are right down to depth d for sequence b, and R_d the probability that
a drafter is where they are not (`reach`), asking it for D levels adds Σ_b Σ_d≤D (1 - L_b,d) R_d tokens, and takes its
seconds and those of verifying its nodes. Nodes at hand are bought along with it, as far as that pays (`buying`).

Arctic's rule, a lookup's draft instead of a model's where it is expected to be accepted as far, follows from this.

Letters: B sequences, D levels, k nodes at hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

_MOST_NODES = 128  # at hand that are looked at, the most valuable ones


class AtHand(NamedTuple):
    """The trees of those who have answered.

    Attributes:
        reach: (B, D) probability that one of them is right down to each depth.
        values: (k,) probabilities of their nodes, falling.
        draft_s: Seconds that they took.
    """

    reach: NDArray[np.float64]
    values: NDArray[np.float64]
    draft_s: float


class Candidate(NamedTuple):
    """A drafter that was not asked yet; all (D,), by depth.

    Attributes:
        reach: Probability that it is right down to there where those at hand are not.
        widths: Nodes of a sequence at that depth that are verified.
        seconds: Of drafts so deep.
    """

    reach: NDArray[np.float64]
    widths: NDArray[np.float64]
    seconds: NDArray[np.float64]


class Costs(NamedTuple):
    """What everything else takes, seconds.

    Attributes:
        passes: Of target passes, by their tokens.
        host: Of accepting and committing, by the tokens generated.
        merging: Of merging another tree into those at hand.
    """

    passes: Callable[[NDArray[Any]], NDArray[np.float64]]
    host: Callable[[NDArray[np.float64]], NDArray[np.float64]]
    merging: float


class Choice(NamedTuple):
    """A drafter to be asked.

    Attributes:
        drafter: None for nobody.
        depth: Levels that pay most.
        rate: Tokens a second that are expected.
    """

    drafter: int | None
    depth: int
    rate: float


def stop_rate(at_hand: AtHand, costs: Costs) -> float:
    """Tokens a second when nobody else is asked."""
    batch = len(at_hand.reach)
    tokens = batch + _sums(at_hand.values)
    seconds = costs.passes(batch + np.arange(len(tokens))) + at_hand.draft_s + costs.host(tokens)
    return float((tokens / seconds).max())


def best_depth(at_hand: AtHand, candidate: Candidate, costs: Costs) -> tuple[int, float]:
    """Levels of a candidate's draft that bring most tokens a second, and how many; one level at least."""
    batch, deepest = at_hand.reach.shape[0], len(candidate.reach)
    covered = at_hand.reach[:, :deepest]
    added = ((1 - covered).sum(0) * candidate.reach[: covered.shape[1]]).cumsum()
    if deepest > covered.shape[1]:  # nothing at hand is so deep
        beyond = (batch * candidate.reach[covered.shape[1] :]).cumsum()
        added = np.concatenate([added, beyond + (added[-1] if len(added) else 0.0)])
    sums = _sums(at_hand.values)
    tokens = batch + sums[:, None] + added
    widths = batch + np.arange(len(sums))[:, None] + batch * candidate.widths.cumsum()
    drafting = at_hand.draft_s + candidate.seconds + costs.merging * (len(at_hand.values) > 0)
    rates = tokens / (costs.passes(widths) + drafting + costs.host(tokens))
    by_depth = rates.max(0)
    best = int(by_depth.argmax())
    return best + 1, float(by_depth[best])


def choose(at_hand: AtHand, candidates: Mapping[int, Candidate], costs: Costs) -> Choice:
    """The drafter whose draft adds most to the tokens a second; nobody where none adds any.

    Asked again after every answer, this finds those who pay together: what a drafter adds only falls with the others'
    trees, so that where none pays alone, several do not pay either.
    """
    best = Choice(None, 0, stop_rate(at_hand, costs))
    for drafter, candidate in candidates.items():
        depth, rate = best_depth(at_hand, candidate, costs)
        if rate > best.rate:
            best = Choice(drafter, depth, rate)
    return best


def _sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """(k + 1,), what the first nodes are worth together, from none on."""
    return np.concatenate([[0.0], values[:_MOST_NODES].cumsum()])
