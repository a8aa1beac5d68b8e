"""The lean decoder on our own kernels for CPUs: `decoder.cpp`, one call a pass.

It reads the module's weights in place. Its arithmetic does not depend on the number of tokens or sequences in a pass: a
tree's path and plain decoding get the same bits, in every dtype.
"""

from __future__ import annotations

from ctypes import addressof, byref, c_int64
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from foretoken.core.backend import kernel_threads, runs_cpu_kernels
from foretoken.core.errors import PassError
from foretoken.decoder.arguments import Model, PassArguments, Status
from foretoken.decoder.base import PassOutput, UnsuitableError
from foretoken.decoder.blocks import Blocks, LeanWeights, tap_indices
from foretoken.decoder.library import native_library
from foretoken.decoder.native_model import NativeModel
from foretoken.decoder.native_states import StateMemory, block_maker, put_states
from foretoken.decoder.recurrent_states import PathStates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.passes import Pass, Tap, TokenChoice
    from foretoken.decoder.native_states import StateBlock
    from foretoken.decoder.quantized import Quantization
    from foretoken.decoder.slot_cache import SlotCache

DTYPES = (torch.float32, torch.bfloat16)
_Wanted = tuple[str, Tensor | None, torch.dtype, tuple[int, ...]]  # name, tensor, expected dtype and shape


class Workspaces:
    """Memory for calls of the kernels; two Python threads never share one."""

    def __init__(self) -> None:
        self._idle: list[Tensor] = []

    def take(self, size: int, what: str) -> Tensor:
        """Returns at least `size` bytes, for one call; a negative size stands for a number beyond 64 bits.

        Raises `PassError` if there is no memory for `what`.
        """
        try:
            memory = self._idle.pop()
        except IndexError:
            memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        if 0 <= size <= memory.numel():
            return memory
        try:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        except RuntimeError as err:  # torch has no type for it
            raise PassError(f"there is no memory for {what}. Feed fewer at once.") from err

    def give_back(self, memory: Tensor) -> None:
        """Takes back what `take` returned, after the call."""
        self._idle.append(memory)


class PreparedPass(NamedTuple):
    """A pass for the kernels: the model, the arguments, and the objects that must outlive the call."""

    model: Model
    arguments: PassArguments
    held: list[Any]
    states: PathStates[StateBlock] | None  # of recurrent layers


