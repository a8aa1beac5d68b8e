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
import math
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from foretoken.core.errors import ForetokenError
from foretoken.files.user_cache import KeptEntries, is_number
from foretoken.formats.checkpoint import TargetFingerprint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from foretoken.models.loading import LoadedModel

# Each number below was halved and doubled in the made worlds: NOTES, "Numbers of the controller".
_FADE = 0.5 ** (1 / 50)  # decay per draft
_PRIOR = 2.0  # observations that the expected rate is worth, at each depth and over all of them
_GUESS = 0.6  # rate before any observation
_DEEPEST = 64  # most levels that are told apart
AGED = 8.0  # weight of all earlier drafts when a probe begins, because texts change


class LevelAcceptance:
    """P(a drafter is right at depth d | it is right above, and the drafters before it are not), for every depth."""

    def __init__(self, deepest: int, expected: Sequence[float] = ()) -> None:
        """Starts without observations.

        Args:
            deepest: Most levels of a draft.
            expected: Rates by depth from held-out text; may be shorter than the drafts are deep.
        """
        rates: list[float] = []
        for d in range(deepest):
            rate = min(max(expected[d], 0.05), 0.98) if d < len(expected) else rates[-1] if rates else _GUESS
            rates.append(max(rate, 0.5 * rates[-1]) if rates else rate)  # a level that was never right may be tried
        self._expected = np.array(rates)
        self._seen, self._right = np.zeros(deepest), np.zeros(deepest)
        self._estimate: NDArray[np.float64] | None = None

    def rates(self) -> NDArray[np.float64]:
        """(deepest,) rates; close to the expected rates, scaled to what was seen, where observations are few."""
        scale = (self._right.sum() + _PRIOR) / (float(self._seen @ self._expected) + _PRIOR)
        guess = np.minimum(scale * self._expected, 1.0)
        result: NDArray[np.float64] = (self._right + _PRIOR * guess) / (self._seen + _PRIOR)
        return result

    def survival(self) -> NDArray[np.float64]:
        """(deepest,) P(right down to each depth)."""
        if self._estimate is None:
            self._estimate = self.rates().cumprod()
        return self._estimate

    @property
    def num_seen(self) -> float:
        """Weight of the drafts that were counted."""
        return float(self._seen.max(initial=0.0))

    def learn(self, before: Sequence[int], right: Sequence[int], last: Sequence[int]) -> None:
        """Counts the drafts of a batch.

        Args:
            before: Depth down to which the earlier drafters were right, by sequence.
            right: Depth down to which this drafter was right.
            last: Deepest level with a label: asked for, and within the text that was written.
        """
        fade = _FADE ** len(before)
        self._seen *= fade
        self._right *= fade
        for begin, end, most in zip(before, right, last, strict=True):
            self._seen[begin : min(end + 1, most)] += 1  # empty if the earlier drafters are right down to there
            self._right[begin : min(end, most)] += 1
        self._estimate = None

    def age(self) -> None:
        """Caps the weight of past observations, because texts change."""
        share = AGED / np.maximum(self._seen, AGED)
        self._seen, self._right, self._estimate = self._seen * share, self._right * share, None

    def halved(self) -> LevelAcceptance:
        """Returns what is known of such a drafter where another one was wrong at once."""
        made = LevelAcceptance(len(self._seen))
        made._expected = self.rates() * np.where(np.arange(len(self._seen)) == 0, 0.5, 1.0)
        return made

    def state(self) -> list[float]:
        """Returns the counts as numbers, for `restore`."""
        return [*self._seen.tolist(), *self._right.tolist()]

    def restore(self, state: Sequence[float]) -> bool:
        """Starts from the state of a model of the same depth; returns whether it can be true."""
        seen, right = np.split(np.array(state), 2) if len(state) == 2 * len(self._seen) else (np.ones(1),) * 2
        if len(seen) != len(self._seen) or not (right >= 0).all() or not (right <= seen + 1e-3).all():
            return False
        self._seen, self._right, self._estimate = seen, np.minimum(right, seen), None
        self.age()
        return True


_SLOPE, _INTERCEPT = 0.5, -0.2  # as vLLM's estimator of acceptance starts
_START = 1 / (1 + math.exp(-_INTERCEPT))
_RIDGE = 0.25  # curvature of one node of even odds, which the start is worth
_SURE = 9.0  # greatest log-odds that count


