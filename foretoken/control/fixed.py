"""The controller that changes nothing: every drafter drafts what its options ask for, and all of it is verified."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.control.base import UNBOUNDED, Allotment, Allowance
from foretoken.trees.merge import merge_trees

if TYPE_CHECKING:
    from collections.abc import Mapping

    from foretoken.control.base import Continue
    from foretoken.core.records import StepRecord
    from foretoken.core.token_tree import TokenTree


class Fixed:
    """Asks for whole drafts in every iteration."""

    def __init__(self, max_nodes: int) -> None:
        """A controller without state.

        Args:
            max_nodes: Most nodes of a verified tree, root included.
        """
        self._allowance, self._max_nodes = Allowance(depth=UNBOUNDED, nodes=max_nodes), max_nodes

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
        return merge_trees(list(trees.values()), max_nodes=self._max_nodes).narrowed()

    def learn(self, record: StepRecord) -> None:
        """Nothing to learn."""
