"""What drafts take that are made level by level, by their number of levels."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DRAFTS_KEPT = 5  # of a depth, the median of which counts: one that also reads a prompt says nothing of the next
_LONGEST_KEPT = 100  # drafts after which one is forgotten: machines slow down and speed up
_FAR = 1000.0  # levels, more than are drafted


class LevelSeconds:
    """Seconds of drafts by depth: a rising curve through the origin and the medians of recent drafts of each depth."""

    def __init__(self) -> None:
        self._drafts: dict[int, deque[tuple[int, float]]] = {}  # by depth: when each was made, seconds
        self._count = 0
        self._curve: tuple[list[float], list[float]] | None = None  # until another draft is made

    @property
    def is_known(self) -> bool:
        """Whether any draft was timed."""
        return bool(self._drafts)

    def learn(self, depth: int, seconds: float) -> None:
        """Takes in a draft; depth: its levels, at least 1."""
        self._count += 1
        self._drafts.setdefault(depth, deque(maxlen=_DRAFTS_KEPT)).append((self._count, seconds))
        self._drafts = {
            each: drafts for each, drafts in self._drafts.items() if drafts[-1][0] > self._count - _LONGEST_KEPT
        }
        self._curve = None

    def __call__(self, depths: NDArray[Any] | float) -> NDArray[np.float64]:
        """Seconds of drafts of some depths, beyond the deepest one seen as far as the line goes on; 0 before any."""
        if self._curve is None:
            self._curve = self._points()
        return np.asarray(np.interp(depths, *self._curve))

    def _points(self) -> tuple[list[float], list[float]]:
        """Depths and seconds that the curve goes through."""
        depths, seconds = [0.0], [0.0]
        for depth in sorted(self._drafts):
            depths.append(float(depth))
            seconds.append(max(median(each for _, each in self._drafts[depth]), seconds[-1]))
        if len(depths) > 1:
            slope = (seconds[-1] - seconds[-2]) / (depths[-1] - depths[-2])
            depths.append(_FAR)
            seconds.append(seconds[-1] + slope * (_FAR - depths[-2]))
        return depths, seconds
