"""What one iteration did, as a value that statistics, benchmarks and controllers all read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Wall-clock seconds of the four stages of one iteration, or their sums."""

    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    commit: float = 0.0

    @property
    def total(self) -> float:
        """Sum of the four."""
        return self.draft + self.verify + self.accept + self.commit

    def __add__(self, other: StageSeconds) -> StageSeconds:
        return StageSeconds(
            draft=self.draft + other.draft,
            verify=self.verify + other.verify,
            accept=self.accept + other.accept,
            commit=self.commit + other.commit,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStep:
    """What one iteration did to one sequence.

    Attributes:
        request_id: The sequence's request, unique in the life of an engine.
        num_drafted: Drafted nodes in its tree, root not counted.
        tree_depth: Greatest depth of its tree.
        num_accepted: Drafted tokens that survived verification, 0..tree_depth.
        num_emitted: Tokens added to the output: `num_accepted + 1`, or fewer when the sequence stopped inside the path.
        accepted_by: Accepted nodes per drafter name; a node proposed by two drafters counts for both.
    """

    request_id: str
    num_drafted: int
    tree_depth: int
    num_accepted: int
    num_emitted: int
    accepted_by: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one iteration did to the batch.

    Attributes:
        sequences: One entry a sequence of the batch.
        width: Padded tree width N that the target verified.
        seconds: Where the time went.
        draft_error: Why the drafter was ignored in this iteration, or None.
        lossy_tv: Mean total-variation distance per tested position of a lossy rule; 0 for lossless rules.
    """

    sequences: Sequence[SequenceStep]
    width: int
    seconds: StageSeconds
    draft_error: str | None = None
    lossy_tv: float = 0.0
