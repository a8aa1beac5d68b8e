"""How probable it is that a drafted path is accepted: a drafter's own scores, corrected by what was accepted before.

Log-probabilities of drafters are over-confident, and some drafters have none. So nodes of one drafter are sorted into
bins by depth and score, and each bin remembers the share of its nodes that were accepted, older ones counting less. An
empty bin of a depth starts from what is known of its scores at all depths, and that from the drafter's own probability;
without scores, from one half a level. A node whose score lies between the middles of two bins belongs to both in
proportion, so that a better score counts more within a bin too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

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
