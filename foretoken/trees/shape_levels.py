"""Index tensors of a static shape: ancestors, and the nodes of each level that have children.

Built once per shape and device, and shared by all trees of the shape.

Letters: B sequences, N nodes of the shape, P nodes of one level that have children, C children of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foretoken.core.token_tree import DrawKind

if TYPE_CHECKING:
    from foretoken.trees.choices import TreeShape


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Relations:
    """The parents, levels and counts of a shape.

    Attributes:
        depths: Depth of every node.
        levels: Of each depth, the nodes that have children.
        places: (3, N) int64, parents, depths and ranks.
        max_siblings: Most children of a node.
        num_inner: Nodes that have children.
        widest_level: Most nodes with children of one depth.
        num_candidates: The largest rank plus 1.
    """

    depths: list[int]
    levels: list[Level]
    places: Tensor
    max_siblings: int
    num_inner: int
    widest_level: int
    num_candidates: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Level:
    """The P nodes of one depth that have children, and their C children.

    Attributes:
        indices: P nodes.
        nodes: Index of these in (B, N): a slice if they are contiguous, else (P,) int64.
        origins: See `Frontier`.
        children: (C,) int64, nodes.
        parents: (C,) int64, the parent of each.
        place: (C,) int64, index of that parent among the P nodes.
        rank: (C,) int64, of each among the candidates after its parent.
        order: (C,) int64, of each among its siblings.
        kind: (C,) int64, the `DrawKind` of each if it is drawn.
        num_candidates: Candidates needed after a node: the largest rank plus 1.
    """

    indices: list[int]
    nodes: slice | Tensor
    origins: Tensor | None
    children: Tensor
    parents: Tensor
    place: Tensor
    rank: Tensor
    order: Tensor
    kind: Tensor
    num_candidates: int

    def narrowed(self, places: Tensor, above: Tensor | None) -> Level:
        """Returns a part of the level.

        Args:
            places: (P',) int64, which of the P nodes, ascending.
            above: The same of the level above; None at the root.
        """
        device = places.device
        new_place = torch.full((len(self.indices),), -1, device=device)
        new_place[places] = torch.arange(len(places), device=device)
        stays = new_place[self.place] >= 0
        origins = None
        if above is not None:
            all_origins = torch.arange(len(self.indices), device=device) if self.origins is None else self.origins[0]
            origins = torch.searchsorted(above, all_origins[places]).unsqueeze(0)
        indices = [self.indices[place] for place in places.tolist()]
        return Level(
            indices=indices,
            nodes=torch.tensor(indices, dtype=torch.int64, device=device),
            origins=origins,
            children=self.children[stays],
            parents=self.parents[stays],
            place=new_place[self.place[stays]],
            rank=self.rank[stays],
            order=self.order[stays],
            kind=self.kind[stays],
            num_candidates=self.num_candidates,
        )


class _Table(NamedTuple):
    """Parent, children and rank of every node of a shape."""

    parents: list[int]
    children: list[list[int]]
    ranks: list[int]


@lru_cache(maxsize=64)  # a drafter has one shape, truncated to as many depths as it has levels
def relations_of(shape: TreeShape, device: torch.device) -> Relations:
    """Returns the index tensors of a shape; cached."""
    parents, depths, ranks = shape.parents, shape.depths, shape.ranks
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if node:
            children[parent].append(node)
    inner: list[list[int]] = [[] for _ in range(shape.depth)]
    for node, own in enumerate(children):
        if own:
            inner[depths[node]].append(node)
    return Relations(
        depths=depths,
        levels=[
            _level(nodes, inner[depth - 1] if depth else [-1], _Table(parents, children, ranks), device)
            for depth, nodes in enumerate(inner)
        ],
        places=torch.tensor([parents, depths, ranks], device=device),
        max_siblings=max(map(len, children)),
        num_inner=sum(map(len, inner)),
        widest_level=max(map(len, inner), default=0),
        num_candidates=max(ranks) + 1,
    )


@lru_cache(maxsize=64)
def whole_places(relations: Relations, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns parents (B, N), depths (B, N) and numbers of nodes (B,) of uncut trees."""
    parents, depths, _ = relations.places.unsqueeze(1).expand(-1, batch, -1).unbind()
    return parents, depths, torch.full((batch,), len(relations.depths), device=parents.device)


def _level(nodes: list[int], above: list[int], relations: _Table, device: torch.device) -> Level:
    """Returns the nodes of one depth that have children; above: those of the depth above."""
    parents, children, ranks = relations
    columns = [
        (child, node, place, ranks[child], order, _kind(len(children[node])))
        for place, node in enumerate(nodes)
        for order, child in enumerate(children[node])
    ]
    origins = [above.index(parents[node]) for node in nodes]
    first, last = nodes[0], nodes[-1]
    is_run = last - first + 1 == len(nodes)
    child, parent, place, rank, order, kind = torch.tensor(columns, device=device).T.contiguous()
    return Level(
        indices=nodes,
        nodes=slice(first, last + 1) if is_run else torch.tensor(nodes, device=device),
        origins=None if origins == list(range(len(above))) else torch.tensor([origins], device=device),
        children=child,
        parents=parent,
        place=place,
        rank=rank,
        order=order,
        kind=kind,
        num_candidates=max(column[3] for column in columns) + 1,
    )


def _kind(siblings: int) -> int:
    return (DrawKind.INDEPENDENT if siblings == 1 else DrawKind.WITHOUT_REPLACEMENT).value
