"""What a controller is: it bounds what drafters draft in an iteration and chooses which of their nodes are verified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.records import Declined, StepRecord
    from foretoken.core.token_tree import TokenTree

UNBOUNDED = 1 << 20  # deeper than any tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """What may be drafted for one sequence in one iteration.

    Attributes:
        depth: Deepest node; 0 for no draft.
        nodes: Most nodes of a drafter's tree, root included.
    """

    depth: int
    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Allotment:
    """What may be drafted in one iteration.

    Attributes:
        allowances: One a sequence of the batch.
        declined: Why nothing is to be drafted at all; None where something is.
        may_draft_next: Whether something may be drafted in the next iteration. Where it may not, drafters need not hear
            of this one.
    """

    allowances: Sequence[Allowance]
    declined: Declined | None = None
    may_draft_next: bool = True


class Controller(Protocol):
    """Decides before drafting how much to ask for, and afterwards what of it to verify."""

    def allot(self, batch_size: int) -> Allotment:
        """What drafters may do for a batch of sequences."""

    def select(self, trees: Sequence[TokenTree]) -> TokenTree:
        """The tree to verify.

        Args:
            trees: One a drafter, in the engine's order, over the same roots; valid, and within the allowances.
        """

    def learn(self, record: StepRecord) -> None:
        """Takes in what an iteration brought."""
