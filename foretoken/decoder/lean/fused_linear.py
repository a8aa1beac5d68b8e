"""Linear layers that are one matrix product: joined side by side, and packed for the CPU's kernels where that pays.

oneDNN's packed order is worth two to four times torch's plain product at the widths of decoding
(`benchmarks/NOTES.md`).
The original layers stay usable: other decoders of the same model, and the model itself, run on them.

- Packed weights (float32 and bfloat16 on CPUs) are in memory beside the originals, for as long as a decoder uses them.
- Joined weights take the place of the originals, which become views of them, in a model that we loaded; beside a
  caller's own model they are a copy.
- A layer that is neither joined nor packed is the original's weight.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretoken.core.backend import runs_cpu_kernels

_PACKED_FOR_ROWS = 16  # width that oneDNN chooses its blocking for: a verify pass


class FusedLinear(nn.Module):
    """Several linear layers of the same input as one."""

    def __init__(self, parts: list[nn.Linear], *, moves_weights: bool = False) -> None:
        """Joins layers.

        Args:
            parts: In the order of the outputs.
            moves_weights: Whether the parts' weights may become views of the joined one; see the module.
        """
        super().__init__()
        weights = [part.weight.detach() for part in parts]
        weight = weights[0] if len(parts) == 1 else torch.cat(weights)
        biases = [part.bias for part in parts]
        bias = None
        if any(b is not None for b in biases):
            bias = torch.cat([p.weight.new_zeros(p.out_features) if p.bias is None else p.bias.detach() for p in parts])
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        self._is_packed = is_packable(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS) if self._is_packed else weight
        self._bias = bias
        if moves_weights and len(parts) > 1 and not self._is_packed:
            for part, rows in zip(parts, weight.split([part.out_features for part in parts]), strict=True):
                part.weight.data = rows

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, in_features); gives (…, out_features)."""
        if self._is_packed:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        else:
            result = functional.linear(x, self._weight, self._bias)
        return result


# Decoders of one model share what they fuse; it goes with the last of them.
_fused: WeakKeyDictionary[nn.Module, WeakValueDictionary[tuple[str, ...], FusedLinear]] = WeakKeyDictionary()


def is_packable(weight: Tensor) -> bool:
    """Whether oneDNN has a packed product for a weight here."""
    is_known = weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return runs_cpu_kernels(weight.device) and torch.backends.mkldnn.is_available() and is_known


def fuse(owner: Any, *names: str, moves_weights: bool = False) -> FusedLinear:
    """Fuses layers of a module, or finds them fused already.

    Args:
        owner: The module that holds them; its layers stay what they are.
        names: Their attribute names, in the order of the outputs.
        moves_weights: See `FusedLinear`.
    """
    known = _fused.setdefault(owner, WeakValueDictionary())
    whole = known.get(names)
    if whole is None:
        whole = known[names] = FusedLinear([getattr(owner, name) for name in names], moves_weights=moves_weights)
    return whole
