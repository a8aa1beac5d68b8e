"""The lean decoder on kernels of our own, for CPUs: `decoder.cpp`, one call a pass.

It reads the weights where transformers put them and shares them with the module. Its arithmetic does not depend on how
many tokens or sequences share a pass: what a tree's path gets is what plain decoding gets, bit for bit, in every dtype.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int64
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from foretoken.core.errors import PassError
from foretoken.target.decoder import PassOutput, UnsuitableError
from foretoken.target.lean.build import native_library
from foretoken.target.lean.native_model import NativeModel
from foretoken.target.lean.structures import Pass, Status
from foretoken.target.lean.threads import kernel_threads
from foretoken.target.lean.weights import LeanWeights, read_weights, tap_indices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.attention.layout import AttentionLayout
    from foretoken.target.loading import LoadedModel
    from foretoken.target.slot_cache import SlotCache
    from foretoken.target.taps import Tap

_DTYPES = (torch.float32, torch.bfloat16)


class _Workspace(NamedTuple):
    """Buffers that suffice for so many tokens and threads."""

    memory: Tensor
    num_tokens: int
    threads: int


class NativeDecoder:
    """See `Decoder`."""

    name = "lean-native"
    is_exact = True

    def __init__(self, model: LoadedModel, cache: SlotCache, taps: Sequence[Tap]) -> None:
        """Compiles the kernels where that has not been done yet.

        Raises:
            UnsuitableError: When the architecture is not known, the model is not on a CPU in float32 or bfloat16, or
                the kernels cannot be compiled.
        """
        if not self.runs(model):
            raise UnsuitableError(f"it runs float32 and bfloat16 on CPUs, not {model.dtype} on {model.device}.")
        weights = read_weights(model, cache.capacity)
        self._vocab = model.vocab_size
        self._blocks = NativeBlocks(weights, cache, model.dtype, tap_indices(taps, len(weights.blocks)))

    @staticmethod
    def runs(model: LoadedModel) -> bool:
        """Whether the kernels are made for a model's device and dtype."""
        return model.device.type == "cpu" and model.dtype in _DTYPES

    def run(self, tokens: Tensor, layout: AttentionLayout) -> PassOutput:
        """See `Decoder`."""
        logits = torch.empty(*tokens.shape, self._vocab, dtype=torch.float32, device="cpu")
        return PassOutput(logits=logits, features=self._blocks.decode(tokens, layout, logits))

    def fill(self, tokens: Tensor, layout: AttentionLayout) -> Tensor | None:
        """See `Decoder`."""
        return self._blocks.decode(tokens, layout, None)


