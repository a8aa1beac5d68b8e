"""The acceptance model: how probable it is that drafted tokens are accepted.

- `LevelAcceptance` counts by depth, before a draft: P(level d is right | the level above is, other drafters are not).
- `NodeAcceptance` judges nodes that were drafted, from the drafter's probabilities:
  `P(node | its parent) = sigmoid(w * log_odds(q) + b_depth)`, learned online. q is the drafter's probability, or what a
  lookup says of a match of this length. Nodes of drafters that say nothing are counted by depth.

Labels are censored: a draft that is right to its end says nothing of deeper levels, and a node whose parent was not
reached has no label. Older observations count less.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import exp
from operator import mul
from typing import TYPE_CHECKING, Any, Protocol

from foretoken.core.errors import ForetokenError
from foretoken.files.user_cache import KeptEntries, is_number
from foretoken.formats.checkpoint import TargetFingerprint

if TYPE_CHECKING:
    from foretoken.models.loaded import LoadedModel

# Each number below was halved and doubled in the made worlds: NOTES, "Numbers of the controller".
_FADE = 0.5 ** (1 / 50)  # decay per draft
_PRIOR = 2.0  # observations that the expected rate is worth, at each depth and over all of them
_GUESS = 0.7  # rate before any observation
_DEEPEST = 16  # levels of nodes that are told apart; deeper nodes count as the last
_TEXT_RATE = 0.5  # weight of a text in the mean of texts; see NOTES, "Texts of several kinds"
_POOLED = 8.0  # drafts that the rate of all depths is worth at each depth; and all drafts before a try: texts change


class LevelAcceptance:
    """P(a drafter is right at depth d | it is right above, and the drafters before it are not), for every depth."""

    def __init__(self, deepest: int, expected: Sequence[float] = ()) -> None:
        """Starts without observations; `expected`: rates by depth from held-out text, perhaps not of all depths."""
        self._expected = _tryable(expected, deepest)
        self._seen, self._right = [0.0] * deepest, [0.0] * deepest
        self._estimate: list[float] | None = None

    def rates(self) -> list[float]:
        """Rates by depth; close to the expected rates, scaled to what was seen, where observations are few."""
        scale = (sum(self._right) + _PRIOR) / (_dot(self._seen, self._expected) + _PRIOR)
        return [
            (right + _POOLED * min(scale * expected, 1.0)) / (seen + _POOLED)
            for seen, right, expected in zip(self._seen, self._right, self._expected, strict=True)
        ]

    def survival(self) -> list[float]:
        """P(right down to each depth)."""
        if self._estimate is None:
            self._estimate = list(accumulate(self.rates(), mul))
        return self._estimate

    @property
    def num_seen(self) -> float:
        """Weight of the drafts that were counted."""
        return max(self._seen, default=0.0)

    def begin_text(self) -> None:
        """Starts a text from the mean of the texts before it: texts differ more than the parts of one text."""
        self._expected = _tryable(self.state(), len(self._seen))
        self._scale(0.0)

    def learn(self, before: Sequence[int], right: Sequence[int], last: Sequence[int]) -> None:
        """Counts the drafts of a batch.

        Args:
            before: Depth down to which the earlier drafters were right, by sequence.
            right: Depth down to which this drafter was right.
            last: Deepest level with a label: asked for, and within the text that was written.
        """
        self._scale(_FADE ** len(before))
        for begin, end, most in zip(before, right, last, strict=True):
            for d in range(begin, min(end + 1, most)):  # empty if the earlier drafters are right down to there
                self._seen[d] += 1
                self._right[d] += d < end

    def age(self) -> None:
        """Caps the weight of past observations, because texts change."""
        self._scale(_POOLED / max([*self._seen, _POOLED]))

    def _scale(self, share: float) -> None:
        self._seen, self._right = _scaled(self._seen, share), _scaled(self._right, share)
        self._estimate = None

    def halved(self) -> LevelAcceptance:
        """Returns what is known of such a drafter where another one was wrong at once."""
        made, rates = LevelAcceptance(len(self._seen)), self.rates()
        made._expected = [rate if d else 0.5 * rate for d, rate in enumerate(rates)]
        return made

    def state(self) -> list[float]:
        """Returns the rates that the next text is expected to have; a text of few drafts changes them little."""
        weight = _TEXT_RATE * min(self.num_seen / _POOLED, 1.0)
        return [old + weight * (new - old) for old, new in zip(self._expected, self.rates(), strict=True)]

    def restore(self, state: Sequence[float]) -> bool:
        """Starts from the state of a model of the same depth; returns whether it can be true."""
        if len(state) != len(self._seen) or not all(0 <= rate <= 1 for rate in state):
            return False
        self._expected = _tryable(state, len(state))
        self._scale(0.0)
        return True


def _tryable(rates: Sequence[float], deepest: int) -> list[float]:
    """Fills up and bounds expected rates: a level that was never right may be tried."""
    found: list[float] = []
    for d in range(deepest):
        rate = min(max(rates[d], 0.05), 0.98) if d < len(rates) else found[-1] if found else _GUESS
        found.append(max(rate, 0.5 * found[-1]) if found else rate)
    return found


_SLOPE, _INTERCEPT = 0.5, -0.2  # as vLLM's estimator of acceptance starts
_START = 1 / (1 + exp(-_INTERCEPT))
_RIDGE = 0.25  # curvature of one node of even odds, which the start is worth


class NodeAcceptance:
    """P(a drafted node is accepted | its parent is), by online logistic regression on the drafter's log-odds.

    Nodes without log-odds are counted by depth.
    """

    def __init__(self) -> None:
        size = _DEEPEST + 1
        self._slope, self._intercepts = _SLOPE, [_INTERCEPT] * size
        # Curvature: of the slope, of each intercept, and of both.
        self._ww, self._bb, self._wb = 0.0, [0.0] * size, [0.0] * size
        self._num, self._right = [0.0] * size, [0.0] * size  # labels of each depth; true ones

    def path_values(self, parents: Sequence[int], depths: Sequence[int], odds: Sequence[float] | None) -> list[float]:
        """Returns the probability that each node of a tree is accepted with its path; 1 for the root.

        `odds`: log-odds of each node after its parent, see `log_odds`; None to count.
        """
        values, slope = [1.0] * len(parents), self._slope
        levels = self._rates() if odds is None else self._smooth_intercepts()
        for node in range(1, len(parents)):
            p = levels[min(depths[node], _DEEPEST)]
            if odds is not None:
                p = 1 / (1 + exp(-slope * odds[node] - p))
            values[node] = p * values[parents[node]]
        return values

    def logistic(self, deepest: int) -> tuple[float, list[float]]:
        """Returns the slope on log-odds, and the intercepts by depth from 1 on."""
        levels = self._smooth_intercepts()
        return self._slope, [levels[min(depth, _DEEPEST)] for depth in range(1, deepest + 1)]

    def chain_values(self, length: int) -> list[float]:
        """Returns the probabilities of the nodes of a chain without log-odds, the root left out."""
        return self.path_values(range(-1, length), range(length + 1), None)[1:]

    def _rates(self) -> list[float]:
        rate = (sum(self._right) + _START) / (sum(self._num) + 1)
        return [(right + _PRIOR * rate) / (num + _PRIOR) for right, num in zip(self._right, self._num, strict=True)]

    def _smooth_intercepts(self) -> list[float]:
        """Intercepts by depth; depths with few labels have about the mean of all."""
        mean = (_dot(self._num, self._intercepts) + _INTERCEPT) / (sum(self._num) + 1)
        return [(num * each + mean) / (num + 1) for num, each in zip(self._num, self._intercepts, strict=True)]

    def learn(self, labels: Sequence[tuple[float | None, int, bool]]) -> None:
        """Learns from the nodes of an iteration whose parents were accepted: a damped Newton step.

        `labels`: log-odds, None to count; depth; and whether the node was accepted.
        """
        num, right = _scaled(self._num, _FADE), _scaled(self._right, _FADE)
        self._num, self._right = num, right
        errors, slope_error = [0.0] * len(num), 0.0
        ww, bb, wb = _FADE * self._ww, _scaled(self._bb, _FADE), _scaled(self._wb, _FADE)
        for odds, deep, is_accepted in labels:
            depth = min(deep, _DEEPEST)
            num[depth] += 1
            right[depth] += is_accepted
            if odds is not None:
                p = 1 / (1 + exp(-self._slope * odds - self._intercepts[depth]))
                error, weight = is_accepted - p, p * (1 - p)
                ww += weight * odds * odds
                bb[depth] += weight
                wb[depth] += weight * odds
                errors[depth] += error
                slope_error += error * odds
        if labels[0][0] is None:
            return
        shares = [both / (each + _RIDGE) for both, each in zip(wb, bb, strict=True)]
        curvature = ww + _RIDGE - _dot(wb, shares)
        step = max((slope_error - _dot(shares, errors)) / curvature, -self._slope)
        self._slope += step
        self._intercepts = [
            old + error / (each + _RIDGE) - share * step
            for old, error, each, share in zip(self._intercepts, errors, bb, shares, strict=True)
        ]
        self._ww, self._bb, self._wb = ww, bb, wb

    def age(self) -> None:
        """Caps the weight of past observations, because texts change."""
        share = _POOLED / max([*self._num, _POOLED])
        self._ww *= share
        self._bb, self._wb = _scaled(self._bb, share), _scaled(self._wb, share)
        self._num, self._right = _scaled(self._num, share), _scaled(self._right, share)

    def state(self) -> list[float]:
        """Returns the estimate as numbers, for `restore`."""
        return [self._slope, self._ww, *self._intercepts, *self._bb, *self._wb, *self._num, *self._right]

    def restore(self, state: Sequence[float]) -> bool:
        """Starts from the state of another model; returns whether it can be true."""
        size = _DEEPEST + 1
        if len(state) != 2 + 5 * size:
            return False
        slope, ww = state[:2]
        intercepts, bb, wb, num, right = (list(state[2 + i * size : 2 + (i + 1) * size]) for i in range(5))
        if not (0 <= slope <= 20 and ww >= 0 and max(map(abs, intercepts)) < 40) or not all(
            bb[d] >= 0 and 0 <= right[d] <= num[d] + 1e-3 and wb[d] ** 2 <= (bb[d] + 1e-3) * (ww + 1e-3)
            for d in range(size)
        ):
            return False
        self._slope, self._ww = slope, ww
        self._intercepts, self._bb, self._wb, self._num, self._right = intercepts, bb, wb, num, right
        self.age()
        return True


def _scaled(values: Sequence[float], share: float) -> list[float]:
    return [share * value for value in values]


def _dot(values: Sequence[float], others: Sequence[float]) -> float:
    return float(sum(map(mul, values, others)))


_KEPT = KeptEntries(
    file="foretoken-acceptance.json", mark="foretoken_acceptance", holder="drafters",
    what="estimates of drafters' acceptance",
)  # fmt: skip
_FORMAT = 5
_LEAST_LEARNED = 64  # iterations that must be learned before anything is stored
_EVERY = 4096  # iterations between two writes, for processes that never end
_log = logging.getLogger(__name__)


def pair_key(model: LoadedModel, drafters: Sequence[object]) -> str | None:
    """Returns a name for a target and its drafters; None if the caller made the weights, which may change."""
    if model.is_borrowed:
        return None
    target: Any = model.files
    try:
        target = target or TargetFingerprint.of(model).model_dump(exclude={"name"})
    except ForetokenError as err:
        _log.debug("acceptance is not kept for '%s': %s", model.name, err)
        return None
    facts = [_FORMAT, target, model.quantization, [repr(each) for each in drafters]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


class Learner(Protocol):
    """An estimate that can be stored."""

    def state(self) -> list[float]:
        """Returns the estimate as numbers."""

    def restore(self, state: Sequence[float]) -> bool:
        """Starts from the `state` of an estimate of the same shape; returns whether it can be true."""


class KeptAcceptance:
    """Restores estimates from the cache directory, and stores what they become."""

    def __init__(self, learners: Sequence[Learner], key: str) -> None:
        """Restores the estimates stored under a key; those that cannot be true start anew."""
        self._learners, self._key, self._num_learned = learners, key, 0
        entry = _KEPT.read(key)
        states: Any = None if entry is None else entry.get("states")
        if isinstance(states, list) and len(states) == len(learners):
            for learner, state in zip(learners, states, strict=True):
                if isinstance(state, list) and all(is_number(each) and abs(each) < 1e9 for each in state):
                    learner.restore(state)

    def learned(self) -> None:
        """Counts a learned iteration, and stores the estimates now and then."""
        self._num_learned += 1
        if self._num_learned % _EVERY == 0:
            self.keep()

    def keep(self) -> None:
        """Stores the estimates if enough was learned."""
        if self._num_learned >= _LEAST_LEARNED:
            _KEPT.keep(self._key, {"states": [[round(x, 4) for x in each.state()] for each in self._learners]})


class Known:
    """What a controller knows of one drafter: how often its nodes are right, and what its trees look like.

    Attributes:
        deepest: Levels of its deepest drafts.
        nodes: Of the nodes that it proposes.
        continuations: Of the chains that it proposes below drafts of other drafters.
        levels: By the drafters that were asked before and cost something.
        shape: Nodes per level of its trees.
        widths: Nodes that are verified per level of a sequence.
        hits: Share of the sequences for which it proposes anything.
        ends_early: Whether its chains end by `PathFloors`.
    """

    def __init__(
        self, nodes_by_depth: Sequence[int], expected: Sequence[float], *, is_read: bool, ends_early: bool
    ) -> None:
        self.ends_early, self.nodes_by_depth = ends_early, nodes_by_depth
        self.deepest = min(len(nodes_by_depth) - 1, 64)
        self.nodes, self.continuations = NodeAcceptance(), NodeAcceptance()
        self.levels = {frozenset[int](): LevelAcceptance(self.deepest, expected)}
        self.shape = [float(after - before) for before, after in pairwise(nodes_by_depth)][: self.deepest]
        self.widths = [min(nodes, 1.0) for nodes in self.shape] if is_read else self.shape
        self.hits = 1.0

    def after(self, others: frozenset[int]) -> LevelAcceptance:
        """Returns the rates by depth where drafters that were asked before are wrong."""
        if others not in self.levels:
            self.levels[others] = self.levels[frozenset()].halved()
        return self.levels[others]

    @property
    def is_new(self) -> bool:
        """Whether so little of a text was seen that an estimate is a guess; see NOTES, "A first answer"."""
        return self.levels[frozenset()].num_seen < _POOLED

    def begin_text(self) -> None:
        """Expects of another text what the texts before it had in the mean."""
        for levels in self.levels.values():
            levels.begin_text()

    def age(self) -> None:
        """Caps the weight of past observations, because texts change."""
        self.nodes.age()
        for levels in self.levels.values():
            levels.age()
