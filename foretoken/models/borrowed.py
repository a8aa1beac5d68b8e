"""A model in its caller's memory: a copy of its modules over the same weights, and changes that the caller makes."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from functools import cache, partial
from operator import attrgetter
from types import MethodType
from typing import Any
from weakref import WeakValueDictionary

import torch
import transformers
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from foretoken.core.errors import ModelError, foreign_errors_as
from foretoken.decoder.memory import has_memory, is_plain, lost_memory, plain_tensors

_ADAPTERS = ("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")  # attributes of peft's layers
_SETTINGS = (bool, int, float, str, type(None))
_ANY_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")  # torch calls these on every module


def model_structure(model: nn.Module) -> tuple[Any, ...]:
    """Returns a value that changes with the model's structure; `WeightWrites` detects writes to weights instead.

    It changes when a module, weight, buffer or `forward` is replaced or moved, a hook is added or removed, an adapter
    is switched, or a number of a module or of the configuration is set. Takes some microseconds a module.
    """
    return *map(_module_structure, model.modules()), _settings(vars(getattr(model, "config", model)))


def _module_structure(module: nn.Module) -> tuple[Any, ...]:
    own = vars(module)
    tensors = (*module._parameters.values(), *module._buffers.values())
    return (
        module,
        type(module).forward,
        own.get("forward"),
        list(_foreign_hooks(module)),
        [(id(each), _address(each)) for each in tensors if each is not None],
        _settings(own),
        repr([own.get(name) for name in _ADAPTERS]) if _ADAPTERS[1] in own else None,
    )


def _settings(attributes: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in attributes.items() if type(value) in _SETTINGS and key != "training"]


def _foreign_hooks(module: nn.Module) -> Iterator[Any]:
    """Yields the forward hooks of a module, except those of this package and transformers, which change no result."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for hook in hooks.values():
            if not str(getattr(hook, "__module__", "")).startswith(("transformers.", "foretoken.")):
                yield hook


def foreign_call(model: nn.Module) -> str | None:
    """Returns a sentence on the first forward hook or replaced `forward` of others; None if there is none."""
    if any(getattr(nn.modules.module, name) for name in _ANY_HOOKS):
        return "torch calls a forward hook on every module"
    for name, module in model.named_modules():
        where = name or type(model).__name__
        if "forward" in vars(module) and not is_adapted(module):
            return f"{where} has another forward than its class"
        if any(True for _ in _foreign_hooks(module)):
            return f"{where} has a forward hook"
    return None


def is_adapted(module: nn.Module) -> bool:
    """Decides whether a recurrent mixer calls its class's forward, level by level in our passes."""
    forward = vars(module).get("forward")
    if not isinstance(forward, partial) or forward.func.__module__ != "foretoken.models.recurrent":
        return False
    return getattr(forward.args[1], "__func__", None) is type(module).forward


def count_writes(model: nn.Module) -> None:
    """Counts a write to every weight of a model, for writes through `.data`, which torch does not count."""
    torch.autograd.graph.increment_version(model.parameters())


class WeightWrites:
    """Detects writes to weights and buffers of a model in some 100 ns a tensor, but no replaced weights."""

    def __init__(self, model: nn.Module) -> None:
        counted = [each for each in (*model.parameters(), *model.buffers()) if not each.is_inference()]
        # `detach` shares the version counter, and `_version` of a plain tensor is read faster than a parameter's.
        self._tensors = [each.detach() if is_plain(each) else each for each in counted]
        self._versions = self._seen = self._now()
        _alive[id(self)] = self
        _see_optimizers()

    def leave_out_written(self) -> None:
        """Leaves out tensors written since the last look: the model's own passes write to them."""
        pairs = zip(self._tensors, self._versions, strict=True)
        self._tensors = [tensor for tensor, version in pairs if tensor._version == version]
        self._versions = self._now()

    def are_new(self) -> bool:
        """Whether anything was written since `mark_known`, or since the object was made."""
        self._seen = self._now()
        return self._seen != self._versions

    def mark_known(self) -> None:
        """Marks the writes that `are_new` saw as known; later writes are still new."""
        self._versions = self._seen

    def _now(self) -> list[int]:
        return list(map(_version, self._tensors))


_version = attrgetter("_version")
_alive: WeakValueDictionary[int, WeightWrites] = WeakValueDictionary()


@cache
def _see_optimizers() -> None:
    register_optimizer_step_post_hook(_count_step)


def _count_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Counts a step on watched weights: torch counts no writes of fused optimizers, the default of `Trainer`."""
    if torch.compiler.is_compiling():
        return
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    addresses = {_address(each) for each in parameters} - {0}
    alive = filter(None, (each() for each in _alive.valuerefs()))
    if any(_address(tensor) in addresses for each in alive for tensor in each._tensors):
        torch.autograd.graph.increment_version(parameters)


def _address(tensor: Tensor) -> int:
    """Returns the address of a tensor; 0 for subclasses, which may have several."""
    return tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0


def shared_copy(model: Any) -> Any:
    """Copies the structure of a transformers causal LM and shares its weights.

    The copy has its own modules, configuration, mode and attention. Its parameters and buffers lie in the original's
    memory: a weight that is changed in place changes in both, one that is replaced (`model.to(...)`) changes in the
    original alone. Tied weights stay tied. Both call the hooks.

    `torch.compile` and peft adapters may wrap the model. Raises `ModelError` for anything else, and for weights that
    are not in memory, or on several devices.
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


def _plain_model(model: Any) -> transformers.PreTrainedModel:
    model = getattr(model, "_orig_mod", model)  # torch.compile
    name = type(model).__name__
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        if any(getattr(config, "is_prompt_learning", False) for config in model.peft_config.values()):
            raise ModelError(
                f"{name} learns prompts, which come before the tokens of every request. Expected a model, or adapters "
                "within its layers (LoRA and its kind)."
            )
        model = model.get_base_model()
    if not isinstance(model, transformers.PreTrainedModel):
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
    memo = copies_of_empty_parts(source)
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


def copies_of_empty_parts(source: nn.Module) -> dict[int, Any]:
    """Returns a memo for `copy.deepcopy` with copies of a module's empty containers, which take most of its time."""
    return {
        id(value): type(value)()
        for module in source.modules()
        for value in vars(module).values()
        if not value and type(value) in (dict, OrderedDict, set)
    }


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    """Returns another parameter over the same memory; shares subclasses, which quantized layers use, as they are."""
    if type(parameter) is not nn.Parameter:
        return parameter
    with torch.no_grad():
        return nn.Parameter(parameter.detach(), requires_grad=False)
