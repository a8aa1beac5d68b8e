"""The states of recurrent layers in a pass of the generic decoder: tensors behind every node, level by level."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foretoken.decoder.recurrent_states import LayerState, kept_nodes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from foretoken.core.passes import Pass
    from foretoken.decoder.recurrent_states import RecurrentStates, Start


class LayerStates(dict[int, LayerState]):
    """The states behind a node, by layer."""

    def tensors(self) -> Iterable[Tensor]:
        """See `foretoken.decoder.state_snapshots.State`."""
        return [part for state in self.values() for part in state if part is not None]


class NodeLevel(NamedTuple):
    """Nodes of a pass that are equally deep.

    Attributes:
        tokens: (n,) int64, indices of the nodes in the pass.
        parents: (n,) int64, indices of their parents in the level before; in the first level, of their sequences.
        is_kept: Whether the states of the nodes outlive the pass.
    """

    tokens: Tensor
    parents: Tensor
    is_kept: bool


@dataclass(frozen=True, slots=True)
class LevelStates:
    """The states of a pass in progress, see `PassStates`: tensors of every node, level by level.

    Attributes:
        starts: Of each sequence.
        empty: The states before any text, by layer.
        levels: All nodes of the pass, by depth.
        place: Level of each node of the pass, and its index there.
        kept: Filled by the recurrent layers: states of kept levels, by layer and level.
    """

    starts: Sequence[Start]
    empty: Mapping[int, LayerState]
    levels: Sequence[NodeLevel]
    place: Sequence[tuple[int, int]]
    kept: dict[int, dict[int, LayerState]] = field(default_factory=dict)

    @classmethod
    def of(cls, work: Pass, slots: RecurrentStates) -> LevelStates:
        """Sorts the nodes of a pass by depth; raises `PassError` as `RecurrentStates.begin`."""
        starts = slots.begin(work)
        above = work.parents.tolist()
        wanted = kept_nodes(work)
        place: list[tuple[int, int]] = []
        tokens, parents, kept = list[list[int]](), list[list[int]](), set[int]()
        for sequence, (first, end) in enumerate(pairwise(work.offsets)):
            for node in range(first, end):
                level, parent = (0, sequence) if above[node] < 0 else place[first + above[node]]
                level += above[node] >= 0
                if level == len(tokens):
                    tokens.append([])
                    parents.append([])
                place.append((level, len(tokens[level])))
                tokens[level].append(node)
                parents[level].append(parent)
                if node in wanted:
                    kept.add(level)
        device = work.tokens.device
        levels = [
            NodeLevel(torch.tensor(nodes, device=device), torch.tensor(rows, device=device), number in kept)
            for number, (nodes, rows) in enumerate(zip(tokens, parents, strict=True))
        ]
        return cls(starts, slots.empty, levels, place)

    def before(self, layer: int) -> LayerState:
        """Returns the states of all sequences before the pass in one layer."""
        states = [(self.empty if start.state is None else start.state)[layer] for start in self.starts]
        recurrent = [each.recurrent for each in states if each.recurrent is not None]
        return LayerState(torch.stack([each.window for each in states]), torch.stack(recurrent) if recurrent else None)

    def is_kept(self, node: int) -> bool:
        """See `PassStates`."""
        return self.levels[self.place[node][0]].is_kept

    def after(self, node: int) -> LayerStates:
        """See `PassStates`."""
        level, row = self.place[node]
        return LayerStates({layer: levels[level].row(row) for layer, levels in self.kept.items()})
