"""A drafter of any static tree whose drafts are right as often as a script says, at next to no cost.

The `oracle` drafter of the package drafts chains and their siblings; heads draft trees of 64 nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.drafters.base import TargetReads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.drafters.base import Committed, DraftContext, Drafter, DraftRequest, TargetHandle
    from foretoken.trees.choices import TreeShape

_WRONG = 100  # how far a wrong token is from any that could be right


class ScriptedDrafter:
    """Drafts the successors of the root down one path of a tree, and what is certainly wrong elsewhere."""

    name = "scripted"
    reads = TargetReads()

    def __init__(self, shape: TreeShape, pattern: Sequence[int]) -> None:
        self.nodes_by_depth = (1, *[shape.num_nodes] * shape.depth)
        self._parents, self._depth = shape.parents, shape.depth
        # The right child is another one in each pass: accepted rows then have to be moved, as in real decoding.
        self._plans = [_plan(shape.parents, min(right, shape.depth), turn) for turn, right in enumerate(pattern)]
        self._passes: dict[int, int] = {}

    def attach(self, target: TargetHandle) -> None:
        """Learns what a wrong token can be."""
        self._target = target

    def begin(self, slot: int, request: DraftRequest) -> None:
        """The script starts anew."""
        del request
        self._passes[slot] = 0

    def propose(self, context: DraftContext) -> TokenTree:
        """See `Drafter`."""
        return TokenTree.from_rows(
            [self._row(self._passes[slot], root) for slot, root in zip(context.slots, context.roots, strict=True)],
            device=self._target.device,
        )

    def commit(self, committed: Committed) -> None:
        """The script goes on by one pass, except after a part of a prompt."""
        for slot in committed.slots if committed.verified is not None else ():
            self._passes[slot] += 1

    def release(self, slot: int) -> None:
        """See `Drafter`."""
        self._passes.pop(slot, None)

    def _row(self, number: int, root: int) -> TreeRow:
        """One sequence's tree."""
        plan = self._plans[number % len(self._plans)]
        return TreeRow([(root + step) % self._target.vocab_size for step in plan], self._parents)


def scripted(shape: TreeShape, pattern: Sequence[int]) -> Callable[[], Drafter]:
    """A drafter to hand to `LLM`.

    Args:
        shape: Of every draft.
        pattern: Right tokens in each pass, repeated from the start when it ends.
    """
    return lambda: ScriptedDrafter(shape, pattern)


def _plan(parents: Sequence[int], num_right: int, turn: int) -> list[int]:
    """What is added to the root's token at every node."""
    steps = [0, *(_WRONG + node for node in range(1, len(parents)))]
    node = 0
    for depth in range(1, num_right + 1):
        children = [child for child, parent in enumerate(parents) if parent == node]
        deep = [child for child in children if _height(parents, child) >= num_right - depth]
        node = deep[turn % len(deep)]
        steps[node] = depth
    return steps


def _height(parents: Sequence[int], node: int) -> int:
    """Levels below a node."""
    heights = [0] * len(parents)
    for child in range(len(parents) - 1, 0, -1):
        heights[parents[child]] = max(heights[parents[child]], heights[child] + 1)
    return heights[node]
