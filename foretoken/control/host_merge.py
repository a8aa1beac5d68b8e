"""Merging and grafting on the host, for trees whose nodes were chosen: controllers have them there anyway.

What `foretoken.trees.merge` and `foretoken.trees.graft` do with tensors, and gives the same trees: for a few dozens of
nodes a loop takes a fraction of the time of as many small tensor operations. Trees that were drawn from need those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from foretoken.control.host_trees import HostTree
from foretoken.core.token_tree import PROBE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.trees.graft import Graft


class _Row(NamedTuple):
    """One sequence's tree, an entry a node; see `TokenTree`."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    scores: list[float]
    sources: list[int]

    def add(self, token: int, parent: int, depth: int, score: float, source: int) -> int:
        """Adds a node and gives its place."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(depth)
        self.scores.append(score)
        self.sources.append(source)
        return len(self.tokens) - 1


class HostMerge:
    """The union of several drafters' trees, see `merge_trees`."""

    def __init__(self, trees: Sequence[HostTree], drafters: Sequence[int], *, max_nodes: int) -> None:
        """Unites trees over the same roots, in their order.

        Args:
            trees: One at least, with scores.
            drafters: Whose each tree is, places among the engine's drafters.
            max_nodes: Most nodes of a merged tree, root included: what is beyond is left out from the end.
        """
        everyone = sum(1 << drafter for drafter in drafters)
        self._max_nodes = max_nodes
        self._rows = [_Row([root], [-1], [0], [0.0], [everyone]) for root in trees[0].tokens[:, 0].tolist()]
        self._children: list[dict[tuple[int, int], int]] = [{} for _ in self._rows]  # by parent and token: the first
        for tree, drafter in zip(trees, drafters, strict=True):
            self._unite(tree, 1 << drafter)

    def _unite(self, tree: HostTree, bit: int) -> None:
        """Adds a drafter's tree: a node joins the one that an earlier tree has in its place."""
        assert tree.scores is not None, "the trees are valued"
        parts = [part.tolist() for part in (tree.tokens, tree.parents, tree.scores, tree.sources)]
        for row, children, tokens, parents, scores, sources in zip(self._rows, self._children, *parts, strict=True):
            new: dict[tuple[int, int], int] = {}
            places = [0] * len(tokens)  # in the union; -1 for what is left out
            for node in range(1, len(tokens)):
                parent = places[parents[node]] if parents[node] >= 0 else -1
                probe = sources[node] & PROBE
                found = children.get((parent, tokens[node]))
                if found is not None:
                    row.scores[found] = max(row.scores[found], scores[node])
                    row.sources[found] = (row.sources[found] | bit) & ~(0 if probe else PROBE)
                elif parent >= 0 and len(row.tokens) < self._max_nodes:
                    found = row.add(tokens[node], parent, row.depths[parent] + 1, scores[node], bit | probe)
                    new.setdefault((parent, tokens[node]), found)
                places[node] = -1 if found is None else found
            children.update(new)

    def graft(self, graft: Graft) -> None:
        """Adds a chain below a node, as far as there is room."""
        row, node, depth = self._rows[graft.row], graft.node, graft.depth
        for token, score in zip(graft.tokens, graft.scores, strict=True):
            if len(row.tokens) >= self._max_nodes:
                return
            depth += 1
            node = row.add(token, node, depth, score, graft.source)

    def tree(self) -> HostTree:
        """What there is now."""
        width = max(len(row.tokens) for row in self._rows)
        short = [width - len(row.tokens) for row in self._rows]
        integers = [
            [
                [*row.tokens, *[0] * less], [*row.parents, *[-1] * less],
                [*row.depths, *[0] * less], [*row.sources, *[0] * less],
            ]
            for row, less in zip(self._rows, short, strict=True)
        ]  # fmt: skip
        tokens, parents, depths, sources = np.array(integers).swapaxes(0, 1)
        scores = np.array(
            [[*row.scores, *[0.0] * less] for row, less in zip(self._rows, short, strict=True)], dtype=np.float32
        )
        is_drafted = (parents >= 0) & (sources & PROBE == 0)
        return HostTree(tokens, parents, depths, scores, is_drafted, sources)
