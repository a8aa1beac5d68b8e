"""What controllers read of a batch of trees, on the host, and what follows from it.

Letters: B sequences, N nodes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from foretoken.core.token_tree import PROBE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from foretoken.core.records import SequenceStep
    from foretoken.core.token_tree import TokenTree
    from foretoken.drafting.calibration import Calibration
    from foretoken.trees.merge import Graft


class HostTree(NamedTuple):
    """A batch of trees; all (B, N).

    Attributes:
        tokens: See `TokenTree`, as the next three.
        parents: Of each node.
        depths: Of each node.
        scores: None where the drafter gives none.
        is_drafted: Neither the root nor padding, nor what was cut off, nor a probe.
        sources: See `TokenTree`; 0 without any.
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    depths: NDArray[np.int64]
    scores: NDArray[np.float32] | None
    is_drafted: NDArray[np.bool_]
    sources: NDArray[np.int64]


def on_host(tree: TokenTree) -> HostTree:
    """A tree's values. Synchronises with the host."""
    source = torch.zeros_like(tree.tokens) if tree.source is None else tree.source
    tokens, parents, depths, sources = torch.stack([tree.tokens, tree.parents, tree.depths, source]).cpu().numpy()
    is_drafted = (parents >= 0) & (sources & PROBE == 0)
    scores = None if tree.scores is None else tree.scores.cpu().numpy()
    return HostTree(tokens, parents, depths, scores, is_drafted, sources)


def falling(values: NDArray[np.float64], host: HostTree) -> NDArray[np.float64]:
    """(B, N) values, none above its parent's; those of roots bound nothing."""
    rows = np.arange(len(values))[:, None]
    above = np.maximum(host.parents, 0)
    result = values.copy()
    result[:, 0] = np.inf
    for _ in range(int(host.depths.max(initial=0)).bit_length()):  # the least of 2, 4, 8, … nodes of a path
        result, above = np.minimum(result, result[rows, above]), above[rows, above]
    result[:, 0] = values[:, 0]
    return result


def values_of(host: HostTree, calibration: Calibration) -> NDArray[np.float64]:
    """(B, N), the calibrated probability that each node of one drafter is accepted with its path."""
    return falling(calibration.probabilities(host.depths, host.scores), host)


def valued(host: HostTree, values: NDArray[np.float64]) -> HostTree:
    """Trees with (B, N) probabilities of their nodes as scores."""
    return host._replace(scores=_logarithms(values))


def with_values(tree: TokenTree, values: NDArray[np.float64]) -> TokenTree:
    """As `valued`, where the tree lies."""
    return replace(tree, scores=torch.from_numpy(_logarithms(values)).to(tree.tokens.device))


def _logarithms(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Of probabilities, finite ones."""
    return np.log(np.maximum(values, 1e-30)).astype(np.float32)


def with_ancestors(nodes: NDArray[np.bool_], host: HostTree) -> NDArray[np.bool_]:
    """(B, N), some nodes and all on the paths to them, the roots left out."""
    result = nodes.copy()
    for row, node in zip(*np.nonzero(nodes), strict=True):
        above = host.parents[row, node]
        while above > 0 and not result[row, above]:
            result[row, above] = True
            above = host.parents[row, above]
    return result


def followed(host: HostTree, row: int, tokens: Sequence[int]) -> list[bool | None]:
    """Which nodes of a tree the generated tokens followed, verified or not.

    Args:
        host: The trees.
        row: Which of them.
        tokens: What was generated after its root.

    Returns:
        An entry a node. None deeper than what was generated, where all that was generated agrees: nobody knows.
    """
    parents, depths, ids = host.parents[row].tolist(), host.depths[row].tolist(), host.tokens[row].tolist()
    follows: list[bool | None] = [True]
    for node in range(1, len(ids)):
        depth, above = depths[node], follows[max(parents[node], 0)]
        does: bool | None = False
        if above is not False and depth > 0:
            is_known = above is True and depth <= len(tokens)
            does = ids[node] == tokens[depth - 1] if is_known else None
        follows.append(does)
    return follows


def count_followed(host: HostTree, calibration: Calibration, steps: Sequence[SequenceStep]) -> list[int]:
    """Tells one drafter's calibration which of its nodes the generated tokens followed.

    Returns:
        How deep they followed each tree.
    """
    depths: list[int] = []
    scores: list[float] = []
    accepted: list[bool] = []
    deepest = [0] * len(steps)
    for row, step in enumerate(steps):
        for node, does in enumerate(followed(host, row, step.tokens)):
            if does is None or not host.is_drafted[row, node]:
                continue
            depth = int(host.depths[row, node])
            deepest[row] = max(deepest[row], depth if does else 0)
            depths.append(depth)
            accepted.append(does)
            if host.scores is not None:
                scores.append(float(host.scores[row, node]))
    if depths:
        calibration.learn(depths, scores if host.scores is not None else None, accepted)
    return deepest


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
