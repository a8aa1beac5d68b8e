"""How probable it is that a drafted path is accepted: a drafter's own scores, corrected by what was accepted before.

Log-probabilities of drafters are over-confident, and lookups have none. So nodes of one drafter are sorted into bins by
depth and score, and each bin remembers the share of its nodes that were accepted, older ones counting less. An empty
bin starts from the drafter's own probability, or from one half a level where there is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_EDGES = np.log([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9])  # of path log-probabilities
_MIDDLES = np.array([0.01, 0.035, 0.075, 0.15, 0.275, 0.425, 0.575, 0.725, 0.85, 0.95])
_UNSCORED = len(_MIDDLES)  # the bin of nodes whose drafter gives no scores
_DEEPEST = 16
_PRIOR = 4.0  # nodes that the start is worth
_FADE = 0.5 ** (1 / 200)  # by iteration


class Calibration:
    """Estimates of one drafter's acceptance, by depth and score of a node."""

    def __init__(self) -> None:
        bins = (_DEEPEST + 1, _UNSCORED + 1)
        depths = np.arange(_DEEPEST + 1)[:, None]
        self._start = np.concatenate([np.tile(_MIDDLES, (_DEEPEST + 1, 1)), 0.5**depths], axis=1)
        self._seen, self._accepted = np.zeros(bins), np.zeros(bins)

    def probabilities(self, depths: NDArray[np.int64], scores: NDArray[np.float32] | None) -> NDArray[np.float64]:
        """P(the whole path down to a node is accepted).

        Args:
            depths: Of nodes, in any shape.
            scores: The drafter's path log-probabilities, in the same shape; None where it gives none.
        """
        at = _bins(depths, scores)
        estimate = (self._accepted[at] + _PRIOR * self._start[at]) / (self._seen[at] + _PRIOR)
        result: NDArray[np.float64] = estimate
        return result

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
        at = _bins(np.array(depths, dtype=np.int64), None if scores is None else np.array(scores, dtype=np.float32))
        np.add.at(self._seen, at, 1.0)
        np.add.at(self._accepted, at, np.array(accepted, dtype=np.float64))


def _bins(depths: NDArray[np.int64], scores: NDArray[np.float32] | None) -> tuple[NDArray[np.int64], ...]:
    """Where nodes are counted; a score that is no number counts as the least."""
    depth = np.minimum(depths, _DEEPEST)
    if scores is None:
        return depth, np.full_like(depth, _UNSCORED)
    return depth, np.searchsorted(_EDGES, np.nan_to_num(scores, nan=-np.inf)).astype(np.int64)
