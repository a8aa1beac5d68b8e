"""States of recurrent layers as a block of memory and the tokens behind it, which the next pass computes again.

A block has the states of all layers behind some tokens. Of each token behind these, a row has what the layers keep: of
a tree, every node has a row. A state for every node would take a hundred times as much memory. So the state behind a
node is a block and the rows of the tokens on the way to the node; the next pass computes these again, and makes a block
of its own. A pass over a level of a tree makes rows alone.

What a block is, its decoder knows: `foretoken.decoder.native_states` and `foretoken.decoder.torch_mixers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

from foretoken.decoder.recurrent_states import kept_nodes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from foretoken.core.passes import Pass
    from foretoken.decoder.recurrent_states import RecurrentStates, Start


class Block(Protocol):
    """The states of all layers if there are any, and rows; never changed once a pass has made them."""

    def tensors(self) -> Sequence[Tensor]:
        """Returns the memory of the block."""
        ...


B = TypeVar("B", bound=Block)


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