class NodeAcceptance:
    """P(a drafted node is accepted | its parent is), by online logistic regression on the drafter's log-odds."""

    def __init__(self) -> None:
        self._slope = _SLOPE
        self._intercepts = np.full(_DEEPEST + 1, _INTERCEPT)
        # Curvature: of the slope, of each intercept, and of both.
        self._ww, self._bb, self._wb = 0.0, np.zeros(_DEEPEST + 1), np.zeros(_DEEPEST + 1)
        self._num, self._right = np.zeros(_DEEPEST + 1), np.zeros(_DEEPEST + 1)  # labels of each depth; true ones

    def probabilities(self, log_odds: NDArray[np.float64] | None, depths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns P(node | parent) in the shape of `depths`; a depth without labels is judged by the others.

        Without log-odds the labels of each depth are counted.
        """
        if log_odds is None:
            rate = (self._right.sum() + _START) / (self._num.sum() + 1)
            counted: NDArray[np.float64] = (self._right + _PRIOR * rate) / (self._num + _PRIOR)
            return counted[np.minimum(depths, _DEEPEST)]
        mean = (self._num @ self._intercepts + _INTERCEPT) / (self._num.sum() + 1)
        intercepts = (self._num * self._intercepts + mean) / (self._num + 1)
        odds = self._slope * log_odds + intercepts[np.minimum(depths, _DEEPEST)]
        result: NDArray[np.float64] = 1 / (1 + np.exp(-odds))
        return result

    def learn(
        self, log_odds: NDArray[np.float64] | None, depths: NDArray[np.int64], accepted: NDArray[np.bool_]
    ) -> None:
        """Learns from the nodes of an iteration whose parents were accepted: a damped Newton step."""
        depths, size = np.minimum(depths, _DEEPEST), len(self._num)
        self._num = _FADE * self._num + np.bincount(depths, minlength=size)
        self._right = _FADE * self._right + np.bincount(depths, accepted, size)
        if log_odds is None:
            return
        p = 1 / (1 + np.exp(-self._slope * log_odds - self._intercepts[depths]))
        error, weight = accepted - p, p * (1 - p)
        self._ww = _FADE * self._ww + float(weight @ log_odds**2)
        self._bb = _FADE * self._bb + np.bincount(depths, weight, size)
        self._wb = _FADE * self._wb + np.bincount(depths, weight * log_odds, size)
        slope_error, errors = float(error @ log_odds), np.bincount(depths, error, size)
        damped = self._bb + _RIDGE
        curvature = self._ww + _RIDGE - float(self._wb @ (self._wb / damped))
        step = max((slope_error - float(self._wb @ (errors / damped))) / curvature, -self._slope)
        self._slope += step
        self._intercepts += (errors - self._wb * step) / damped

    def age(self) -> None:
        """Caps the weight of past observations, because texts change."""
        share = AGED / max(float(self._num.max()), AGED)
        self._ww, self._bb, self._wb = self._ww * share, self._bb * share, self._wb * share
        self._num, self._right = self._num * share, self._right * share

    def state(self) -> list[float]:
        """Returns the estimate as numbers, for `restore`."""
        return [
            self._slope,
            self._ww,
            *self._intercepts.tolist(),
            *self._bb.tolist(),
            *self._wb.tolist(),
            *self._num.tolist(),
            *self._right.tolist(),
        ]

    def restore(self, state: Sequence[float]) -> bool:
        """Starts from the state of another model; returns whether it can be true."""
        size = _DEEPEST + 1
        if len(state) != 2 + 5 * size:
            return False
        slope, ww, rest = state[0], state[1], np.array(state[2:]).reshape(5, size)
        is_true = 0 <= slope <= 20 and ww >= 0 and (np.abs(rest[0]) < 40).all() and (rest[[1, 3, 4]] >= 0).all()
        if (
            not is_true
            or not (rest[4] <= rest[3] + 1e-3).all()
            or not (rest[2] ** 2 <= (rest[1] + 1e-3) * (ww + 1e-3)).all()
        ):
            return False
        self._slope, self._ww = slope, ww
        self._intercepts, self._bb, self._wb, self._num, self._right = rest
        self.age()
        return True


def log_odds_of(scores: NDArray[np.float32] | None, parents: NDArray[np.int64]) -> NDArray[np.float64] | None:
    """(B, N) log-odds of each node after its parent, from log-probabilities of paths; None for drafters without any."""
    if scores is None:
        return None
    paths = np.fmax(scores, -99.0).astype(np.float64)  # -99 for NaN
    above = paths[np.arange(len(paths))[:, None], np.maximum(parents, 0)]
    above[parents <= 0] = 0.0
    q = np.exp(np.minimum(paths - above, 0.0)) * (1 - 1e-9)
    result: NDArray[np.float64] = np.maximum(np.log(q / (1 - q)), -_SURE)
    return np.minimum(result, _SURE)


_KEPT = KeptEntries(
    file="foretoken-acceptance.json", mark="foretoken_acceptance", holder="drafters",
    what="estimates of drafters' acceptance",
)  # fmt: skip
_FORMAT = 3
_LEAST_LEARNED = 64  # iterations that must be learned before anything is stored
_EVERY = 4096  # iterations between two writes, for processes that never end
_log = logging.getLogger(__name__)


def pair_key(model: LoadedModel, drafters: Sequence[object]) -> str | None:
    """Returns a name for a target and its drafters; None if the caller made the weights, which may change."""
    if model.is_borrowed:
        return None
    try:
        target = TargetFingerprint.of(model).model_dump(exclude={"name"})
    except ForetokenError as err:
        _log.debug("acceptance is not kept for '%s': %s", model.name, err)
        return None
    facts = [_FORMAT, target, [repr(each) for each in drafters]]
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
