"""What runs the blocks of a `BlockStack`.

On CPUs the native kernels, where these know the dtype; on GPUs torch's GEMM with one CUDA graph for each size of pass;
elsewhere torch's operations.

Letters: M tokens of a pass, E hidden size, F taps.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from foretoken.attention.dispatch import has_kernel
from foretoken.attention.layout import AttentionLayout
from foretoken.core.backend import has_cuda_graphs, runs_cpu_kernels
from foretoken.core.errors import PassError
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.captured_pass import PassShape, captured_pass, padded_inputs, shape_of
from foretoken.decoder.cuda_graphs import CapturedGraphs, CudaGraphCapture
from foretoken.decoder.held_memory import HeldMemory, check_memory, is_plain
from foretoken.decoder.lean.native import NativeBlocks
from foretoken.decoder.lean.torch_blocks import TorchBlocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.passes import Pass
    from foretoken.decoder.blocks import Blocks
    from foretoken.decoder.cuda_graphs import GraphCapture
    from foretoken.decoder.lean.int8 import Quantization
    from foretoken.decoder.slot_cache import SlotCache

_MAX_GRAPHS = 32
_LONGEST_CAPTURED = 32  # tokens of one sequence; over longer ones the GPU is busy for longer than launches take


class Backend(Protocol):
    """What runs the blocks of a stack."""

    name: str

    @property
    def native_blocks(self) -> NativeBlocks | None:
        """The native kernels, where these run the blocks."""
        ...

    def run(self, inputs: Tensor, work: Pass, side: Tensor | None) -> Tensor:
        """(M, 1 + F, E) of (M, E), and (M, E) where the first block has a second input."""
        ...

    def append(self, inputs: Tensor, work: Pass, side: Tensor | None) -> None:
        """See `BlockStack`."""
        ...


def backend_for(
    layers: Blocks,
    cache: SlotCache,
    taps: Sequence[int],
    backend: str,
    capture: GraphCapture | None,
    quantization: Quantization | None,
) -> Backend:
    """The backend that was asked for, or the fastest.

    Raises:
        UnsuitableError: See `BlockStack`.
    """
    if quantization is not None:
        if backend == "torch" or capture is not None or not runs_cpu_kernels(layers.device):
            raise UnsuitableError(f"only native kernels on CPUs run {quantization} weights.")
        return _Native(layers, cache, taps, quantization)
    if backend == "native" or (backend == "auto" and runs_cpu_kernels(layers.device) and capture is None):
        try:
            return _Native(layers, cache, taps)
        except UnsuitableError:
            if backend == "native":
                raise
    if capture is None and has_cuda_graphs(layers.device):
        capture = CudaGraphCapture(layers.device)
    plain = _Torch(layers, cache, taps)
    widest = max(block.spec.head_dim for block in layers.blocks)
    if backend == "torch" or capture is None or layers.has_experts or not has_kernel(layers.dtype, widest):
        return plain
    return _Graphs(plain, layers, capture)


class _Native:
    """The native kernels."""

    name = "native"
    native_blocks: NativeBlocks

    def __init__(
        self, layers: Blocks, cache: SlotCache, taps: Sequence[int], quantization: Quantization | None = None
    ) -> None:
        """Raises `UnsuitableError` where they cannot run the blocks."""
        self.native_blocks = NativeBlocks(layers, cache, taps, quantization=quantization)

    def run(self, inputs: Tensor, work: Pass, side: Tensor | None) -> Tensor:
        """See `Backend`."""
        features = self.native_blocks.run(work, inputs.detach().float(), _in_float32(side)).features
        assert features is not None, "the output is tapped"
        return features

    def append(self, inputs: Tensor, work: Pass, side: Tensor | None) -> None:
        """See `Backend`."""
        self.native_blocks.append(work, inputs.detach().float(), _in_float32(side))


class _Torch:
    """Torch's operations."""

    name = "torch"
    native_blocks = None

    def __init__(self, layers: Blocks, cache: SlotCache, taps: Sequence[int]) -> None:
        """Fuses the projections."""
        self._blocks, self._taps, self._dtype = TorchBlocks(layers, cache), taps, layers.dtype
        self._tensors = list(filter(is_plain, layers.tensors()))

    def run(self, inputs: Tensor, work: Pass, side: Tensor | None) -> Tensor:
        """See `Backend`."""
        return self.run_on(inputs, work, side, AttentionLayout(work))

    def run_on(self, inputs: Tensor, work: Pass, side: Tensor | None, layout: AttentionLayout) -> Tensor:
        """`run` where the layout of the pass exists already."""
        check_memory(self._tensors)
        with torch.no_grad():
            features = self._blocks.run(inputs.to(self._dtype), work, layout, self._taps, self._fitted(side))[1]
        assert features is not None, "the output is tapped"
        return features

    def append(self, inputs: Tensor, work: Pass, side: Tensor | None) -> None:
        """See `Backend`."""
        check_memory(self._tensors)
        with torch.no_grad():
            self._blocks.append(inputs.to(self._dtype), work, AttentionLayout(work), self._fitted(side))

    def _fitted(self, side: Tensor | None) -> Tensor | None:
        """The second input in the dtype of the blocks."""
        return None if side is None else side.to(self._dtype).contiguous()


class _Graphs:
    """Torch's operations, short passes as CUDA graphs."""

    name = "graphs"
    native_blocks = None

    def __init__(self, plain: _Torch, layers: Blocks, capture: GraphCapture) -> None:
        """Prepares; graphs are captured when a shape is first met."""
        self._plain, self._dtype = plain, layers.dtype
        self._weights = HeldMemory(filter(is_plain, layers.tensors()))
        self._graphs: CapturedGraphs[Tensor] = CapturedGraphs(
            capture, layers.device, limit=_MAX_GRAPHS, name="a decoder block"
        )

    def run(self, inputs: Tensor, work: Pass, side: Tensor | None) -> Tensor:
        """See `Backend`."""
        if self._weights.has_changed():
            raise PassError("a weight has moved in memory, where captured passes do not find it. Make a new LLM.")
        shape = shape_of(work)
        if max(end - start for start, end in pairwise(work.offsets)) > _LONGEST_CAPTURED:
            return self._plain.run(inputs, work, side)
        padded = [
            pad(each.to(self._dtype), (0, 0, 0, shape.num_tokens - len(inputs)))
            for each in (inputs, side)
            if each is not None
        ]
        outputs = self._graphs.run(shape, [*padded_inputs(work, shape), *padded], partial(self._run_captured, shape))
        return outputs[: len(inputs)].clone()  # the next run fills the same tensor

    def append(self, inputs: Tensor, work: Pass, side: Tensor | None) -> None:
        """See `Backend`; without a graph."""
        self._plain.append(inputs, work, side)

    def _run_captured(self, shape: PassShape, *inputs: Tensor) -> Tensor:
        """What is captured; inputs: the two of the pass, then what goes into the first block."""
        work, layout = captured_pass(shape, inputs[:2])
        return self._plain.run_on(inputs[2], work, inputs[3] if len(inputs) > 3 else None, layout)


def _in_float32(side: Tensor | None) -> Tensor | None:
    """The second input as the native kernels take it."""
    return None if side is None else side.detach().float()
