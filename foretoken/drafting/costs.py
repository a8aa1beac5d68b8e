"""The cost model: seconds of a pass, of a draft and of the host; measured at load, corrected while running.

A pass of B sequences over T tokens takes `told(T) * factor(B, T) * machine` seconds. `told` is the staircase that was
measured at load. `factor` is learned for each width, so that a curve that was told too flat or too steep does not last.
`machine` is learned from all passes, and says how busy the machine is. A draft takes `told(depth) * factor(depth) *
machine` seconds.
"""

from __future__ import annotations

from bisect import bisect_right
from math import exp, log
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from foretoken.runner.costs import CostCurve

_STEP = 1.4  # an observation counts at most this much above or below what is known: it may have been interrupted
_FAR = 3.0  # the same for drafts, after three slow ones in a row: their times at load may be wrong
_PASS_FADE = 0.5 ** (1 / 100)  # decay of earlier observations of a size with every new one
_MACHINE_RATE = 0.1  # weight of a pass in the factor of the machine
_FADE = 0.5 ** (1.0 / 40.0)
_REFRESH_EVERY = 16  # observations between two tables
_RIDGE = 0.01  # observations of one size tell no slope: as one more, whose told seconds differ by a tenth
_TILT_RIDGE = 4.0  # the same for a further token: as one more, two tokens away
_LINE_WEIGHT = 1.0  # observations of a size that the line is worth


