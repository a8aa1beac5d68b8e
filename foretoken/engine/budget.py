"""How deep a draft pays: expected tokens per second from measured costs and measured acceptance.

With c(T) the seconds of a target pass over T tokens, s the seconds a drafter takes per level, h those of the host and
A_k the probability that at least k drafted tokens survive, a chain of depth K earns 1 + A_1 + … + A_K tokens in
c(1 + K) + K s + h seconds.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from foretoken.core.records import StepRecord
    from foretoken.engine.costs import CostCurve

_HALF_LIFE = 100.0  # drafts after which an observation counts half
_LEVELS_KEPT = 9
_PROBE_EVERY = 32  # iterations after which a draft is tried although none seems to pay
_REFRESH_EVERY = 8  # iterations for which costs are taken from the table
_LEARNING_RATE = 0.1  # weight of one iteration in what the host takes


class DepthBudget:
    """Chooses the depth of the next draft from what recent drafts brought."""

    def __init__(self, cost: CostCurve, max_depth: int) -> None:
        self._cost, self._max_depth = cost, max_depth
        self._depths = np.arange(1, max_depth + 1)
        self._reached = np.zeros(max_depth)  # drafts whose first d tokens were tested or accepted, fading
        self._accepted = np.zeros(max_depth)  # of these, the ones that accepted token d
        self._levels: deque[float] = deque(maxlen=_LEVELS_KEPT)  # seconds a level of recent drafts
        self._host = 0.0  # seconds of accepting and committing
        self._idle = 0
        self._table: tuple[int, np.ndarray] | None = None  # batch size, seconds by depth
        self._age = 0

    def depth(self, batch_size: int) -> int:
        """Depth that earns the most tokens per second for a batch; 0 where plain decoding does.

        Args:
            batch_size: Sequences in the pass.
        """
        # The fastest: a draft that also reads a prompt, or all that passed while nothing was drafted, takes many times
        # as long and says nothing of the next one.
        level_seconds = min(self._levels, default=0.0)
        expected = 1.0 + self._conditional().cumprod().cumsum()
        passes = self._pass_seconds(batch_size)
        rates = expected / (passes[1:] + self._depths * level_seconds + self._host)
        best = int(rates.argmax()) + 1
        if rates[best - 1] > 1.0 / (passes[0] + self._host):
            return best
        self._idle += 1
        # Two in a row: the first catches up with what it missed, the second shows what a draft costs.
        return 1 if self._idle >= _PROBE_EVERY and self._idle % _PROBE_EVERY < 2 else 0

    def learn(self, record: StepRecord) -> None:
        """Counts an iteration's drafts and their cost."""
        self._cost.learn(record.width * len(record.sequences), record.seconds.verify)
        self._host += _LEARNING_RATE * (record.seconds.accept + record.seconds.commit - self._host)
        fade = 0.5 ** (1.0 / _HALF_LIFE)
        deepest = max((step.tree_depth for step in record.sequences), default=0)
        if deepest:
            self._levels.append(record.seconds.draft / deepest)
        for step in record.sequences:
            if step.tree_depth == 0:
                continue
            tested = min(step.num_accepted + 1, step.tree_depth, self._max_depth)
            self._reached = self._reached * fade + (self._depths <= tested)
            self._accepted = self._accepted * fade + (self._depths <= step.num_accepted)

    def _pass_seconds(self, batch_size: int) -> np.ndarray:
        """Seconds of passes at depths 0, 1, …; read off the curve anew now and then, as it hardly moves."""
        if self._table is None or self._table[0] != batch_size or self._age >= _REFRESH_EVERY:
            widths = batch_size * np.arange(1, self._max_depth + 2)
            self._table, self._age = (batch_size, self._cost.seconds(widths)), 0
        self._age += 1
        return self._table[1]

    def _conditional(self) -> np.ndarray:
        """P(token survives | the ones before did) by depth, drawn towards the pooled rate where little is known."""
        pooled = (self._accepted.sum() + 1.5) / (self._reached.sum() + 2.5)
        result: np.ndarray = (self._accepted + 4 * pooled) / (self._reached + 4)
        return result
