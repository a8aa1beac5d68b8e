"""The contract of controllers: a controller bounds the drafts of an iteration and chooses the nodes to verify."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from foretoken.trees.merge import merge_trees

if TYPE_CHECKING:
    from foretoken.core.records import Declined, StepRecord
    from foretoken.core.token_tree import TokenTree
    from foretoken.trees.stopping import PathFloors

UNBOUNDED = 1 << 20  # deeper than any tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """Bounds on the draft of one sequence in one iteration.

    Attributes:
        depth: Deepest node; 0 for no draft.
        nodes: Most nodes of a drafter's tree, root included.
    """

    depth: int
    nodes: int


class Ask(NamedTuple):
    """The drafters to ask now.

    Attributes:
        drafters: Indices of the engine's drafters; empty for none.
        depth: Deepest node that pays. The allowances also bound the depth.
        floors: Ends chains early, of one drafter that follows them; None for none.
    """

    drafters: Sequence[int]
    depth: int = UNBOUNDED
    floors: PathFloors | None = None


class Leaf(NamedTuple):
    """A drafted node below which lookups may continue.

    Attributes:
        row: Index of its sequence in the batch.
        path: Tokens below the root, down to the node.
    """

    row: int
    path: Sequence[int]


# Returns the continuations that lookups propose below a leaf, by the lookup's index among the engine's drafters.
Continue = Callable[[Leaf], Sequence[tuple[int, Sequence[int]]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allotment:
    """Bounds on the drafts of one iteration.

    Attributes:
        allowances: One per sequence of the batch.
        first: The drafters to ask first; None for all drafters.
        declined: Reason for not drafting; None if there are drafts, or if the controller measures plain decoding.
    """

    allowances: Sequence[Allowance]
    first: Ask | None = None
    declined: Declined | None = None

    @classmethod
    def nothing(cls, batch_size: int, declined: Declined | None = None) -> Self:
        """Returns no drafts for a batch of sequences."""
        return cls(allowances=[Allowance(depth=0, nodes=1)] * batch_size, declined=declined)

    @property
    def is_empty(self) -> bool:
        """Whether nothing may be drafted."""
        return not any(allowance.depth for allowance in self.allowances)


class Controller(Protocol):
    """Decides how much to draft, and then which nodes to verify."""

    def allot(self, batch_size: int, num_prompt_tokens: int = 0) -> Allotment:
        """Returns the bounds of the drafts for a batch of sequences.

        A draft may take place one iteration later than allotted, see `Drafting.propose`.

        Args:
            batch_size: Sequences that are drafted for.
            num_prompt_tokens: Prompt tokens of other sequences that the same pass reads.
        """

    def further(self, trees: Mapping[int, TokenTree]) -> Ask | None:
        """Returns the drafters to ask next, after some have answered; None for no drafter.

        Args:
            trees: By the drafter's index, over the same roots; valid, and within the allowances.
        """

    def select(self, trees: Mapping[int, TokenTree], continued: Continue | None = None) -> TokenTree:
        """Returns the tree to verify.

        Args:
            trees: Of all drafters that were asked, at least one; see `further`.
            continued: Returns what lookups propose after paths that are not committed.
        """

    def learn_step(self, record: StepRecord) -> None:
        """Learns from the record of an iteration."""


class Fixed:
    """Asks for whole drafts in every iteration."""

    def __init__(self, max_nodes: int, most_nodes: Sequence[int] | None = None) -> None:
        """Makes a controller without state.

        Args:
            max_nodes: Most nodes of a verified tree, root included.
            most_nodes: Of each drafter's own tree, see `merge_trees`.
        """
        self._allowance, self._max_nodes = Allowance(depth=UNBOUNDED, nodes=max_nodes), max_nodes
        self._most_nodes = most_nodes

    def allot(self, batch_size: int, num_prompt_tokens: int = 0) -> Allotment:
        """Returns unbounded allowances for every sequence, also beside prompts."""
        del num_prompt_tokens
        return Allotment(allowances=[self._allowance] * batch_size)

    def further(self, trees: Mapping[int, TokenTree]) -> None:
        """Returns None: all drafters are asked at once."""

    def select(self, trees: Mapping[int, TokenTree], continued: Continue | None = None) -> TokenTree:
        """Returns the tree, or all trees merged, earlier drafters first. Merging synchronises once."""
        del continued
        if len(trees) == 1:
            return next(iter(trees.values()))
        most = None if self._most_nodes is None else [self._most_nodes[i] for i in trees]
        return merge_trees(list(trees.values()), max_nodes=self._max_nodes, most_nodes=most).narrowed()

    def learn_step(self, record: StepRecord) -> None:
        """Learns nothing."""
