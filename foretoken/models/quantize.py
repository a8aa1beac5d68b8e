"""Rounds the matrices of a loaded target to 4 or 8 bits: the model then is the quantized one, also for `verify`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import torch
from torch import nn

from foretoken.core.backend import runs_cpu_kernels
from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError, ModelError
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.quantized import Quantization, QuantizedLinear, quantized
from foretoken.models.loading import HASHED_ROWS, LoadedModel

_QUANTIZATIONS = get_args(Quantization)
_DTYPES = (torch.float32, torch.bfloat16)


def check_quantization_name(value: Any) -> Quantization | None:
    """Returns None, or a way to round weights; raises `ConfigError` for anything else."""
    if value is not None and value not in _QUANTIZATIONS:
        raise ConfigError(
            f"quantization is {shown(value)}. Expected {' or '.join(_QUANTIZATIONS)}, or None for the weights as "
            "they are."
        )
    return value  # type: ignore[no-any-return]


def quantize_model(model: LoadedModel, quantization: Quantization) -> LoadedModel:
    """Replaces every linear layer of a target by one in 4 or 8 bits, the LM head too; embedding and experts stay.

    The originals are freed block by block, unless a caller owns them; later writes to a caller's matrices are not seen.

    Raises:
        ModelError: If the model is not on a CPU in float32 or bfloat16, or a weight is not finite.
    """
    if not runs_cpu_kernels(model.device) or model.dtype not in _DTYPES:
        raise ModelError(
            f"quantization '{quantization}' was asked for '{model.name}' in {model.dtype} on '{model.device}'. Only "
            "CPUs have kernels for it, and inputs are float32 or bfloat16. Pass device='cpu' and dtype='bfloat16'."
        )
    module: Any = model.module
    head = module.get_output_embeddings()
    first_rows = head.weight.detach()[:HASHED_ROWS].clone()
    if not model.is_borrowed:  # vectors share memory with the matrices of their block, which is freed
        for parameter in module.parameters():
            if parameter.dim() < 2:
                parameter.data = parameter.data.clone()
    for name in [name for name, part in module.named_modules() if type(part) is nn.Linear]:
        owner_name, _, own_name = name.rpartition(".")
        owner: Any = module.get_submodule(owner_name)
        setattr(owner, own_name, _rounded(getattr(owner, own_name), quantization, model, name))
    return replace(model, quantization=quantization, first_head_rows=first_rows)


def _rounded(part: nn.Linear, quantization: Quantization, model: LoadedModel, name: str) -> QuantizedLinear:
    try:
        return QuantizedLinear(quantized(part.weight, quantization, dtype=model.dtype), part.bias)
    except UnsuitableError as err:
        raise ModelError(f"'{name}' of '{model.name}' cannot be rounded: {err}") from err
