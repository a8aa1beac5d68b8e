"""Pads tensors so that a network of larger sizes computes what the smaller one did, bit for bit.

All sizes (hidden size, heads, units of the MLP) grow by one factor, a power of four. The numbers of the small network
lie first along each axis; what is new is dead: nothing that it computes is ever added to the live part.

An RMS norm over a vector and zeros beside it divides by a root mean square that is smaller by the root of the factor, a
power of two, once epsilon is divided by the factor. Its weight is divided by that root, which is exact in floating
point, and so is everything that follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from foretoken.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Fill = Literal["zeros", "random"]
_DEVIATION = 0.02  # of random weights, as models are initialised


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one tensor grows.

    Attributes:
        axes: Those that grow, counted from the last: -1 for columns, -2 for rows.
        is_written: Whether its output is added to the residual stream or goes into a norm: all that is new is zero
            then, whatever the filling.
        is_scaled_down: Whether its numbers are divided by the root of the factor: weights of norms over what grows, and
            what takes back the scale that such a norm had before.
        parts: How many vectors of the hidden size stand side by side in the last axis, each of which grows.
        row_parts: Likewise one below the other in the axis before it, as the gates of an LSTM.
    """

    axes: tuple[int, ...] = ()
    is_written: bool = False
    is_scaled_down: bool = False
    parts: int = 1
    row_parts: int = 1


@dataclass(frozen=True, slots=True)
class Padding:
    """Pads by one factor.

    Attributes:
        factor: A power of four.
        fill: What dead weights are: "zeros", or "random" where what they compute meets a zero further on.
        generator: Of the random weights; padded tensors lie on its device.
    """

    factor: int
    fill: Fill
    generator: torch.Generator

    @property
    def root(self) -> int:
        """The square root of the factor, a power of two."""
        return math.isqrt(self.factor)

    def __call__(self, tensor: Tensor, rule: Rule) -> Tensor:
        """The padded tensor, in memory of its own.

        Args:
            tensor: Of any shape, on any device.
            rule: Which of its axes grow.
        """
        live = tensor / self.root if rule.is_scaled_down else tensor
        if not rule.axes:
            return live.to(self.generator.device, copy=True)
        *rest, columns = live.shape
        if rest:
            rest = [*rest[:-1], rule.row_parts, rest[-1] // rule.row_parts]
        live = live.reshape(*rest, rule.parts, columns // rule.parts)
        axes = {2 * axis + 1 for axis in rule.axes}  # parts stand before each of the last two axes
        shape = [size * self.factor if axis - live.dim() in axes else size for axis, size in enumerate(live.shape)]
        padded = torch.zeros(shape, dtype=tensor.dtype, device=self.generator.device)
        if self.fill == "random" and not rule.is_written and tensor.is_floating_point():
            padded.normal_(std=_DEVIATION, generator=self.generator)
        padded[tuple(slice(size) for size in live.shape)] = live
        padded = padded.flatten(-2)
        return padded.flatten(-3, -2) if tensor.dim() > 1 else padded


def growth(small: int, large: int) -> int | None:
    """By what a size grows; None where that is no power of four."""
    factor, rest = divmod(large, small)
    is_power = factor > 0 and factor & (factor - 1) == 0 and factor.bit_length() % 2 == 1
    return factor if is_power and not rest else None


def exactly(tensor: Tensor, dtype: torch.dtype | None, what: str) -> Tensor:
    """The same numbers in another dtype; None keeps theirs. Integers stay as they are.

    Args:
        tensor: Of any shape.
        dtype: Of floating point.
        what: Names the model or head, for the message.

    Raises:
        ConfigError: When rounding would change them.
    """
    if dtype is None or not tensor.is_floating_point():
        return tensor
    converted = tensor.to(dtype)
    if not torch.equal(converted.to(tensor.dtype), tensor):
        raise ConfigError(
            f"{str(dtype).removeprefix('torch.')} cannot hold the weights of {what} exactly, which are "
            f"{str(tensor.dtype).removeprefix('torch.')}. Expected a dtype that can. Leave it out to keep theirs."
        )
    return converted
