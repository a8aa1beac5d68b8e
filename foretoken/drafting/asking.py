"""Chooses which drafter to call next.

L_b,d is the probability that the trees at hand are right down to depth d of sequence b. R_d is the probability that the
candidate drafter is right at depth d where the trees at hand are wrong (`Reach`). Calling the drafter for D levels adds
Σ_b Σ_d≤D (1 - L_b,d) R_d expected tokens. It costs the drafter's seconds and those of verifying its nodes. The nodes at
hand are bought together with the new ones, see `buying`.

Arctic's rule is a special case: take a lookup's draft instead of a model's where it is expected to be accepted as far.

Letters: B sequences, D levels, k nodes at hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from foretoken.drafting.calibration import Calibration
from foretoken.drafting.draft_costs import DraftSeconds
from foretoken.drafting.measured_gain import WEIGHT_AT_PROBE, ProbeSchedule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

_FADE = 0.5 ** (1 / 60)  # decay per observation
_PRIOR = 4.0  # observations that the mean rate is worth at each level
_GUESS = 0.6  # first mean rate
_GUESS_WEIGHT = 10.0  # tokens that the first mean rate is worth, so that a few wrong drafts do not end drafting


class Reach:
    """P(a drafter is right down to depth d | the drafters before it are not), for every depth."""

    def __init__(self, deepest: int) -> None:
        """Starts without observations; deepest: most levels of a draft."""
        self._seen, self._right = np.zeros(deepest), np.zeros(deepest)  # tests after right tokens; right ones
        # The same over all levels, also where earlier drafters are right.
        self._tested, self._passed = _GUESS_WEIGHT, _GUESS * _GUESS_WEIGHT
        self._estimate: NDArray[np.float64] | None = None

    def rates(self) -> NDArray[np.float64]:
        """(deepest,) shares of right tokens after right tokens; close to the mean rate where observations are few."""
        mean = self._passed / self._tested
        result: NDArray[np.float64] = (self._right + _PRIOR * mean) / (self._seen + _PRIOR)
        return result

    def probabilities(self) -> NDArray[np.float64]:
        """(deepest,) products of the rates, falling."""
        if self._estimate is None:
            self._estimate = self.rates().cumprod()
        return self._estimate

    def learn_draft(self, *, before: int, right: int, asked: int, generated: int) -> None:
        """Counts one sequence's draft.

        Args:
            before: Depth down to which the earlier drafters were right.
            right: Depth down to which this drafter was right.
            asked: Levels that this drafter was asked for.
            generated: Tokens generated after the root. Deeper levels stay unknown.
        """
        last = min(asked, generated, len(self._seen))
        right, tested = min(right, last), min(right + 1, last)
        self._seen *= _FADE
        self._right *= _FADE
        self._seen[before:tested] += 1  # empty if the earlier drafters are right down to there
        self._right[before:right] += 1
        self._tested = self._tested * _FADE + tested
        self._passed = self._passed * _FADE + right
        self._estimate = None

    def age(self, weight: float) -> None:
        """Caps the weight of past observations, because texts change."""
        share = weight / np.maximum(self._seen, weight)
        self._seen *= share
        self._right *= share
        self._estimate = None

    def counts(self) -> NDArray[np.float64]:
        """(2, deepest): tests of each level after right tokens, and how many of them were right."""
        return np.stack([self._seen, self._right])

    def restore(self, counts: NDArray[np.float64]) -> None:
        """Starts from the `counts` of a reach of the same depth."""
        self._seen, self._right = counts[0].copy(), counts[1].copy()
        self._estimate = None


_DEEPEST = 64  # most levels that are told apart


class KnownDrafter:
    """Measurements of one drafter.

    Attributes:
        deepest: Levels of its deepest drafts, at most 64.
        nodes_by_depth: See `foretoken.drafters.base.Drafter`.
        calibration: Of the nodes that it proposes.
        grafts: Of the chains that it proposes below drafts of other drafters.
        seconds: Of its proposals.
        probes: When the drafter is tried although it does not pay.
        widths: (D,) nodes bought per level; starts as a chain.
    """

    def __init__(self, nodes_by_depth: Sequence[int], timed: Sequence[tuple[int, float]]) -> None:
        """Starts without acceptance; timed: see `DraftSeconds`."""
        self.deepest, self.nodes_by_depth = min(len(nodes_by_depth) - 1, _DEEPEST), nodes_by_depth
        self.calibration, self.grafts = Calibration(), Calibration()
        self.seconds = DraftSeconds(self.deepest, timed)
        self.probes = ProbeSchedule()
        self.widths = np.minimum(np.diff(nodes_by_depth)[: self.deepest], 1.0)
        self._reach = {frozenset[int](): Reach(self.deepest)}

    @property
    def first_reach(self) -> Reach:
        """Its reach if only free drafters were asked before."""
        return self._reach[frozenset()]

    def reach(self, before: frozenset[int]) -> Reach:
        """Returns its reach after other drafters that cost something; starts from half of `first_reach`."""
        known = self._reach.get(before)
        if known is None:
            known = self._reach[before] = Reach(self.deepest)
            guess = self.first_reach.rates()
            guess[0] *= 0.5
            known.restore(WEIGHT_AT_PROBE * np.stack([np.ones(self.deepest), guess]))
        return known


_MOST_NODES = 128  # most nodes at hand that count, the most valuable first


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


class Costs(NamedTuple):
    """Seconds of everything but drafting.

    Attributes:
        passes: Of target passes, by their tokens.
        host: Of accepting and committing, by the emitted tokens.
        merging: Of merging one more tree.
    """

    passes: Callable[[NDArray[Any]], NDArray[np.float64]]
    host: Callable[[NDArray[np.float64]], NDArray[np.float64]]
    merging: float


class Choice(NamedTuple):
    """The drafter to ask next.

    Attributes:
        drafter: Its index; None for no drafter.
        depth: Levels that pay most.
        rate: Expected tokens per second.
    """

    drafter: int | None
    depth: int
    rate: float


def stop_rate(at_hand: AtHand, costs: Costs) -> float:
    """Returns the expected tokens per second if no other drafter is asked."""
    batch = len(at_hand.reach)
    tokens = batch + _sums(at_hand.values)
    seconds = costs.passes(batch + np.arange(len(tokens))) + at_hand.draft_s + costs.host(tokens)
    return float((tokens / seconds).max())


def best_depth(at_hand: AtHand, candidate: Candidate, costs: Costs) -> tuple[int, float]:
    """Returns the depth, at least 1, with the most tokens per second for a candidate, and these tokens per second."""
    batch, deepest = at_hand.reach.shape[0], len(candidate.reach)
    covered = at_hand.reach[:, :deepest]
    added = ((1 - covered).sum(0) * candidate.reach[: covered.shape[1]]).cumsum()
    if deepest > covered.shape[1]:  # no tree at hand is so deep
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
    """Returns the drafter that adds most tokens per second; no drafter if none adds any.

    Called after every answer, this also finds groups of drafters: a drafter adds less after others have answered. If no
    drafter pays alone, no group pays.
    """
    best = Choice(None, 0, stop_rate(at_hand, costs))
    for drafter, candidate in candidates.items():
        depth, rate = best_depth(at_hand, candidate, costs)
        if rate > best.rate:
            best = Choice(drafter, depth, rate)
    return best


def _sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """(k + 1,) expected tokens of the first 0, 1, …, k nodes."""
    return np.concatenate([[0.0], values[:_MOST_NODES].cumsum()])
