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

from foretoken.drafting.calibration import Calibration
from foretoken.drafting.draft_costs import DraftSeconds
from foretoken.drafting.probing import WEIGHT_AT_PROBE, ProbeSchedule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

_FADE = 0.5 ** (1 / 60)  # of an observation, by later ones
_PRIOR = 4.0  # observations that the mean rate is worth as a guess at each level
_GUESS = 0.6  # the mean rate to begin with,
_GUESS_WEIGHT = 10.0  # and tokens that it is worth, so that a few wrong drafts are no reason to give up


class Reach:
    """P(a drafter is right down to depth d | the drafters before it are not), for every depth."""

    def __init__(self, deepest: int) -> None:
        """Nothing was observed yet; deepest: levels that are drafted at most."""
        self._seen, self._right = np.zeros(deepest), np.zeros(deepest)  # tested after right ones; of these, right ones
        self._tested, self._passed = _GUESS_WEIGHT, _GUESS * _GUESS_WEIGHT  # likewise, where those before are right too
        self._estimate: NDArray[np.float64] | None = None

    def rates(self) -> NDArray[np.float64]:
        """(deepest,) shares of right tokens after right ones; where little is known, near the drafter's mean rate."""
        mean = self._passed / self._tested
        result: NDArray[np.float64] = (self._right + _PRIOR * mean) / (self._seen + _PRIOR)
        return result

    def probabilities(self) -> NDArray[np.float64]:
        """(deepest,), falling."""
        if self._estimate is None:
            self._estimate = self.rates().cumprod()
        return self._estimate

    def learn(self, *, before: int, right: int, asked: int, generated: int) -> None:
        """Counts one sequence's draft.

        Args:
            before: Depth down to which the drafters asked before were right.
            right: Depth down to which this one was.
            asked: Levels that it was asked for.
            generated: Tokens that followed the root: nobody knows what is right below them.
        """
        last = min(asked, generated, len(self._seen))
        right, tested = min(right, last), min(right + 1, last)
        self._seen *= _FADE
        self._right *= _FADE
        self._seen[before:tested] += 1  # nothing where those before are right down to there
        self._right[before:right] += 1
        self._tested = self._tested * _FADE + tested
        self._passed = self._passed * _FADE + right
        self._estimate = None

    def age(self, weight: float) -> None:
        """Lets what was observed weigh no more than some observations: it is old, and texts change."""
        share = weight / np.maximum(self._seen, weight)
        self._seen *= share
        self._right *= share
        self._estimate = None

    def counts(self) -> NDArray[np.float64]:
        """(2, deepest): how often each level was tested after right ones, and how often the drafter was right there."""
        return np.stack([self._seen, self._right])

    def restore(self, counts: NDArray[np.float64]) -> None:
        """Begins from what `counts` gave of a reach of the same depth."""
        self._seen, self._right = counts[0].copy(), counts[1].copy()
        self._estimate = None


_DEEPEST = 64  # levels that are told apart


class KnownDrafter:
    """What is known of one drafter.

    Attributes:
        deepest: Levels of its deepest drafts, as far as they are told apart.
        nodes_by_depth: See `foretoken.drafters.base.Drafter`.
        calibration: Of the nodes that it proposes.
        grafts: Of the chains that it proposes below drafts of others.
        seconds: Of its proposals.
        probes: When it is tried, while it is not asked.
        widths: (D,) nodes bought a level, at first a chain.
    """

    def __init__(self, nodes_by_depth: Sequence[int], timed: Sequence[tuple[int, float]]) -> None:
        """Nothing is known of its acceptance yet; timed: see `DraftSeconds`."""
        self.deepest, self.nodes_by_depth = min(len(nodes_by_depth) - 1, _DEEPEST), nodes_by_depth
        self.calibration, self.grafts = Calibration(), Calibration()
        self.seconds = DraftSeconds(self.deepest, timed)
        self.probes = ProbeSchedule()
        self.widths = np.minimum(np.diff(nodes_by_depth)[: self.deepest], 1.0)
        self._reach = {frozenset[int](): Reach(self.deepest)}

    @property
    def first_reach(self) -> Reach:
        """Its reach where only drafters that cost nothing were asked before."""
        return self._reach[frozenset()]

    def reach(self, before: frozenset[int]) -> Reach:
        """Its reach after some others that cost something; to begin with, half of what it is without them."""
        known = self._reach.get(before)
        if known is None:
            known = self._reach[before] = Reach(self.deepest)
            guess = self.first_reach.rates()
            guess[0] *= 0.5
            known.restore(WEIGHT_AT_PROBE * np.stack([np.ones(self.deepest), guess]))
        return known


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
