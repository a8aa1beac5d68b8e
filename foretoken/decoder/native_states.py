"""The states of recurrent layers in passes of the native kernels: blocks of memory, and tokens to compute again.

A block has the states of all layers behind some tokens, and the inputs of the tokens behind them: of a tree, all nodes.
A state for every node would take a hundred times as much memory. So the state behind a node is a block and the rows of
the tokens on the way to the node; the next pass computes these again, and makes a block of its own. See
`kernels/recurrent.h`.
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
from foretoken.decoder.blocks import LinearAttention
from foretoken.decoder.recurrent_states import kept_nodes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.passes import Pass
    from foretoken.decoder.arguments import Model, PassArguments
    from foretoken.decoder.blocks import ShortConvolution
    from foretoken.decoder.recurrent_states import RecurrentStates, Start

_MOST_IDLE = 4  # blocks; a choice: a slot takes turns with two or three
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

    def __init__(self) -> None:
        self._idle: deque[Tensor] = deque(maxlen=_MOST_IDLE)

    def take(self, size: int) -> Tensor:
        """Returns at least `size` floats, at most twice as many; raises `PassError` without memory for them."""
        for _ in range(len(self._idle)):
            memory = self._idle.popleft()
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
    """States of all layers and `num_rows` rows of inputs, see `Pass` in `kernels/interface.h`; never changed."""

    def __init__(self, model: Model, num_rows: int, memory: StateMemory) -> None:
        self._memory, self.num_rows = memory, num_rows
        self.tensor = memory.take(model.state_size + (model.window + num_rows) * model.row_size)

    def __del__(self) -> None:
        if hasattr(self, "tensor"):
            self._memory.give_back(self.tensor)


class NativeState(NamedTuple):
    """The state of a block after the tokens of some of its rows."""

    block: StateBlock
    rows: Sequence[int]

    def tensors(self) -> Sequence[Tensor]:
        """See `foretoken.decoder.state_snapshots.State`."""
        return [self.block.tensor]


@dataclass(frozen=True, slots=True)
class NativeStates:
    """The states that a pass makes, see `PassStates`.

    Attributes:
        starts: Of each sequence.
        blocks: Of each sequence, made by the pass.
        settled: Of each sequence, the first nodes, which no later pass computes again.
        offsets: S + 1, the first node of each sequence.
        parents: Of each node, see `Pass`.
        held: What must outlive the call of the kernels.
    """

    starts: Sequence[Start]
    blocks: Sequence[StateBlock]
    settled: Sequence[int]
    offsets: Sequence[int]
    parents: Sequence[int]
    held: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, work: Pass, model: Model, slots: RecurrentStates, memory: StateMemory) -> NativeStates:
        """Makes blocks for a pass; raises `PassError` as `RecurrentStates.begin`, and without memory for them."""
        starts, parents, kept = slots.begin(work), work.parents.tolist(), kept_nodes(work)
        settled = [_settled(parents[first:end], first, kept) for first, end in pairwise(work.offsets)]
        blocks = [
            StateBlock(model, end - first - count, memory)
            for (first, end), count in zip(pairwise(work.offsets), settled, strict=True)
        ]
        return cls(starts, blocks, settled, work.offsets, parents)

    @property
    def num_replayed(self) -> int:
        """Tokens that the pass computes again."""
        return sum(len(start.state.rows) for start in self.starts if start.state is not None)

    def put_into(self, arguments: PassArguments) -> None:
        """Sets the arguments of the kernels."""
        num = len(self.blocks)
        states: list[NativeState | None] = [start.state for start in self.starts]
        rows = [() if state is None else state.rows for state in states]
        blocks = [None if state is None else state.block for state in states]
        arrays: dict[str, Array[Any]] = {
            "states_from": (c_void_p * num)(*(None if block is None else block.tensor.data_ptr() for block in blocks)),
            "states_to": (c_void_p * num)(*(block.tensor.data_ptr() for block in self.blocks)),
            "rows_from": (c_int64 * num)(*(0 if block is None else block.num_rows for block in blocks)),
            "replayed": (c_int64 * self.num_replayed)(*(row for each in rows for row in each)),
            "replay_starts": (c_int64 * (num + 1))(*accumulate(map(len, rows), initial=0)),
            "settled": (c_int64 * num)(*self.settled),
        }
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
        path = []
        while index >= self.settled[row]:
            path.append(index - self.settled[row])
            index = self.parents[self.offsets[row] + index]
        return NativeState(self.blocks[row], path[::-1])

    def _place(self, node: int) -> tuple[int, int]:
        """Returns the sequence of a node, and its index there."""
        row = next(row for row, end in enumerate(self.offsets[1:]) if node < end)
        return row, node - self.offsets[row]


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
