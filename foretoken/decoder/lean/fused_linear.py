"""Linear layers that are one GEMM: joined side by side, and packed for the CPU's kernels where that pays.

oneDNN's packed order is worth two to four times torch's plain GEMM at the widths of decoding (`benchmarks/NOTES.md`).
The original weights stay usable: other decoders of the same model, and the model itself, run on them.

- Packed weights (float32 and bfloat16 on CPUs) are in memory beside the originals, for as long as a decoder uses them.
- Joined weights take the place of the originals, which become views of them, where the caller says that they may move;
  else they are a copy.
- Weights that already lie one after another, as an architecture's fused projections do, are joined where they are.
- A layer that is neither joined nor packed is the original's weight.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretoken.core.backend import runs_cpu_kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.decoder.blocks import Matrix

_PACKED_FOR_ROWS = 16  # width that oneDNN chooses its blocking for: a verify pass


class FusedLinear(nn.Module):
    """Several linear layers of the same input as one."""

    def __init__(self, parts: Sequence[Matrix], *, moves_weights: bool = False) -> None:
        """Joins layers.

        Args:
            parts: In the order of the outputs.
            moves_weights: Whether the parts' weights may become views of the joined one; see the module.
        """
        super().__init__()
        weights = [part.weight.detach() for part in parts]
        is_joined = _are_adjacent(weights)
        weight = _joined(weights) if is_joined else torch.cat(weights)
        bias = None
        if any(part.bias is not None for part in parts):
            bias = torch.cat([w.new_zeros(len(w)) if p.bias is None else p.bias.detach().to(w.dtype)
                              for p, w in zip(parts, weights, strict=True)])  # fmt: skip
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        self._is_packed = is_packable(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS) if self._is_packed else weight
        self._bias = bias
        if moves_weights and not is_joined and not self._is_packed:
            for part, rows in zip(parts, weight.split([len(each) for each in weights]), strict=True):
                part.weight.data = rows
        self._originals = [part.weight.detach() for part in parts]  # `_key` is theirs alone as long as they live

    def forward(self, x: Tensor) -> Tensor:
        """x: (…, in_features); gives (…, out_features)."""
        if self._is_packed:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        else:
            result = functional.linear(x, self._weight, self._bias)
        return result


# Decoders of one model share what they fuse; it goes with the last of them.
_fused: WeakValueDictionary[tuple[tuple[int, ...], ...], FusedLinear] = WeakValueDictionary()


def is_packable(weight: Tensor) -> bool:
    """Whether oneDNN has a packed GEMM for a weight here."""
    is_known = weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return runs_cpu_kernels(weight.device) and torch.backends.mkldnn.is_available() and is_known


def fuse(*parts: Matrix, moves_weights: bool = False) -> FusedLinear:
    """Fuses layers, or finds them fused already.

    Args:
        parts: Layers of the same input, in the order of the outputs.
        moves_weights: See `FusedLinear`.
    """
    whole = _fused.get(_key(parts))
    if whole is None:
        whole = FusedLinear(parts, moves_weights=moves_weights)
        _fused[_key(parts)] = whole  # of where the weights lie now
    return whole


def _key(parts: Sequence[Matrix]) -> tuple[tuple[int, ...], ...]:
    """Tells layers from all others whose weights and biases are in memory, and from themselves before a change."""
    return tuple(
        (t.untyped_storage()._cdata, 0 if t.is_inference() else t._version, t.storage_offset(), *t.shape, *t.stride())
        for part in parts
        for t in (part.weight, *(() if part.bias is None else (part.bias,)))
    )


def _are_adjacent(weights: Sequence[Tensor]) -> bool:
    """Whether matrices lie one after another in one storage, row by row."""
    is_one = len({w.untyped_storage()._cdata for w in weights}) == 1 and all(w.is_contiguous() for w in weights)
    return len(weights) == 1 or (
        is_one and all(a.storage_offset() + a.numel() == b.storage_offset() for a, b in pairwise(weights))
    )


def _joined(weights: Sequence[Tensor]) -> Tensor:
    """Adjacent matrices as one, in place."""
    first = weights[0]
    if len(weights) == 1:
        return first
    return first.as_strided((sum(map(len, weights)), first.shape[1]), (first.shape[1], 1), first.storage_offset())
