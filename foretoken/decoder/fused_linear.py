"""Linear layers for torch's GEMM: those of one input as one matrix, packed by oneDNN on CPUs."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretoken.core.backend import has_triton_kernels, runs_cpu_kernels
from foretoken.decoder.blocks import Matrix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.decoder.blocks import LeanWeights

_PACKED_FOR_ROWS = 16  # the width of a usual verify pass, for which oneDNN chooses its blocking; a choice


class FusedLinear(nn.Module):
    """Several linear layers of the same input as one; adjacent weights are read in place, others are copied."""

    def __init__(self, parts: Sequence[Matrix], *, moves_weights: bool = False) -> None:
        """Joins layers in order; with `moves_weights` the parts may become views of the joined weight."""
        super().__init__()
        weights = [part.dense().detach() for part in parts]
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
        self._is_streamed = _is_streamed(weight, bias)
        if moves_weights and not is_joined and not self._is_packed:
            for part, rows in zip(parts, weight.split([len(each) for each in weights]), strict=True):
                part.dense().data = rows
        self._originals = [part.dense().detach() for part in parts]  # keeps the storages in `_key` alive

    def forward(self, x: Tensor) -> Tensor:
        """Turns (…, in_features) into (…, out_features)."""
        if self._is_packed:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return result
        return self.gemm(x, x.dtype)

    def gemm(self, x: Tensor, dtype: torch.dtype, *, in_parts: bool = False) -> Tensor:
        """Turns (M, in_features) into (M, out_features) of a dtype; few rows by the GEMM of `triton_kernels`.

        in_parts: Whether the caller can sum over (P, M, out_features) float32.
        """
        if self._is_streamed and x.dim() == 2 and x.is_contiguous():
            from foretoken.decoder.triton_kernels import MOST_ROWS, small_batch_gemm

            if len(x) <= MOST_ROWS:
                return small_batch_gemm(x, self._weight, dtype, in_parts=in_parts)
        return functional.linear(x, self._weight, self._bias).to(dtype)


# Decoders of one model share fused layers, which live as long as the last decoder.
_fused: WeakValueDictionary[tuple[tuple[int, ...], ...], FusedLinear] = WeakValueDictionary()


def is_packable(weight: Tensor) -> bool:
    """Decides whether oneDNN has a packed GEMM for a weight here."""
    is_known = weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return runs_cpu_kernels(weight.device) and torch.backends.mkldnn.is_available() and is_known


def _is_streamed(weight: Tensor, bias: Tensor | None) -> bool:
    if not has_triton_kernels(weight.device):
        return False
    from foretoken.decoder.triton_kernels import fits_gemm

    return fits_gemm(weight, bias)


def fuse(*parts: Matrix, moves_weights: bool = False) -> FusedLinear:
    """Returns the fused layers of one input, in the order of the outputs; reuses earlier ones. See `FusedLinear`."""
    whole = _fused.get(_key(parts))
    if whole is None:
        whole = FusedLinear(parts, moves_weights=moves_weights)
        _fused[_key(parts)] = whole  # the key after the weights moved
    return whole


def _key(parts: Sequence[Matrix]) -> tuple[tuple[int, ...], ...]:
    return tuple(
        (t.untyped_storage()._cdata, 0 if t.is_inference() else t._version, t.storage_offset(), *t.shape, *t.stride())
        for part in parts
        for t in (part.dense(), *(() if part.bias is None else (part.bias,)))
    )


def _are_adjacent(weights: Sequence[Tensor]) -> bool:
    is_one = len({w.untyped_storage()._cdata for w in weights}) == 1 and all(w.is_contiguous() for w in weights)
    return len(weights) == 1 or (
        is_one and all(a.storage_offset() + a.numel() == b.storage_offset() for a, b in pairwise(weights))
    )


def _joined(weights: Sequence[Tensor]) -> Tensor:
    first = weights[0]
    if len(weights) == 1:
        return first
    return first.as_strided((sum(map(len, weights)), first.shape[1]), (first.shape[1], 1), first.storage_offset())


def lm_head(weights: LeanWeights) -> Callable[[Tensor], Tensor]:
    """Returns the LM head, packed if possible; a tied head may be as large as the rest of a small model."""
    head = weights.head
    if type(head) is not nn.Linear or weights.head_tokens is not None:  # rows may be exchanged in place
        return head
    if _is_streamed(head.weight, head.bias):
        return partial(fuse(Matrix(weight=head.weight, bias=head.bias)).gemm, dtype=torch.float32)
    is_tied = head.weight.data_ptr() == Matrix(weight=weights.embedding).dense().data_ptr()
    return fuse(Matrix(weight=head.weight, bias=head.bias)) if is_packable(head.weight) and not is_tied else head
