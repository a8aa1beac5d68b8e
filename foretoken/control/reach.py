"""How deep a drafter's trees are right where those of the drafters asked before it are not, by what was generated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FADE = 0.5 ** (1 / 60)  # of an observation, by later ones
_PRIOR = 4.0  # observations that the levels above are worth as a guess


class Reach:
    """P(a drafter is right down to depth d | the drafters before it are not), for every depth."""

    def __init__(self, deepest: int) -> None:
        """Nothing was observed yet; deepest: levels that are drafted at most."""
        self._seen, self._right = np.zeros(deepest), np.zeros(deepest)
        self._tested, self._passed = 2.5, 1.5  # tokens that were tested after right ones, with a guess to begin with
        self._estimate: NDArray[np.float64] | None = None

    def probabilities(self) -> NDArray[np.float64]:
        """(deepest,), falling. Depths that little is known of go on from the ones above at the drafter's mean rate."""
        if self._estimate is None:
            above, rate, result = 1.0, self._passed / self._tested, []
            for seen, right in zip(self._seen.tolist(), self._right.tolist(), strict=True):
                above = min((right + _PRIOR * above * rate) / (seen + _PRIOR), above)
                result.append(above)
            self._estimate = np.array(result)
        return self._estimate

    def learn(self, *, before: int, right: int, asked: int, generated: int) -> None:
        """Counts one sequence's draft.

        Args:
            before: Depth down to which the drafters asked before were right.
            right: Depth down to which this one was.
            asked: Levels that it was asked for.
            generated: Tokens that followed the root: what is deeper than these is known only of drafts that were wrong
                before their end.
        """
        asked = min(asked, len(self._seen))
        last = min(asked, generated) if right >= generated else asked
        self._seen *= _FADE
        self._right *= _FADE
        if before < generated:  # else nobody knows how far those before are right
            self._seen[before:last] += 1
            self._right[before : min(right, last)] += 1
        self._tested = self._tested * _FADE + min(right + 1, last)
        self._passed = self._passed * _FADE + min(right, last)
        self._estimate = None

    def age(self, weight: float) -> None:
        """Lets what was observed weigh no more than some observations: it is old, and texts change."""
        share = weight / np.maximum(self._seen, weight)
        self._seen *= share
        self._right *= share
        self._estimate = None

    def counts(self) -> NDArray[np.float64]:
        """(2, deepest): how often each depth was observed, and how often the drafter was right there."""
        return np.stack([self._seen, self._right])

    def restore(self, counts: NDArray[np.float64]) -> None:
        """Begins from what `counts` gave of a reach of the same depth."""
        self._seen, self._right = counts[0].copy(), counts[1].copy()
        self._estimate = None
