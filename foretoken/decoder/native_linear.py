"""Linear layers for inference: small-batch GEMM by the native kernels, and a part of an LM head.

On CPUs torch takes several times as long for two or four rows.

Letters: N outputs and K inputs of a layer; V vocabulary, E hidden size and R rows of an LM head.
"""

from __future__ import annotations

from ctypes import addressof, c_int64, c_void_p
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foretoken.core.backend import kernel_threads, runs_cpu_kernels
from foretoken.core.errors import PassError
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.library import native_library
from foretoken.decoder.memory import HeldMemory, check_memory, has_memory
from foretoken.decoder.quantized import Quantization, QuantizedMatrix, matrix_struct, quantized
from foretoken.decoder.quantized_modules import QuantizedLinear

if TYPE_CHECKING:
    from foretoken.decoder.arguments import MatrixStruct
    from foretoken.decoder.blocks import LeanWeights

_ALONE = 1 << 15  # multiplications that one thread makes; a choice: fewer end before a second thread has begun


class NativeLinear(nn.Module):
    """A linear layer for inference, on the weights in place or on a copy in 4 or 8 bits."""

    def __init__(
        self,
        weight: Tensor | QuantizedMatrix,
        bias: Tensor | None = None,
        *,
        quantization: Quantization | None = None,
    ) -> None:
        """Keeps the weight in place, or a quantized copy of the weight.

        Args:
            weight: (N, K), on a CPU, contiguous, in float32 or bfloat16; any floating dtype with `quantization`. Or a
                quantized matrix.
            bias: (N,), or None.
            quantization: For a quantized copy, see `quantized`; the layer then does not keep the weight.

        Raises:
            UnsuitableError: If the weight is anything else, or not finite if it is quantized, or the kernels cannot be
                compiled.
        """
        super().__init__()
        is_read = quantization is None  # otherwise the kernels read the copy
        is_known = weight.dtype in (torch.float32, torch.bfloat16) if is_read else weight.dtype.is_floating_point
        if not runs_cpu_kernels(weight.device) or not is_known:
            raise UnsuitableError(f"native layers need float32 or bfloat16 weights on a CPU, not {weight.dtype}.")
        if isinstance(weight, Tensor):
            if weight.dim() != 2 or not weight.numel() or not weight.is_contiguous():
                raise UnsuitableError("native layers need a contiguous matrix that is not empty.")
            _check_plain(weight.detach())
        if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_cpu):
            raise UnsuitableError(f"a bias {tuple(bias.shape)} on {bias.device} does not fit {tuple(weight.shape)}.")
        self._bias = None if bias is None else bias.detach().float().contiguous()
        if isinstance(weight, Tensor) and quantization is not None:
            self._weight: Tensor | QuantizedMatrix = quantized(weight, quantization)
            self._copied_version = weight_version(weight)
        else:
            self._weight = weight.detach() if isinstance(weight, Tensor) else weight
        self._quantization = quantization
        for part in self.tensors():
            _check_plain(part)
        self._rows, self._cols = weight.shape
        self._matrix, self._memory = self._described()
        self._is_bfloat16 = self._weight.dtype == torch.bfloat16
        self._multiply: Any = native_library().foretoken_linear
        self._multiply.argtypes = (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64)

    def forward(self, x: Tensor) -> Tensor:
        """Turns (..., K) of any dtype, on a CPU, into (..., N) float32; raises `PassError` for other inputs.

        Memory that is too small, or freed, also raises `PassError`.
        """
        if self._memory.has_changed():
            check_memory(self.tensors())
            self._matrix, self._memory = self._described()
        if not x.is_cpu or x.shape[-1:] != (self._cols,):
            raise PassError(f"inputs are {tuple(x.shape)} on {x.device}. Expected (..., {self._cols}) on a CPU.")
        rows = x.reshape(-1, self._cols).float().contiguous()
        count = rows.shape[0]
        out = torch.empty(count, self._rows, dtype=torch.float32, device="cpu")
        if count:
            threads = 1 if count * self._rows * self._cols <= _ALONE else kernel_threads()
            if self._multiply(
                addressof(self._matrix), self._is_bfloat16, rows.data_ptr(), count, out.data_ptr(), threads
            ):
                raise PassError(f"there is no memory for {count} inputs of {self._cols}. Feed fewer at once.")
        return out.view(*x.shape[:-1], self._rows)

    def described(self) -> tuple[MatrixStruct, bool]:
        """Returns the layer for the kernels, valid until its tensors move, and whether they multiply in bfloat16."""
        check_memory(self.tensors())
        return self._described()[0], self._is_bfloat16

    def requantize(self, weight: Tensor) -> None:
        """Renews a quantized copy after writes to its weight (N, K); raises `UnsuitableError` if that is not finite."""
        own = self._weight
        if self._quantization is None or isinstance(own, Tensor):
            return
        if weight_version(weight) != self._copied_version:
            made = quantized(weight, self._quantization)
            for kept, new in zip(own.tensors(), made.tensors(), strict=True):
                if kept.dtype != new.dtype:
                    raise UnsuitableError("the scales of the new weights are in another dtype. Make a new LLM.")
                kept.copy_(new)
            self._copied_version = weight_version(weight)

    def tensors(self) -> list[Tensor]:
        """Returns the tensors that the kernels read."""
        parts = self._weight.tensors() if isinstance(self._weight, QuantizedMatrix) else [self._weight]
        return [*parts, *(() if self._bias is None else (self._bias,))]

    def _described(self) -> tuple[MatrixStruct, HeldMemory]:
        return matrix_struct(self._weight, self._bias), HeldMemory(self.tensors())


