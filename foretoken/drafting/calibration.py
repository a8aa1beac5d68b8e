"""Estimates the probability that a drafted path is accepted, from the drafter's scores and past acceptance.

Log-probabilities of drafters are over-confident, and some drafters have none. The nodes of a drafter are therefore
sorted into bins by depth and score. Each bin counts the share of accepted nodes; older nodes count less. An empty bin
of a depth starts from the bin of that score over all depths, and that bin from the drafter's own probability. Without
scores it starts from one half per level. A node between the middles of two bins counts in both, in proportion.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from foretoken.core.errors import ForetokenError
from foretoken.files.user_cache import KeptEntries, is_number
from foretoken.formats.checkpoint import TargetFingerprint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from foretoken.models.loading import LoadedModel

_STARTS = np.array([0.01, 0.035, 0.075, 0.15, 0.275, 0.425, 0.575, 0.725, 0.85, 0.95])  # path probabilities
_MIDDLES = np.log(_STARTS)
_BINS = np.arange(len(_MIDDLES))
_UNSCORED = len(_MIDDLES)  # bin of nodes without scores
_DEEPEST = 16
_PRIOR = 4.0  # nodes that the start value is worth
_FADE = 0.5 ** (1 / 200)  # decay per iteration


class Calibration:
    """Estimates one drafter's acceptance by depth and score of a node."""

    def __init__(self) -> None:
        bins = (_DEEPEST + 1, _UNSCORED + 1)
        depths = np.arange(_DEEPEST + 1)[:, None]
        self._start = np.concatenate([np.tile(_STARTS, (_DEEPEST + 1, 1)), 0.5**depths], axis=1)
        self._seen, self._accepted = np.zeros(bins), np.zeros(bins)

    def probabilities(self, depths: NDArray[np.int64], scores: NDArray[np.float32] | None) -> NDArray[np.float64]:
        """Returns P(the whole path down to a node is accepted), in the shape of `depths`.

        Args:
            depths: Of nodes, any shape.
            scores: The drafter's path log-probabilities, in the same shape; None if it gives none.
        """
        estimates = self._estimates()
        depth, below, above, share = _places(depths, scores)
        result: NDArray[np.float64] = estimates[depth, below]
        result += share * (estimates[depth, above] - result)
        return result

    def _estimates(self) -> NDArray[np.float64]:
        """(depths, bins); with scores, each bin starts from that score's estimate over all depths."""
        start = self._start.copy()
        start[:, :_UNSCORED] = (self._accepted[:, :_UNSCORED].sum(0) + _PRIOR * _STARTS) / (
            self._seen[:, :_UNSCORED].sum(0) + _PRIOR
        )
        estimates: NDArray[np.float64] = (self._accepted + _PRIOR * start) / (self._seen + _PRIOR)
        return estimates

    def age(self, weight: float) -> None:
        """Caps the weight of past nodes in each bin, because texts change."""
        share = weight / np.maximum(self._seen, weight)
        self._seen *= share
        self._accepted *= share

    def counts(self) -> NDArray[np.float64]:
        """(2, depths, bins): counted nodes, and accepted nodes among them."""
        return np.stack([self._seen, self._accepted])

    def restore(self, counts: NDArray[np.float64]) -> None:
        """Starts from the `counts` of another calibration."""
        self._seen, self._accepted = counts[0].copy(), counts[1].copy()

    def learn_nodes(self, depths: Sequence[int], scores: Sequence[float] | None, accepted: Sequence[bool]) -> None:
        """Counts an iteration's nodes."""
        self._seen *= _FADE
        self._accepted *= _FADE
        is_accepted = np.array(accepted, dtype=np.float64)
        depth, below, above, share = _places(
            np.array(depths, dtype=np.int64), None if scores is None else np.array(scores, dtype=np.float32)
        )
        for at, weight in ((below, 1.0 - share), (above, share)):
            np.add.at(self._seen, (depth, at), weight)
            np.add.at(self._accepted, (depth, at), weight * is_accepted)


