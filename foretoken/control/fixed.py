"""The controller that changes nothing: every drafter drafts what its options ask for, and all of it is verified."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.control.base import UNBOUNDED, Allotment, Allowance
from foretoken.trees.merge import merge_trees

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from foretoken.control.base import Continue
    from foretoken.core.records import StepRecord
    from foretoken.core.token_tree import TokenTree


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
