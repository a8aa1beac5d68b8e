"""How safetensors store a matrix in integers: GPTQ, AWQ and compressed-tensors.

A layout reads the tensors of one linear layer as a `QuantizedMatrix`; `checkpoints` finds the tensors.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from foretoken.core.checks import shown, validated
from foretoken.core.errors import ModelError
from foretoken.decoder.quantized import QuantizedMatrix

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor


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
    """Returns how GPTQ stores matrices, see `compressed_tensors_layout`; other bits than 4 and 8 are refused."""
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
    """Returns how AWQ stores matrices, see `compressed_tensors_layout`; only 4 bits of the version "gemm" are read."""
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


_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "mixed-precision")


class _Numbers(BaseModel):
    """How weights or inputs are quantized."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    num_bits: int
    type: str = "int"
    symmetric: bool = True
    strategy: Literal["tensor", "channel", "group", "token"] | None = None
    group_size: int | None = Field(default=None, ge=-1, le=1 << 24)
    dynamic: bool = False
    actorder: str | bool | None = None

    @property
    def has_order(self) -> bool:
        """Whether inputs are sorted, so that a layer stores the group of each."""
        return self.actorder is True or str(self.actorder).lower() in ("group", "dynamic")


class _Scheme(BaseModel):
    """The layers of a group of the configuration, and how they are quantized."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    targets: list[str]
    weights: _Numbers
    input_activations: _Numbers | None = None
    output_activations: None = None

    @property
    def label(self) -> str:
        return f"W{self.weights.num_bits}A{16 if self.input_activations is None else self.input_activations.num_bits}"


class _Settings(BaseModel):
    """The part of `quantization_config` that says how to read numbers; what would change them is None or empty."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    format: str
    config_groups: dict[str, _Scheme] = Field(min_length=1)
    kv_cache_scheme: None = None
    transform_config: dict[str, Any] | None = Field(default=None, max_length=0)
    sparsity_config: dict[str, Any] | None = None


def compressed_tensors_layout(settings: Mapping[str, Any], name: str) -> Layout:
    """Returns how matrices are stored.

    Args:
        settings: `quantization_config`.
        name: Of the model.

    Raises:
        ModelError: For floating-point numbers, other bits than 4 and 8, inputs that are not quantized a token at a
            time, and everything that changes numbers besides: KV caches, transforms, sparsity.
    """
    found = validated(
        _Settings,
        dict(settings),
        f"quantization_config in the config.json of '{name}'",
        error=ModelError,
        advice="Such checkpoints cannot be read.",
    )
    schemes = list(found.config_groups.values())
    reason = _reason(found, schemes)
    if reason is not None:
        raise ModelError(
            f"'{name}' is a checkpoint of compressed-tensors with {reason}. Expected integers of 4 or 8 bits, and "
            "inputs as they are or in 8 bits with a scale a token (W4A16, W8A16, W8A8, W4A8)."
        )

    def matrix(linear: str, parts: dict[str, Tensor], dtype: torch.dtype) -> QuantizedMatrix:
        return _matrix(linear, parts, dtype, _scheme_of(linear, schemes, name))

    return Layout(
        label=f"compressed-tensors {' and '.join(sorted({each.label for each in schemes}))}",
        marker="weight_scale",
        parts=("weight_scale",),
        optional=("weight", "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx"),
        matrix=matrix,
    )


def _reason(settings: _Settings, schemes: list[_Scheme]) -> str | None:
    if settings.format not in _FORMATS:
        return f"numbers of the format {shown(settings.format)}"
    if (settings.sparsity_config or {}).get("format", "dense") != "dense":
        return "sparse weights"
    for scheme in schemes:
        weights, inputs = scheme.weights, scheme.input_activations
        if weights.type != "int" or weights.num_bits not in (4, 8) or weights.strategy == "token":
            return f"weights of {weights.num_bits} bits of the type {shown(weights.type)}"
        if inputs is not None and (
            (inputs.type, inputs.num_bits, inputs.symmetric, inputs.dynamic, inputs.strategy)
            != ("int", 8, True, True, "token")
        ):
            kind = "dynamic" if inputs.dynamic else "static"
            return (
                f"{kind} inputs of {inputs.num_bits} bits of the type {shown(inputs.type)}, a scale a {inputs.strategy}"
            )
    return None


