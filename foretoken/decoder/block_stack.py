"""Decoder blocks with their own KV cache, on the fastest backend, for drafters that have blocks.

Letters: M tokens of a pass, E hidden size.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from operator import add
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from foretoken.attention.layout import AttentionLayout, has_kernel
from foretoken.core.backend import has_cuda_runtime, runs_cpu_kernels
from foretoken.core.checks import require
from foretoken.core.errors import PassError
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.cuda_graphs import (
    CapturedGraphs,
    CudaGraphCapture,
    GraphCapture,
    PassShape,
    captured_pass,
    padded_inputs,
    shape_of,
)
from foretoken.decoder.memory import HeldMemory, check_memory, is_plain
from foretoken.decoder.native import NativeBlocks
from foretoken.decoder.slot_cache import LayerShape, SlotCache
from foretoken.decoder.torch_blocks import TorchBlocks

if TYPE_CHECKING:
    from foretoken.core.passes import Pass
    from foretoken.decoder.blocks import Blocks
    from foretoken.decoder.quantized import Quantization

_MAX_GRAPHS = 32  # graphs; a choice: each shape saves launches and holds its buffers
_LONGEST_CAPTURED = 32  # tokens of one sequence; a choice: more tokens keep the GPU busy for longer than launches take


def _backend_for(
    layers: Blocks,
    cache: SlotCache,
    backend: str,
    capture: GraphCapture | None,
    quantization: Quantization | None,
) -> _Native | _Torch | _Graphs:
    if quantization is not None:
        if backend == "torch" or capture is not None or not runs_cpu_kernels(layers.device):
            raise UnsuitableError(f"only native kernels on CPUs run {quantization} weights.")
        return _Native(layers, cache, quantization)
    if backend == "native" or (backend == "auto" and runs_cpu_kernels(layers.device) and capture is None):
        try:
            return _Native(layers, cache)
        except UnsuitableError:
            if backend == "native":
                raise
    if capture is None and has_cuda_runtime(layers.device):
        capture = CudaGraphCapture(layers.device)
    plain = _Torch(layers, cache)
    widest = max(block.spec.head_dim for block in layers.attention)
    if backend == "torch" or capture is None or layers.has_experts or not has_kernel(layers.dtype, widest):
        return plain
    return _Graphs(plain, layers, capture)


class _Native:
    """Runs the native kernels. All backends have these methods."""

    name = "native"
    native_blocks: NativeBlocks

    def __init__(self, layers: Blocks, cache: SlotCache, quantization: Quantization | None = None) -> None:
        output = len(layers.blocks) + 1
        self.native_blocks = NativeBlocks(layers, cache, [output], quantization=quantization)

    def run(self, inputs: Tensor, work: Pass, side: Tensor | None) -> Tensor:
        features = self.native_blocks.run(work, inputs.detach().float(), _in_float32(side)).features
        assert features is not None, "the output is tapped"
        return features[:, 0]

    def append(self, inputs: Tensor, work: Pass, side: Tensor | None) -> None:
        self.native_blocks.append(work, inputs.detach().float(), _in_float32(side))


class _Torch:
    name = "torch"
    native_blocks = None

    def __init__(self, layers: Blocks, cache: SlotCache) -> None:
        self._blocks, self._dtype = TorchBlocks(layers, cache), layers.dtype
        self._tensors = list(filter(is_plain, layers.tensors()))

    def run(self, inputs: Tensor, work: Pass, side: Tensor | None) -> Tensor:
        check_memory(self._tensors)
        with torch.no_grad():
            layout = AttentionLayout(work)
            return self._blocks.run(inputs.to(self._dtype), work, layout, (), self._fitted(side))[0]

    def append(self, inputs: Tensor, work: Pass, side: Tensor | None) -> None:
        check_memory(self._tensors)
        with torch.no_grad():
            self._blocks.append(inputs.to(self._dtype), work, AttentionLayout(work), self._fitted(side))

    def _fitted(self, side: Tensor | None) -> Tensor | None:
        return None if side is None else side.to(self._dtype).contiguous()


class _Graphs:
    """Runs torch's operations, and short passes as CUDA graphs."""

    name = "graphs"
    native_blocks = None

    def __init__(self, plain: _Torch, layers: Blocks, capture: GraphCapture) -> None:
        self._plain, self._dtype = plain, layers.dtype
        self._weights = HeldMemory(filter(is_plain, layers.tensors()))
        self._graphs: CapturedGraphs[Tensor] = CapturedGraphs(
            capture, layers.device, limit=_MAX_GRAPHS, name="a decoder block"
        )

    def run(self, inputs: Tensor, work: Pass, side: Tensor | None) -> Tensor:
        if self._weights.has_changed():
            raise PassError("a weight has moved in memory, where captured passes do not find it. Make a new LLM.")
        if work.tables is not None:  # the caller captures more than this pass
            return self._plain.run(inputs, work, side)
        shape = shape_of(work)
        if max(end - start for start, end in pairwise(work.offsets)) > _LONGEST_CAPTURED:
            return self._plain.run(inputs, work, side)
        padded = [
            pad(each.to(self._dtype), (0, 0, 0, shape.num_tokens - len(inputs)))
            for each in (inputs, side)
            if each is not None
        ]
        outputs = self._graphs.run(shape, [*padded_inputs(work, shape), *padded], partial(self._run_captured, shape))
        return outputs[: len(inputs)].clone()  # the next run overwrites the tensor

    def append(self, inputs: Tensor, work: Pass, side: Tensor | None) -> None:
        self._plain.append(inputs, work, side)

    def _run_captured(self, shape: PassShape, *inputs: Tensor) -> Tensor:
        return self._plain.run(inputs[2], captured_pass(shape, inputs[:2]), inputs[3] if len(inputs) > 3 else None)


