"""Which states of recurrent layers a slot has: behind its committed tokens, behind the nodes of its last pass.

Keys and values of a rejected token are never read again. A recurrent state has absorbed its token. So a pass leaves the
committed state of a slot alone, and knows a state behind every node that may be accepted. A commit keeps the state of
the last accepted node. Prompt chunks need no commit: the next pass of their slot begins behind them.

A draft model expands its tree in several passes over the same prefix. Each knows the states of the nodes before.

What a state is, the decoder knows: tensors of every layer (`foretoken.models.recurrent`), or a state and the inputs of
the tokens behind it (`foretoken.decoder.path_states`). None is the state before any text. States are never changed.
So slots share them, and a failed pass is repeated from the same state.

Another text can begin inside the text of a slot where a snapshot was kept: before the last token of a prompt, about
every `SPACING` tokens of a long one, where a text began in a slot with a prefix, and where `keep` was called.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from foretoken.core.errors import PassError
from foretoken.decoder.state_snapshots import Snapshots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

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


class Start(NamedTuple):
    """Where a sequence of a pass begins.

    Attributes:
        state: Behind the prefix; None before any text.
        earlier: The states of the pass that computed the sequence's earlier nodes; None without such nodes.
        first: The place of the sequence's first node among the nodes of that pass.
    """

    state: Any
    earlier: PassStates | None = None
    first: int = 0


class PassStates(Protocol):
    """The states that a pass has made, behind its nodes: those of earlier passes too, one sequence after another."""

    @property
    def starts(self) -> Sequence[Start]:
        """Of each sequence."""
        ...

    def is_kept(self, node: int) -> bool:
        """Whether the state behind a node of the pass is known."""
        ...

    def after(self, node: int) -> Any:
        """Returns the state behind a node, which is kept."""
        ...


def kept_nodes(work: Pass) -> set[int]:
    """Returns the nodes of a pass, by their place among all nodes, behind which a state is needed.

    Nodes of trees that need logits may be accepted; of scored prompts they are not. Of a prompt, another text may begin
    behind or before the last token. Where a tree is expanded in several passes, later nodes may begin behind any node.
    """
    if work.num_earlier is not None:
        return set(range(work.node_offsets[-1]))
    ends = work.node_offsets[1:]
    kept = {node for start, end in pairwise(work.node_offsets) for node in (end - 2, end - 1) if node >= start}
    if work.logit_rows is None or work.is_causal:
        return kept
    for row in work.logit_rows.tolist():
        sequence = bisect_right(work.offsets, row) - 1
        kept.add(row - work.offsets[sequence + 1] + ends[sequence])
    return kept


class NodeLevel(NamedTuple):
    """Nodes that are equally deep, and the places of their parents in the level before; at first, of states."""

    nodes: list[int]
    parents: list[int]


def sorted_by_depth(parents: Sequence[int]) -> tuple[list[NodeLevel], list[tuple[int, int]]]:
    """Sorts nodes by depth; parents: an earlier node of each, or ~i for a node that begins with state i.

    Returns the levels, and the level of each node with its place there.
    """
    levels, places = list[NodeLevel](), list[tuple[int, int]]()
    for node, parent in enumerate(parents):
        depth, place = (0, ~parent) if parent < 0 else (places[parent][0] + 1, places[parent][1])
        if depth == len(levels):
            levels.append(NodeLevel([], []))
        places.append((depth, len(levels[depth].nodes)))
        levels[depth].nodes.append(node)
        levels[depth].parents.append(place)
    return levels, places


class _LastPass(NamedTuple):
    """The last pass of a slot: its nodes begin behind `length` tokens, and at node `first` of the whole pass.

    `is_level`: whether later passes may go on with its nodes.
    """

    length: int
    parents: Sequence[int]
    first: int
    states: PassStates
    is_level: bool

    def ends_at(self, length: int) -> bool:
        """Whether the first nodes are a chain that ends behind `length` tokens, with a kept state."""
        count = length - self.length
        if not 0 < count <= len(self.parents) or list(self.parents[:count]) != list(range(-1, count - 1)):
            return False
        return self.states.is_kept(self.first + count - 1)

    def after(self, node: int) -> Any:
        return self.states.after(self.first + node)


class _At(NamedTuple):
    """A state and the number of tokens that it has absorbed."""

    length: int
    state: Any


_EMPTY = _At(0, None)


class RecurrentStates:
    """The states of all slots: the committed one, the one before its last token, those of the last pass, and snapshots.

    A draft model feeds the last token again if its draft was discarded. The state before that token is known if the
    token was fed alone or in a chain.
    """

    def __init__(self, empty: dict[int, LayerState], *, num_slots: int) -> None:
        """Begins without any text; `empty` are the states before the first token, by layer."""
        self.empty = empty
        self.snapshots = Snapshots(num_slots)
        self._committed = [_EMPTY] * num_slots
        self._before: list[_At | None] = [None] * num_slots
        self._last: list[_LastPass | None] = [None] * num_slots
        self._begun = set[int]()  # slots whose text began with a prefix, before its first pass

    @property
    def layers(self) -> frozenset[int]:
        """The recurrent layers."""
        return frozenset(self.empty)

    def begin(self, work: Pass) -> list[Start]:
        """Returns where the sequences of a pass begin; changes nothing.

        Raises `PassError` if a slot has no state at the prefix, the pass ends before the last block, or the slot's last
        pass was not over the earlier nodes.
        """
        if work.num_layers is not None:
            raise PassError("recurrent layers run through all blocks. Use another drafter for this target.")
        starts = [Start(self._at(*each).state) for each in zip(work.slots, work.prefix_lens, strict=True)]
        for row, count in enumerate(work.num_earlier or ()):
            if count:
                last = self._last[work.slots[row]]
                length = work.prefix_lens[row]
                if last is None or not last.is_level or last.length != length or len(last.parents) < count:
                    raise PassError(
                        f"slot {work.slots[row]} has no states of {count} earlier nodes behind {length} tokens. Feed "
                        "them in the pass before, over the same prefix, and say there too how many nodes are earlier."
                    )
                starts[row] = starts[row]._replace(earlier=last.states, first=last.first)
        return starts

    def finish(self, work: Pass, states: PassStates) -> None:
        """Keeps the states that a pass has made."""
        parents = work.parents.tolist()
        for row, (first, end) in enumerate(pairwise(work.node_offsets)):
            slot, length = work.slots[row], work.prefix_lens[row]
            before = self._known(slot, length - 1)
            self._keep_snapshots(slot, length, states.starts[row].state)
            self._before[slot] = before
            self._committed[slot] = _At(length, states.starts[row].state)
            self._last[slot] = _LastPass(length, parents[first:end], first, states, work.num_earlier is not None)

    def _keep_snapshots(self, slot: int, length: int, state: Any) -> None:
        """Keeps states of a slot whose text goes on behind `length` tokens with this state."""
        last = self._last[slot]
        self.snapshots.cut(slot, length)
        if state is not None and slot in self._begun:
            self.snapshots.keep(slot, length, state)
        self._begun.discard(slot)
        if last is not None and length - 1 > last.length and last.ends_at(length) and last.ends_at(length - 1):
            self.snapshots.keep_end(slot, length - 1, last.after(length - last.length - 2))  # of a prompt read so far

    def commit(self, slots: Sequence[int], lengths: Sequence[int], nodes: Sequence[Sequence[int]]) -> None:
        """Keeps the states of the last accepted nodes.

        Args:
            slots: B slots, all different.
            lengths: The prefix of each slot's last pass.
            nodes: Accepted nodes of that pass in order, at least one of each.
        """
        committed: list[_At] = []
        for slot, length, accepted in zip(slots, lengths, nodes, strict=True):
            last = self._last[slot]
            if last is None or last.length != length:
                raise PassError(
                    f"slot {slot} has no nodes behind {length} tokens. Commit the last pass of a slot once."
                )
            committed.append(_At(length + len(accepted), last.after(accepted[-1])))
        for slot, state in zip(slots, committed, strict=True):  # all or none: a failed iteration is repeated
            self._committed[slot], self._last[slot] = state, None

    def reusable(self, slot: int, length: int) -> int:
        """Returns the longest prefix of a slot, at most `length` tokens, whose state is known."""
        last = self._last[slot]
        known = [self._committed[slot].length, self.snapshots.longest(slot, length)]
        if (before := self._before[slot]) is not None:
            known.append(before.length)
        if last is not None:
            known += [each for each in (length, last.length + len(last.parents)) if last.ends_at(each)]
        return max((each for each in known if each <= length), default=0)

    def keep(self, slot: int, length: int) -> None:
        """Keeps a snapshot behind `length` tokens of a slot; raises `PassError` if the state there is not known."""
        self.snapshots.keep(slot, length, self._at(slot, length).state)

    def copy(self, source: int, slot: int, length: int) -> None:
        """Begins a slot with the first `length` tokens of another one. Raises `PassError` as `begin`."""
        state = self._at(source, length)
        self.snapshots.copy(source, slot, length)
        self._committed[slot], self._before[slot], self._last[slot] = state, None, None
        self._begun.add(slot)

    def trim(self, slot: int, length: int) -> None:
        """Forgets all of a slot that a text which begins with its first `length` tokens cannot use."""
        self.snapshots.cut(slot, length)
        is_known = self.reusable(slot, length) == length
        self._committed[slot] = self._at(slot, length) if is_known else _EMPTY
        self._before[slot] = self._last[slot] = None
        self._begun.add(slot)

    def assume(self, length: int) -> None:
        """Takes the state before any token for that behind `length` tokens, in all slots; for passes that are timed."""
        self._committed = [_At(length, None)] * len(self._committed)
        self._last = [None] * len(self._last)

    def _at(self, slot: int, length: int) -> _At:
        known = self._known(slot, length)
        if known is None:
            raise PassError(
                f"slot {slot} has no recurrent state behind {length} tokens, only behind "
                f"{self._committed[slot].length}. Read the text from its beginning."
            )
        return known

    def _known(self, slot: int, length: int) -> _At | None:
        """Returns the state of a slot behind its first `length` tokens; None if it is not known."""
        last = self._last[slot]
        if length == 0:
            return _EMPTY
        if self._committed[slot].length != length and last is not None and last.ends_at(length):
            return _At(length, last.after(length - last.length - 1))
        for each in (self._committed[slot], self._before[slot]):
            if each is not None and each.length == length:
                return each
        snapshot = self.snapshots.find(slot, length)
        return None if snapshot is None else _At(length, snapshot)
