"""A checkpoint whose matrices are in integers, as they are stored; drafts are then verified against it.

A format is a module that opens a checkpoint as `StoredModel`; `building` makes a transformers model of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from foretoken.core.errors import ModelError
from foretoken.decoder.quantized import QuantizedMatrix

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

OWN_METHOD = "foretoken"  # what transformers is told when it builds a model; no checkpoint has it


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A checkpoint with matrices in integers.

    Attributes:
        config: Of transformers, without `quantization_config`; says that weights are not tied if the LM head is one of
            `linears`.
        label: The format and its bits, for people: "GPTQ, 4 bits".
        linears: Names of linear layers in integers, as "model.layers.0.mlp.up_proj"; of experts, see `experts.py`.
        matrix: Reads one of them, or the embedding, for inputs of a dtype, float32 or bfloat16. Raises `ModelError` if
            it is damaged.
        dense: Reads all other weights, by their names in the architecture; may convert them to a dtype.
        embedding: Name of the embedding if it is in integers, or None.
    """

    config: Any
    label: str
    linears: frozenset[str]
    matrix: Callable[[str, torch.dtype], QuantizedMatrix]
    dense: Callable[[torch.dtype], Mapping[str, Tensor]]
    embedding: str | None = None

    def with_inputs(self, input_bits: int | None) -> StoredModel:
        """Returns the model with `input_bits` of all matrices, see `QuantizedMatrix`; None for the model itself."""
        if input_bits is None:
            return self

        def matrix(name: str, dtype: torch.dtype) -> QuantizedMatrix:
            return replace(self.matrix(name, dtype), input_bits=input_bits)

        return replace(self, label=label_of_inputs(self.label, input_bits), matrix=matrix)


def label_of_inputs(label: str, input_bits: int | None) -> str:
    """Adds the bits of inputs to a label, for people."""
    return label if input_bits is None else f"{label}, inputs of {input_bits} bits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a format stores a linear layer in safetensors.

    Attributes:
        label: As in `StoredModel`.
        marker: The last part of the name of a tensor that only such layers have.
        parts: The last parts of the names of all tensors that a layer has, without its bias.
        optional: Those that it may have.
        matrix: As in `StoredModel`, from a layer's name and its tensors by these last parts.
    """

    label: str
    marker: str
    parts: tuple[str, ...]
    matrix: Callable[[str, dict[str, Tensor], torch.dtype], QuantizedMatrix]
    optional: tuple[str, ...] = ()


def unpacked_words(name: str, words: Tensor, bits: int, rows: int, count: int) -> Tensor:
    """Returns (rows, count) int16 numbers without sign from words (rows, W) int32, the lowest bits first.

    Raises:
        ModelError: If there are not `rows` times as many words as `count` numbers of `bits` bits need.
    """
    each = 32 // bits
    if words.shape != (rows, -(-count // each)) or words.dtype != torch.int32 or count < 1:
        raise ModelError(
            f"{name} holds {list(words.shape)} words of {words.dtype}. Expected {[rows, -(-count // each)]} of int32. "
            "Copy or download the model again."
        )
    parts = words.contiguous().view(torch.uint8)  # words are little-endian on all processors with kernels
    numbers = torch.stack([parts & 15, parts >> 4], 2).flatten(1) if bits == 4 else parts
    return numbers[:, :count].to(torch.int16)


def packed_words(numbers: Tensor, bits: int) -> Tensor:
    """Returns words (N, W) int32 of numbers (N, K) int8 from -2^(bits - 1) on, the lowest bits first."""
    unsigned = (numbers + (-128 if bits == 8 else 8)).view(torch.uint8)
    unsigned = nn.functional.pad(unsigned, (0, -numbers.shape[1] % (32 // bits)))
    parts = unsigned[:, ::2] | unsigned[:, 1::2] << 4 if bits == 4 else unsigned
    return parts.contiguous().view(torch.int32)


def order_of_groups(name: str, groups: Tensor, group: int, cols: int) -> Tensor | None:
    """Returns the inputs sorted by their group, (K,) int32; None if they are in that order.

    Args:
        name: Of the layer.
        groups: (K,), the group of each input.
        group: Inputs of a group.
        cols: K.

    Raises:
        ModelError: If a group has another number of inputs.
    """
    sorted_groups, order = groups.flatten().long().sort(stable=True)
    if group <= 0 or not torch.equal(sorted_groups, torch.arange(cols) // group):
        raise ModelError(
            f"g_idx of {name} does not name {group} inputs for each group. Copy or download the model again."
        )
    return None if torch.equal(order, torch.arange(cols)) else order.int()


def matrix_of(
    name: str,
    numbers: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    *,
    bits: int,
    group: int,
    dtype: torch.dtype,
    order: Tensor | None = None,
    **fields: Any,
) -> QuantizedMatrix:
    """Stores a matrix whose weight is scale * (number - zero).

    Args:
        name: Of the layer.
        numbers: (N, K) int8, of 4 bits from -8 to 7, in the order of inputs.
        scales: (N, G) of any real dtype.
        zeros: (N, G) integers, or None for 0.
        bits: 4 or 8.
        group: Weights that share a scale; 0 if a row does.
        dtype: Of inputs.
        order: See `order_of_groups`.
        fields: Others of `QuantizedMatrix`.

    Raises:
        ModelError: If shapes do not fit, or a scale is an integer, NaN or infinite.
    """
    rows, cols = numbers.shape
    group = 0 if group >= cols else group
    if group and (group < 16 or group & (group - 1)):
        raise ModelError(f"{name} has groups of {group} weights. Expected a power of 2 from 16 on.")
    shape = [rows, -(-cols // group) if group else 1]
    if list(scales.shape) != shape or (zeros is not None and list(zeros.shape) != shape):
        found = list(scales.shape) if list(scales.shape) != shape or zeros is None else list(zeros.shape)
        raise ModelError(
            f"{name} has scales or zero points {found} for a matrix {[rows, cols]}. Expected {shape}. Copy or download "
            "the model again."
        )
    if not scales.is_floating_point():
        raise ModelError(
            f"{name} has scales of {scales.dtype}. Expected floating-point numbers. Copy or download the model again."
        )
    wide = scales.float()
    offsets = None if zeros is None else -zeros.float() * wide
    if not wide.isfinite().all() or (offsets is not None and not offsets.isfinite().all()):
        raise ModelError(f"{name} has scales that are NaN or infinite. Copy or download the model again.")
    ordered = numbers if order is None else numbers[:, order.long()]
    fields |= {"bits": bits, "dtype": dtype, "input_order": order}
    if not group and bits == 8 and offsets is None:
        return QuantizedMatrix.of(ordered, row_scales=wide.flatten().contiguous(), **fields)
    # A row may be one group. Groups are powers of 2.
    whole = group or max(64, 1 << (cols - 1).bit_length())
    is_half = all(each is None or torch.equal(each.half().float(), each) for each in (wide, offsets))
    kind = torch.float16 if is_half else torch.float32
    return QuantizedMatrix.of(
        ordered, group=whole, group_scales=wide.to(kind), group_offsets=None if offsets is None else offsets.to(kind),
        **fields,
    )  # fmt: skip
