"""Builds the transformers model of a checkpoint whose matrices are in integers (`StoredModel`), and unpacks it.

The model is built without its matrices, which are read one at a time. All weights are in memory in the model's dtype
only if `unpacked` is called.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.logging import disable_progress_bar
from transformers.utils.quantization_config import QuantizationConfigMixin

from foretoken.core.errors import ModelError, foreign_errors_as, listed, one_line
from foretoken.decoder.quantized_modules import (
    QuantizedEmbedding,
    QuantizedExperts,
    QuantizedLinear,
    are_plain_experts,
    is_plain_experts,
    stacked,
)
from foretoken.models.stored import OWN_METHOD, PARTS, StoredModel, experts_of

if TYPE_CHECKING:
    from foretoken.decoder.quantized import QuantizedMatrix


class _Settings(QuantizationConfigMixin):
    """Tells transformers which linear layers to leave out, and which embedding; both as in `StoredModel`."""

    def __init__(self, linears: frozenset[str] = frozenset(), embedding: str | None = None) -> None:
        self.quant_method: Any = OWN_METHOD
        self.linears, self.embedding = linears, embedding


class _LinearStub(nn.Module):
    """Stands where a `QuantizedLinear` will, with its bias."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.weight = torch.empty(linear.weight.shape, device="meta")  # which Mamba initializes