class _Places(NamedTuple):
    """Two neighbouring bins of a depth for each node, and the share of the second one; all of one shape."""

    depth: NDArray[np.int64]
    below: NDArray[np.int64]
    above: NDArray[np.int64]
    share: NDArray[np.float64]


def _places(depths: NDArray[np.int64], scores: NDArray[np.float32] | None) -> _Places:
    """Returns the bins whose middles are next to the scores; NaN counts as the least score."""
    depth = np.minimum(depths, _DEEPEST)
    if scores is None:
        unscored = np.full_like(depth, _UNSCORED)
        return _Places(depth, unscored, unscored, np.zeros(depth.shape))
    place = np.interp(np.fmax(scores, _MIDDLES[0]), _MIDDLES, _BINS)
    below = place.astype(np.int64)
    return _Places(depth, below, np.minimum(below + 1, _UNSCORED - 1), place - below)


_KEPT = KeptEntries(
    file="foretoken-acceptance.json", mark="foretoken_acceptance", holder="drafters",
    what="estimates of drafters' acceptance",
)  # fmt: skip
_FORMAT = 2
_LEAST_LEARNED = 64  # iterations that must be learned before anything is stored
_EVERY = 4096  # iterations between two writes, for processes that never end
_MOST, _MOST_KEPT = 1e6, 20.0  # limit of a stored count; cap on its weight, because texts change
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
    """An object that counts observations in bins."""

    def counts(self) -> NDArray[np.float64]:
        """(2, …): observations of each bin, and how many of them were right."""

    def restore(self, counts: NDArray[np.float64]) -> None:
        """Starts from counts of the same shape."""


class KeptAcceptance:
    """Restores the counts of learners from the cache directory, and stores what they count."""

    def __init__(self, learners: Sequence[Learner], key: str) -> None:
        """Restores the counts stored under a key."""
        self._learners, self._key, self._num_learned = learners, key, 0
        entry = _KEPT.read(key)
        found = _dense(entry.get("counts"), [each.counts().shape for each in learners]) if entry is not None else None
        for learner, counts in zip(learners, found or (), strict=found is not None):
            learner.restore(counts)

    def learned(self) -> None:
        """Counts a learned iteration, and stores the counts now and then."""
        self._num_learned += 1
        if self._num_learned % _EVERY == 0:
            self.keep()

    def keep(self) -> None:
        """Stores the counts if there are enough of them."""
        if self._num_learned >= _LEAST_LEARNED:
            _KEPT.keep(self._key, {"counts": [_sparse(each.counts()) for each in self._learners]})


def _sparse(counts: NDArray[np.float64]) -> list[list[float]]:
    seen, right = counts.reshape(2, -1)
    return [[int(at), round(float(seen[at]), 4), round(float(right[at]), 4)] for at in np.flatnonzero(seen > 1e-3)]


def _dense(kept: Any, shapes: Sequence[tuple[int, ...]]) -> list[NDArray[np.float64]] | None:
    if not isinstance(kept, list) or len(kept) != len(shapes):
        return None
    result = []
    for bins, shape in zip(kept, shapes, strict=True):
        counts = np.zeros((2, int(np.prod(shape[1:]))))
        if not isinstance(bins, list) or not all(_is_bin(each, counts.shape[1]) for each in bins):
            return None
        for at, seen, right in bins:
            counts[:, at] = min(seen, _MOST_KEPT), right * min(seen, _MOST_KEPT) / seen
        result.append(counts.reshape(shape))
    return result


def _is_bin(value: Any, num_bins: int) -> bool:
    if not isinstance(value, list) or len(value) != 3 or type(value[0]) is not int:
        return False
    at, seen, right = value
    return is_number(seen) and is_number(right) and 0 <= at < num_bins and 0 <= right <= seen and 0 < seen <= _MOST
