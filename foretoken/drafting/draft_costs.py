"""Estimates the seconds of drafts by depth, and the seconds that drafts add to passes that also read prompts."""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from foretoken.runner.costs import CostCurve

_FADE = 0.5 ** (1.0 / 40.0)  # an observation counts half after 40 others


class FadingLine:
    """A rising least-squares line through observations; older observations count less."""

    def __init__(self) -> None:
        self._count = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        """Adds an observation."""
        self._count = self._count * _FADE + 1
        self._x = self._x * _FADE + x
        self._y = self._y * _FADE + y
        self._xx = self._xx * _FADE + x * x
        self._xy = self._xy * _FADE + x * y

    @property
    def line(self) -> tuple[float, float]:
        """Returns the height at 0 and the slope; 0 and 0 before any observation."""
        if not self._count:
            return 0.0, 0.0
        mean_x, mean_y = self._x / self._count, self._y / self._count
        variance = self._xx / self._count - mean_x**2
        slope = (self._xy / self._count - mean_x * mean_y) / variance if variance > 1e-6 else 0.0
        steepest = mean_y / mean_x if mean_x > 0 else 0.0
        slope = min(max(slope, 0.0), steepest)  # neither falls nor starts below 0
        return mean_y - slope * mean_x, slope

    def __call__(self, x: float | np.ndarray) -> float | np.ndarray:
        """Returns the height of the line at x."""
        start, slope = self.line
        return start + slope * x


_LONG_RATIO = 1.5  # ignores one proposal slower than this times the known seconds; believes two in a row
_LARGEST_RATIO = 2.0  # times the known seconds: cap of a slow proposal
_SMALLEST_RATIO = 0.5  # times the known seconds: a faster proposal corrects them, as none is fast by chance


class DraftSeconds:
    """Estimates the seconds of one drafter's proposals by depth."""

    def __init__(self, deepest: int, timed: Sequence[tuple[int, float]] = ()) -> None:
        """Starts from proposals that were timed before.

        Args:
            deepest: Most levels of a draft.
            timed: Depth and seconds of proposals; the fastest of each depth counts.
        """
        self._deepest, self._line, self._num = deepest, FadingLine(), 0
        self._was_long = False  # whether the last proposal was slow and left out
        for depth, seconds in fastest_by_depth(timed).items():
            self._line.add(depth, seconds)
            self._num += 1

    @property
    def is_known(self) -> bool:
        """Whether any proposal was timed."""
        return self._num > 0

    def __call__(self, depths: np.ndarray | float) -> np.ndarray | float:
        """Returns the seconds of proposals of some depths; 0 before any was timed."""
        return self._line(depths)

    @property
    def of_deepest(self) -> float:
        """Seconds of a proposal of the greatest depth."""
        return float(self._line(float(self._deepest)))

    def learn_seconds(self, depth: int, seconds: float) -> None:
        """Learns the seconds of a proposal that reached `depth`."""
        if self._num:
            known = float(self._line(float(depth)))
            if seconds < _SMALLEST_RATIO * known:
                self._line, self._was_long = FadingLine(), False
            elif known > 0:
                self._was_long = seconds > _LONG_RATIO * known and not self._was_long
                if self._was_long:
                    return
                seconds = min(seconds, _LARGEST_RATIO * known)
        self._num += 1
        self._line.add(depth, seconds)


def fastest_by_depth(timed: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Returns the seconds of the fastest draft of each depth; timed: depths and seconds."""
    fastest: dict[int, float] = {}
    for depth, seconds in timed:
        fastest[depth] = min(fastest.get(depth, seconds), seconds)
    return fastest


_DRAFTS_KEPT = 5  # drafts of a depth; their median counts, which ignores a draft that also reads a prompt
_LONGEST_KEPT = 100  # drafts after which one is forgotten: machines slow down and speed up
_FAR = 1000.0  # levels, more than are drafted


class LevelSeconds:
    """Seconds of drafts by depth: a rising curve through the origin and the medians of recent drafts of each depth."""

    def __init__(self) -> None:
        self._drafts: dict[int, deque[tuple[int, float]]] = {}  # by depth: index and seconds of each draft
        self._count = 0
        self._curve: tuple[list[float], list[float]] | None = None  # cleared by the next draft

    @property
    def is_known(self) -> bool:
        """Whether any draft was timed."""
        return bool(self._drafts)

    def learn_seconds(self, depth: int, seconds: float) -> None:
        """Learns the seconds of a draft; depth: its levels, at least 1."""
        self._count += 1
        self._drafts.setdefault(depth, deque(maxlen=_DRAFTS_KEPT)).append((self._count, seconds))
        self._drafts = {
            each: drafts for each, drafts in self._drafts.items() if drafts[-1][0] > self._count - _LONGEST_KEPT
        }
        self._curve = None

    def __call__(self, depths: NDArray[Any] | float) -> NDArray[np.float64]:
        """Returns the seconds of drafts of some depths, extrapolated beyond the deepest; 0 before any draft."""
        if self._curve is None:
            self._curve = self._points()
        return np.asarray(np.interp(depths, *self._curve))

    def _points(self) -> tuple[list[float], list[float]]:
        depths, seconds = [0.0], [0.0]
        for depth in sorted(self._drafts):
            depths.append(float(depth))
            seconds.append(max(median(each for _, each in self._drafts[depth]), seconds[-1]))
        if len(depths) > 1:
            slope = (seconds[-1] - seconds[-2]) / (depths[-1] - depths[-2])
            depths.append(_FAR)
            seconds.append(seconds[-1] + slope * (_FAR - depths[-2]))
        return depths, seconds


_LARGEST_SHARE = 0.75  # share of the mean cost of a token: a further token that adds more does not fit


class BesidePrompts:
    """Decides whether to draft in passes that also read prompts."""

    def __init__(self, cost: CostCurve) -> None:
        self._cost = cost

    def has_room(self, num_sequences: int, num_prompt_tokens: int) -> bool:
        """Decides whether drafts may pay in a pass; always true if the pass reads no prompts.

        Args:
            num_sequences: Decoding sequences, one token each.
            num_prompt_tokens: Prompt tokens of other sequences in the pass.
        """
        if not num_prompt_tokens:
            return True
        width = num_sequences + num_prompt_tokens
        return self._cost(2 * width) - self._cost(width) <= _LARGEST_SHARE * self._cost(width)