class NativeBlocks:
    """The blocks of a model on a slot cache, with whatever stands before and after them."""

    def __init__(self, weights: LeanWeights, cache: SlotCache, dtype: torch.dtype, taps: Sequence[int]) -> None:
        """Compiles the kernels where that has not been done yet.

        Args:
            weights: On a CPU.
            cache: In the same dtype.
            dtype: float32 or bfloat16.
            taps: Boundary indices of the features that passes give.

        Raises:
            UnsuitableError: For another dtype, when the kernels cannot be compiled, when a weight has been packed, or
                when sizes do not fit each other.
        """
        if dtype not in _DTYPES:
            raise UnsuitableError(f"it runs float32 and bfloat16, not {dtype}.")
        self._library = native_library()
        self._library.foretoken_workspace_bytes.restype = c_int64
        self._library.foretoken_decode.restype = c_int64
        self._dtype, self._taps = dtype, list(taps)
        if any(not 0 <= tap <= len(weights.blocks) + 1 for tap in self._taps):
            raise UnsuitableError(f"taps {self._taps} do not all exist.")
        self._tap_order = torch.tensor(sorted(set(self._taps)), dtype=torch.int64, device="cpu")
        self._taken = torch.searchsorted(self._tap_order, torch.tensor(self._taps, dtype=torch.int64, device="cpu"))
        self._weights, self._cache = weights, cache
        self._described = NativeModel(weights, cache, dtype)  # holds what the structure points to
        self._model = self._described.structure
        self._idle: list[_Workspace] = []

    def decode(self, tokens: Tensor, layout: AttentionLayout, logits: Tensor | None) -> Tensor | None:
        """One call of the kernels.

        Args:
            tokens: (B, T) int64; or (B, T, D) float32, what stands in the place of their embeddings.
            layout: Positions, slots and who sees what.
            logits: (B, T, V) float32, filled; or None.

        Returns:
            The (B, T, F, D) features.

        Raises:
            PassError: When something does not fit the model or the cache, or a weight's memory was freed; nothing has
                been computed then.
        """
        if self._described.has_moved():
            self._describe_anew()
        described = self._described  # until the end of the pass, also where another thread describes it anew
        given, held = self._prepare(tokens, layout, logits)
        features = None
        if self._taps:
            shape = (len(self._tap_order), given.batch, given.width, self._model.hidden)
            features = torch.empty(shape, dtype=torch.float32, device="cpu")
            given.features = features.data_ptr()
        workspace = self._take_workspace(given.batch * given.width, given.num_threads)
        given.workspace = workspace.memory.data_ptr()
        status = self._library.foretoken_decode(byref(described.structure), byref(given))
        self._idle.append(workspace)
        del held  # the kernels read it until here
        if status:
            raise PassError(self._complaint(Status(status), tokens, layout))
        if features is None:
            return None
        if len(self._taps) == 1:
            return features[0].unsqueeze(2).to(self._dtype)
        return features[self._taken].permute(1, 2, 0, 3).to(self._dtype)

    def _describe_anew(self) -> None:
        """Takes the addresses of weights that have moved.

        Raises:
            PassError: When they are no longer what the kernels can run on.
        """
        try:
            self._described = NativeModel(self._weights, self._cache, self._dtype)
        except UnsuitableError as err:
            raise PassError(str(err)) from err
        self._model = self._described.structure

    def _prepare(self, tokens: Tensor, layout: AttentionLayout, logits: Tensor | None) -> tuple[Pass, list[Any]]:
        """What the kernels are told of a pass, and what must live as long as they run.

        Raises:
            PassError: When a tensor has another shape, dtype or device; the kernels check what is in it.
        """
        batch, width = tokens.shape[:2]
        if len(layout.slots) != batch or len(layout.prefix) != batch:
            raise PassError(f"{len(layout.slots)} slots, {len(layout.prefix)} prefixes. Expected {batch} of each.")
        slots, prefix = (c_int64 * batch)(*layout.slots), (c_int64 * batch)(*layout.prefix)
        positions = _fitting("positions", layout.positions, torch.int64, (batch, width))
        given = Pass(
            num_threads=kernel_threads(),
            batch=batch,
            width=width,
            offset=layout.offset,
            positions=positions.data_ptr(),
            slots=ctypes.addressof(slots),
            prefix=ctypes.addressof(prefix),
            taps=self._tap_order.data_ptr(),
            num_taps=len(self._tap_order),
        )
        if tokens.is_floating_point():
            tokens = _fitting("inputs", tokens, torch.float32, (batch, width, self._model.hidden))
            given.inputs = tokens.data_ptr()
        else:
            tokens = _fitting("tokens", tokens, torch.int64, (batch, width))
            given.tokens = tokens.data_ptr()
        held: list[Any] = [tokens, positions, slots, prefix]
        if layout.tree is not None:
            held.append(_fitting("parents", layout.tree.parents, torch.int64, (batch, width)))
            given.parents = held[-1].data_ptr()
        if layout.visible is not None:
            given.num_scratch = rows = layout.offset + width
            held.append(_fitting("visible", layout.visible, torch.bool, (batch, width, rows)))
            given.visible = held[-1].data_ptr()
            held.append(_fitting("scratch_positions", layout.scratch_positions, torch.int64, (batch, rows)))
            given.scratch_positions = held[-1].data_ptr()
        if logits is not None:
            if not logits.is_contiguous():
                raise PassError("logits are not contiguous. Expected a tensor to fill in place.")
            given.logits = _fitting("logits", logits, torch.float32, (batch, width, self._model.head.rows)).data_ptr()
        return given, held

    def _take_workspace(self, num_tokens: int, threads: int) -> _Workspace:
        """An idle workspace that is large enough for a pass, or a new one; two Python threads never share one.

        Raises:
            PassError: When there is no memory for it.
        """
        try:
            idle = self._idle.pop()
        except IndexError:
            idle = _Workspace(torch.empty(0, dtype=torch.uint8, device="cpu"), 0, 0)
        if num_tokens <= idle.num_tokens and threads <= idle.threads:
            return idle
        num_tokens, threads = max(num_tokens, idle.num_tokens), max(threads, idle.threads)
        size = self._library.foretoken_workspace_bytes(byref(self._model), c_int64(num_tokens), c_int64(threads))
        try:
            return _Workspace(torch.empty(size, dtype=torch.uint8, device="cpu"), num_tokens, threads)
        except RuntimeError as err:
            self._idle.append(idle)
            # torch has no type for it; a size below 0 stands for one beyond 64 bits
            raise PassError(f"there is no memory for a pass of {num_tokens} tokens. Feed fewer at once.") from err

    def _complaint(self, status: Status, tokens: Tensor, layout: AttentionLayout) -> str:
        """What is wrong with a pass that the kernels refused."""
        model = self._model
        rows = f"prefixes {list(layout.prefix)}, {layout.offset} earlier rows and {tokens.shape[1]} new ones"
        match status:
            case Status.TOKENS:
                text = f"tokens lie in {_range(tokens)}. Expected ids in 0..{model.vocab - 1}."
            case Status.POSITIONS:
                text = f"positions lie in {_range(layout.positions)}. Expected 0..{model.num_positions - 1}."
            case Status.SLOTS:
                text = f"the slots are {list(layout.slots)}. Expected 0..{model.num_slots - 1}."
            case Status.CACHE_ROWS:
                text = f"{rows} do not fit. Expected at most {model.capacity} rows a slot in all."
            case Status.PARENTS:
                text = "a node's parent does not come before it. Expected parents in -1..node - 1."
            case Status.SCRATCH:
                text = (
                    f"{rows} do not fit `visible` and `scratch_positions`, which say who sees the rows after a prefix."
                )
            case Status.NO_MEMORY:
                text = f"there is no memory for a pass of {tokens.numel()} tokens. Feed fewer at once."
            case _:
                text = (
                    f"the pass lacks something: {status.name}. Expected tensors with memory, and at least one thread."
                )
        return text


def _fitting(name: str, tensor: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A contiguous tensor of what the kernels read.

    Raises:
        PassError: When it is anything else.
    """
    if tensor is None or tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_cpu:
        raise PassError(f"{name} is {_described(tensor)}. Expected {shape} {dtype} on a CPU.")
    return tensor.contiguous()


def _described(tensor: Tensor | None) -> str:
    """Shape, dtype and device."""
    return "None" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def _range(values: Tensor) -> str:
    """Least and greatest value."""
    return f"{values.min()}..{values.max()}"
