"""The blocks of states and rows (`foretoken.decoder.recurrent_states`) in passes of the native kernels.

See `kernels/recurrent.h`.
"""

from __future__ import annotations

from collections import deque
from ctypes import Array, addressof, c_int64, c_void_p
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.core.errors import PassError
from foretoken.decoder.mixers import LinearAttention

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.decoder.arguments import Model, PassArguments
    from foretoken.decoder.mixers import ShortConvolution
    from foretoken.decoder.recurrent_states import PathState, PathStates

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


def state_bytes(mixers: Sequence[ShortConvolution | LinearAttention], num_blocks: int, num_nodes: int) -> int:
    """Returns the bytes of the blocks of all slots with the inputs of `num_nodes` nodes each, and of idle ones."""
    return (num_blocks + _MOST_IDLE) * block_bytes(mixers, num_nodes)


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

    def tensors(self) -> Sequence[Tensor]:
        """See `Block`."""
        return (self.tensor,)

    def row(self, index: int) -> int:
        """Returns the address of a row."""
        return self.first_row + index * self._row_bytes

    def __del__(self) -> None:
        if hasattr(self, "tensor"):
            self._memory.give_back(self.tensor)


def block_maker(model: Model, memory: tuple[StateMemory, StateMemory]) -> Callable[[int, bool], StateBlock]:
    """Returns the function that `PathStates` makes blocks with, which raises `PassError` without memory for one.

    memory: Of blocks with states, and of rows alone.
    """
    return lambda num_rows, has_states: StateBlock(model, num_rows, memory[not has_states], has_states=has_states)


def put_states(states: PathStates[StateBlock], arguments: PassArguments) -> list[Any]:
    """Sets the arguments of the kernels; returns what must outlive the call."""
    num, begins = len(states.made), states.begins()
    known = [[each.block.row(each.place) for each in states.known(sequence)] for sequence in range(num)]
    arrays: dict[str, Array[Any]] = {
        "states_from": (c_void_p * num)(*map(_address, begins)),
        "states_to": (c_void_p * num)(*(
            _address(state) if state.block is made else None
            for state, made in zip(states.behind, states.made, strict=True)
        )),
        "rows_to": (c_void_p * num)(*(made.first_row for made in states.made)),
        "known": (c_void_p * sum(map(len, known)))(*(row for each in known for row in each)),
        "known_starts": (c_int64 * (num + 1))(*accumulate(map(len, known), initial=0)),
        "settled": (c_int64 * num)(*states.settled),
    }  # fmt: skip
    for name, array in arrays.items():
        setattr(arguments, name, addressof(array))
    return list(arrays.values())


def _address(state: PathState[StateBlock]) -> int | None:
    return None if state.block is None else state.block.tensor.data_ptr()
