"""Small-batch GEMM on the CPU by the native kernels: torch takes several times as long for two or four rows."""

from __future__ import annotations

from ctypes import addressof, c_int64, c_void_p
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from foretoken.core.backend import runs_cpu_kernels
from foretoken.core.errors import PassError
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.library import MatrixStruct, kernel_threads, native_library
from foretoken.decoder.memory import HeldMemory, check_memory, has_memory

Quantization = Literal["int8"]

_GREATEST = 127  # of int8; -128 is left out, so that the range is symmetric
_AT_ONCE = 1 << 24  # weights in float32 during rounding, 64 MiB; a choice: more memory for fewer calls


class Int8Weight(NamedTuple):
    """An int8 matrix (N, K) with rows `scales[n] * numbers[n]` and float32 scales (N,): K + 4 bytes a row."""

    numbers: Tensor
    scales: Tensor


def int8_weight(weight: Tensor) -> Int8Weight:
    """Rounds every row of (N, K) to multiples of 1 / 127 of its largest absolute value, ties to even.

    The weight has any real dtype and lies on a CPU. Raises `UnsuitableError` for NaN and infinity.
    """
    weight = weight.detach()
    numbers = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    num_rows = max(1, _AT_ONCE // weight.shape[1])
    for part, rounded, scale in zip(*(each.split(num_rows) for each in (weight, numbers, scales)), strict=True):
        wide = part.float()
        torch.div(wide.abs().amax(1), _GREATEST, out=scale)
        if not scale.isfinite().all():
            raise UnsuitableError(
                f"a weight {tuple(weight.shape)} {weight.dtype} holds NaN or infinite values, which int8 has not."
            )
        divisor = torch.where(scale > 0, scale, 1.0).unsqueeze(1)
        rounded.copy_((wide / divisor).round_().clamp_(-_GREATEST, _GREATEST))
    return Int8Weight(numbers, scales)


_ALONE = 1 << 15  # multiplications; a choice: fewer end before a second thread has begun


class NativeLinear(nn.Module):
    """A linear layer for inference, on the weights in place or on an int8 copy."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, quantization: Quantization | None = None) -> None:
        """Keeps the weight in place, or an int8 copy of the weight.

        Args:
            weight: (N, K), on a CPU, contiguous, in float32 or bfloat16; any floating dtype with `quantization`.
            bias: (N,), or None.
            quantization: "int8" for an int8 copy, one byte a weight; the layer then does not keep the weight.

        Raises:
            UnsuitableError: If the weight is anything else, or not finite if it is quantised, or the kernels cannot be
                compiled.
        """
        super().__init__()
        is_read = quantization is None  # otherwise the kernels read the copy
        is_known = weight.dtype in (torch.float32, torch.bfloat16) if is_read else weight.is_floating_point()
        if not runs_cpu_kernels(weight.device) or not is_known:
            raise UnsuitableError(f"native layers take float32 and bfloat16 on CPUs, not {weight.dtype}.")
        if weight.dim() != 2 or not weight.numel() or not weight.is_contiguous():
            raise UnsuitableError("native layers take a matrix whose rows lie one after another.")
        if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_cpu):
            raise UnsuitableError(f"a bias {tuple(bias.shape)} on {bias.device} does not fit {tuple(weight.shape)}.")
        self._weight = weight.detach()
        self._scales: Tensor | None = None
        self._bias = None if bias is None else bias.detach().float().contiguous()
        for part in self.tensors():
            if type(part) is not Tensor or not has_memory(part):
                raise UnsuitableError(f"native layers take plain tensors with memory, not a {type(part).__name__}.")
        if quantization is not None:
            self._weight, self._scales = int8_weight(self._weight)
            self._copied_version = _version(weight)
        self._rows, self._cols = weight.shape
        self._matrix, self._memory = self._described()
        self._is_bfloat16 = weight.dtype == torch.bfloat16
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
        """Returns the layer for the kernels, valid until its tensors move, and whether it is bfloat16."""
        check_memory(self.tensors())
        return self._described()[0], self._is_bfloat16

    def requantize(self, weight: Tensor) -> None:
        """Renews an int8 copy in place after writes to its weight (N, K); raises `UnsuitableError` if not finite."""
        if self._scales is not None and _version(weight) != self._copied_version:
            for kept, new in zip((self._weight, self._scales), int8_weight(weight), strict=True):
                kept.copy_(new)
            self._copied_version = _version(weight)

    def tensors(self) -> list[Tensor]:
        """Returns the tensors that the kernels read."""
        return [part for part in (self._weight, self._bias, self._scales) if part is not None]

    def _described(self) -> tuple[MatrixStruct, HeldMemory]:
        bias, scales = (None if part is None else part.data_ptr() for part in (self._bias, self._scales))
        matrix = MatrixStruct(
            weight=self._weight.data_ptr(), bias=bias, rows=self._rows, cols=self._cols, scales=scales
        )
        return matrix, HeldMemory(self.tensors())


def _version(weight: Tensor) -> int:
    return 0 if weight.is_inference() else weight._version


def fast_linear(layer: nn.Module, *, quantization: Quantization | None = None, compacts: bool = True) -> nn.Module:
    """Returns a native layer if possible, else the layer itself.

    Args:
        quantization: "int8" for an int8 copy, which has its own memory.
        compacts: Whether a float32 weight becomes bfloat16 if that is exact: half the bytes to read, but inputs are
            rounded to bfloat16. Otherwise the weight is read in place.

    Raises:
        UnsuitableError: If a linear layer is to be quantised and cannot be a native one.
    """
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
