"""How probable it is that a drafted path is accepted: a drafter's own scores, corrected by what was accepted before.

Log-probabilities of drafters are over-confident, and some drafters have none. So nodes of one drafter are sorted into
bins by depth and score, and each bin remembers the share of its nodes that were accepted, older ones counting less. An
empty bin of a depth starts from what is known of its scores at all depths, and that from the drafter's own probability;
without scores, from one half a level. A node whose score lies between the middles of two bins belongs to both in
proportion, so that a better score counts more within a bin too.
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
_UNSCORED = len(_MIDDLES)  # the bin of nodes whose drafter gives no scores
_DEEPEST = 16
_PRIOR = 4.0  # nodes that the start is worth
_FADE = 0.5 ** (1 / 200)  # by iteration


class Calibration:
    """Estimates of one drafter's acceptance, by depth and score of a node."""

    def __init__(self) -> None:
        bins = (_DEEPEST + 1, _UNSCORED + 1)
        depths = np.arange(_DEEPEST + 1)[:, None]
        self._start = np.concatenate([np.tile(_STARTS, (_DEEPEST + 1, 1)), 0.5**depths], axis=1)
        self._seen, self._accepted = np.zeros(bins), np.zeros(bins)

    def probabilities(self, depths: NDArray[np.int64], scores: NDArray[np.float32] | None) -> NDArray[np.float64]:
        """P(the whole path down to a node is accepted).

        Args:
            depths: Of nodes, in any shape.
            scores: The drafter's path log-probabilities, in the same shape; None where it gives none.
        """
        estimates = self._estimates()
        depth, below, above, share = _places(depths, scores)
        result: NDArray[np.float64] = estimates[depth, below]
        result += share * (estimates[depth, above] - result)
        return result

    def _estimates(self) -> NDArray[np.float64]:
        """(depths, bins); with scores, a bin of any depth begins from what is known of that score at all depths."""
        start = self._start.copy()
        start[:, :_UNSCORED] = (self._accepted[:, :_UNSCORED].sum(0) + _PRIOR * _STARTS) / (
            self._seen[:, :_UNSCORED].sum(0) + _PRIOR
        )
        estimates: NDArray[np.float64] = (self._accepted + _PRIOR * start) / (self._seen + _PRIOR)
        return estimates

    def age(self, weight: float) -> None:
        """Lets what was counted so far weigh no more than some nodes in each bin: it is old, and texts change."""
        share = weight / np.maximum(self._seen, weight)
        self._seen *= share
        self._accepted *= share

    def counts(self) -> NDArray[np.float64]:
        """(2, depths, bins): how many nodes were counted, and how many of them were accepted."""
        return np.stack([self._seen, self._accepted])

    def restore(self, counts: NDArray[np.float64]) -> None:
        """Begins from what `counts` gave."""
        self._seen, self._accepted = counts[0].copy(), counts[1].copy()

    def learn(self, depths: Sequence[int], scores: Sequence[float] | None, accepted: Sequence[bool]) -> None:
        """Counts an iteration's nodes.

        Args:
            depths: Of the nodes of this drafter that were verified.
            scores: What the drafter gave them.
            accepted: Which were accepted.
        """
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
    """Where nodes are counted, all of one shape: in two bins of a depth, the share of the second one."""

    depth: NDArray[np.int64]
    below: NDArray[np.int64]
    above: NDArray[np.int64]
    share: NDArray[np.float64]


def _places(depths: NDArray[np.int64], scores: NDArray[np.float32] | None) -> _Places:
    """The bins whose middles are next to the scores; a score that is no number counts as the least."""
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
_LEAST_LEARNED = 64  # iterations, below which nothing is kept
_EVERY = 4096  # iterations, after which it is kept for a process that may not end by itself
_MOST, _MOST_KEPT = 1e6, 20.0  # observations that a bin may claim, and that it is believed to have: texts change
_log = logging.getLogger(__name__)


def pair_key(model: LoadedModel, drafters: Sequence[object]) -> str | None:
    """Names a target and the drafters for it; None for weights that are a caller's own, which may change.

    Args:
        model: The target.
        drafters: Their options, which print all they say.
    """
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
    """What counts observations in bins."""

    def counts(self) -> NDArray[np.float64]:
        """(2, …): how often each bin was observed, and how often what it stands for was right."""

    def restore(self, counts: NDArray[np.float64]) -> None:
        """Begins from counts of the same shape."""


class KeptAcceptance:
    """Gives learners what earlier ones counted, and keeps what they count."""

    def __init__(self, learners: Sequence[Learner], key: str) -> None:
        """Restores what is kept under a key."""
        self._learners, self._key, self._num_learned = learners, key, 0
        entry = _KEPT.read(key)
        found = _dense(entry.get("counts"), [each.counts().shape for each in learners]) if entry is not None else None
        for learner, counts in zip(learners, found or (), strict=found is not None):
            learner.restore(counts)

    def learned(self) -> None:
        """An iteration was learned from."""
        self._num_learned += 1
        if self._num_learned % _EVERY == 0:
            self.keep()

    def keep(self) -> None:
        """Keeps what was counted, where that is enough to tell anything."""
        if self._num_learned >= _LEAST_LEARNED:
            _KEPT.keep(self._key, {"counts": [_sparse(each.counts()) for each in self._learners]})


def _sparse(counts: NDArray[np.float64]) -> list[list[float]]:
    """(bin, seen, right) of each bin in which anything was seen."""
    seen, right = counts.reshape(2, -1)
    return [[int(at), round(float(seen[at]), 4), round(float(right[at]), 4)] for at in np.flatnonzero(seen > 1e-3)]


def _dense(kept: Any, shapes: Sequence[tuple[int, ...]]) -> list[NDArray[np.float64]] | None:
    """Counts of some shapes, of what `_sparse` gave; None where a value of JSON cannot be that."""
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
    """Whether a value of JSON is a bin's number, how often it was observed, and how often it was right."""
    if not isinstance(value, list) or len(value) != 3 or type(value[0]) is not int:
        return False
    at, seen, right = value
    return is_number(seen) and is_number(right) and 0 <= at < num_bins and 0 <= right <= seen and 0 < seen <= _MOST
