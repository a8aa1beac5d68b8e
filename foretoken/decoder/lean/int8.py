"""Weights in int8, for drafters alone: each row in whole numbers of -127..127, and a scale in float32."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from foretoken.decoder.base import UnsuitableError

Quantization = Literal["int8"]

_GREATEST = 127
_AT_ONCE = 1 << 24  # weights that are held in float32 while they are rounded: 64 MiB


class Int8Weight(NamedTuple):
    """A matrix (N, K) whose row n is `scales[n] * numbers[n]`: K + 4 bytes a row.

    Attributes:
        numbers: (N, K) int8, contiguous.
        scales: (N,) float32, 0 where a row is zero.
    """

    numbers: Tensor
    scales: Tensor


def int8_weight(weight: Tensor) -> Int8Weight:
    """Rounds every row to multiples of 1 / 127 of its greatest absolute value, to even where two are as near.

    Args:
        weight: (N, K) of any real dtype, on a CPU, N and K at least 1.

    Raises:
        UnsuitableError: When a weight is NaN or infinite.
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
