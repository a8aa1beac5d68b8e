"""What a drafter's proposals take, by how deep they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.control.fading_line import FadingLine

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

_LONG_RATIO = 1.5  # of a proposal to what is known: one that also reads a prompt says nothing of the next; two do
_LARGEST_RATIO = 2.0  # of a proposal that is believed
_SMALLEST_RATIO = 0.5  # below it what is known is wrong: no proposal is faster by chance


class DraftSeconds:
    """Seconds of one drafter's proposals."""

    def __init__(self, deepest: int, timed: Sequence[tuple[int, float]] = ()) -> None:
        """What is known beforehand.

        Args:
            deepest: Levels that are drafted at most.
            timed: Depth and seconds of proposals that were timed, the fastest of each depth of which count.
        """
        self._deepest, self._line, self._num = deepest, FadingLine(), 0
        self._was_long = False  # the last proposal, which was left out
        for depth, seconds in fastest_by_depth(timed).items():
            self._line.learn(depth, seconds)
            self._num += 1

    @property
    def is_known(self) -> bool:
        """Whether any proposal was timed."""
        return self._num > 0

    def __call__(self, depths: np.ndarray | float) -> np.ndarray | float:
        """Seconds of proposals of some depths; 0 before any was timed."""
        return self._line(depths)

    @property
    def of_deepest(self) -> float:
        """Seconds of a proposal of the greatest depth."""
        return float(self._line(float(self._deepest)))

    def learn(self, depth: int, seconds: float) -> None:
        """Takes in a proposal; depth: that it reached."""
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
        self._line.learn(depth, seconds)


def fastest_by_depth(timed: Sequence[tuple[int, float]]) -> dict[int, float]:
    """Seconds of the fastest draft of each depth, of depth and seconds of some."""
    fastest: dict[int, float] = {}
    for depth, seconds in timed:
        fastest[depth] = min(fastest.get(depth, seconds), seconds)
    return fastest