class NativeBlocks:
    """Blocks on a slot cache, with embedding and LM head if they are a model's."""

    def __init__(
        self,
        layers: Blocks,
        cache: SlotCache,
        taps: Sequence[int],
        *,
        ends: LeanWeights | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        """Compiles the kernels if needed.

        Args:
            layers: On a CPU, in float32 or bfloat16.
            cache: In the same dtype, or quantized.
            taps: Boundary indices of features: i is the input of block i, L the output of the last block, L + 1 the
                final norm.
            ends: The whole model, for its embedding and LM head; None for blocks alone.

        Raises:
            UnsuitableError: For another dtype or device, if the kernels cannot be compiled, or if sizes do not fit each
                other.
        """
        if layers.dtype not in DTYPES:
            raise UnsuitableError(f"it runs float32 and bfloat16, not {layers.dtype}.")
        self.library, self.workspaces = native_library(), Workspaces()
        self._dtype, self._taps = layers.dtype, list(taps)
        if any(not 0 <= tap <= len(layers.blocks) + 1 for tap in self._taps):
            raise UnsuitableError(f"taps {self._taps} do not all exist.")
        self._tap_indices = (c_int64 * len(self._taps))(*self._taps)
        self._described = NativeModel(layers, ends, cache, quantization)  # keeps the structure's tensors alive
        self._num_bytes: dict[tuple[int, ...], int] = {}  # of workspaces
        self._states, self._state_memory = cache.states, StateMemory.of_decoder()

    @property
    def num_logits(self) -> int:
        """V, the width of the logits."""
        return int(self._described.structure.num_logits)

    def run(self, work: Pass, inputs: Tensor | None = None, sides: Tensor | None = None) -> PassOutput:
        """Runs a pass in one call of the kernels.

        Args:
            inputs: (M, E) float32, in place of the tokens' embeddings; None for the embeddings.
            sides: (M, E) float32, the second input of the first block, or None.

        Raises:
            PassError: If something does not fit the model or the cache, or a weight's memory was freed; nothing was
                computed.
        """
        ready = self.prepared(work, inputs, sides)
        model, arguments = ready.model, ready.arguments
        features = logits = chosen = attention = None
        if not work.has_features or work.num_layers is not None:
            arguments.num_taps = 0
        elif self._taps:
            shape = (work.offsets[-1], len(self._taps), model.hidden)
            features = torch.empty(shape, dtype=self._dtype, device="cpu")
            arguments.features = features.data_ptr()
        if work.logit_rows is not None:
            wanted = (len(work.logit_rows), model.num_logits)
            logits = torch.empty(wanted, dtype=torch.float32, device="cpu")
            arguments.logits = logits.data_ptr()  # null without rows
            chosen = torch.empty(wanted[0], dtype=torch.int64, device="cpu")
            arguments.chosen = chosen.data_ptr()
        if work.attention_rows is not None:
            most = max(
                prefix + nodes for prefix, nodes in zip(work.prefix_lens, _lengths(work.node_offsets), strict=True)
            )
            attention = torch.zeros(len(work.slots), model.num_layers, model.kv_heads, most, device="cpu")
            (rows,) = fitting(("attention_rows", work.attention_rows, torch.int64, (len(work.attention_rows),)))
            ready.held.append(rows)
            arguments.num_attention, arguments.attention_rows = len(rows), rows.data_ptr()
            arguments.attention, arguments.attention_cols = attention.data_ptr(), most
        self._call_kernels(ready, work)
        return PassOutput(logits=logits, features=features, chosen=chosen, attention=attention)

    def append(self, work: Pass, inputs: Tensor, sides: Tensor | None = None) -> None:
        """Runs a pass without the rest of the last block after its keys and values; raises `PassError` as `run`."""
        ready = self.prepared(replace(work, logit_rows=None), inputs, sides)
        ready.arguments.is_append, ready.arguments.num_taps = 1, 0
        self._call_kernels(ready, work)

    def prepared(self, work: Pass, inputs: Tensor | None = None, sides: Tensor | None = None) -> PreparedPass:
        """Returns a pass without outputs and workspace; arguments and errors as `run`."""
        self._described = described = self._described.current()
        model = described.structure if work.num_layers is None else _cut(described.structure, work.num_layers)
        states = (
            None if self._states is None else PathStates.of(work, self._states, block_maker(model, self._state_memory))
        )
        num, num_tokens, node_offsets = len(work.slots), work.offsets[-1], work.node_offsets
        lists = [(c_int64 * num)(*work.slots), (c_int64 * num)(*work.prefix_lens)]
        lists += [(c_int64 * (num + 1))(*work.offsets), (c_int64 * (num + 1))(*node_offsets)]
        slots, prefix, starts, node_starts = map(addressof, lists)
        arguments = PassArguments(
            num_threads=kernel_threads(),
            num_sequences=num,
            slots=slots,
            prefix=prefix,
            starts=starts,
            node_starts=node_starts,
            taps=addressof(self._tap_indices),
            num_taps=len(self._taps),
            features_are_bfloat16=self._dtype == torch.bfloat16,
        )
        nodes, hidden = (node_offsets[-1],), (num_tokens, model.hidden)
        wanted: list[_Wanted] = [
            ("positions", work.positions, torch.int64, nodes),
            ("parents", work.parents, torch.int64, nodes),
            ("tokens", work.tokens, torch.int64, (num_tokens,))
            if inputs is None
            else ("inputs", inputs, torch.float32, hidden),
        ]
        if sides is not None:
            wanted.append(("sides", sides, torch.float32, hidden))
        if work.logit_rows is not None:
            arguments.num_logits = len(work.logit_rows)
            wanted.append(("logit_rows", work.logit_rows, torch.int64, (arguments.num_logits,)))
            if work.choice is not None:
                wanted += _of_choice(work.choice, arguments)
        tensors = fitting(*wanted)
        for (name, *_), tensor in zip(wanted, tensors, strict=True):
            setattr(arguments, name, tensor.data_ptr())
        arrays = [] if states is None else put_states(states, arguments)
        # The description too: another thread may replace it.
        return PreparedPass(model, arguments, [described, *lists, *tensors, *arrays], states)

    def _call_kernels(self, ready: PreparedPass, work: Pass) -> None:
        arguments, nodes = ready.arguments, len(work.parents)
        replayed = 0 if ready.states is None else ready.states.num_replayed
        size = self._workspace_bytes(nodes, arguments.num_threads, arguments.num_attention, replayed)
        memory = self.workspaces.take(size, f"a pass of {nodes} nodes")
        arguments.workspace = memory.data_ptr()
        status = self.library.foretoken_decode(byref(ready.model), byref(arguments))
        self.workspaces.give_back(memory)
        if status:
            raise PassError(self.complaint(Status(status), work))
        self.finish(work, ready)

    def behind_ends(self, ready: PreparedPass, num_nodes: int) -> PathStates[StateBlock] | None:
        """Returns states of nodes to draft behind the ends of a pass, see `PathStates`; None without recurrence."""
        if ready.states is None:
            return None
        return ready.states.behind_ends(num_nodes, block_maker(ready.model, self._state_memory))

    def finish(self, work: Pass, ready: PreparedPass, drafted: PathStates[StateBlock] | None = None) -> None:
        """Keeps the states that a pass has made, and those of nodes `drafted` behind its ends in the same call."""
        if self._states is None or ready.states is None:
            return
        self._states.finish(work, ready.states)
        if drafted is not None and drafted.parents:
            ends = [length + count for length, count in zip(work.prefix_lens, _lengths(work.node_offsets), strict=True)]
            self._states.finish_nodes(work.slots, ends, drafted, is_level=True)

    def _workspace_bytes(self, *sizes: int) -> int:
        """`sizes`: nodes, threads, tokens whose attention weights are needed, tokens of recurrent layers replayed."""
        if sizes not in self._num_bytes:
            structure = self._described.structure
            self._num_bytes[sizes] = self.library.foretoken_workspace_bytes(byref(structure), *map(c_int64, sizes))
        return self._num_bytes[sizes]

    def complaint(self, status: Status, work: Pass) -> str:
        """Returns the error for a pass that the kernels refused."""
        model = self._described.structure
        match status:
            case Status.TOKENS:
                text = f"tokens lie in {range_of(work.tokens)}. Expected ids in 0..{model.vocab - 1}."
            case Status.POSITIONS:
                text = f"positions lie in {range_of(work.positions)}. Expected 0..{model.num_positions - 1}."
            case Status.SLOTS:
                text = f"the slots are {list(work.slots)}. Expected 0..{model.num_slots - 1}."
            case Status.CACHE_ROWS:
                text = (
                    f"prefixes {list(work.prefix_lens)} and the nodes after them, {_lengths(work.node_offsets)}, do "
                    f"not fit. Expected at most {model.capacity} rows a slot in all, which end within the cache."
                )
            case Status.PARENTS:
                text = "a node's parent does not come before it. Expected parents in -1..node - 1."
            case Status.SEQUENCES:
                text = (
                    f"the sequences have {_lengths(work.offsets)} tokens and {_lengths(work.node_offsets)} nodes. "
                    "Expected at least one token each, and a node for each token."
                )
            case Status.LOGIT_ROWS:
                text = f"logit_rows are not ascending in 0..{work.num_tokens - 1}."
            case Status.ATTENTION_ROWS:
                text = f"attention_rows are not ascending in 0..{work.num_tokens - 1}."
            case Status.SHAPE | Status.DRAWS:
                text = f"the draft is no tree level by level: {status.name}. Expected children side by side, by rank."
            case Status.NO_MEMORY:
                text = f"there is no memory for a pass of {work.num_tokens} tokens. Feed fewer at once."
            case _:
                text = (
                    f"the pass lacks something: {status.name}. Expected tensors with memory, and at least one thread."
                )
        return text


class NativeDecoder(NativeBlocks):
    """The lean decoder on the native CPU kernels, see `Decoder`."""

    name = "lean-native"
    is_exact = True

    def __init__(
        self, weights: LeanWeights, cache: SlotCache, taps: Sequence[Tap], *, quantization: Quantization | None = None
    ) -> None:
        """Compiles the kernels if needed. Quantization of a draft model's matrices: see `NativeModel`.

        Raises `UnsuitableError` if the weights are not float32 or bfloat16 on a CPU, a tap does not exist, the kernels
        cannot be compiled, or the model cannot be quantized.
        """
        if not self.runs(weights.device, weights.dtype):
            raise UnsuitableError(f"it runs float32 and bfloat16 on CPUs, not {weights.dtype} on {weights.device}.")
        super().__init__(
            weights.layers, cache, tap_indices(taps, weights.num_layers), ends=weights, quantization=quantization
        )

    @staticmethod
    def runs(device: torch.device, dtype: torch.dtype) -> bool:
        """Decides whether the kernels support a device and a dtype."""
        return runs_cpu_kernels(device) and dtype in DTYPES


def _cut(model: Model, num_layers: int) -> Model:
    if num_layers > model.num_layers:
        raise PassError(f"the pass goes through {num_layers} blocks, the target has {model.num_layers}.")
    cut = Model.from_buffer_copy(model)
    cut.num_layers = num_layers
    return cut


def _of_choice(choice: TokenChoice, arguments: PassArguments) -> list[_Wanted]:
    """Returns the tensors of a choice by the names of their arguments; sets the number of impossible tokens."""
    rows = (arguments.num_logits,)
    wanted: list[_Wanted] = [
        ("inverse_temperature", choice.inverse_temperature, torch.float32, rows),
        ("seeds", choice.seeds, torch.int64, rows),
    ]
    if choice.impossible_ids is not None:
        arguments.num_impossible = choice.impossible_ids.numel()
        wanted.append(("impossible_ids", choice.impossible_ids, torch.int64, (arguments.num_impossible,)))
    return wanted


def _lengths(offsets: Sequence[int]) -> list[int]:
    return [end - start for start, end in pairwise(offsets)]


def fitting(*wanted: _Wanted) -> list[Tensor]:
    """Returns contiguous tensors; raises `PassError` for another dtype, shape or device."""
    found = []
    for name, tensor, dtype, shape in wanted:
        if tensor is None or tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_cpu:
            raise PassError(f"{name} is {_described(tensor)}. Expected {shape} {dtype} on a CPU.")
        found.append(tensor.contiguous())
    return found


def _described(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def range_of(values: Tensor) -> str:
    """Returns the least and the greatest value, for messages."""
    return f"{values.min()}..{values.max()}"
