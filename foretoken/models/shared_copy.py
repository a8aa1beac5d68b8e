"""Creates a second set of modules over the same weights, so that a caller's model stays as it is."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foretoken.core.errors import ModelError, foreign_errors_as
from foretoken.decoder.memory import has_memory, lost_memory, plain_tensors


def shared_copy(model: Any) -> Any:
    """Copies the structure of a transformers model and shares its weights.

    The copy has its own modules, configuration, mode and attention. Its parameters and buffers lie in the original's
    memory: a weight that is changed in place changes in both, one that is replaced (`model.to(...)`) changes in the
    original alone. Tied weights stay tied. Both call the hooks.

    Args:
        model: A transformers causal LM; also inside `torch.compile`, or with peft adapters.

    Raises:
        ModelError: If it is anything else, or its weights are not in memory, or on several devices.
    """
    source = _plain_model(model)
    with foreign_errors_as(  # an attribute may hold locks, files, generators
        ModelError,
        lambda err: (
            f"{type(source).__name__} holds something that cannot be copied ({type(err).__name__}). Expected a "
            "transformers causal LM as it was loaded. Save it with save_pretrained and pass the directory."
        ),
    ):
        return copy.deepcopy(source, _kept_as_they_are(source))


def _plain_model(model: Any) -> PreTrainedModel:
    """Returns the transformers model inside wrappers that leave its arithmetic as it is."""
    model = getattr(model, "_orig_mod", model)  # torch.compile
    name = type(model).__name__
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        if any(getattr(config, "is_prompt_learning", False) for config in model.peft_config.values()):
            raise ModelError(
                f"{name} learns prompts, which come before the tokens of every request. Expected a model, or adapters "
                "within its layers (LoRA and its kind)."
            )
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise ModelError(
            f"a {name} is no transformers model. Expected a causal LM such as AutoModelForCausalLM gives; unwrap it "
            "first where it is inside something else."
        )
    head = model.get_output_embeddings()
    if not isinstance(getattr(head, "weight", None), Tensor):
        raise ModelError(f"{name} has no LM head. Expected a causal LM: load it with AutoModelForCausalLM.")
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if "meta" in devices:
        raise ModelError(
            f"some weights of {name} are on the device 'meta': they were never loaded, or are offloaded. Expected all "
            "weights in memory. Load it without device_map, on one device."
        )
    lost = next((tensor for tensor in plain_tensors(model) if not has_memory(tensor)), None)
    if lost is not None:
        raise ModelError(f"{name} cannot be used: {lost_memory(lost)}")
    if len(devices) > 1:
        raise ModelError(f"{name} is spread over {', '.join(devices)}. Expected all its weights on one device.")
    return model


def _kept_as_they_are(source: nn.Module) -> dict[int, Any]:
    """Returns the memo that makes `copy.deepcopy` share tensors, and hooks, which are not copied."""
    inside = {id(module) for module in source.modules()}
    memo: dict[int, Any] = {}
    for module in source.modules():
        for value in (*module._buffers.values(), *vars(module).values()):
            if isinstance(value, Tensor):
                memo[id(value)] = value
        for parameter in module._parameters.values():
            if parameter is not None:
                memo.setdefault(id(parameter), _alias(parameter))
        merged = getattr(module, "merged_adapters", None)  # peft: the adapters that the shared weight contains
        if isinstance(merged, list):
            memo[id(merged)] = merged
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for hook in hooks.values():
                if not (isinstance(hook, MethodType) and id(hook.__self__) in inside):
                    memo[id(hook)] = hook
    return memo


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    """Returns another parameter over the same memory; shares subclasses, which quantised layers use, as they are."""
    if type(parameter) is not nn.Parameter:
        return parameter
    with torch.no_grad():
        return nn.Parameter(parameter.detach(), requires_grad=False)
