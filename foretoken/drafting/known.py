"""What a controller knows of one drafter: how often its nodes are right, and what its trees look like."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from foretoken.drafting.acceptance import POOLED, LevelAcceptance, NodeAcceptance

if TYPE_CHECKING:
    from collections.abc import Sequence


class Known:
    """Estimates of one drafter.

    Attributes:
        deepest: Levels of its deepest drafts.
        nodes: Of the nodes that it proposes.
        continuations: Of the chains that it proposes below drafts of other drafters.
        levels: By the drafters that were asked before and cost something.
        shape: Nodes per level of its trees.
        widths: Nodes that are verified per level of a sequence.
        hits: Share of the sequences for which it proposes anything.
        ends_early: Whether its chains end by `PathFloors`.
    """

    def __init__(
        self, nodes_by_depth: Sequence[int], expected: Sequence[float], *, is_read: bool, ends_early: bool
    ) -> None:
        self.ends_early, self.nodes_by_depth = ends_early, nodes_by_depth
        self.deepest = min(len(nodes_by_depth) - 1, 64)
        self.nodes, self.continuations = NodeAcceptance(), NodeAcceptance()
        self.levels = {frozenset[int](): LevelAcceptance(self.deepest, expected)}
        self.shape = [float(after - before) for before, after in pairwise(nodes_by_depth)][: self.deepest]
        self.widths = [min(nodes, 1.0) for nodes in self.shape] if is_read else self.shape
        self.hits = 1.0

    def after(self, others: frozenset[int]) -> LevelAcceptance:
        """Returns the rates by depth where drafters that were asked before are wrong."""
        if others not in self.levels:
            self.levels[others] = self.levels[frozenset()].halved()
        return self.levels[others]

    @property
    def is_new(self) -> bool:
        """Whether so little of a text was seen that an estimate is a guess; see NOTES, "A first answer"."""
        return self.levels[frozenset()].num_seen < POOLED

    def begin_text(self) -> None:
        """Expects of another text what the texts before it had in the mean."""
        for levels in self.levels.values():
            levels.begin_text()

    def age(self) -> None:
        """Caps the weight of past observations, because texts change."""
        self.nodes.age()
        for levels in self.levels.values():
            levels.age()
