"""How deep a drafter's trees are right where those of the drafters asked before it are not, by what was generated.

Counted level by level, as P(it is right at a level | it is right at those above, and the drafters before are not down
to there). A draft that was right to its end says nothing of deeper levels, and one that was wrong nothing of those
below: shares of all drafts that are right down to a depth would count the wrong ones alone there, and fall for good.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FADE = 0.5 ** (1 / 60)  # of an observation, by later ones
_PRIOR = 4.0  # observations that the mean rate is worth as a guess at each level
_GUESS = 0.6  # the mean rate to begin with,
_GUESS_WEIGHT = 10.0  # and tokens that it is worth, so that a few wrong drafts are no reason to give up


class Reach:
    """P(a drafter is right down to depth d | the drafters before it are not), for every depth."""

    def __init__(self, deepest: int) -> None:
        """Nothing was observed yet; deepest: levels that are drafted at most."""
        self._seen, self._right = np.zeros(deepest), np.zeros(deepest)  # tested after right ones; of these, right ones
        self._tested, self._passed = _GUESS_WEIGHT, _GUESS * _GUESS_WEIGHT  # likewise, where those before are right too
        self._estimate: NDArray[np.float64] | None = None

    def rates(self) -> NDArray[np.float64]:
        """(deepest,) shares of right tokens after right ones; where little is known, near the drafter's mean rate."""
        mean = self._passed / self._tested
        result: NDArray[np.float64] = (self._right + _PRIOR * mean) / (self._seen + _PRIOR)
        return result

    def probabilities(self) -> NDArray[np.float64]:
        """(deepest,), falling."""
        if self._estimate is None:
            self._estimate = self.rates().cumprod()
        return self._estimate

    def learn(self, *, before: int, right: int, asked: int, generated: int) -> None:
        """Counts one sequence's draft.

        Args:
            before: Depth down to which the drafters asked before were right.
            right: Depth down to which this one was.
            asked: Levels that it was asked for.
            generated: Tokens that followed the root: nobody knows what is right below them.
        """
        last = min(asked, generated, len(self._seen))
        right, tested = min(right, last), min(right + 1, last)
        self._seen *= _FADE
        self._right *= _FADE
        self._seen[before:tested] += 1  # nothing where those before are right down to there
        self._right[before:right] += 1
        self._tested = self._tested * _FADE + tested
        self._passed = self._passed * _FADE + right
        self._estimate = None

    def age(self, weight: float) -> None:
        """Lets what was observed weigh no more than some observations: it is old, and texts change."""
        share = weight / np.maximum(self._seen, weight)
        self._seen *= share
        self._right *= share
        self._estimate = None

    def counts(self) -> NDArray[np.float64]:
        """(2, deepest): how often each level was tested after right ones, and how often the drafter was right there."""
        return np.stack([self._seen, self._right])

    def restore(self, counts: NDArray[np.float64]) -> None:
        """Begins from what `counts` gave of a reach of the same depth."""
        self._seen, self._right = counts[0].copy(), counts[1].copy()
        self._estimate = None
