"""Noticing that the memory under some tensors has moved or shrunk, before kernels read it by its address.

Every tensor over a storage can move or shrink it for all the others: `share_memory_()`, sending one of them to another
process, and `untyped_storage().resize_()` free what was there before. Holding a tensor, or its storage, does not keep
its memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from foretoken.core.errors import PassError

if TYPE_CHECKING:
    from collections.abc import Iterable

_address, _num_bytes = torch.UntypedStorage.data_ptr, torch.UntypedStorage.nbytes


class HeldMemory:
    """Where some tensors lie, to be compared before every use: some 100 ns a tensor."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Notes addresses and sizes; keeps the storages alive, not their memory."""
        self._storages = list({s._cdata: s for s in (tensor.untyped_storage() for tensor in tensors)}.values())
        self._addresses = list(map(_address, self._storages))
        self._sizes = list(map(_num_bytes, self._storages))  # one that shrank twice may be back at its address

    def has_changed(self) -> bool:
        """Whether any of them lies elsewhere, or has another size."""
        is_same = list(map(_address, self._storages)) == self._addresses
        return not is_same or list(map(_num_bytes, self._storages)) != self._sizes


def has_memory(tensor: Tensor) -> bool:
    """Whether all of a strided tensor's elements lie within its storage."""
    count = tensor.numel()
    if count and not tensor.is_contiguous():
        count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return not count or tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + count) * tensor.itemsize


def in_own_memory(tensor: Tensor) -> Tensor:
    """The tensor itself, or a copy of one on the CPU whose memory is not torch's own, as a mapped file is not.

    Reading a mapped file that was cut ends the process, and one that was written over gives other weights.
    """
    return tensor if not tensor.is_cpu or tensor.untyped_storage().resizable() else tensor.clone()


def plain_tensors(module: nn.Module) -> list[Tensor]:
    """Parameters of a module whose memory can be looked at: no subclasses, as quantised layers have, nothing sparse."""
    return list(filter(is_plain, module.parameters()))


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's memory can be looked at."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided


def check_memory(tensors: Iterable[Tensor]) -> None:
    """Refuses weights that were freed or cut, which torch's operations may read past their end.

    Args:
        tensors: As `plain_tensors` gives them; moving them is no harm.

    Raises:
        PassError: Naming shape and sizes of the first such tensor.
    """
    for tensor in tensors:
        if not has_memory(tensor):
            raise PassError(lost_memory(tensor))


def lost_memory(tensor: Tensor) -> str:
    """What is wrong with a weight that was freed or cut."""
    return (
        f"the memory of a weight {tuple(tensor.shape)} {tensor.dtype} was freed or cut: "
        f"{tensor.untyped_storage().nbytes()} bytes are left of {tensor.nbytes}. Expected weights that stay as long as "
        "they are used; make a new LLM of the whole model."
    )
