"""How safetensors store a matrix in integers: GPTQ, AWQ and compressed-tensors.

A layout reads the tensors of one linear layer as a `QuantizedMatrix`; `checkpoints` finds the tensors.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from foretoken.core.checks import shown, validated
from foretoken.core.errors import ModelError
from foretoken.decoder.quantized import QuantizedMatrix

_AGAIN = "Copy or download the model again."
_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "mixed-precision")  # of compressed-tensors
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where a word of AWQ has the numbers of eight outputs side by side


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a format stores a linear layer in safetensors.

    Attributes:
        label: As in `StoredModel`.
        parts: The last parts of the names of all tensors that a layer has, without its bias. Only layers in integers
            have the first one.
        optional: Those that it may have.
        matrix: As in `StoredModel`, from a layer's name and its tensors by these last parts.
    """

    label: str
    parts: tuple[str, ...]
    matrix: Callable[[str, dict[str, Tensor], torch.dtype], QuantizedMatrix]
    optional: tuple[str, ...] = ()


class _Read(BaseModel):
    """A part of the settings; keys that it does not name are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class _Gptq(_Read):
    bits: int
    group_size: int = Field(default=-1, ge=-1, le=1 << 24)
    desc_act: bool | None = None
    checkpoint_format: str = "gptq"
    dynamic: dict[str, Any] | None = None


class _Awq(_Read):
    bits: int
    group_size: int = Field(ge=-1, le=1 << 24)
    version: str = "gemm"


class _Numbers(_Read):
    """How compressed-tensors quantizes weights or inputs."""

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


class _Scheme(_Read):
    """The layers of a group of the configuration, and how they are quantized."""

    targets: list[str]
    weights: _Numbers
    input_activations: _Numbers | None = None
    output_activations: None = None

    @property
    def label(self) -> str:
        return f"W{self.weights.num_bits}A{16 if self.input_activations is None else self.input_activations.num_bits}"


class _CompressedTensors(_Read):
    """Settings of compressed-tensors; those that would change numbers are None or empty."""

    format: str
    config_groups: dict[str, _Scheme] = Field(min_length=1)
    kv_cache_scheme: None = None
    transform_config: dict[str, Any] | None = Field(default=None, max_length=0)
    sparsity_config: dict[str, Any] | None = None


def _checked(kind: type[Any], settings: Mapping[str, Any], what: str) -> Any:
    return validated(kind, dict(settings), what, error=ModelError, advice="Such checkpoints cannot be read.")


def gptq_layout(settings: Mapping[str, Any], name: str) -> Layout:
    """Returns how GPTQ stores matrices.

    Args:
        settings: `quantization_config`.
        name: Of the model.

    Raises:
        ModelError: For other bits than 4 and 8, and for other numbers in some layers.
    """
    found = _checked(_Gptq, settings, f"the quantization settings of '{name}'")
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
        words, zero_words, num_groups = _checked_parts(linear, parts)
        cols, rows, bits = words.shape[0] * 32 // found.bits, words.shape[1], found.bits
        numbers = _unpacked_words(f"{linear}.qweight", words.T, bits, rows, cols)
        zero_words = (zero_words.long() + less << 32 >> 32).int()
        zeros = _unpacked_words(f"{linear}.qzeros", zero_words, bits, num_groups, rows).T
        group = max(found.group_size, 0)
        order = _order_of_groups(linear, parts["g_idx"], group, cols) if "g_idx" in parts and group > 0 else None
        return _unsigned(linear, numbers, parts["scales"], zeros, bits=bits, group=group, dtype=dtype, order=order)

    parts, order = ("qweight", "qzeros", "scales"), ("g_idx",)
    has_order = bool(found.desc_act) and found.group_size > 0
    return Layout(
        label=f"GPTQ, {found.bits} bits", parts=(*parts, *order) if has_order else parts,
        optional=() if has_order else order, matrix=matrix,
    )  # fmt: skip


def awq_layout(settings: Mapping[str, Any], name: str) -> Layout:
    """Returns how AWQ stores matrices, see `gptq_layout`; only 4 bits of the version "gemm" are read."""
    found = _checked(_Awq, settings, f"the quantization settings of '{name}'")
    if found.bits != 4 or found.version.lower() != "gemm":
        raise ModelError(
            f"'{name}' is a checkpoint of AWQ with {found.bits} bits, version {shown(found.version)}. Expected 4 bits, "
            "version 'gemm'."
        )

    def unpacked(part: str, words: Tensor, rows: int, cols: int) -> Tensor:
        eights: Tensor = _unpacked_words(part, words, 4, rows, cols).unflatten(1, (-1, 8))
        return eights[:, :, list(_AWQ_ORDER)].flatten(1).T

    def matrix(linear: str, parts: dict[str, Tensor], dtype: torch.dtype) -> QuantizedMatrix:
        words, zero_words, num_groups = _checked_parts(linear, parts)
        cols, rows = words.shape[0], words.shape[1] * 8
        numbers = unpacked(f"{linear}.qweight", words, cols, rows)
        zeros = unpacked(f"{linear}.qzeros", zero_words, num_groups, rows)
        return _unsigned(linear, numbers, parts["scales"], zeros, bits=4, group=max(found.group_size, 0), dtype=dtype)

    return Layout(label="AWQ, 4 bits", parts=("qweight", "qzeros", "scales"), matrix=matrix)


def _checked_parts(linear: str, parts: dict[str, Tensor]) -> tuple[Tensor, Tensor, int]:
    """Returns the words of numbers and zero points of GPTQ and AWQ, and the number of groups."""
    for words in (parts["qweight"], parts["qzeros"]):
        if words.dim() != 2 or words.dtype != torch.int32:
            raise ModelError(f"{linear} has words {list(words.shape)} {words.dtype}. Expected int32 in two dimensions.")
    if parts["scales"].dim() != 2:
        raise ModelError(f"{linear} has scales {list(parts['scales'].shape)}. Expected two dimensions.")
    return parts["qweight"], parts["qzeros"], len(parts["scales"])


def _unsigned(
    linear: str, numbers: Tensor, scales: Tensor, zeros: Tensor, *, bits: int, **fields: Any
) -> QuantizedMatrix:
    """A weight is scale * (number - zero), both without sign; scales (G, N) and zeros (N, G)."""
    half = 1 << bits - 1
    offsets = zeros - half if (zeros != half).any() else None
    return _matrix_of(linear, (numbers - half).to(torch.int8), scales.T, offsets, bits=bits, **fields)


def compressed_tensors_layout(settings: Mapping[str, Any], name: str) -> Layout:
    """Returns how compressed-tensors stores matrices, see `gptq_layout`.

    Raises:
        ModelError: For floating-point numbers, other bits than 4 and 8, inputs that are not quantized a token at a
            time, and everything that changes numbers besides: KV caches, transforms, sparsity.
    """
    found = _checked(_CompressedTensors, settings, f"quantization_config in the config.json of '{name}'")
    schemes = list(found.config_groups.values())
    reason = _reason(found, schemes)
    if reason is not None:
        raise ModelError(
            f"'{name}' is a checkpoint of compressed-tensors with {reason}. Expected integers of 4 or 8 bits, and "
            "inputs as they are or in 8 bits with a scale a token (W4A16, W8A16, W8A8, W4A8)."
        )

    def matrix(linear: str, parts: dict[str, Tensor], dtype: torch.dtype) -> QuantizedMatrix:
        return _compressed_matrix(linear, parts, dtype, _scheme_of(linear, schemes, name))

    return Layout(
        label=f"compressed-tensors {' and '.join(sorted({each.label for each in schemes}))}",
        parts=("weight_scale",),
        optional=("weight", "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx"),
        matrix=matrix,
    )


def _reason(settings: _CompressedTensors, schemes: list[_Scheme]) -> str | None:
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


def _compressed_matrix(linear: str, parts: dict[str, Tensor], dtype: torch.dtype, scheme: _Scheme) -> QuantizedMatrix:
    numbers = _compressed_numbers(linear, parts, scheme.weights.num_bits)
    rows, cols = numbers.shape

    def of_rows(each: Tensor) -> Tensor:
        return each.reshape(1, 1).expand(rows, 1) if each.numel() == 1 else each

    scales = parts["weight_scale"]
    zeros = _zero_points(linear, parts.get("weight_zero_point"), scheme.weights, rows, of_rows(scales).shape[-1])
    group = scheme.weights.group_size or 0 if scheme.weights.strategy in ("group", None) else 0
    order, groups = None, parts.get("weight_g_idx")
    if groups is None and group > 0 and scheme.weights.has_order:
        raise ModelError(f"{linear} lacks weight_g_idx, the group of each input. {_AGAIN}")
    if groups is not None and not (groups == -1).all():  # -1 stands for none
        order = _order_of_groups(linear, groups, group, cols)
    fields: dict[str, Any] = {} if scheme.input_activations is None else {"input_bits": 8, "has_token_scales": True}
    return _matrix_of(
        linear, numbers.to(torch.int8), of_rows(scales), None if zeros is None else of_rows(zeros),
        bits=scheme.weights.num_bits, group=max(group, 0), order=order, dtype=dtype, **fields,
    )  # fmt: skip


def _compressed_numbers(linear: str, parts: dict[str, Tensor], bits: int) -> Tensor:
    if "weight_packed" in parts:
        shape = parts.get("weight_shape")
        if shape is None or shape.numel() != 2 or shape.is_floating_point():
            raise ModelError(f"{linear} has no weight_shape of two numbers. {_AGAIN}")
        rows, cols = map(int, shape.flatten().tolist())
        return _unpacked_words(f"{linear}.weight_packed", parts["weight_packed"], bits, rows, cols) - (1 << bits - 1)
    if "weight" in parts and parts["weight"].dtype == torch.int8 and parts["weight"].dim() == 2:
        return parts["weight"]
    raise ModelError(f"{linear} has neither weight_packed nor a weight of int8. {_AGAIN}")


def _zero_points(linear: str, zeros: Tensor | None, weights: _Numbers, rows: int, num_groups: int) -> Tensor | None:
    if not weights.symmetric and (zeros is None or zeros.is_floating_point()):
        raise ModelError(f"{linear} has no zero points of integers. {_AGAIN}")
    if zeros is not None and zeros.dtype == torch.int32:
        words = zeros.T if zeros.dim() == 2 else zeros  # of others `_unpacked_words` names the shape
        unpacked = _unpacked_words(f"{linear}.weight_zero_point", words, weights.num_bits, num_groups, rows)
        zeros = unpacked.T - (1 << weights.num_bits - 1)
    if weights.symmetric and zeros is not None and zeros.any():
        raise ModelError(
            f"{linear} has zero points other than 0, but quantization_config says 'symmetric'. Correct config.json."
        )
    return None if weights.symmetric else zeros


def _unpacked_words(name: str, words: Tensor, bits: int, rows: int, count: int) -> Tensor:
    """Returns (rows, count) int16 numbers without sign from words (rows, W) int32, the lowest bits first."""
    each = 32 // bits
    if words.shape != (rows, -(-count // each)) or words.dtype != torch.int32 or count < 1:
        raise ModelError(
            f"{name} holds {list(words.shape)} words of {words.dtype}. Expected {[rows, -(-count // each)]} of int32. "
            f"{_AGAIN}"
        )
    parts = words.contiguous().view(torch.uint8)  # words are little-endian on all processors with kernels
    numbers = torch.stack([parts & 15, parts >> 4], 2).flatten(1) if bits == 4 else parts
    return numbers[:, :count].to(torch.int16)


def _order_of_groups(name: str, groups: Tensor, group: int, cols: int) -> Tensor | None:
    """Returns the inputs sorted by their group, (cols,) int32; None if they are in that order.

    `groups`: (cols,), the group of each input; `group`: inputs of a group.
    """
    sorted_groups, order = groups.flatten().long().sort(stable=True)
    if group <= 0 or not torch.equal(sorted_groups, torch.arange(cols) // group):
        raise ModelError(f"g_idx of {name} does not name {group} inputs for each group. {_AGAIN}")
    return None if torch.equal(order, torch.arange(cols)) else order.int()


def _matrix_of(
    name: str, numbers: Tensor, scales: Tensor, zeros: Tensor | None, *, bits: int, group: int, dtype: torch.dtype,
    order: Tensor | None = None, **fields: Any,
) -> QuantizedMatrix:  # fmt: skip
    """Stores a matrix whose weight is scale * (number - zero).

    Args:
        name: Of the layer.
        numbers: (N, K) int8, of 4 bits from -8 to 7, in the order of inputs.
        scales: (N, G) of any real dtype.
        zeros: (N, G) integers, or None for 0.
        bits: 4 or 8.
        group: Weights that share a scale; 0 if a row does.
        dtype: Of inputs.
        order: See `_order_of_groups`.
        fields: Others of `QuantizedMatrix`.
    """
    rows, cols = numbers.shape
    group = 0 if group >= cols else group
    if group and (group < 16 or group & (group - 1)):
        raise ModelError(f"{name} has groups of {group} weights. Expected a power of 2 from 16 on.")
    shape = [rows, -(-cols // group) if group else 1]
    wrong = next((list(each.shape) for each in (scales, zeros) if each is not None and list(each.shape) != shape), None)
    if wrong is not None:
        raise ModelError(
            f"{name} has scales or zero points {wrong} for a matrix {[rows, cols]}. Expected {shape}. {_AGAIN}"
        )
    if not scales.is_floating_point():
        raise ModelError(f"{name} has scales of {scales.dtype}. Expected floating-point numbers. {_AGAIN}")
    wide = scales.float()
    offsets = None if zeros is None else -zeros.float() * wide
    if not wide.isfinite().all() or (offsets is not None and not offsets.isfinite().all()):
        raise ModelError(f"{name} has scales that are NaN or infinite. {_AGAIN}")
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
