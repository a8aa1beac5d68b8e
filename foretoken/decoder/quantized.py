"""Matrices in 4 or 8 bits: how weights are rounded and stored, and a linear layer that keeps no other copy.

Letters: N outputs and K inputs of a matrix, G groups of weights that share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretoken.core.checks import require
from foretoken.core.errors import ModelError
from foretoken.decoder.base import UnsuitableError

if TYPE_CHECKING:
    from collections.abc import Iterator

Quantization = Literal["int4", "int8"]

_GREATEST = 127  # of int8; -128 is left out, so that the range is symmetric
_ZERO = 8  # a number of 4 bits stands for itself less this
_TOGETHER = 64  # numbers of 4 bits that are stored together, see `kernels/quantized.h`
_GROUP = 64  # weights of int4 that share a scale; a choice: 4.25 bits a weight
# Shares of the scale at which a group's greatest weight ends the range; the one with the least squared error is taken.
# A choice: smaller ones cut the greatest weights, and all others are rounded more finely.
_SHARES = (1.0, 0.93, 0.86, 0.79)
_AT_ONCE = 1 << 20  # weights in float32 during rounding, 4 MiB; a choice: they stay in the processor's caches
_DENSE_AT_ONCE = 1 << 24  # weights that `QuantizedLinear` has dense at once; a choice: some 200 MiB with temporaries


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedMatrix:
    """A matrix (N, K): row n is `row_scales[n] * (numbers[n] * group_scales[n, g] + group_offsets[n, g])`.

    Attributes:
        numbers: (N, K) int8; or (N, 32 * ceil(K / 64)) uint8 with two numbers of 4 bits each: byte i of 32 has number i
            of 64 in its lower half, and number 32 + i in the upper one; they stand for themselves less 8.
        num_inputs: K.
        dtype: Of the layer's inputs and outputs, into which the kernels decode: float32 or bfloat16.
        row_scales: (N,) float32, or None for 1.
        group: Weights side by side that share a scale, a power of 2 from 32 on; 0 without groups.
        group_scales: (N, G) float16 or float32, or None for 1.
        group_offsets: As `group_scales`, or None for 0.
    """

    numbers: Tensor
    num_inputs: int
    dtype: torch.dtype
    row_scales: Tensor | None = None
    group: int = 0
    group_scales: Tensor | None = None
    group_offsets: Tensor | None = None

    def __post_init__(self) -> None:
        rows, width = self.numbers.shape
        groups = -(-self.num_inputs // self.group) if self.group else 0
        is_packed = self.numbers.dtype == torch.uint8
        expected = _TOGETHER // 2 * -(-self.num_inputs // _TOGETHER) if is_packed else self.num_inputs
        scales = [each for each in (self.group_scales, self.group_offsets) if each is not None]
        require(self.numbers.dtype in (torch.int8, torch.uint8) and width == expected, "numbers have another shape")
        require(self.dtype in (torch.float32, torch.bfloat16), "the dtype is not float32 or bfloat16")
        require(not self.group or (self.group >= 32 and self.group & (self.group - 1) == 0), "a group is too short")
        require((self.group_scales is not None) == bool(self.group), "groups have scales, and only groups")
        require(bool(self.group) or not is_packed, "numbers of 4 bits come in groups")
        require(
            all(each.shape == (rows, groups) and each.dtype == scales[0].dtype for each in scales)
            and (not scales or scales[0].dtype in (torch.float16, torch.float32)),
            "scales and offsets of groups have another shape or dtype",
        )
        require(self.row_scales is None or self.row_scales.shape == (rows,), "there is not one scale a row")
        require(all(each.is_contiguous() for each in self.tensors()), "a tensor is not contiguous")

    @property
    def bits(self) -> int:
        """Bits of a number."""
        return 8 if self.numbers.dtype == torch.int8 else 4

    @property
    def shape(self) -> torch.Size:
        """(N, K)."""
        return torch.Size((len(self.numbers), self.num_inputs))

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.numbers.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.nbytes for each in self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """Yields every tensor."""
        for each in (self.numbers, self.row_scales, self.group_scales, self.group_offsets):
            if each is not None:
                yield each

    def rows(self, start: int, end: int) -> QuantizedMatrix:
        """Returns the rows start..end in place."""
        row_scales, scales, offsets = (
            None if each is None else each[start:end]
            for each in (self.row_scales, self.group_scales, self.group_offsets)
        )
        return replace(
            self, numbers=self.numbers[start:end], row_scales=row_scales, group_scales=scales, group_offsets=offsets
        )

    def decoded(self) -> Tensor:
        """Returns the weights that the kernels multiply by, (N, K) in `dtype`, without `row_scales`."""
        numbers = self.numbers
        if self.bits == 4:
            pairs = numbers.unflatten(1, (-1, _TOGETHER // 2))
            numbers = torch.stack([pairs & 15, pairs >> 4], 2).flatten(1)[:, : self.num_inputs].to(torch.int8) - _ZERO
        if self.group_scales is None:
            return numbers.to(self.dtype)
        scales = self._spread(self.group_scales)
        if self.group_offsets is None:
            return (numbers * scales).to(self.dtype)
        # The product is exact in float64. The kernels' fused addition rounds once, this one again to float32: they may
        # differ in one of 2**29 sums.
        return (numbers * scales.double() + self._spread(self.group_offsets)).float().to(self.dtype)

    def _spread(self, each: Tensor) -> Tensor:
        return each.float().repeat_interleave(self.group, 1)[:, : self.num_inputs]

    def dequantized(self) -> Tensor:
        """Returns the weights that the matrix stands for, (N, K) in `dtype`; scaling rows rounds them once more."""
        decoded = self.decoded()
        return decoded if self.row_scales is None else (decoded.float() * self.row_scales.unsqueeze(1)).to(self.dtype)


def bytes_per_weight(quantization: Quantization) -> float:
    """Returns the bytes of a rounded weight with its share of the scales."""
    return 1.0 if quantization == "int8" else 0.5 + 2.0 / _GROUP


def quantized(weight: Tensor, quantization: Quantization, *, dtype: torch.dtype | None = None) -> QuantizedMatrix:
    """Rounds a weight (N, K) of any real dtype on a CPU.

    Args:
        quantization: "int8" rounds every row to multiples of 1 / 127 of its largest absolute value, ties to even.
            "int4" rounds groups of 64 weights to 16 multiples of a scale, of several scales the one with the least
            squared error.
        dtype: See `QuantizedMatrix`; None for bfloat16.

    Raises:
        UnsuitableError: For NaN and infinity.
    """
    weight, dtype = weight.detach(), dtype or torch.bfloat16
    round_part = _rounded_to_int8 if quantization == "int8" else _rounded_to_int4
    numbers, scales = zip(*map(round_part, weight.split(max(1, _AT_ONCE // weight.shape[1]))), strict=True)
    joined = torch.cat(scales)
    if not joined.isfinite().all():
        raise UnsuitableError(
            f"a weight {tuple(weight.shape)} {weight.dtype} holds NaN or infinite values, which {quantization} has not."
        )
    rows, cols = torch.cat(numbers), weight.shape[1]
    if quantization == "int8":
        return QuantizedMatrix(numbers=rows, num_inputs=cols, dtype=dtype, row_scales=joined)
    stored = joined.half() if _fits_half(joined) else joined
    return QuantizedMatrix(numbers=rows, num_inputs=cols, dtype=dtype, group=_GROUP, group_scales=stored)


def _rounded_to_int8(part: Tensor) -> tuple[Tensor, Tensor]:
    wide = part.float()
    scale = wide.abs().amax(1).div_(_GREATEST)
    divisor = torch.where(scale > 0, scale, 1.0).unsqueeze(1)
    return (wide / divisor).round_().clamp_(-_GREATEST, _GREATEST).to(torch.int8), scale


def _rounded_to_int4(part: Tensor) -> tuple[Tensor, Tensor]:
    groups = functional.pad(part.float(), (0, -part.shape[1] % _TOGETHER)).unflatten(1, (-1, _GROUP))
    low, high = groups.aminmax(dim=2)
    # The greatest weight is at the end of the range with one number more, whatever its sign.
    greatest = torch.where(high > -low, high, low).div_(-_ZERO)
    best, error = greatest, groups.new_full(greatest.shape, torch.inf)
    for share in _SHARES:
        scale = _as_stored(greatest * share)
        rest = _numbers(groups, scale).mul_(scale.unsqueeze(2)).sub_(groups)
        own = rest.square_().sum(2)
        best, error = torch.where(own < error, scale, best), torch.minimum(own, error)
    numbers = _numbers(groups, best).add_(_ZERO).to(torch.uint8).flatten(1).unflatten(1, (-1, 2, _TOGETHER // 2))
    return (numbers[:, :, 0] | numbers[:, :, 1] << 4).flatten(1), best


def _numbers(groups: Tensor, scale: Tensor) -> Tensor:
    divisor = torch.where(scale == 0, 1.0, scale).unsqueeze(2)
    return (groups / divisor).round_().clamp_(-_ZERO, _ZERO - 1)


def _as_stored(scale: Tensor) -> Tensor:
    """Rounds scales to half precision if that is a small change, so that errors are those of the stored ones."""
    return scale.half().float() if _fits_half(scale) else scale


def _fits_half(scale: Tensor) -> bool:
    sizes = scale.abs()
    return bool(((sizes == 0) | ((sizes >= 2.0**-14) & (sizes <= torch.finfo(torch.float16).max))).all())


class QuantizedLinear(nn.Module):
    """A linear layer that keeps its weight in 4 or 8 bits; torch multiplies by dequantized rows that it then frees.

    The native kernels read `matrix` in place.
    """

    def __init__(self, matrix: QuantizedMatrix, bias: Tensor | None = None) -> None:
        """Takes the tensors in place; bias: (N,), or None."""
        super().__init__()
        self.matrix = matrix
        self.out_features, self.in_features = matrix.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        for index, each in enumerate(matrix.tensors()):  # so that their bytes and devices are seen
            self.register_buffer(f"part_{index}", each, persistent=False)

    @property
    def weight(self) -> Tensor:
        """A dequantized copy of the weight, (N, K)."""
        return self.matrix.dequantized()

    def forward(self, x: Tensor) -> Tensor:
        """Turns (..., K) into (..., N) of the same dtype."""
        step = max(1, _DENSE_AT_ONCE // self.in_features)
        starts = range(0, self.out_features, step)
        rows = (self.matrix.rows(start, min(start + step, self.out_features)) for start in starts)
        parts = [functional.linear(x, each.dequantized().to(x.dtype)) for each in rows]
        y = torch.cat(parts, -1)
        return y if self.bias is None else y + self.bias.to(x.dtype)

    def _save_to_state_dict(self, _: Any, prefix: str, __: bool) -> None:
        raise ModelError(
            f"'{prefix.rstrip('.')}' keeps its weight in {self.matrix.bits} bits, which cannot be saved. Save the "
            "model before it is rounded."
        )
