"""What a controller is: it bounds what drafters draft in an iteration and chooses which of their nodes are verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from foretoken.trees.merge import merge_trees

if TYPE_CHECKING:
    from collections.abc import Mapping

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


class Ask(NamedTuple):
    """Who is asked for a draft now.

    Attributes:
        drafters: Places among the engine's drafters; none for nobody.
        depth: Deepest node that pays; the allowances bound it too.
    """

    drafters: Sequence[int]
    depth: int = UNBOUNDED


class Leaf(NamedTuple):
    """A drafted node that text may be continued after.

    Attributes:
        row: Its sequence in the batch.
        path: Tokens from below the root down to it.
    """

    row: int
    path: Sequence[int]


# What lookups, by their places among the engine's drafters, say of the text after a leaf: those that say something.
Continue = Callable[[Leaf], Sequence[tuple[int, Sequence[int]]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allotment:
    """What may be drafted in one iteration.

    Attributes:
        allowances: One a sequence of the batch.
        first: Who is asked first; None for all drafters.
        declined: Why nothing is to be drafted at all; None where something is, and where `measures_plain`.
        may_draft_next: Whether something may be drafted in the next iteration. Where it may not, drafters need not hear
            of this one.
        measures_plain: Whether nothing is drafted in this iteration only to see what it takes without.
    """

    allowances: Sequence[Allowance]
    first: Ask | None = None
    declined: Declined | None = None
    may_draft_next: bool = True
    measures_plain: bool = False


class Controller(Protocol):
    """Decides before drafting how much to ask for, and afterwards what of it to verify."""

    def allot(self, batch_size: int) -> Allotment:
        """What drafters may do for a batch of sequences."""

    def further(self, trees: Mapping[int, TokenTree]) -> Ask | None:
        """Who else is asked, now that some drafters have answered; None for nobody.

        Args:
            trees: By the drafter's place among the engine's, over the same roots; valid, and within the allowances.
        """

    def select(self, trees: Mapping[int, TokenTree], continued: Continue | None = None) -> TokenTree:
        """The tree to verify.

        Args:
            trees: Of all who were asked, one at least; see `further`.
            continued: Gives what lookups say of paths that are not committed.
        """

    def learn(self, record: StepRecord) -> None:
        """Takes in what an iteration brought."""


class Fixed:
    """Asks for whole drafts in every iteration."""

    def __init__(self, max_nodes: int, most_nodes: Sequence[int] | None = None) -> None:
        """A controller without state.

        Args:
            max_nodes: Most nodes of a verified tree, root included.
            most_nodes: Of each drafter's own tree, see `merge_trees`.
        """
        self._allowance, self._max_nodes = Allowance(depth=UNBOUNDED, nodes=max_nodes), max_nodes
        self._most_nodes = most_nodes

    def allot(self, batch_size: int) -> Allotment:
        """As much as there is, for everyone."""
        return Allotment(allowances=[self._allowance] * batch_size)

    def further(self, trees: Mapping[int, TokenTree]) -> None:
        """All drafters are asked at once."""

    def select(self, trees: Mapping[int, TokenTree], continued: Continue | None = None) -> TokenTree:
        """The tree, or all of them merged, earlier drafters first, which synchronises once."""
        del continued
        if len(trees) == 1:
            return next(iter(trees.values()))
        most = None if self._most_nodes is None else [self._most_nodes[i] for i in trees]
        return merge_trees(list(trees.values()), max_nodes=self._max_nodes, most_nodes=most).narrowed()

    def learn(self, record: StepRecord) -> None:
        """Nothing to learn."""
