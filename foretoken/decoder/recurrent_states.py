"""Which states of recurrent layers a slot has: behind its committed tokens, behind the nodes of its last pass.

Keys and values of a rejected token are never read again. A recurrent state has absorbed its token. So a pass leaves the
committed state of a slot alone, and knows a state behind every node that may be accepted. A commit keeps the state of
the last accepted node. Prompt chunks need no commit: the next pass of their slot begins behind them.

A draft model expands its tree in several passes over the same prefix. Each knows the states of the nodes before.

What a state is, the decoder knows: tensors of every layer (`foretoken.models.recurrent`), or a block and the rows of
tokens behind it, as on lean decoders. None is the state before any text. States are never changed. So slots share them,
and a failed pass is repeated from the same state.

Another text can begin inside the text of a slot where a snapshot was kept: before the last token of a prompt, about
every `SPACING` tokens of a long one, where a text began in a slot with a prefix, and where `keep` was called.

A block has the states of all layers behind some tokens. Of each token behind these, a row has what the layers keep: of
a tree, every node has a row. A state for every node would take a hundred times as much memory. So the state behind a
node is a block and the rows of the tokens on the way to the node; the next pass computes these again, and makes a block
of its own. A pass over a level of a tree makes rows alone. What a block is, its decoder knows
(`foretoken.decoder.native_states`, `foretoken.decoder.torch_mixers`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from foretoken.core.errors import PassError
from foretoken.decoder.state_snapshots import Snapshots

if TYPE_CHECKING:
    from collections.abc import Callable

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

    @property
    def offsets(self) -> Sequence[int]:
        """S + 1, the first node of each sequence, earlier ones too."""
        ...

    @property
    def parents(self) -> Sequence[int]:
        """Of each node, see `Pass`."""
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
        self.finish_nodes(work.slots, work.prefix_lens, states, is_level=work.num_earlier is not None)

    def finish_nodes(self, slots: Sequence[int], lengths: Sequence[int], states: PassStates, *, is_level: bool) -> None:
        """Keeps states behind nodes; `lengths`: tokens before them; `is_level`: see `_LastPass`."""
        for row, (first, end) in enumerate(pairwise(states.offsets)):
            slot, length = slots[row], lengths[row]
            before = self._known(slot, length - 1)
            self._keep_snapshots(slot, length, states.starts[row].state)
            self._before[slot] = before
            self._committed[slot] = _At(length, states.starts[row].state)
            self._last[slot] = _LastPass(length, states.parents[first:end], first, states, is_level)

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


class HeldStates(Protocol):
    """The states of all layers if there are any, and rows; never changed once a pass has made them."""

    def tensors(self) -> Sequence[Tensor]:
        """Returns the memory of the block."""
        ...


B = TypeVar("B", bound=HeldStates)


class NodeRow(NamedTuple, Generic[B]):
    """What the layers keep of a token: row `place` of a block."""

    block: B
    place: int


class PathState(NamedTuple, Generic[B]):
    """The state of a block, None before any text, after the tokens of some rows."""

    block: B | None
    rows: Sequence[NodeRow[B]]

    def tensors(self) -> Sequence[Tensor]:
        """See `foretoken.decoder.state_snapshots.State`."""
        blocks = [*(() if self.block is None else (self.block,)), *(row.block for row in self.rows)]
        return [tensor for block in {id(each): each for each in blocks}.values() for tensor in block.tensors()]


@dataclass(frozen=True, slots=True)
class PathStates(Generic[B]):
    """The states that a pass makes, see `PassStates`.

    Attributes:
        starts: Of each sequence.
        behind: Of each sequence, where the rows of its nodes begin: the block that the pass makes, or where the
            sequence begins if it makes none.
        made: Of each sequence, the memory that the pass writes.
        settled: Of each sequence, how many first nodes no later pass computes again.
        rows: Of all other nodes of each sequence, those of earlier passes too.
        offsets: S + 1, the first node of each sequence.
        parents: Of each node, see `Pass`.
    """

    starts: Sequence[Start]
    behind: Sequence[PathState[B]]
    made: Sequence[B]
    settled: Sequence[int]
    rows: Sequence[Sequence[NodeRow[B]]]
    offsets: Sequence[int]
    parents: Sequence[int]

    @classmethod
    def of(cls, work: Pass, slots: RecurrentStates, make: Callable[[int, bool], B]) -> PathStates[B]:
        """Makes blocks for a pass; raises `PassError` as `RecurrentStates.begin`.

        make: Returns a block with a number of rows, with states or without.
        """
        starts, parents, kept = slots.begin(work), work.parents.tolist(), kept_nodes(work)
        is_level = work.num_earlier is not None
        behind, made, settled = list[PathState[B]](), list[B](), list[int]()
        rows = list[Sequence[NodeRow[B]]]()
        for row, (first, end) in enumerate(pairwise(work.node_offsets)):
            start, num_tokens = starts[row], work.offsets[row + 1] - work.offsets[row]
            settled.append(0 if is_level else settled_nodes(parents[first:end], first, kept))
            num_rows = num_tokens - settled[-1]
            block = make(num_rows, not is_level)
            earlier: Sequence[NodeRow[B]] = ()
            if isinstance(start.earlier, PathStates):
                earlier = start.earlier.rows_of(start.first, end - first - num_tokens)
            rows.append([*earlier, *(NodeRow(block, place) for place in range(num_rows))])
            behind.append((start.state or PathState(None, ())) if is_level else PathState(block, ()))
            made.append(block)
        return cls(starts, behind, made, settled, rows, work.node_offsets, parents)

    def begins(self) -> list[PathState[B]]:
        """Returns where each sequence begins."""
        return [start.state or PathState(None, ()) for start in self.starts]

    def known(self, sequence: int) -> Sequence[NodeRow[B]]:
        """Returns the rows of a sequence that earlier passes made: those computed again, then earlier nodes."""
        own = self.made[sequence]
        return [row for row in (*self.begins()[sequence].rows, *self.rows[sequence]) if row.block is not own]

    @property
    def num_replayed(self) -> int:
        """Tokens before the nodes that the pass computes again."""
        return sum(len(each.rows) for each in self.begins())

    def behind_ends(self, num_nodes: int, make: Callable[[int, bool], B]) -> PathStates[B]:
        """Returns states behind up to `num_nodes` nodes that each sequence gets behind its last one; see `of_nodes`.

        They are rows alone. make: As in `of`.
        """
        starts = [Start(self.after(end - 1)) for end in self.offsets[1:]]
        made = [make(max(num_nodes, 1), False) for _ in starts]
        rows = [[NodeRow(block, place) for place in range(num_nodes)] for block in made]
        return PathStates(starts, [start.state for start in starts], made, [0] * len(made), rows, [0], [])

    def of_nodes(self, parents: Tensor) -> PathStates[B]:
        """Returns these states for the nodes that were made; parents: (S, W) or (1, W) int64, see `Pass`."""
        num, count = len(self.made), parents.shape[1]
        offsets = [place * count for place in range(num + 1)]
        return replace(self, offsets=offsets, parents=parents.expand(num, -1).flatten().tolist())

    def is_kept(self, node: int) -> bool:
        """See `PassStates`."""
        row, index = self._place(node)
        return index >= self.settled[row] - 1

    def after(self, node: int) -> PathState[B]:
        """See `PassStates`."""
        row, index = self._place(node)
        block, before = self.behind[row]
        path = []
        while index >= self.settled[row]:
            path.append(self.rows[row][index - self.settled[row]])
            index = self.parents[self.offsets[row] + index]
        return PathState(block, [*before, *path[::-1]])

    def rows_of(self, first: int, count: int) -> Sequence[NodeRow[B]]:
        """Returns the rows of the first nodes of a sequence, which begins at node `first`; none of them is settled."""
        row, _ = self._place(first)
        return self.rows[row][:count]

    def _place(self, node: int) -> tuple[int, int]:
        """Returns the sequence of a node, and its index there."""
        row = next(row for row, end in enumerate(self.offsets[1:]) if node < end)
        return row, node - self.offsets[row]


def settled_nodes(parents: Sequence[int], first: int, kept: set[int]) -> int:
    """Returns how many nodes of a sequence, a chain that all others come after, have states that nobody needs.

    The state behind the last of them is that of the block. `first`: the place of the sequence's first node in `kept`.
    """
    lowest = list(accumulate(reversed(parents), min))[::-1]  # the first parent of a node and all later ones
    lowest.append(len(parents))
    count = 0
    while count < len(parents) and lowest[count + 1] >= count and (count == 0 or first + count - 1 not in kept):
        count += 1
    return count