def _check_plain(part: Tensor) -> None:
    if type(part) is not Tensor or not has_memory(part):
        raise UnsuitableError(f"native layers need plain tensors with memory, not a {type(part).__name__}.")


def weight_version(weight: Tensor) -> int:
    """Returns a number that grows with every write to a weight; 0 where none is counted."""
    return 0 if weight.is_inference() else weight._version


def fast_linear(layer: nn.Module, *, quantization: Quantization | None = None, compacts: bool = True) -> nn.Module:
    """Returns a native layer if possible, else the layer itself.

    Args:
        quantization: For a quantized copy with its own memory; a `QuantizedLinear` keeps its matrix.
        compacts: Whether a float32 weight becomes bfloat16 if that is exact: half the bytes to read, but inputs are
            rounded to bfloat16. Otherwise the weight is read in place.

    Raises:
        UnsuitableError: If a linear layer is to be quantized and cannot be a native one.
    """
    if isinstance(layer, QuantizedLinear):
        try:
            return NativeLinear(layer.matrix, layer.bias)
        except UnsuitableError:
            return layer
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        return layer
    if quantization is not None:
        return NativeLinear(layer.weight, layer.bias, quantization=quantization)
    weight = layer.weight.detach().to(torch.bfloat16) if compacts and fits_bfloat16(layer.weight) else layer.weight
    try:
        return NativeLinear(weight, layer.bias)
    except UnsuitableError:
        return layer


def optimize_for_inference(
    module: nn.Module, *, quantization: Quantization | None = None, compacts: bool = True
) -> None:
    """Replaces linear layers within a module by native ones where possible, in place; arguments as in `fast_linear`.

    Some layers are native already when `fast_linear` raises `UnsuitableError`.
    """
    for name, child in module.named_children():
        setattr(module, name, fast_linear(child, quantization=quantization, compacts=compacts))
        optimize_for_inference(child, quantization=quantization, compacts=compacts)


def linear_layer(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Returns a layer on existing weights, without gradients; weight (N, K), bias (N,) or None."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


def fits_bfloat16(weight: Tensor) -> bool:
    """Decides whether bfloat16 holds the numbers exactly."""
    return torch.equal(weight.detach().to(torch.bfloat16).to(weight.dtype), weight)


class HeadRows:
    """Copies of some rows of an LM head, so that drafts read less; decoders and captured graphs follow exchanged rows.

    Source: FR-Spec (arXiv 2502.14856): drafts cover the most frequent tokens, verification all of them.

    Attributes:
        layer: (..., E) to (..., R).
        tokens: (R,) int64, the token of each row, all different.
    """

    def __init__(self, head: nn.Module, tokens: Tensor, quantization: Quantization | None = None) -> None:
        """Copies the rows of (R,) int64 tokens, or quantized copies of them; the head itself does not change.

        Raises `UnsuitableError` if the head is no plain linear layer.
        """
        whole: Any = head
        if type(head) not in (nn.Linear, QuantizedLinear):
            raise UnsuitableError(f"the LM head is a {type(head).__name__}. Expected a plain linear layer.")
        stored: Tensor | QuantizedMatrix = whole.matrix if isinstance(head, QuantizedLinear) else whole.weight.detach()
        self._stored, self._quantization = stored, quantization
        self._version = weight_version(stored) if isinstance(stored, Tensor) else 0
        weight = self._quantized()
        bias: Tensor | None = None if whole.bias is None else whole.bias.detach()
        self._weight, self._bias, self.tokens = weight, bias, tokens.clone()
        self.layer: nn.Module
        if isinstance(weight, QuantizedMatrix):
            self.layer = QuantizedLinear(weight.taken(tokens), None if bias is None else bias[tokens])
        else:
            self.layer = nn.Linear(weight.shape[1], len(tokens), bias=bias is not None, device="meta")
            self.layer.weight = nn.Parameter(weight[tokens], requires_grad=False)
            if bias is not None:
                self.layer.bias = nn.Parameter(bias[tokens], requires_grad=False)

    def _quantized(self) -> Tensor | QuantizedMatrix:
        if self._quantization is None or isinstance(self._stored, QuantizedMatrix):
            return self._stored
        return quantized(self._stored, self._quantization, dtype=torch.bfloat16)

    def follow_weight(self) -> None:
        """Copies the rows anew after writes to the head's weight; raises `UnsuitableError` if it is not finite."""
        if isinstance(self._stored, Tensor) and weight_version(self._stored) != self._version:
            self._version, self._weight = weight_version(self._stored), self._quantized()
            self.exchange(torch.arange(len(self.tokens), device=self.tokens.device), self.tokens.clone())

    def exchange(self, places: Tensor, tokens: Tensor) -> None:
        """Replaces the rows at `places` by those of other tokens, (K,) int64 each. A token must not get two rows."""
        layer: Any = self.layer
        if isinstance(self._weight, QuantizedMatrix):
            layer.matrix.put(places, self._weight, tokens)
        else:
            layer.weight.data[places] = self._weight[tokens]
        if self._bias is not None:
            layer.bias.data[places] = self._bias[tokens]
        self.tokens[places] = tokens

    def within(self, weights: LeanWeights) -> LeanWeights:
        """Returns the weights of a model with these rows in place of its LM head."""
        return replace(weights, head=self.layer, head_tokens=self.tokens)
