"""Tells whether anything was done to a model's weights since they were looked at last."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from foretoken.decoder.held_memory import is_plain

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


def count_writes(model: nn.Module) -> None:
    """Has torch count a write to every weight of a model, for those through `.data`, which it does not see."""
    torch.autograd.graph.increment_version(model.parameters())


class WeightWrites:
    """Notices writes to the weights and buffers of a model, in some 100 ns a tensor, so before every pass.

    As `weight_versions`, but for weights that are replaced: a runner goes on with those that it was made of.
    """

    def __init__(self, model: nn.Module) -> None:
        """Nothing was written yet."""
        counted = [each for each in (*model.parameters(), *model.buffers()) if not each.is_inference()]
        # A plain tensor that shares the count says it in half of the time that a parameter takes.
        self._tensors = [each.detach() if is_plain(each) else each for each in counted]
        self._versions = self._now()

    def leave_out_written(self) -> None:
        """Leaves out what was written since the last look: by passes of the model itself."""
        pairs = zip(self._tensors, self._versions, strict=True)
        self._tensors = [tensor for tensor, version in pairs if tensor._version == version]
        self._versions = self._now()

    def are_new(self) -> bool:
        """Whether anything was written since `take`, or since this was made."""
        return self._now() != self._versions

    def take(self) -> None:
        """Takes what was written for known."""
        self._versions = self._now()

    def _now(self) -> list[int]:
        return list(map(_version, self._tensors))


_version = attrgetter("_version")


def _address(tensor: Tensor) -> int:
    """Where a tensor lies; 0 for subclasses, which may lie in several places."""
    return tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0
