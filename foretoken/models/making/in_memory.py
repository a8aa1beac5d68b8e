"""Quantizes the weights of a loaded target to 4 or 8 bits; drafts are then verified against the quantized model."""

from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import nn

from foretoken.core.backend import runs_cpu_kernels
from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError, ModelError
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.quantized import Quantization, QuantizedMatrix, is_int4, quantized
from foretoken.decoder.quantized_modules import (
    QuantizedEmbedding,
    QuantizedExperts,
    QuantizedLinear,
    are_plain_experts,
    is_plain_embedding,
    is_plain_experts,
    quantized_parts,
)
from foretoken.models.borrowed import foreign_call
from foretoken.models.loaded import HASHED_ROWS, LoadedModel, gather_weights

# Not of weights: those that are stored in integers round their inputs to 8 bits.
RoundsInputs = Literal["a8"]
_QUANTIZATIONS = (*get_args(Quantization), *get_args(RoundsInputs))
_DTYPES = (torch.float32, torch.bfloat16)


def check_quantization_name(value: Any) -> Quantization | RoundsInputs | None:
    """Returns None, a way to quantize weights, or `RoundsInputs`; raises `ConfigError` for anything else."""
    if value is not None and value not in _QUANTIZATIONS:
        raise ConfigError(
            f"quantization is {shown(value)}. Expected {' or '.join(_QUANTIZATIONS)}, or None for the weights as "
            "they are."
        )
    return value  # type: ignore[no-any-return]


def quantize_model(model: LoadedModel, quantization: Quantization) -> LoadedModel:
    """Replaces the linear layers and experts of a target by those in 4 or 8 bits, the LM head too; routers stay.

    The embedding gets 8 bits with a scale a row. It shares the integers of an LM head that has the same weight and is
    quantized alike. An embedding that computes anything else than rows of its weight, times a factor, stays as it is.

    The module is changed in place. The originals are freed block by block, unless others hold them.

    Raises:
        ModelError: If the model is not on a CPU in float32 or bfloat16, has layers of other kinds, hooks or adapters,
            or a weight is not finite; some layers are replaced then.
    """
    if not runs_cpu_kernels(model.device) or model.dtype not in _DTYPES:
        raise ModelError(
            f"quantization '{quantization}' was asked for '{model.name}' in {model.dtype} on '{model.device}'. Only "
            "CPUs have kernels for it, and inputs are float32 or bfloat16. Pass device='cpu' and dtype='bfloat16'."
        )
    module: Any = model.module
    _check_layers(model, quantization)
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    is_tied = getattr(embedding, "weight", None) is head.weight
    first_rows = head.weight.detach()[:HASHED_ROWS].clone()
    if not model.is_borrowed:  # vectors share memory with the matrices of their block, which is freed
        for parameter in module.parameters():
            if parameter.dim() < 2:
                parameter.data = parameter.data.clone()
    for name in [name for name, part in module.named_modules() if type(part) is nn.Linear or are_plain_experts(part)]:
        module.set_submodule(name, _quantized_part(module.get_submodule(name), quantization, model, name))
    shares_head = is_tied and not is_int4(quantization)
    _quantize_embedding(model, embedding, module.get_output_embeddings().matrix if shares_head else None)
    if not model.is_borrowed:
        gather_weights(module)  # away from the memory that they shared with matrices
    return replace(model, quantization=quantization, first_head_rows=first_rows)


def _check_layers(model: LoadedModel, quantization: Quantization) -> None:
    module: Any = model.module
    reason = foreign_call(module)
    for name, part in module.named_modules():
        is_known = type(part) is nn.Linear or isinstance(part, nn.Embedding) or type(part).__name__.endswith("Router")
        is_known = is_known or are_plain_experts(part) or type(part) is nn.Conv1d  # a convolution stays as it is
        if type(part).__module__.startswith("peft"):
            reason = f"'{name}' is an adapter"
        elif not is_known and any(each.dim() > 1 for each in part.parameters(recurse=False)):
            reason = f"'{name}' is a {type(part).__name__}, not a plain linear layer"
    if getattr(model.config, "quantization_config", None) is not None:
        reason = "its weights are quantized already"
    if reason is not None:
        raise ModelError(
            f"quantization '{quantization}' was asked for '{model.name}', but {reason.rstrip('.')}. Expected a model "
            "of plain linear layers and experts. Leave quantization out."
        )


def _quantize_embedding(model: LoadedModel, embedding: Any, tied: QuantizedMatrix | None) -> None:
    """Replaces the embedding, by `tied` if the LM head has it in 8 bits, unless another module has its weight too."""
    module: Any = model.module
    others = (part for part in module.modules() if part is not embedding)
    if not is_plain_embedding(embedding) or any(
        each is embedding.weight for part in others for each in part.parameters(recurse=False)
    ):
        return
    names = [name for name, part in module.named_modules(remove_duplicate=False) if part is embedding]
    scale = getattr(embedding, "embed_scale", None)
    made = _quantized_part(embedding, "int8", model, names[0]) if tied is None else QuantizedEmbedding(tied, scale)
    for name in names:
        module.set_submodule(name, made)


def _quantized_part(
    part: Any, quantization: Quantization, model: LoadedModel, name: str
) -> QuantizedLinear | QuantizedExperts | QuantizedEmbedding:
    try:
        if type(part) is nn.Linear:
            return QuantizedLinear(quantized(part.weight, quantization, dtype=model.dtype), part.bias)
        if is_plain_embedding(part):
            table = quantized(part.weight, quantization, dtype=model.dtype)
            return QuantizedEmbedding(table, getattr(part, "embed_scale", None))
        is_gated = is_plain_experts(part)
        gate_up, down = (
            quantized_parts(weight.detach(), parts, quantization, dtype=model.dtype)
            for weight, parts in ((part.gate_up_proj, 2) if is_gated else (part.up_proj, 1), (part.down_proj, 1))
        )
    except UnsuitableError as err:
        raise ModelError(f"'{name}' of '{model.name}' cannot be quantized: {err}") from err
    return QuantizedExperts(gate_up, down, part.act_fn, is_gated=is_gated)
