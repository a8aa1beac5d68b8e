"""Products with few rows on the CPU by the native kernels: torch takes several times as long for two or four."""

from __future__ import annotations

from ctypes import byref, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.target.decoder import UnsuitableError
from foretoken.target.lean.build import native_library
from foretoken.target.lean.native import Matrix

if TYPE_CHECKING:
    from torch import nn


class NativeLinear:
    """A linear layer for inference, on the weights where they are."""

    def __init__(self, layer: nn.Linear) -> None:
        """Takes a layer.

        Args:
            layer: On a CPU, with a contiguous weight in float32 or bfloat16.

        Raises:
            UnsuitableError: When it is anything else, or the kernels cannot be compiled here.
        """
        weight = layer.weight.detach()
        if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
            raise UnsuitableError(f"native products take float32 and bfloat16 on CPUs, not {weight.dtype}.")
        if not weight.is_contiguous():
            raise UnsuitableError("native products take rows that lie one after another.")
        self._weight = weight
        self._bias = None if layer.bias is None else layer.bias.detach().float().contiguous()
        self._matrix = Matrix(
            weight=weight.data_ptr(), bias=None if self._bias is None else self._bias.data_ptr(),
            rows=weight.shape[0], cols=weight.shape[1],
        )  # fmt: skip
        self._multiply: Any = native_library().foretoken_linear

    def __call__(self, x: Tensor) -> Tensor:
        """(..., K) of any dtype to (..., N) float32."""
        rows = x.reshape(-1, x.shape[-1]).to(torch.float32).contiguous()
        out = torch.empty(rows.shape[0], self._weight.shape[0])
        if len(rows):
            self._multiply(
                byref(self._matrix), c_int64(self._weight.dtype == torch.bfloat16), c_void_p(rows.data_ptr()),
                c_int64(len(rows)), c_void_p(out.data_ptr()), c_int64(torch.get_num_threads()),
            )  # fmt: skip
        return out.view(*x.shape[:-1], out.shape[1])


def fast_linear(layer: Any) -> Any:
    """A native layer where it can be one, else the layer itself."""
    if not isinstance(layer, torch.nn.Linear) or type(layer).forward is not torch.nn.Linear.forward:
        return layer
    try:
        return NativeLinear(layer)
    except UnsuitableError:
        return layer
