"""The states of recurrent layers in passes of the native kernels: blocks of memory, and tokens to compute again.

A block has the states of all layers behind some tokens. Of each token behind these, a row has what the layers keep: of
a tree, every node has a row. A state for every node would take a hundred times as much memory. So the state behind a
node is a block and the rows of the tokens on the way to the node; the next pass computes these again, and makes a block
of its own. A pass over a level of a tree makes rows alone. See `kernels/recurrent.h`.
"""

from __future__ import annotations

from collections import deque
from ctypes import Array, addressof, c_int64, c_void_p
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from foretoken.core.errors import PassError
from foretoken.decoder.mixers import LinearAttention
from foretoken.decoder.recurrent_states import kept_nodes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.passes import Pass
    from foretoken.decoder.arguments import Model, PassArguments
    from foretoken.decoder.mixers import ShortConvolution
    from foretoken.decoder.recurrent_states import RecurrentStates, Start

_MOST_IDLE = 4  # blocks; a choice: a slot takes turns with two or three
_MOST_IDLE_ROWS = 16  # blocks without states; a choice: a draft makes one for each level
_STATE_COLUMNS = 16  # of a state, side by side; `kTile` of the kernels


def mixer_floats(mixer: ShortConvolution | LinearAttention) -> tuple[int, int]:
    """Returns the floats of a recurrent layer in a block: of its states, and of a row of its inputs."""
    channels = int(mixer.convolution.weight.shape[0])
    if not isinstance(mixer, LinearAttention):
        return 0, channels
    columns = -(-mixer.value_dim // _STATE_COLUMNS) * _STATE_COLUMNS
    gates = 2 if mixer.beta_scale else 1
    return mixer.num_heads * mixer.key_dim * columns, channels + mixer.num_heads * gates


def state_bytes(mixers: Sequence[ShortConvolution | LinearAttention], num_slots: int, num_nodes: int) -> int:
    """Returns the bytes of the blocks of all slots: before a pass over `num_nodes` nodes each, and after it."""
    return (2 * num_slots + _MOST_IDLE) * block_bytes(mixers, num_nodes)


def block_bytes(mixers: Sequence[ShortConvolution | LinearAttention], num_rows: int) -> int:
    """Returns the bytes of a block with `num_rows` rows of inputs."""
    sizes = [mixer_floats(mixer) for mixer in mixers]
    window = max(int(mixer.convolution.weight.shape[1]) for mixer in mixers) - 1
    floats = sum(state + (window + num_rows) * row for state, row in sizes)
    return floats * torch.float32.itemsize


class StateMemory:
    """Memory of blocks that nobody uses any more, for the next ones: pages of new memory are slow to touch."""

    def __init__(self, most_idle: int) -> None:
        self._idle: deque[Tensor] = deque(maxlen=most_idle)

    @classmethod
    def of_decoder(cls) -> tuple[StateMemory, StateMemory]:
        """Returns memory for blocks with states, and for rows alone."""
        return cls(_MOST_IDLE), cls(_MOST_IDLE_ROWS)

    def take(self, size: int) -> Tensor:
        """Returns at least `size` floats, at most twice as many; raises `PassError` without memory for them."""
        for _ in range(len(self._idle)):
            try:
                memory = self._idle.popleft()
            except IndexError:  # another thread took it
                break
            if size <= memory.numel() <= 2 * size:
                return memory
            self._idle.append(memory)
        try:
            return torch.empty(size, dtype=torch.float32, device="cpu")
        except RuntimeError as err:  # torch has no type for it
            raise PassError("there is no memory for the states of recurrent layers. Feed fewer at once.") from err

    def give_back(self, memory: Tensor) -> None:
        """Takes back what `take` returned."""
        self._idle.append(memory)


class StateBlock:
    """The states of all layers if there are any, then `num_rows` rows; never changed once a pass has made them.

    Attributes:
        tensor: States, the rows of the window, and the other rows; see `Pass` in `kernels/interface.h`.
        first_row: Address of the first of the other rows.
    """

    def __init__(self, model: Model, num_rows: int, memory: StateMemory, *, has_states: bool) -> None:
        self._memory = memory
        self._row_bytes: int = 4 * model.row_size
        first = model.state_size + model.window * model.row_size if has_states else 0
        self.tensor = memory.take(first + num_rows * model.row_size)
        self.first_row: int = self.tensor.data_ptr() + 4 * first

    def row(self, index: int) -> int:
        """Returns the address of a row."""
        return self.first_row + index * self._row_bytes

    def __del__(self) -> None:
        if hasattr(self, "tensor"):
            self._memory.give_back(self.tensor)


class NodeRow(NamedTuple):
    """The row of a token."""

    block: StateBlock
    place: int


class NativeState(NamedTuple):
    """The state of a block, None before any text, after the tokens of some rows."""

    block: StateBlock | None
    rows: Sequence[NodeRow]

    def tensors(self) -> Sequence[Tensor]:
        """See `foretoken.decoder.state_snapshots.State`."""
        blocks = [*(() if self.block is None else (self.block,)), *(row.block for row in self.rows)]
        return [block.tensor for block in dict.fromkeys(blocks)]


_EMPTY = NativeState(None, ())


@dataclass(frozen=True, slots=True)
class NativeStates:
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
        held: What must outlive the call of the kernels.
    """

    starts: Sequence[Start]
    behind: Sequence[NativeState]
    made: Sequence[StateBlock]
    settled: Sequence[int]
    rows: Sequence[Sequence[NodeRow]]
    offsets: Sequence[int]
    parents: Sequence[int]
    held: list[Any] = field(default_factory=list)

    @classmethod
    def of(
        cls, work: Pass, model: Model, slots: RecurrentStates, memory: tuple[StateMemory, StateMemory]
    ) -> NativeStates:
        """Makes blocks for a pass; raises `PassError` as `RecurrentStates.begin`, and without memory for them."""
        starts, parents, kept = slots.begin(work), work.parents.tolist(), kept_nodes(work)
        is_level, (for_states, for_rows) = work.num_earlier is not None, memory
        behind, made, settled, rows = list[NativeState](), list[StateBlock](), list[int](), list[list[NodeRow]]()
        for row, (first, end) in enumerate(pairwise(work.node_offsets)):
            start, num_tokens = starts[row], work.offsets[row + 1] - work.offsets[row]
            settled.append(0 if is_level else _settled(parents[first:end], first, kept))
            num_rows = num_tokens - settled[-1]
            block = StateBlock(model, num_rows, for_rows if is_level else for_states, has_states=not is_level)
            earlier: Sequence[NodeRow] = ()
            if isinstance(start.earlier, NativeStates):
                earlier = start.earlier.rows_of(start.first, end - first - num_tokens)
            rows.append([*earlier, *(NodeRow(block, place) for place in range(num_rows))])
            behind.append((start.state or _EMPTY) if is_level else NativeState(block, ()))
            made.append(block)
        return cls(starts, behind, made, settled, rows, work.node_offsets, parents)

    @property
    def num_replayed(self) -> int:
        """Tokens before the nodes that the pass computes again."""
        return sum(len((start.state or _EMPTY).rows) for start in self.starts)

    def put_into(self, arguments: PassArguments) -> None:
        """Sets the arguments of the kernels."""
        num = len(self.made)
        begins = [start.state or _EMPTY for start in self.starts]
        known = [
            [each.block.row(each.place) for each in (*state.rows, *rows) if each.block is not made]
            for state, rows, made in zip(begins, self.rows, self.made, strict=True)
        ]
        arrays: dict[str, Array[Any]] = {
            "states_from": (c_void_p * num)(*map(_address, begins)),
            "states_to": (c_void_p * num)(*(
                _address(state) if state.block is made else None
                for state, made in zip(self.behind, self.made, strict=True)
            )),
            "rows_to": (c_void_p * num)(*(made.first_row for made in self.made)),
            "known": (c_void_p * sum(map(len, known)))(*(row for each in known for row in each)),
            "known_starts": (c_int64 * (num + 1))(*accumulate(map(len, known), initial=0)),
            "settled": (c_int64 * num)(*self.settled),
        }  # fmt: skip
        self.held.extend(arrays.values())
        for name, array in arrays.items():
            setattr(arguments, name, addressof(array))

    def is_kept(self, node: int) -> bool:
        """See `PassStates`."""
        row, index = self._place(node)
        return index >= self.settled[row] - 1

    def after(self, node: int) -> NativeState:
        """See `PassStates`."""
        row, index = self._place(node)
        block, before = self.behind[row]
        path = []
        while index >= self.settled[row]:
            path.append(self.rows[row][index - self.settled[row]])
            index = self.parents[self.offsets[row] + index]
        return NativeState(block, [*before, *path[::-1]])

    def rows_of(self, first: int, count: int) -> Sequence[NodeRow]:
        """Returns the rows of the first nodes of a sequence, which begins at node `first`; none of them is settled."""
        row, _ = self._place(first)
        return self.rows[row][:count]

    def _place(self, node: int) -> tuple[int, int]:
        """Returns the sequence of a node, and its index there."""
        row = next(row for row, end in enumerate(self.offsets[1:]) if node < end)
        return row, node - self.offsets[row]


def _address(state: NativeState) -> int | None:
    return None if state.block is None else state.block.tensor.data_ptr()


def _settled(parents: Sequence[int], first: int, kept: set[int]) -> int:
    """Returns how many nodes of a sequence, a chain that all others come after, have states that nobody needs.

    The state behind the last of them is that of the block. `first`: the place of the sequence's first node in `kept`.
    """
    lowest = list(accumulate(reversed(parents), min))[::-1]  # the first parent of a node and all later ones
    lowest.append(len(parents))
    count = 0
    while count < len(parents) and lowest[count + 1] >= count and (count == 0 or first + count - 1 not in kept):
        count += 1
    return count