class _ExpertsStub(nn.Module):
    """Stands where `QuantizedExperts` will."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.act_fn, self.is_gated = experts.act_fn, is_plain_experts(experts)
        self.count, self.hidden_size, self.inner_size = experts.down_proj.shape


class _Quantizer(HfQuantizer):
    is_trainable = False

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        settings: Any = self.quantization_config
        for name in sorted(settings.linears):
            owner = experts_of(name)
            if owner is not None and isinstance(experts := _submodule(model, owner), nn.Module):
                if are_plain_experts(experts):
                    model.set_submodule(owner, _ExpertsStub(experts))
                if isinstance(_submodule(model, owner), _ExpertsStub):
                    continue
            part = _submodule(model, name)
            if type(part) is not nn.Linear:
                raise ModelError(
                    f"{name} is in integers, but the architecture has no plain linear layer there. Copy or download "
                    "the model again."
                )
            model.set_submodule(name, _LinearStub(part))
        if settings.embedding is not None:
            # The module stays until transformers has set its buffers; `build` gives it a table of one row meanwhile.
            table = model.get_submodule(settings.embedding)
            table.weight = nn.Parameter(table.weight[:1].detach(), requires_grad=False)


register_quantization_config(OWN_METHOD)(_Settings)
register_quantizer(OWN_METHOD)(_Quantizer)


def build(stored: StoredModel, name: str, dtype: torch.dtype) -> tuple[Any, Mapping[str, Any]]:
    """Returns a transformers model on the CPU, and what transformers tells about keys that did not fit.

    Raises `ModelError` if a tensor is damaged, or does not fit the architecture.
    """
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(stored.config)]
    weights = dict(stored.dense(dtype))
    if stored.embedding is not None:  # one row in place of the table, see `_Quantizer`
        weights[f"{stored.embedding}.weight"] = torch.zeros(1, stored.config.hidden_size, dtype=dtype)
    if not sys.stderr.isatty():
        disable_progress_bar()
    with foreign_errors_as(ModelError, partial(_refusal, name), passing=(ModelError,)):
        module, info = kind.from_pretrained(
            None,
            config=stored.config,
            state_dict=weights,
            dtype=dtype,
            attn_implementation="eager",
            quantization_config=_Settings(stored.linears, stored.embedding),
            output_loading_info=True,
        )
    module.hf_quantizer.remove_quantization_config(module)
    orders: dict[bytes, Tensor] = {}

    def matrix(linear: str, rows: int, cols: int) -> QuantizedMatrix:
        with foreign_errors_as(ModelError, partial(_refusal, name), passing=(ModelError,)):
            found = stored.matrix(linear, dtype)
        if found.input_order is not None:  # one tensor, as the kernels compare addresses
            order = found.input_order
            found = replace(found, input_order=orders.setdefault(order.numpy().tobytes(), order))
        if found.shape != (rows, cols):
            raise ModelError(
                f"{linear} of '{name}' is {list(found.shape)}. Expected {[rows, cols]}, as its configuration says. "
                "Copy or download the model again."
            )
        return found

    for owner in sorted({owner for linear in stored.linears if (owner := experts_of(linear)) is not None}):
        module.set_submodule(owner, _experts(owner, module.get_submodule(owner), stored.linears, matrix, name))
    for linear in sorted(stored.linears):
        if experts_of(linear) is None:
            stub: Any = module.get_submodule(linear)
            made = matrix(linear, stub.out_features, stub.in_features)
            module.set_submodule(linear, QuantizedLinear(made, stub.bias))
    if stored.embedding is not None:
        replaced: Any = module.get_submodule(stored.embedding)
        table = matrix(stored.embedding, replaced.num_embeddings, replaced.embedding_dim)
        module.set_submodule(stored.embedding, QuantizedEmbedding(table, getattr(replaced, "embed_scale", None)))
    return module, info


def unpacked(module: Any, dtype: torch.dtype) -> Any:
    """Returns a model of transformers' own layers, on the CPU, with the weights that a module's integers stand for.

    Numbers are computed in float32 and rounded once to `dtype`. The result shares no weight with the module, whose
    matrices were stored in integers or quantized in memory.
    """
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    config = copy.deepcopy(module.config)
    config.tie_word_embeddings = getattr(embedding, "matrix", embedding) is getattr(head, "matrix", head)
    weights = {key: weight.to(dtype, copy=True) for key, weight in _unpacked_weights(module)}
    made, info = type(module).from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), f"of one class: {info}"
    if getattr(module, "generation_config", None) is not None:
        made.generation_config = copy.deepcopy(module.generation_config)
    return made


def _unpacked_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    seen = set[int]()  # a head may share the integers of the embedding
    for name, part in module.named_modules():
        if isinstance(part, QuantizedExperts):
            inner, hidden = part.down.num_inputs, part.gate_up.num_inputs
            key, rows = ("gate_up_proj", 2 * inner) if part.is_gated else ("up_proj", inner)
            yield f"{name}.{key}", part.gate_up.dequantized().view(-1, rows, hidden)
            yield f"{name}.down_proj", part.down.dequantized().view(-1, hidden, inner)
        elif isinstance(part, QuantizedLinear | QuantizedEmbedding) and id(part.matrix) not in seen:
            seen.add(id(part.matrix))
            yield f"{name}.weight", part.matrix.dequantized()
    for name, parameter in module.named_parameters():
        yield name, parameter.detach()


def _experts(
    owner: str, stub: Any, linears: frozenset[str], matrix: Callable[[str, int, int], QuantizedMatrix], name: str
) -> QuantizedExperts:
    hidden, inner = stub.hidden_size, stub.inner_size
    own = PARTS if stub.is_gated else PARTS[1:]
    wanted = [[f"{owner}.{expert}.{part}" for part in own] for expert in range(stub.count)]
    odd = {each for expert in wanted for each in expert} ^ {each for each in linears if experts_of(each) == owner}
    if odd:
        raise ModelError(
            f"'{name}' should have {stub.count} experts in {owner}, all in integers, as its configuration says. "
            f"Missing, or more than that: {listed(odd)}. Copy or download the model again."
        )
    try:
        gate_up = stacked([matrix(each, inner, hidden) for *first, _ in wanted for each in first])
        down = stacked([matrix(last, hidden, inner) for *_, last in wanted])
    except ValueError as err:
        raise ModelError(
            f"the experts in {owner} of '{name}' are not stored alike: they differ in bits, groups or the order of "
            "inputs. Such checkpoints cannot be read."
        ) from err
    return QuantizedExperts(gate_up, down, stub.act_fn, is_gated=stub.is_gated)


def _refusal(name: str, error: Exception) -> str:
    return f"model '{name}' cannot be loaded: {one_line(error)}. Check that it is complete."


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None
