"""How many levels of a dynamic tree are worth drafting: as long as a level's nodes bring tokens faster than passes do.

With W_d the tokens that the verified nodes of depth d are expected to bring, s the seconds of drafting a level and r
those of the rest of an iteration, a draft of D levels earns 1 + W_1 + … + W_D tokens in r + D s seconds.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FADE = 0.5 ** (1 / 40)  # of what levels brought, by draft
_DRAFTS_KEPT = 9
_LOOK_EVERY = 8  # drafts of which one goes a level deeper than pays, to see what is there
_NUM_FREE = 2  # drafts before anything is decided: the first reads the prompt


class PayingDepth:
    """Chooses the depth of the next draft from what the levels of recent ones brought."""

    def __init__(self, deepest: int) -> None:
        """Nothing is known yet; deepest: levels that can be drafted at most."""
        self._deepest = deepest
        self._brought, self._weights = np.zeros(deepest), np.zeros(deepest)  # tokens by level, fading, and drafts
        self._level_s: deque[float] = deque(maxlen=_DRAFTS_KEPT)  # seconds a level of recent drafts
        self._best, self._count = deepest, 0

    def next(self) -> int:
        """Levels of the next draft."""
        self._count += 1
        return min(self._best + (self._count % _LOOK_EVERY == 0), self._deepest)

    def learn(self, asked: int, tokens: NDArray[np.float64], *, draft_s: float, rest_s: float) -> None:
        """Takes in what a draft brought.

        Args:
            asked: Levels that were drafted.
            tokens: Entry d: expected tokens a sequence from the verified nodes of depth d + 1.
            draft_s: Seconds that it took.
            rest_s: Of the rest of the iteration.
        """
        self._level_s.append(draft_s / asked)
        self._brought *= _FADE
        self._weights *= _FADE
        self._brought[:asked] += tokens[:asked]
        self._weights[:asked] += 1.0
        if len(self._level_s) < _NUM_FREE:
            return
        known = int(np.count_nonzero(self._weights))
        means = self._brought[:known] / self._weights[:known]
        generated = 1.0 + means.cumsum()
        seconds = rest_s + min(self._level_s) * np.arange(1, known + 1)
        self._best = int((generated / seconds).argmax()) + 1