def _in_float32(side: Tensor | None) -> Tensor | None:
    return None if side is None else side.detach().float()


class BlockStack:
    """Blocks and their KV rows by slot.

    A drafter feeds its own inputs (embeddings, features of the target, both joined) in place of token embeddings, with
    passes over trees or chains like a target's. `work.tokens` is not read. Row i of a slot holds committed position i,
    and the nodes of a pass follow their prefix. `cache.move_paths` makes an accepted path permanent; rejected nodes
    need no call. Example: "A head with a KV cache of its own" in `docs/drafters.md`.

    Attributes:
        cache: KV rows; the caller may move and poison them.
        backend: "native", "torch" or "graphs".
        hidden_size: E.
        has_side: Whether the first block has a second input.
    """

    def __init__(
        self,
        layers: Blocks,
        *,
        num_slots: int,
        capacity: int,
        num_positions: int | None = None,
        backend: Literal["auto", "native", "torch"] = "auto",
        capture: GraphCapture | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        """Allocates the cache, in the dtype and on the device of the blocks.

        Args:
            layers: The blocks; their weights stay where they are and must not be freed.
            capacity: Rows of a slot, with those of drafted nodes.
            num_positions: See `SlotCache`.
            backend: "auto" for the fastest.
            capture: Captures and replays; None for CUDA graphs on GPUs and no capture elsewhere.
            quantization: For quantized copies of all matrices, on the native backend alone. None to read the weights in
                place.

        Raises:
            UnsuitableError: If the requested backend cannot run the blocks, or they cannot be quantized.
            ValueError: If a rotary table ends before the slots do.
        """
        for block in layers.attention:
            rows = capacity if block.rotary is None else block.rotary.cos.shape[0]
            require(rows >= capacity, f"a rotary table has {rows} positions. Expected at least the capacity {capacity}")
        shapes = [LayerShape(b.spec.num_kv_heads, b.spec.head_dim, b.spec.head_dim) for b in layers.attention]
        self.cache = SlotCache(
            shapes, num_slots=num_slots, capacity=capacity, dtype=layers.dtype, device=layers.device,
            num_positions=num_positions,
        )  # fmt: skip
        self.hidden_size, self.has_side = layers.hidden_size, layers.has_side
        self._backend = _backend_for(layers, self.cache, backend, capture, quantization)
        self.backend = self._backend.name

    @property
    def native_blocks(self) -> NativeBlocks | None:
        """The native kernels, if they run the blocks, for drafting with them."""
        return self._backend.native_blocks

    def run(self, inputs: Tensor, work: Pass, side: Tensor | None = None) -> Tensor:
        """Computes every token of a pass; writes its keys and values to the cache rows of its nodes.

        Args:
            inputs: (M, E), any real dtype, the inputs of the first block.
            work: Slots, positions and parents; its tokens and logit rows are not read.
            side: (M, E), any real dtype, the second input of the first block; None if the block has one input.

        Returns:
            (M, E) in the dtype of the blocks: the output of the last block, after the final norm if there is one.

        Raises:
            PassError: If something does not fit the blocks or the cache, or a weight's memory was freed.
        """
        self._check_inputs(inputs, work, side)
        return self._backend.run(inputs, work, side)

    def append(self, inputs: Tensor, work: Pass, side: Tensor | None = None) -> None:
        """Writes the keys and values of a pass like `run`, but skips the rest of the last block."""
        self._check_inputs(inputs, work, side)
        self._backend.append(inputs, work, side)

    def _check_inputs(self, inputs: Tensor, work: Pass, side: Tensor | None) -> None:
        expected = (work.num_tokens, self.hidden_size)
        if inputs.shape != expected:
            raise PassError(f"inputs are {tuple(inputs.shape)}. Expected {expected}: a row for each token of the pass.")
        found = None if side is None else tuple(side.shape)
        if found != (expected if self.has_side else None):
            wanted = f"{expected}: a second input" if self.has_side else "None: the first block has no second input"
            raise PassError(f"side is {found}. Expected {wanted}.")
        if work.tables is not None:
            return
        rows = max(map(add, work.prefix_lens, (end - start for start, end in pairwise(work.node_offsets))))
        if rows > self.cache.capacity:
            raise PassError(f"the pass needs {rows} rows of a slot, which has {self.cache.capacity}. Feed fewer.")
