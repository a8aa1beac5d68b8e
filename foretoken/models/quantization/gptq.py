"""Matrices of GPTQ and AWQ checkpoints: integers in words of 32 bits, the inputs of a matrix along the rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from foretoken.core.checks import shown, validated
from foretoken.core.errors import ModelError
from foretoken.models.quantization.stored import Layout, matrix_of, order_of_groups, unpacked_words

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from foretoken.decoder.quantized import QuantizedMatrix

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where a word of AWQ has the numbers of eight outputs side by side


class _Gptq(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    bits: int
    group_size: int = Field(default=-1, ge=-1, le=1 << 24)
    desc_act: bool | None = None
    checkpoint_format: str = "gptq"
    dynamic: dict[str, Any] | None = None


class _Awq(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    bits: int
    group_size: int = Field(ge=-1, le=1 << 24)
    version: str = "gemm"


def gptq_layout(settings: Mapping[str, Any], name: str) -> Layout:
    """Returns how GPTQ stores matrices, see `compressed_tensors.layout`; other bits than 4 and 8 are refused."""
    found = _checked(_Gptq, settings, name)
    reason = None
    if found.bits not in (4, 8):
        reason = f"numbers of {found.bits} bits"
    elif found.checkpoint_format not in ("gptq", "gptq_v2"):
        reason = f"numbers of the format {shown(found.checkpoint_format)}"
    elif any(not key.startswith("-:") for key in found.dynamic or ()):  # those are layers that stay as they are
        reason = "other numbers in some layers ('dynamic')"
    if reason is not None:
        raise ModelError(f"'{name}' is a checkpoint of GPTQ with {reason}. Expected 4 or 8 bits in every layer.")
    # Zero points are stored less one, and whole words at once: 0 borrows from the next.
    less = 0 if found.checkpoint_format == "gptq_v2" else 0x11111111 if found.bits == 4 else 0x01010101

    def matrix(linear: str, parts: dict[str, Tensor], dtype: torch.dtype) -> QuantizedMatrix:
        words, scales, bits = _checked_words(linear, parts["qweight"]), parts["scales"], found.bits
        cols, rows = words.shape[0] * 32 // bits, words.shape[1]
        numbers = unpacked_words(f"{linear}.qweight", words.T, bits, rows, cols)
        zero_words = _checked_words(linear, parts["qzeros"]).long() + less
        zero_words = (zero_words << 32 >> 32).int()
        zeros = unpacked_words(f"{linear}.qzeros", zero_words, bits, len(_checked_scales(linear, scales)), rows).T
        group = 0 if found.group_size == -1 else found.group_size
        order = order_of_groups(linear, parts["g_idx"], group, cols) if "g_idx" in parts and group > 0 else None
        return _unsigned(linear, numbers, scales, zeros, bits=bits, group=group, dtype=dtype, order=order)

    parts, order = ("qweight", "qzeros", "scales"), ("g_idx",)
    has_order = bool(found.desc_act) and found.group_size > 0
    return Layout(
        label=f"GPTQ, {found.bits} bits", marker="qweight", parts=(*parts, *order) if has_order else parts,
        optional=() if has_order else order, matrix=matrix,
    )  # fmt: skip


def awq_layout(settings: Mapping[str, Any], name: str) -> Layout:
    """Returns how AWQ stores matrices, see `compressed_tensors.layout`; only 4 bits of the version "gemm" are read."""
    found = _checked(_Awq, settings, name)
    if found.bits != 4 or found.version.lower() != "gemm":
        raise ModelError(
            f"'{name}' is a checkpoint of AWQ with {found.bits} bits, version {shown(found.version)}. Expected 4 bits, "
            "version 'gemm'."
        )

    def matrix(linear: str, parts: dict[str, Tensor], dtype: torch.dtype) -> QuantizedMatrix:
        words, scales = _checked_words(linear, parts["qweight"]), parts["scales"]
        cols, rows = words.shape[0], words.shape[1] * 8
        numbers = _reordered(unpacked_words(f"{linear}.qweight", words, 4, cols, rows)).T
        zero_words, groups = _checked_words(linear, parts["qzeros"]), len(_checked_scales(linear, scales))
        zeros = _reordered(unpacked_words(f"{linear}.qzeros", zero_words, 4, groups, rows)).T
        return _unsigned(linear, numbers, scales, zeros, bits=4, group=max(found.group_size, 0), dtype=dtype)

    return Layout(label="AWQ, 4 bits", marker="qweight", parts=("qweight", "qzeros", "scales"), matrix=matrix)


def _checked(kind: type[Any], settings: Mapping[str, Any], name: str) -> Any:
    return validated(
        kind,
        dict(settings),
        f"the quantization settings of '{name}'",
        error=ModelError,
        advice="Such checkpoints cannot be read.",
    )


def _checked_words(linear: str, words: Tensor) -> Tensor:
    if words.dim() != 2 or words.dtype != torch.int32:
        raise ModelError(f"{linear} has words {list(words.shape)} {words.dtype}. Expected int32 in two dimensions.")
    return words


def _checked_scales(linear: str, scales: Tensor) -> Tensor:
    if scales.dim() != 2:
        raise ModelError(f"{linear} has scales {list(scales.shape)}. Expected two dimensions.")
    return scales


def _reordered(numbers: Tensor) -> Tensor:
    ordered: Tensor = numbers.unflatten(1, (-1, 8))[:, :, list(_AWQ_ORDER)].flatten(1)
    return ordered


def _unsigned(
    linear: str, numbers: Tensor, scales: Tensor, zeros: Tensor, *, bits: int, **fields: Any
) -> QuantizedMatrix:
    """A weight is scale * (number - zero), both without sign; scales (G, N) and zeros (N, G)."""
    half = 1 << bits - 1
    offsets = zeros - half if (zeros != half).any() else None
    return matrix_of(linear, (numbers - half).to(torch.int8), scales.T, offsets, bits=bits, **fields)
