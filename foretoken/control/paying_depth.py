"""How many levels of a dynamic tree are worth drafting: the depth whose drafts earn most tokens a second.

The nodes of a draft of D levels tell what a draft of any d ≤ D levels would have earned: what is bought of its nodes
down to depth d (`foretoken.control.buying`). With T_d the tokens that level d adds, for a sequence, R_d the seconds by
which passes over its nodes are longer, in iterations of plain decoding, and s(d) the seconds of drafting d levels, a
draft of D levels earns 1 + T_1 + … + T_D tokens in 1 + R_1 + … + R_D + s(D).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from foretoken.control.level_seconds import LevelSeconds

if TYPE_CHECKING:
    from foretoken.control.buying import Earnings

_FADE = 0.5 ** (1 / 40)  # of what levels added, by draft
_LOOK_EVERY = 8  # drafts of which one goes a level deeper than pays, to see what is there


class PayingDepth:
    """Chooses the depth of the next draft from what recent ones would have earned at every depth.

    Attributes:
        seconds: Of drafts by depth.
    """

    def __init__(self, deepest: int) -> None:
        """Nothing is known yet; deepest: levels that can be drafted at most."""
        self.seconds = LevelSeconds()
        self._deepest = self._best = deepest
        self._added = np.zeros((2, deepest))  # by each level, T_d and R_d, fading
        self._weights = np.zeros(deepest)  # drafts that had the level, fading
        self._num_asked = self._num_timed = 0

    def next(self) -> int:
        """Levels of the next draft."""
        self._num_asked += 1
        return min(self._best + (self._num_asked % _LOOK_EVERY == 0), self._deepest)

    def learn_seconds(self, depth: int, seconds: float) -> None:
        """Takes in what a draft took, unless it is the first, which reads the prompt; depth: its levels, at least 1."""
        if self._num_timed:
            self.seconds.learn(depth, seconds)
        self._num_timed += 1

    def learn_earnings(self, earned: Earnings, *, batch_size: int, plain_s: float) -> None:
        """Takes in what a draft is expected to earn down to each of its depths.

        Args:
            earned: At depths 1, 2, …
            batch_size: Sequences.
            plain_s: Seconds of an iteration of plain decoding.
        """
        levels = min(len(earned.tokens), self._deepest)
        totals = np.ones((2, 1 + levels))  # without a draft, then at each depth
        totals[0, 1:] = earned.tokens[:levels] / batch_size
        totals[1, 1:] = earned.seconds[:levels] / plain_s
        self._added *= _FADE
        self._weights *= _FADE
        self._added[:, :levels] += totals[:, 1:] - totals[:, :-1]
        self._weights[:levels] += 1.0
        if not self.seconds.is_known:  # or drafting would seem to cost nothing
            return
        known = int(np.count_nonzero(self._weights))
        tokens, seconds = 1.0 + (self._added[:, :known] / self._weights[:known]).cumsum(1)
        seconds += self.seconds(np.arange(1, known + 1)) / plain_s
        self._best = int((tokens / seconds).argmax()) + 1
