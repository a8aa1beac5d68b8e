"""The cost model: seconds of a pass, of a draft and of the host; measured at load, corrected while running.

    pass(B, T) = told(T) * exp(r_B(T))      B sequences, T tokens
    draft(D)   = factor * (fixed + level * D)      D levels
    reading(n) = slope * n      n tokens that a drafter missed
    host(n)    = start + slope * n      n emitted tokens

`told` is the staircase that was measured at load. r_B is learned at the widths of past passes and interpolated between
them, so that a staircase that was measured wrong does not last. `fixed` and `level` come from drafts timed at load.
Before the first reading a token takes a share of what it adds to a wide pass, in proportion to a level and a pass: half
of it for a draft model, a tenth for a head that keeps keys and values alone, nothing for one that reads one feature.

All of these are seconds of a quiet machine. Observed seconds are divided by `machine`, the slowness that recent passes
show. A busy machine slows passes, drafts and the host alike, so `machine` changes no decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import TYPE_CHECKING

import numpy as np

from foretoken.drafters.base import READ_SHARE
from foretoken.runner.costs import CostCurve

if TYPE_CHECKING:
    from foretoken.core.records import AskedDrafter, StepRecord

LONGEST = 1.4  # an observation counts at most this far from what is known, unless the one before was as far
_STEP = log(LONGEST)
_RATE = 0.03  # least weight of an observation among earlier ones of the same kind
_MACHINE_RATE = 0.2  # weight of a pass in the factor of the machine
_RIDGE = 0.3  # seen passes that differ less, as a share of the widest one, say little of wider ones
_LEAST_LEVEL = 0.06  # least time of a level, as a share of the shortest timed draft; a busy machine hides levels
_SHAPE = 0.02  # mean square of what told and true seconds of two widths differ by, as a logarithm
_REFRESH_EVERY = 16  # passes between two tables
_WIDE = 64  # tokens of a pass that is bound by arithmetic; a choice
# Tokens that tell what reading takes, weight of earlier ones, and most of what was expected that counts; choices.
_LEAST_READ, _READ_FADE, _MOST_READ = 16, 0.8, 4.0
_MISSED = 2  # tokens of a sequence that a draft may read besides and still tell what drafts take; a choice


class _Surprise:
    """Clips the logarithm of observed over expected seconds: one long observation was probably interrupted."""

    def __init__(self) -> None:
        self._last = 0.0

    def clipped(self, found: float) -> float:
        most = max(_STEP, abs(self._last) if found * self._last > 0 else 0.0)
        self._last = found
        return min(max(found, -most), most)


class _PassSeconds:
    """Seconds of passes over one number of sequences, for a machine that is as fast as at load."""

    def __init__(self, told: CostCurve) -> None:
        self._told = told
        self._seen: dict[int, tuple[float, float]] = {}  # by tokens: log of true over told seconds, and observations
        self._surprise, self._noise = _Surprise(), 0.0  # mean square of surprises
        self._table, self._age = list[float](), 0

    def copy(self) -> _PassSeconds:
        made = _PassSeconds(self._told)
        made._seen, made._noise = self._seen.copy(), self._noise
        made.age()
        return made

    def age(self) -> None:
        self._seen = {width: (ratio, min(num, 1.0)) for width, (ratio, num) in self._seen.items()}

    def num_seen(self, width: int) -> float:
        return self._seen[width][1] if width in self._seen else 0.0

    def table(self, most: int) -> list[float]:
        """Seconds at 0, 1, … tokens, at least up to `most`."""
        if len(self._table) <= most or self._age >= _REFRESH_EVERY:
            self._table, self._age = self._seconds(max(len(self._table), most + 1, 64)), 0
        return self._table

    def _seconds(self, size: int) -> list[float]:
        told = self._told.seconds(np.arange(size))
        seen = sorted(width for width in self._seen if width < size)
        if not seen:
            return [float(each) for each in told]
        logs, num = np.array([self._seen[width] for width in seen]).T
        # The noisier the clock, the closer are few observations to the mean of all.
        mean = float(num @ logs) / float(num.sum())
        logs = mean + num / (num + self._noise / _SHAPE) * (logs - mean)
        seconds = told * np.exp(np.interp(np.log(np.maximum(np.arange(size), 1)), np.log(seen), logs))
        # Beyond the widest seen pass a token adds what it was told to add, corrected as between the seen passes.
        low, high = seen[0], seen[-1]
        usual = _RIDGE * told[high]
        added = max(seconds[high] - seconds[low], 0.0) + usual * seconds[high] / told[high]
        seconds[high:] = seconds[high] + added / (told[high] - told[low] + usual) * (told[high:] - told[high])
        # No pass takes longer than a wider one: disturbances only add.
        rising: list[float] = np.minimum.accumulate(seconds[::-1])[::-1].tolist()
        return rising

    def learn(self, width: int, seconds: float) -> float:
        """Learns from a pass; returns the part of the surprise that the machine may explain, as a logarithm."""
        known = self.table(width)[width]
        surprise = self._surprise.clipped(log(max(seconds, 1e-9) / known))
        self._noise += _RATE * (surprise**2 - self._noise)
        before, num = self._seen.get(width, (0.0, 0.0))
        rate = max(1 / (num + 1), _RATE)
        found = log(known / self._told(width)) + surprise
        self._seen[width] = before + rate * (found - before), num + 1
        self._age += _REFRESH_EVERY if rate > 0.1 else 1
        return (1 - rate) * surprise


class CostModel:
    """Seconds of everything in an iteration, on a quiet machine.

    Attributes:
        host: Of accepting and committing, by emitted tokens.
        merging: Of merging and selecting, by trees with nodes.
        machine: Slowness of the machine now; 1 for as fast as at load.
    """

    def __init__(
        self, cost: CostCurve | None, deepest: Sequence[int], timed: Sequence[Sequence[tuple[int, float]]],
        read_shares: Sequence[float] = (),
    ) -> None:  # fmt: skip
        """Starts from what was measured at load.

        Args:
            cost: Seconds of a pass by tokens; None if none were measured.
            deepest: Most levels of each drafter.
            timed: Depth and seconds of each drafter's timed drafts; see `time_drafts`.
            read_shares: See `foretoken.drafters.base.SparingReader`, for the time before the first reading; empty for
                `READ_SHARE`.
        """
        self._read_shares = read_shares or [READ_SHARE] * len(deepest)
        self._told = _PassSeconds(cost or CostCurve((1,), (1.0,)))
        self._passes: dict[int, _PassSeconds] = {}
        self.machine, self._num_passes = 1.0, 0
        self.host, self.merging = FadingLine(), FadingLine()
        self._drafts = [_DraftSeconds(*each) for each in zip(deepest, timed, strict=True)]

    def passes(self, batch: int, most: int) -> list[float]:
        """Seconds of a pass of so many sequences over 0, 1, … tokens, at least up to `most`."""
        return self._curve(batch).table(most)

    def plain(self, batch: int) -> float:
        """Returns the seconds of an iteration without drafts."""
        return self.passes(batch, batch)[batch] + self.host(batch)

    def draft(self, drafter: int) -> list[float]:
        """Seconds of a draft of 0, 1, … levels; 0 while nothing is known."""
        return self._drafts[drafter].known

    def reading(self, drafter: int) -> float:
        """Returns the seconds in which a drafter reads a token that it missed."""
        tokens, seconds = self._drafts[drafter].read
        if tokens:
            return seconds / tokens
        told = self._told.table(_WIDE)
        level = self.draft(drafter)[1] if len(self.draft(drafter)) > 1 else 0.0
        share = self._read_shares[drafter]
        return share * (told[_WIDE] - told[_WIDE // 2]) / (_WIDE // 2) * min(level / told[1], 1.0)

    def read_s(self, asked: AskedDrafter, batch: int) -> float:
        """Returns the seconds in which a drafter read what it had missed; an interruption is no reading."""
        draft = self._drafts[asked.index]
        if is_little(asked.num_missed, batch) or not draft.is_known:
            return 0.0
        drafting_s = draft.known[min(asked.depth, len(draft.known) - 1)]
        most = _MOST_READ * asked.num_missed * self.reading(asked.index)
        return min(max(asked.seconds / self.machine - drafting_s, 0.0), most)

    def num_passes(self, batch: int) -> float:
        """Returns how often a pass without drafts was seen, of so many sequences."""
        return self._passes[batch].num_seen(batch) if batch in self._passes else 0.0

    def learn(self, record: StepRecord) -> None:
        """Learns from an iteration.

        The first measured pass rescales the cached costs, which may be old or measured on a busy machine. Iterations
        that also read prompts update draft times only.
        """
        batch, width, seconds = len(record.sequences), record.num_tokens, record.seconds
        slowness = self.machine
        if not record.num_prompt_tokens:
            curve = self._curve(batch)
            known = curve.table(width)[width]
            slowness = max(seconds.verify, 1e-9) / known
            self.machine = self.machine if self._num_passes else slowness
            self._num_passes += 1
            rest = curve.learn(width, seconds.verify / self.machine)
            self.machine *= exp(max(_MACHINE_RATE, 1 / (self._num_passes + 1)) * rest)
            emitted = sum(step.num_emitted for step in record.sequences)
            self.host.add(emitted, (seconds.accept + seconds.commit) / max(self.machine, slowness))
        for asked in record.asked:
            # A moment in which the machine was busy also slowed the pass. Missed tokens are read once, not every time.
            draft = self._drafts[asked.index]
            if is_little(asked.num_missed, batch) or not draft.is_known:
                draft.learn(asked.depth, asked.seconds / self.machine, asked.seconds / slowness)
            else:
                draft.have_read(asked.num_missed, self.read_s(asked, batch))
        if len(self._drafts) > 1 and record.asked:
            rest = seconds.draft - sum(asked.seconds for asked in record.asked)
            self.merging.add(sum(asked.depth > 0 for asked in record.asked), max(rest, 0.0) / self.machine)

    def age(self, drafter: int) -> None:
        """Lowers the weight of what was seen before a try: the machine may have changed."""
        self._drafts[drafter].age()
        for curve in self._passes.values():
            curve.age()

    def _curve(self, batch: int) -> _PassSeconds:
        if batch not in self._passes:
            near = min(self._passes, key=lambda other: abs(log(other / batch)), default=0)
            self._passes[batch] = (self._passes[near] if near else self._told).copy()
        return self._passes[batch]


def is_little(num_missed: int, batch: int) -> bool:
    """Decides whether a draft that reads so many tokens besides still tells what drafts take."""
    return num_missed <= _MISSED * batch


class _DraftSeconds:
    """Seconds of one drafter's drafts by depth: fixed work and levels as timed, times a factor that is learned.

    Attributes:
        known: Seconds by levels; the first entry is for drafts without any token. 0 while unknown.
        read: Tokens that drafts read besides, and their seconds, fading.
    """

    def __init__(self, deepest: int, timed: Sequence[tuple[int, float]]) -> None:
        self.read = 0.0, 0.0
        self.known = [0.0] * (deepest + 1)
        self._surprise, self._num = _Surprise(), 0
        self._first: list[float] = []  # seconds a level, while nothing was timed
        fastest = fastest_by_depth(timed)
        if fastest:
            low, high = min(fastest), max(fastest)
            level = fastest[low] / low if high == low else (fastest[high] - fastest[low]) / (high - low)
            level = max(level, _LEAST_LEVEL * fastest[low])
            self._start(max(fastest[low] - level * low, 0.0), level)

    @property
    def is_known(self) -> bool:
        return self.known[-1] > 0

    def _start(self, fixed: float, level: float) -> None:
        self.known[1:] = [max(fixed + level * depth, 1e-6) for depth in range(1, len(self.known))]

    def age(self) -> None:
        self._num = 0

    def have_read(self, num_tokens: int, seconds: float) -> None:
        """Learns what reading takes."""
        if num_tokens >= _LEAST_READ:
            tokens, total = (_READ_FADE * each for each in self.read)
            self.read = tokens + num_tokens, total + seconds

    def learn(self, depth: int, *seconds: float) -> None:
        """Learns from one draft; seconds: divided by the usual slowness, and by that of the last pass."""
        depth = min(depth, len(self.known) - 1)
        known = self.known[depth]
        if depth and not known:
            # The first draft also reads the prompt: the faster of two counts.
            self._first.append(seconds[0] / depth)
            if len(self._first) > 1:
                self._start(0.0, min(self._first))
            return
        found = min((log(max(each, 1e-9) / max(known, 1e-9)) for each in seconds), key=abs)
        if not depth:
            self.known[0] = known * exp(_RATE * found) if known else seconds[0]
            return
        self._num += 1
        factor = exp(max(1 / (self._num + 2), _RATE) * self._surprise.clipped(found))
        self.known[1:] = [factor * each for each in self.known[1:]]


class FadingLine:
    """A rising least-squares line through observations; older observations count less.

    Attributes:
        line: Height at 0 and slope; 0 and 0 before any observation.
    """

    def __init__(self) -> None:
        self._count = self._x = self._y = self._xx = self._xy = 0.0
        self.line = 0.0, 0.0

    def add(self, x: float, y: float) -> None:
        """Adds an observation; a long one counts as little longer than is known, for it may have been interrupted."""
        if self._count > 2:
            y = min(y, LONGEST * self(x) + 1e-6)
        self._count = self._count * (1 - _RATE) + 1
        self._x = self._x * (1 - _RATE) + x
        self._y = self._y * (1 - _RATE) + y
        self._xx = self._xx * (1 - _RATE) + x * x
        self._xy = self._xy * (1 - _RATE) + x * y
        mean_x, mean_y = self._x / self._count, self._y / self._count
        variance = self._xx / self._count - mean_x**2
        slope = (self._xy / self._count - mean_x * mean_y) / variance if variance > 1e-6 else 0.0
        slope = min(max(slope, 0.0), mean_y / mean_x if mean_x > 0 else 0.0)  # neither falls nor starts below 0
        self.line = mean_y - slope * mean_x, slope

    def __call__(self, x: float) -> float:
        """Returns the height of the line at x."""
        start, slope = self.line
        return start + slope * x


def fastest_by_depth(timed: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Returns the seconds of the fastest draft of each depth; timed: depths and seconds."""
    fastest: dict[int, float] = {}
    for depth, seconds in timed:
        fastest[depth] = min(fastest.get(depth, seconds), seconds)
    return fastest