class LearnedCurve:
    """Seconds by size: told at some sizes, times a factor that is learned. Sizes between are interpolated."""

    def __init__(
        self, sizes: ArrayLike, seconds: ArrayLike, seen: Sequence[int] = (), *, is_draft: bool = False
    ) -> None:
        """Starts with factors of 1.

        Args:
            sizes: Ascending, at least 0.
            seconds: At these sizes, positive.
            seen: The sizes that were measured as others will be, which count as one observation.
            is_draft: Whether three slow observations in a row are believed. Of passes, a busy machine makes many.
        """
        self._sizes, self._told = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
        self._listed, self._num_slow, self._is_draft = self._sizes.tolist(), 0, is_draft
        self._logs, self._num = np.zeros(len(self._sizes)), np.isin(self._sizes, seen).astype(np.float64)
        self._dense = np.zeros(0)
        self._age = 0

    def copy(self) -> LearnedCurve:
        """Returns a curve that starts from this one's factors, and soon has its own."""
        made = LearnedCurve(self._sizes, self._told)
        made._logs, made._num = self._logs.copy(), np.minimum(self._num, 2.0)
        return made

    def observed(self, size: int) -> float:
        """Returns the observations of about this size."""
        return float(np.interp(size, self._sizes, self._num))

    def known(self, most: int) -> NDArray[np.float64]:
        """(at least most + 1,) seconds at 0, 1, …, never falling."""
        if len(self._dense) <= most or self._age >= _REFRESH_EVERY:
            size = max(len(self._dense), 2 * most, 64)
            self._dense, self._age = self._curve(np.arange(size + 1)), 0
        return self._dense

    def _curve(self, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
        told, num = self._told, np.minimum(self._num, 8.0)
        own, total = told * np.exp(self._logs), float(num.sum()) + 1e-9
        # A size that was not seen follows from the seen ones as the told seconds do, plus what a token adds.
        mean_told, mean = float(num @ told) / total, float(num @ own) / total
        line = own
        if total > 1e-6:
            line = mean + self._slope(told / mean_told, own, num, _RIDGE, mean) * (told / mean_told - 1)
            mean_size = float(num @ self._sizes) / total
            tilt = self._slope(self._sizes, own - line, num, _TILT_RIDGE, 0.0)
            line = np.maximum(line + tilt * (self._sizes - mean_size), 0.1 * own)
        values = (num * own + _LINE_WEIGHT * line) / (num + _LINE_WEIGHT)
        # No size takes longer than a greater one. Where two disagree, the one with more observations counts.
        counts, is_below = num[:, None] >= num, np.tri(len(num), dtype=bool)
        least = np.where(is_below.T & counts, values[:, None], -np.inf).max(0)
        most = np.where(is_below & counts, values[:, None], np.inf).min(0)
        values = np.maximum.accumulate(np.clip(values, least, np.maximum(most, least)))
        result: NDArray[np.float64] = np.interp(sizes, self._sizes, values)
        if sizes[-1] > self._sizes[-1]:
            slope = (values[-1] - values[-2]) / (self._sizes[-1] - self._sizes[-2])
            result += slope * np.maximum(sizes - self._sizes[-1], 0.0)
        return result

    @staticmethod
    def _slope(
        x: NDArray[np.float64], y: NDArray[np.float64], num: NDArray[np.float64], ridge: float, usual: float
    ) -> float:
        """Returns the slope of y by x, at least 0; close to `usual` where x hardly differs, or few were seen."""
        from_mean = x - float(num @ x) / float(num.sum())
        return max(float(num @ (from_mean * y)) + ridge * usual, 0.0) / (float(num @ from_mean**2) + ridge)

    def learn(self, size: int, seconds: float) -> float:
        """Learns from one observation.

        Returns:
            The share of the surprise that the size's own factor does not explain, as a logarithm.
        """
        known, sizes = float(self.known(size)[size]), self._sizes
        found = log(max(seconds, 1e-9) / known)
        self._num_slow = self._num_slow + 1 if found > log(_STEP) else 0
        surprise = min(max(found, -log(_STEP)), log(_FAR if self._is_draft and self._num_slow > 2 else _STEP))
        after = min(max(bisect_right(self._listed, size), 1), len(sizes) - 1)
        share = min((size - self._listed[after - 1]) / (self._listed[after] - self._listed[after - 1]), 1.0)
        told = (1 - share) * float(self._told[after - 1]) + share * float(self._told[after])
        own = log(known / told) + surprise
        self._num *= _PASS_FADE
        most = 0.0
        for place, near in ((after - 1, 1 - share), (after, share)):
            rate = near / (float(self._num[place]) + 1)
            self._logs[place] += rate * (own - self._logs[place])
            self._num[place] += near
            most = max(most, rate)
        self._age += _REFRESH_EVERY if most > 0.1 else 1
        return (1 - most) * surprise


class CostModel:
    """Seconds of everything in an iteration.

    Attributes:
        host: Of accepting and committing, by emitted tokens.
        merging: Of merging and buying, by trees with nodes.
        drafts: Of each drafter's drafts, by depth.
    """

    def __init__(
        self, cost: CostCurve | None, deepest: Sequence[int], timed: Sequence[Sequence[tuple[int, float]]]
    ) -> None:
        """Starts from what was measured at load.

        Args:
            cost: Seconds of a pass by tokens; None if none were measured.
            deepest: Most levels of each drafter.
            timed: Depth and seconds of each drafter's timed drafts; see `time_drafts`.
        """
        widths = [1, 8, 64] if cost is None else [width for width, _ in cost.points]
        widths += [widths[-1] << doubled for doubled in range(1, 5)]
        self._told = LearnedCurve(widths, np.ones(len(widths)) if cost is None else cost.seconds(widths))
        self._is_scaled = False  # what was told may be weeks old, or from a busy minute: the first pass scales it
        self._passes: dict[int, LearnedCurve] = {}
        self._machine = 0.0  # logarithm
        self.host, self.merging = FadingLine(), FadingLine()
        self.drafts = [_DraftSeconds(*each) for each in zip(deepest, timed, strict=True)]

    def passes(self, batch: int, most: int) -> NDArray[np.float64]:
        """(at least most + 1,) seconds of a pass of so many sequences over 0, 1, … tokens."""
        return self._curve(batch).known(most) * exp(self._machine)

    def draft(self, drafter: int) -> NDArray[np.float64]:
        """(levels + 1,) seconds of a draft of 0, 1, … levels; 0 while nothing is known."""
        return self.drafts[drafter].known() * exp(self._machine)

    def num_passes(self, batch: int) -> float:
        """Returns how often a pass without drafts was seen, of so many sequences."""
        return self._passes[batch].observed(batch) if batch in self._passes else 0.0

    def learn_pass(self, batch: int, width: int, seconds: float) -> None:
        """Learns from a pass."""
        if not self._is_scaled:
            known = float(self._curve(batch).known(width)[width])
            self._machine, self._is_scaled = log(max(seconds, 1e-9) / known), True
        rest = self._curve(batch).learn(width, seconds / exp(self._machine))
        self._machine += _MACHINE_RATE * rest

    def learn_draft(self, drafter: int, depth: int, seconds: float) -> None:
        """Learns from a draft that reached a depth; 0 for none."""
        self.drafts[drafter].learn(depth, seconds / exp(self._machine))

    def _curve(self, batch: int) -> LearnedCurve:
        if batch not in self._passes:
            near = min(self._passes, key=lambda other: abs(np.log(other / batch)), default=0)
            self._passes[batch] = (self._passes[near] if near else self._told).copy()
        return self._passes[batch]


class _DraftSeconds:
    """Seconds of one drafter's drafts by depth: fixed work and levels at first, then a factor for each depth."""

    def __init__(self, deepest: int, timed: Sequence[tuple[int, float]]) -> None:
        self._deepest = deepest
        self._curve: LearnedCurve | None = None
        self._first: list[float] = []  # seconds a level, while nothing was timed
        fastest = fastest_by_depth(timed)
        if fastest:
            low, high = min(fastest), max(fastest)
            level = max((fastest[high] - fastest[low]) / max(high - low, 1), 0.0)
            self._start(
                max(fastest[low] - level * low, 0.0) if high > low else 0.0, level or fastest[low] / low, list(fastest)
            )

    def _start(self, fixed: float, level: float, seen: Sequence[int]) -> None:
        depths = np.arange(self._deepest + 1.0)
        self._curve = LearnedCurve(depths, np.maximum(fixed + level * depths, 1e-6), seen, is_draft=True)

    def known(self) -> NDArray[np.float64]:
        if self._curve is None:
            return np.zeros(self._deepest + 1)
        return self._curve.known(self._deepest)[: self._deepest + 1]

    def learn(self, depth: int, seconds: float) -> None:
        if self._curve is None:
            # The first draft also reads the prompt: the faster of two counts.
            self._first.append(seconds / max(depth, 1))
            if len(self._first) > 1:
                self._start(0.0, min(self._first), [depth])
        else:
            self._curve.learn(min(depth, self._deepest), seconds)


class FadingLine:
    """A rising least-squares line through observations; older observations count less."""

    def __init__(self) -> None:
        self._count = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        """Adds an observation; a long one counts as little longer than is known, for it may have been interrupted."""
        if self._count > 2:
            y = min(y, _STEP * float(self(x)) + 1e-6)
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

    def __call__(self, x: float | NDArray[np.float64]) -> float | NDArray[np.float64]:
        """Returns the height of the line at x."""
        start, slope = self.line
        return start + slope * x


def fastest_by_depth(timed: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Returns the seconds of the fastest draft of each depth; timed: depths and seconds."""
    fastest: dict[int, float] = {}
    for depth, seconds in timed:
        fastest[depth] = min(fastest.get(depth, seconds), seconds)
    return fastest


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
