"""The states of recurrent layers in a pass of the generic decoder: tensors behind every node, level by level."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foretoken.decoder.recurrent_states import LayerState, kept_nodes, sorted_by_depth

if TYPE_CHECKING:
    from foretoken.core.passes import Pass
    from foretoken.decoder.recurrent_states import PassStates, RecurrentStates, Start


class LayerStates(dict[int, LayerState]):
    """The states behind a node, by layer."""

    def tensors(self) -> Iterable[Tensor]:
        """See `foretoken.decoder.state_snapshots.State`."""
        return [part for state in self.values() for part in state if part is not None]


class TokenLevel(NamedTuple):
    """Nodes of a pass that are equally deep.

    Attributes:
        tokens: (n,) int64, indices of the nodes in the pass.
        parents: (n,) int64, indices of their parents in the level before; in the first level, in `LevelStates.begun`.
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
        offsets: S + 1, the first node of each sequence.
        parents: Of each node, see `Pass`.
        empty: The states before any text, by layer.
        begun: The states that the first level begins with: behind prefixes, and behind nodes of earlier passes.
        levels: All new nodes of the pass, by depth.
        place: Level of each new node, and its index there, by the node's place among all nodes.
        earlier: The pass of each earlier node, and the node's place there, by its place here.
        kept: Filled by the recurrent layers: states of kept levels, by layer and level.
    """

    starts: Sequence[Start]
    offsets: Sequence[int]
    parents: Sequence[int]
    empty: Mapping[int, LayerState]
    begun: Sequence[Mapping[int, LayerState]]
    levels: Sequence[TokenLevel]
    place: Mapping[int, tuple[int, int]]
    earlier: Mapping[int, tuple[PassStates, int]] = field(default_factory=dict)
    kept: dict[int, dict[int, LayerState]] = field(default_factory=dict)

    @classmethod
    def of(cls, work: Pass, slots: RecurrentStates) -> LevelStates:
        """Sorts the nodes of a pass by depth; raises `PassError` as `RecurrentStates.begin`."""
        starts, parents, wanted = slots.begin(work), work.parents.tolist(), kept_nodes(work)
        earlier: dict[int, tuple[PassStates, int]] = {}
        begun, above, nodes = list[Mapping[int, LayerState]](), list[int](), list[int]()
        ends = work.node_offsets
        for sequence, (first_token, end_token) in enumerate(pairwise(work.offsets)):
            first, end, start = ends[sequence], ends[sequence + 1], starts[sequence]
            num_earlier = end - first - (end_token - first_token)
            if start.earlier is not None:
                earlier |= {first + node: (start.earlier, start.first + node) for node in range(num_earlier)}
            index: dict[int, int] = {}  # in `begun`, of the nodes that begin there
            for node in range(first + num_earlier, end):
                nodes.append(node)
                parent = parents[node]
                if parent >= num_earlier:
                    above.append(first_token + parent - num_earlier)
                    continue
                if parent not in index:
                    index[parent] = len(begun)
                    known = start.state if parent < 0 else _behind(earlier, first + parent)
                    begun.append(slots.empty if known is None else known)
                above.append(~index[parent])
        by_depth, places = sorted_by_depth(above)
        place = dict(zip(nodes, places, strict=True))
        kept, device = {place[node][0] for node in wanted if node in place}, work.tokens.device
        levels = [
            TokenLevel(
                torch.tensor(level.nodes, device=device), torch.tensor(level.parents, device=device), number in kept
            )
            for number, level in enumerate(by_depth)
        ]
        return cls(starts, ends, parents, slots.empty, begun, levels, place, earlier)

    def before(self, layer: int) -> LayerState:
        """Returns the states that the first level begins with, in one layer."""
        states = [each[layer] for each in self.begun]
        recurrent = [each.recurrent for each in states if each.recurrent is not None]
        return LayerState(torch.stack([each.window for each in states]), torch.stack(recurrent) if recurrent else None)

    def is_kept(self, node: int) -> bool:
        """See `PassStates`."""
        return node not in self.place or self.levels[self.place[node][0]].is_kept

    def after(self, node: int) -> LayerStates:
        """See `PassStates`."""
        if node not in self.place:
            return _behind(self.earlier, node)
        level, row = self.place[node]
        return LayerStates({layer: levels[level].row(row) for layer, levels in self.kept.items()})


def _behind(earlier: Mapping[int, tuple[PassStates, int]], node: int) -> LayerStates:
    states, place = earlier[node]
    behind: LayerStates = states.after(place)
    return behind
