"""Detects changes to a model in memory: writes to weights, replaced parts, changed hooks and settings."""

from __future__ import annotations

from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from foretoken.decoder.memory import is_plain

if TYPE_CHECKING:
    from collections.abc import Iterator

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
        list(foreign_hooks(module)),
        [(id(each), _address(each)) for each in tensors if each is not None],
        _settings(own),
        repr([own.get(name) for name in _ADAPTERS]) if _ADAPTERS[1] in own else None,
    )


def _settings(attributes: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in attributes.items() if type(value) in _SETTINGS and key != "training"]


def foreign_hooks(module: nn.Module) -> Iterator[Any]:
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
        if "forward" in vars(module):
            return f"{where} has another forward than its class"
        if any(True for _ in foreign_hooks(module)):
            return f"{where} has a forward hook"
    return None


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
    places = {_address(each) for each in parameters} - {0}
    alive = filter(None, (each() for each in _alive.valuerefs()))
    if any(_address(tensor) in places for each in alive for tensor in each._tensors):
        torch.autograd.graph.increment_version(parameters)


def _address(tensor: Tensor) -> int:
    """Returns the address of a tensor; 0 for subclasses, which may have several."""
    return tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0
