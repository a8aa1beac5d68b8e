"""How deep a draft pays: expected tokens per second from measured costs and measured acceptance.

With c(T) the seconds of a target pass over T tokens, s the seconds a drafter takes per level and A_k the probability
that at least k drafted tokens survive, a chain of depth K earns 1 + A_1 + … + A_K tokens in c(1 + K) + K s seconds.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.core.records import StepRecord

_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 17, 24, 32)
_HALF_LIFE = 100.0  # drafts after which an observation counts half
_LEVELS_KEPT = 9
_PROBE_EVERY = 32  # iterations after which a draft is tried although none seems to pay
_LEARNING_RATE = 0.1  # weight of one pass in the cost of its width


class CostCurve:
    """Seconds of a target pass by the number of tokens in it, piecewise linear between measured widths.

    Measured once at the start, then kept true by the passes that decoding makes anyway: caches grow, and other work
    comes and goes on the machine.
    """

    def __init__(self, widths: Sequence[int], seconds: Sequence[float]) -> None:
        """A curve through measured points.

        Args:
            widths: Ascending.
            seconds: One entry a width.
        """
        self._widths: list[int] = list(widths)
        self._seconds: list[float] = list(seconds)

    @classmethod
    def measure(
        cls, run: Callable[[int], None], *, max_width: int, repeats: int = 3, limit_s: float = 2.0
    ) -> CostCurve:
        """Times passes of growing width until `limit_s` is spent.

        Args:
            run: Runs one pass over that many tokens.
            max_width: Widest pass allowed.
            repeats: Passes a width; the fastest counts, as the one least disturbed.
            limit_s: Seconds after which no further width is begun, once there are two.
        """
        widths = [width for width in _WIDTHS if width <= max_width]
        best = [float("inf")] * len(widths)
        begin = time.perf_counter()
        for repeat in range(repeats + 1):  # the first round warms caches and allocators
            for index, width in enumerate(widths):
                start = time.perf_counter()
                if start - begin > limit_s and repeat > 0 and index > 1:
                    break
                run(width)
                if repeat:
                    best[index] = min(best[index], time.perf_counter() - start)
        known = [(width, seconds) for width, seconds in zip(widths, best, strict=True) if seconds < float("inf")]
        return cls([width for width, _ in known], [seconds for _, seconds in known])

    def __call__(self, width: int) -> float:
        """Seconds of a pass over `width` tokens, never less than for fewer; linear past the last measured width."""
        if len(self._widths) == 1:
            return self._seconds[0]
        right = min(max(bisect_left(self._widths, width), 1), len(self._widths) - 1)
        low = max(self._seconds[:right])
        high = max(self._seconds[: right + 1])
        share = (width - self._widths[right - 1]) / (self._widths[right] - self._widths[right - 1])
        return low + (high - low) * share

    def learn(self, width: int, seconds: float) -> None:
        """Moves the measured point of a width, if there is one, towards a pass that was just made."""
        index = min(range(len(self._widths)), key=lambda i: abs(self._widths[i] - width))
        if self._widths[index] == width:
            self._seconds[index] += _LEARNING_RATE * (seconds - self._seconds[index])


class DepthBudget:
    """Chooses the depth of the next draft from what recent drafts brought."""

    def __init__(self, cost: CostCurve, max_depth: int) -> None:
        self._cost, self._max_depth = cost, max_depth
        self._reached = [0.0] * (max_depth + 1)  # drafts whose first d tokens were tested or accepted, fading
        self._accepted = [0.0] * (max_depth + 1)  # of these, the ones that accepted token d
        self._levels: deque[float] = deque(maxlen=_LEVELS_KEPT)  # seconds a level of recent drafts
        self._idle = 0

    def depth(self, batch_size: int) -> int:
        """Depth that earns the most tokens per second for a batch; 0 where plain decoding does.

        Args:
            batch_size: Sequences in the pass.
        """
        best, best_rate = 0, batch_size / self._cost(batch_size)
        # The fastest: a draft that also reads a prompt, or all that passed while nothing was drafted, takes many times
        # as long and says nothing of the next one.
        level_seconds = min(self._levels, default=0.0)
        survival, expected = 1.0, 1.0
        for depth in range(1, self._max_depth + 1):
            survival *= self._conditional(depth)
            expected += survival
            seconds = self._cost(batch_size * (1 + depth)) + depth * level_seconds
            if batch_size * expected / seconds > best_rate:
                best, best_rate = depth, batch_size * expected / seconds
        if best == 0:
            self._idle += 1
            # Two in a row: the first catches up with what it missed, the second shows what a draft costs.
            return 1 if self._idle >= _PROBE_EVERY and self._idle % _PROBE_EVERY < 2 else 0
        return best

    def learn(self, record: StepRecord) -> None:
        """Counts an iteration's drafts and their cost."""
        self._cost.learn(record.width * len(record.sequences), record.seconds.verify + record.seconds.accept)
        fade = 0.5 ** (1.0 / _HALF_LIFE)
        deepest = max((step.tree_depth for step in record.sequences), default=0)
        if deepest:
            self._levels.append(record.seconds.draft / deepest)
        for step in record.sequences:
            if step.tree_depth == 0:
                continue
            tested = min(step.num_accepted + 1, step.tree_depth, self._max_depth)
            for depth in range(1, self._max_depth + 1):
                self._reached[depth] = self._reached[depth] * fade + (depth <= tested)
                self._accepted[depth] = self._accepted[depth] * fade + (depth <= step.num_accepted)

    def _conditional(self, depth: int) -> float:
        """P(token at `depth` survives | the ones before did), drawn towards the pooled rate where little is known."""
        pooled = (sum(self._accepted) + 1.5) / (sum(self._reached) + 2.5)
        return (self._accepted[depth] + 4 * pooled) / (self._reached[depth] + 4)
