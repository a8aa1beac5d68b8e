"""Seconds of passes by their width: a curve through measured points."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LIMIT_S = 1.5
_BURST_S = 0.005
_LEARNING_RATE = 0.1  # weight of one pass in the cost of its width
_LARGEST_RATIO = 2.0  # of a pass to what it was known to cost: one that was interrupted says little
_DRIFT_RATE = 0.05  # and in that of the other widths: machines slow down and speed up as a whole


class CostCurve:
    """Seconds of a pass by its width, piecewise linear between measured widths.

    Never more than for a wider one, as whatever disturbs a measurement only adds to it; linear past the last measured
    width.
    """

    def __init__(self, widths: Sequence[int], seconds: Sequence[float]) -> None:
        """A curve through measured points.

        Args:
            widths: Ascending.
            seconds: One entry a width.
        """
        self._widths, self._seconds = list(widths), [float(each) for each in seconds]

    @property
    def points(self) -> list[tuple[int, float]]:
        """Measured widths and seconds."""
        return list(zip(self._widths, self._seconds, strict=True))

    @classmethod
    def measure(
        cls,
        run: Callable[[int], None],
        widths: Sequence[int],
        *,
        repeats: int = 3,
        limit_s: float = LIMIT_S,
        longest_s: float = math.inf,
    ) -> CostCurve:
        """Times passes of growing width, round after round, until `limit_s` is spent.

        Args:
            run: Runs one pass of that width and waits for its end.
            widths: Ascending.
            repeats: Rounds after the first, which warms up; a width's fastest pass counts, as the least disturbed one.
                A width that no later round came to keeps what the first one said.
            limit_s: Seconds after which no further width is begun, once every width has run and two are timed.
            longest_s: Seconds of a pass after which wider ones are left out; two are timed at least.
        """
        begin = time.perf_counter()
        warm_up: dict[int, float] = {}
        for width in widths:
            warm_up[width] = _fastest(run, width)
            if warm_up[width] > longest_s and len(warm_up) > 1:
                break
        best: dict[int, float] = {}
        for _ in range(repeats):
            for index, width in enumerate(warm_up):
                if time.perf_counter() - begin > limit_s and index > 1:
                    break
                best[width] = min(best.get(width, math.inf), _fastest(run, width))
        return cls(list(warm_up), [best.get(width, seconds) for width, seconds in warm_up.items()])

    def seconds(self, widths: Any) -> Any:
        """Seconds of passes; widths: an array of numbers of tokens, gives an array of the same shape."""
        rising = self._rising()
        inside = np.interp(widths, self._widths, rising)
        return inside + self._slope(rising) * np.maximum(np.asarray(widths) - self._widths[-1], 0.0)

    def __call__(self, width: float) -> float:
        """Seconds of a pass of one width: as `seconds`, without an array, as controllers ask several times a pass."""
        rising, widths = self._rising(), self._widths
        if width >= widths[-1]:
            return rising[-1] + self._slope(rising) * (width - widths[-1])
        after = bisect_right(widths, width)
        if not after:
            return rising[0]
        share = (width - widths[after - 1]) / (widths[after] - widths[after - 1])
        return rising[after - 1] + share * (rising[after] - rising[after - 1])

    def learn(self, width: int, seconds: float) -> None:
        """Moves the measured point of a width, if there is one, towards a pass that was just made, others a little."""
        index = bisect_left(self._widths, width)
        if index < len(self._widths) and self._widths[index] == width:
            known = self._seconds[index]
            change = min(seconds / known, _LARGEST_RATIO) - 1
            self._seconds = [each * (1 + _DRIFT_RATE * change) for each in self._seconds]
            self._seconds[index] = known * (1 + _LEARNING_RATE * change)

    def _rising(self) -> list[float]:
        """Seconds at the measured widths, none more than at a wider one."""
        return [*accumulate(reversed(self._seconds), min)][::-1]

    def _slope(self, rising: Sequence[float]) -> float:
        """Seconds of a token past the last measured width; rising: see `_rising`."""
        if len(rising) == 1:
            return 0.0
        return (rising[-1] - rising[-2]) / (self._widths[-1] - self._widths[-2])


def _fastest(run: Callable[[int], None], width: int) -> float:
    """Seconds of the fastest of several passes in a row: decoding repeats a width too, and finds its caches warm."""
    begin, best = time.perf_counter(), float("inf")
    while best == float("inf") or time.perf_counter() - begin < _BURST_S:
        start = time.perf_counter()
        run(width)
        best = min(best, time.perf_counter() - start)
    return best
