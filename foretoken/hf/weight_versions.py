"""Tells whether anything was done to a model's weights since they were looked at last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Hashable

_ADAPTERS = ("_disable_adapters", "_active_adapter", "merged_adapters")  # of peft's layers


def weight_versions(model: nn.Module) -> Hashable:
    """A value that is another one once a weight was replaced, moved, or written to, or an adapter switched.

    Writing through `.data` leaves no trace in torch and is not seen.
    """
    weights = tuple(
        (id(each), each._version if not each.is_inference() else 0, _address(each)) for each in model.parameters()
    )
    adapters = tuple(
        repr([parts.get(name) for name in _ADAPTERS]) for parts in map(vars, model.modules()) if _ADAPTERS[1] in parts
    )
    return weights, adapters


def _address(tensor: Tensor) -> int:
    """Where a tensor lies; 0 for subclasses, which may lie in several places."""
    return tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0
