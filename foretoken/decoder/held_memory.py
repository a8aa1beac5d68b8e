"""Notices that the memory under tensors has moved or shrunk, before kernels read it by address.

Every tensor over a storage can move or shrink it for all others: `share_memory_()`, sending a tensor to another
process, and `untyped_storage().resize_()` free the old memory. A reference to a tensor or its storage does not keep the
memory.
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
    """Addresses of tensors, compared before every use; takes some 100 ns a tensor."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Stores addresses and sizes; keeps the storages alive, but not their memory."""
        self._storages = list({s._cdata: s for s in (tensor.untyped_storage() for tensor in tensors)}.values())
        self._addresses = list(map(_address, self._storages))
        self._sizes = list(map(_num_bytes, self._storages))  # a storage that shrank twice may be back at its address

    def has_changed(self) -> bool:
        """Whether any storage has another address or size."""
        is_same = list(map(_address, self._storages)) == self._addresses
        return not is_same or list(map(_num_bytes, self._storages)) != self._sizes


def has_memory(tensor: Tensor) -> bool:
    """Decides whether all elements of a strided tensor lie within its storage."""
    count = tensor.numel()
    if count and not tensor.is_contiguous():
        count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return not count or tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + count) * tensor.itemsize


def in_own_memory(tensor: Tensor) -> Tensor:
    """Returns the tensor, or a copy of a CPU tensor whose memory is not torch's own, such as a mapped file.

    Reading a mapped file that was cut ends the process, and one that was overwritten gives other weights.
    """
    return tensor if not tensor.is_cpu or tensor.untyped_storage().resizable() else tensor.clone()


def plain_tensors(module: nn.Module) -> list[Tensor]:
    """Returns the parameters of a module with readable memory: no subclasses, as in quantised layers, none sparse."""
    return list(filter(is_plain, module.parameters()))


def is_plain(tensor: Tensor) -> bool:
    """Decides whether a tensor's memory can be read."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided


def check_memory(tensors: Iterable[Tensor]) -> None:
    """Raises `PassError` for plain tensors whose memory was freed or cut; torch would read past the end."""
    for tensor in tensors:
        if not has_memory(tensor):
            raise PassError(lost_memory(tensor))


def lost_memory(tensor: Tensor) -> str:
    """Returns the error for a weight whose memory was freed or cut."""
    return (
        f"the memory of a weight {tuple(tensor.shape)} {tensor.dtype} was freed or cut: "
        f"{tensor.untyped_storage().nbytes()} bytes are left of {tensor.nbytes}. Expected weights that stay as long as "
        "they are used; make a new LLM of the whole model."
    )
