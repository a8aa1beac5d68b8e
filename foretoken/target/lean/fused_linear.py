"""Linear layers that are one matrix product: joined side by side, and packed for the CPU's kernels where that pays.

A fused layer takes the place of the originals inside the transformers module, which goes on working: no weight exists
twice. oneDNN's packed order is worth two to four times torch's plain product at the widths of decoding
(`benchmarks/NOTES.md`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_PACKED_FOR_ROWS = 16  # width that oneDNN chooses its blocking for: a verify pass


class FusedLinear(nn.Module):
    """Several linear layers of the same input as one."""

    def __init__(self, parts: list[nn.Linear]) -> None:
        super().__init__()
        weight = torch.cat([part.weight.detach() for part in parts])
        biases = [part.bias for part in parts]
        bias = None
        if any(b is not None for b in biases):
            bias = torch.cat([p.weight.new_zeros(p.out_features) if p.bias is None else p.bias.detach() for p in parts])
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        self._is_packed = is_packable(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS) if self._is_packed else weight
        self._bias = bias

    def part(self, start: int, end: int) -> tuple[Tensor, Tensor | None]:
        """Weight (end - start, in_features) and bias of some outputs, in torch's order."""
        weight = self._weight.to_dense() if self._is_packed else self._weight
        return weight[start:end], None if self._bias is None else self._bias[start:end]

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, in_features); gives (…, out_features)."""
        if self._is_packed:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        else:
            result = functional.linear(x, self._weight, self._bias)
        return result


class FusedPart(nn.Module):
    """One of the layers that were fused, for whoever still calls it by its old name."""

    is_fused_part = True

    def __init__(self, whole: FusedLinear, start: int, end: int, *, has_bias: bool) -> None:
        super().__init__()
        self.whole, self._start, self._end, self._has_bias = whole, start, end, has_bias
        self.in_features, self.out_features = whole.in_features, end - start

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, in_features); gives (…, out_features)."""
        result: Tensor = self.whole(x)
        return result[..., self._start : self._end]

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:  # noqa: ARG002
        """Saves what the original would: a model can be written to disk whatever runner it runs on."""
        weight, bias = self.whole.part(self._start, self._end)
        destination[f"{prefix}weight"] = weight
        if bias is not None and self._has_bias:
            destination[f"{prefix}bias"] = bias


def is_packable(weight: Tensor) -> bool:
    """Whether oneDNN has a packed product for a weight here."""
    is_known = weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return weight.device.type == "cpu" and torch.backends.mkldnn.is_available() and is_known


def fuse(owner: Any, *names: str) -> FusedLinear:
    """Fuses layers of a module in place, or finds them fused already.

    Args:
        owner: The module that holds them.
        names: Their attribute names, in the order of the outputs.
    """
    parts = [getattr(owner, name) for name in names]
    if isinstance(parts[0], FusedPart):
        whole: FusedLinear = parts[0].whole
        return whole
    whole = FusedLinear(parts)
    end = 0
    for name, part in zip(names, parts, strict=True):
        end += part.out_features
        setattr(owner, name, FusedPart(whole, end - part.out_features, end, has_bias=part.bias is not None))
    return whole