def _scheme_of(linear: str, schemes: list[_Scheme], name: str) -> _Scheme:
    """A target names a layer, a pattern of names ("re:..."), or a class of layers."""
    for scheme in schemes:
        for target in scheme.targets:
            is_named = target.startswith("re:") and _matches(target.removeprefix("re:"), linear, name)
            if target == linear or is_named:
                return scheme
    for scheme in schemes:
        if "Linear" in scheme.targets:
            return scheme
    raise ModelError(
        f"{linear} of '{name}' is in integers, but no group of quantization_config says how. Correct config.json."
    )


def _matches(pattern: str, linear: str, name: str) -> bool:
    try:
        return re.match(pattern, linear) is not None
    except re.error as err:
        raise ModelError(
            f"quantization_config of '{name}' has the pattern {shown(pattern)}, which is wrong: {err}. Correct "
            "config.json."
        ) from err


def _matrix(linear: str, parts: dict[str, Tensor], dtype: torch.dtype, scheme: _Scheme) -> QuantizedMatrix:
    bits, scales = scheme.weights.num_bits, parts["weight_scale"]
    if "weight_packed" in parts:
        shape = parts.get("weight_shape")
        if shape is None or shape.numel() != 2 or shape.is_floating_point():
            raise ModelError(f"{linear} has no weight_shape of two numbers. Copy or download the model again.")
        rows, cols = map(int, shape.flatten().tolist())
        numbers = unpacked_words(f"{linear}.weight_packed", parts["weight_packed"], bits, rows, cols) - (1 << bits - 1)
    elif "weight" in parts and parts["weight"].dtype == torch.int8 and parts["weight"].dim() == 2:
        numbers = parts["weight"]
    else:
        raise ModelError(f"{linear} has neither weight_packed nor a weight of int8. Copy or download the model again.")
    rows, cols = numbers.shape
    scales = scales.reshape(1, 1).expand(rows, 1) if scales.numel() == 1 else scales
    zeros = parts.get("weight_zero_point")
    if not scheme.weights.symmetric and (zeros is None or zeros.is_floating_point()):
        raise ModelError(f"{linear} has no zero points of integers. Copy or download the model again.")
    if zeros is not None:
        if zeros.dtype == torch.int32:
            words = zeros.T if zeros.dim() == 2 else zeros  # of others `unpacked_words` names the shape
            zeros = unpacked_words(f"{linear}.weight_zero_point", words, bits, scales.shape[-1], rows).T
            zeros = zeros - (1 << bits - 1)
        zeros = zeros.reshape(1, 1).expand(rows, 1) if zeros.numel() == 1 else zeros
    if scheme.weights.symmetric and zeros is not None:
        if zeros.any():
            raise ModelError(
                f"{linear} has zero points other than 0, but quantization_config says 'symmetric'. Correct config.json."
            )
        zeros = None
    group = scheme.weights.group_size or 0 if scheme.weights.strategy in ("group", None) else 0
    order, groups = None, parts.get("weight_g_idx")
    if groups is None and group > 0 and scheme.weights.has_order:
        raise ModelError(f"{linear} lacks weight_g_idx, the group of each input. Copy or download the model again.")
    if groups is not None and not (groups == -1).all():  # -1 stands for none
        order = order_of_groups(linear, groups, group, cols)
    fields: dict[str, Any] = {} if scheme.input_activations is None else {"input_bits": 8, "has_token_scales": True}
    return matrix_of(
        linear,
        numbers.to(torch.int8),
        scales,
        zeros,
        bits=bits,
        group=max(group, 0),
        order=order,
        dtype=dtype,
        **fields,
    )
