"""Matrices of compressed-tensors checkpoints: integers of 4 or 8 bits, and inputs as they are or in 8 bits a token."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from foretoken.core.checks import shown, validated
from foretoken.core.errors import ModelError
from foretoken.models.quantization.stored import Layout, matrix_of, order_of_groups, unpacked_words

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from foretoken.decoder.quantized import QuantizedMatrix

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


def layout(settings: Mapping[str, Any], name: str) -> Layout:
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
