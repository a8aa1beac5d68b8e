"""States of recurrent layers by slot: windows of causal convolutions, and states of linear attention and state spaces.

Keys and values of a rejected token are never read again. A recurrent state has absorbed its token. So a pass leaves the
committed state of a slot alone and makes a state for every node from the state of the node's parent. A commit keeps the
state of the last accepted node. Prompt chunks need no commit: the next pass of their slot begins behind them.

No tensor of a state is ever changed in place. So slots share them, and a failed pass is repeated from the same state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foretoken.core.errors import PassError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.passes import Pass


class LayerState(NamedTuple):
    """The state of one recurrent layer, for one sequence or, with one more dimension in front, for several.

    Attributes:
        window: (C, K), the last inputs of the convolution, in the model's dtype.
        recurrent: Of the layer's own shape and dtype; None if the layer has only a convolution.
    """

    window: Tensor
    recurrent: Tensor | None

    def take(self, rows: Tensor) -> LayerState:
        """Returns a copy of the states of some sequences; rows: (n,) int64."""
        return LayerState(self.window[rows], None if self.recurrent is None else self.recurrent[rows])

    def row(self, index: int) -> LayerState:
        """Returns a copy of the state of one sequence, which keeps no others in memory."""
        return LayerState(self.window[index].clone(), None if self.recurrent is None else self.recurrent[index].clone())


States = dict[int, LayerState]  # of one sequence, by layer


def stacked(states: Sequence[LayerState]) -> LayerState:
    """Returns the states of several sequences as one."""
    recurrent = [each.recurrent for each in states if each.recurrent is not None]
    return LayerState(torch.stack([each.window for each in states]), torch.stack(recurrent) if recurrent else None)


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
class PassStates:
    """States of one pass in progress.

    Attributes:
        starts: State of each sequence before the pass.
        levels: All nodes of the pass, by depth.
        place: NodeLevel of each node of the pass, and its index there.
        kept: Filled by the recurrent layers: states of kept levels, by layer and level.
    """

    starts: Sequence[States]
    levels: Sequence[NodeLevel]
    place: Sequence[tuple[int, int]]
    kept: dict[int, dict[int, LayerState]] = field(default_factory=dict)

    @classmethod
    def of(cls, work: Pass, starts: Sequence[States]) -> PassStates:
        """Sorts the nodes of a pass by depth; `starts` are the states of its sequences.

        Nodes of trees that need logits may be accepted; of scored prompts they are not. Of a prompt, another text may
        begin behind or before the last token.
        """
        above = work.parents.tolist()
        wanted = set[int]() if work.logit_rows is None or work.is_causal else set(work.logit_rows.tolist())
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
                if node in wanted or node >= end - 2:
                    kept.add(level)
        device = work.tokens.device
        levels = [
            NodeLevel(torch.tensor(nodes, device=device), torch.tensor(rows, device=device), number in kept)
            for number, (nodes, rows) in enumerate(zip(tokens, parents, strict=True))
        ]
        return cls(starts, levels, place)

    def before(self, layer: int) -> LayerState:
        """Returns the states of all sequences before the pass in one layer."""
        return stacked([states[layer] for states in self.starts])

    def after(self, node: int) -> States:
        """Returns the state behind a node of the pass, whose level is kept."""
        level, row = self.place[node]
        return {layer: levels[level].row(row) for layer, levels in self.kept.items()}


class _LastPass(NamedTuple):
    """The last pass of a slot: its nodes begin behind `length` tokens, and at node `first` of the whole pass."""

    length: int
    parents: Sequence[int]
    first: int
    states: PassStates

    def ends_at(self, length: int) -> bool:
        """Whether the first nodes are a chain that ends behind `length` tokens, with a kept state."""
        count = length - self.length
        if not 0 < count <= len(self.parents) or list(self.parents[:count]) != list(range(-1, count - 1)):
            return False
        level, _ = self.states.place[self.first + count - 1]
        return self.states.levels[level].is_kept

    def after(self, node: int) -> States:
        return self.states.after(self.first + node)


class _At(NamedTuple):
    """A state and the number of tokens that it has absorbed."""

    length: int
    states: States


class RecurrentStates:
    """The states of all slots: the committed one, those of the last pass, and one snapshot.

    The snapshot is the state before the last token of a prompt. Other completions of the prompt begin there.
    """

    def __init__(self, empty: States, *, num_slots: int) -> None:
        """Begins without any text; `empty` is the state before the first token."""
        self._empty = _At(0, empty)
        self._committed = [self._empty] * num_slots
        self._snapshots: list[_At | None] = [None] * num_slots
        self._last: list[_LastPass | None] = [None] * num_slots

    @property
    def layers(self) -> frozenset[int]:
        """The recurrent layers."""
        return frozenset(self._empty.states)

    def begin(self, work: Pass) -> PassStates:
        """Returns the states with which a pass begins; changes nothing.

        Raises `PassError` if a slot has no state at the prefix, the pass ends before the last block, or it goes on with
        the nodes of an earlier pass.
        """
        if work.num_layers is not None or work.num_earlier is not None:
            raise PassError("recurrent layers run whole trees through all blocks. Use another drafter for this target.")
        return PassStates.of(work, [self._at(*each).states for each in zip(work.slots, work.prefix_lens, strict=True)])

    def finish(self, work: Pass, states: PassStates) -> None:
        """Keeps the states that a pass has made."""
        parents = work.parents.tolist()
        for row, (first, end) in enumerate(pairwise(work.offsets)):
            slot, length = work.slots[row], work.prefix_lens[row]
            last, snapshot = self._last[slot], self._snapshots[slot]
            if last is not None and length - 1 > last.length and last.ends_at(length) and last.ends_at(length - 1):
                snapshot = _At(length - 1, last.after(length - last.length - 2))  # a prompt was read up to here
            self._snapshots[slot] = snapshot if snapshot is not None and snapshot.length <= length else None
            self._committed[slot] = _At(length, states.starts[row])
            self._last[slot] = _LastPass(length, parents[first:end], first, states)

    def commit(self, slots: Sequence[int], lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Keeps the states of the last accepted nodes; arguments: see `Runner.commit`."""
        committed: list[_At] = []
        for slot, length, path in zip(slots, lengths, paths, strict=True):
            last = self._last[slot]
            if last is None or last.length != length:
                raise PassError(
                    f"slot {slot} has no nodes behind {length} tokens. Commit the last pass of a slot once."
                )
            committed.append(_At(length + 1 + len(path), last.after(path[-1] if path else 0)))
        for slot, state in zip(slots, committed, strict=True):  # all or none: a failed iteration is repeated
            self._committed[slot], self._last[slot] = state, None

    def reusable(self, slot: int, length: int) -> int:
        """Returns the longest prefix of a slot, at most `length` tokens, whose state is known."""
        snapshot, last = self._snapshots[slot], self._last[slot]
        known = [self._committed[slot].length, 0 if snapshot is None else snapshot.length]
        if last is not None:
            known += [each for each in (length, last.length + len(last.parents)) if last.ends_at(each)]
        return max((each for each in known if each <= length), default=0)

    def copy(self, source: int, slot: int, length: int) -> None:
        """Begins a slot with the first `length` tokens of another one. Raises `PassError` as `begin`."""
        state = self._at(source, length)
        self._committed[slot], self._snapshots[slot], self._last[slot] = state, state, None

    def assume(self, length: int) -> None:
        """Takes the state before any token for that behind `length` tokens, in all slots; for passes that are timed."""
        self._committed = [_At(length, self._empty.states)] * len(self._committed)
        self._last = [None] * len(self._last)

    def _at(self, slot: int, length: int) -> _At:
        last, snapshot = self._last[slot], self._snapshots[slot]
        if length == 0:
            return self._empty
        if self._committed[slot].length == length:
            return self._committed[slot]
        if last is not None and last.ends_at(length):
            return _At(length, last.after(length - last.length - 1))
        if snapshot is not None and snapshot.length == length:
            return snapshot
        raise PassError(
            f"slot {slot} has no recurrent state behind {length} tokens, only behind {self._committed[slot].length}. "
            "Read the text from its beginning."
        )
