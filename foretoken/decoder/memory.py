"""The memory of weights: notices that it moved or shrank before kernels read it by address, and uses huge pages.

Every tensor over a storage can move or shrink it for all others: `share_memory_()`, sending a tensor to another
process, and `untyped_storage().resize_()` free the old memory. A reference to a tensor or its storage does not keep the
memory.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from foretoken.core.backend import kernel_threads, runs_cpu_kernels
from foretoken.core.errors import PassError
from foretoken.decoder.base import UnsuitableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_address, _num_bytes = torch.UntypedStorage.data_ptr, torch.UntypedStorage.nbytes


class HeldMemory:
    """Addresses of tensors, compared before every use; a comparison takes some 100 ns a tensor."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Stores addresses and sizes; keeps the storages alive, but not their memory."""
        self._storages = list({s._cdata: s for s in (tensor.untyped_storage() for tensor in tensors)}.values())
        self._addresses = list(map(_address, self._storages))
        self._sizes = list(map(_num_bytes, self._storages))  # after two changes it may have its old address again

    def has_changed(self) -> bool:
        """Whether any storage has another address or size."""
        is_same = list(map(_address, self._storages)) == self._addresses
        return not is_same or list(map(_num_bytes, self._storages)) != self._sizes


class Described:
    """A description of tensors by address, for kernels. Subclasses set `_memory`.

    `structure`: valid until a tensor moves.
    """

    structure: Any
    _memory: HeldMemory

    def __init__(self, *made_from: Any) -> None:
        self._made_from = made_from

    def current(self) -> Self:
        """Returns this description, or a new one if a tensor has moved; raises `PassError` if tensors do not fit."""
        if not self._memory.has_changed():
            return self
        try:
            return type(self)(*self._made_from)
        except UnsuitableError as err:
            raise PassError(str(err)) from err


def has_memory(tensor: Tensor) -> bool:
    """Decides whether all elements of a strided tensor lie within its storage."""
    count = tensor.numel()
    if count and not tensor.is_contiguous():
        count = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return not count or tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + count) * tensor.itemsize


def in_own_memory(tensor: Tensor) -> Tensor:
    """Returns the tensor, or a copy of a CPU tensor with memory that is not torch's own, such as a mapped file.

    Reading a mapped file that was cut ends the process, and one that was overwritten gives other weights.
    """
    return tensor if not tensor.is_cpu or tensor.untyped_storage().resizable() else tensor.clone()


def plain_tensors(module: nn.Module) -> list[Tensor]:
    """Returns the parameters of a module with readable memory: no subclasses, as in quantized layers, none sparse."""
    return list(filter(is_plain, module.parameters()))


def is_plain(tensor: Tensor) -> bool:
    """Decides whether a tensor's memory can be read."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided


def check_memory(tensors: Iterable[Tensor]) -> None:
    """Raises `PassError` for plain tensors with memory that was freed or cut; torch would read past the end."""
    for tensor in tensors:
        if not has_memory(tensor):
            raise PassError(lost_memory(tensor))


def lost_memory(tensor: Tensor) -> str:
    """Returns the error for a weight with memory that was freed or cut."""
    return (
        f"the memory of a weight {tuple(tensor.shape)} {tensor.dtype} was freed or cut: "
        f"{tensor.untyped_storage().nbytes()} bytes are left of {tensor.nbytes}. Expected weights that stay as long as "
        "they are used; make a new LLM of the whole model."
    )


_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PAGE = 1 << 21  # bytes of a huge page on x86-64 and arm64 with 4 KiB pages
# Bytes that one thread moves at once; a choice: smaller portions share evenly, larger ones make fewer calls.
_PORTION = 1 << 26
_GAP = 1 << 16  # largest gap of an allocator between two tensors of one model; a choice
_HUGEPAGE, _NO_HUGEPAGE, _COLLAPSE = 14, 15, 25  # of madvise, see linux/mman.h
_LINE = 64  # bytes of a cache line


def use_huge_pages(tensors: Iterable[Tensor]) -> int:
    """Moves the memory of tensors into huge pages if the system has them; returns the bytes in huge pages.

    Contents and addresses stay. The tensors are strided, on a CPU, and already written: the call would allocate
    untouched memory. Adjacent tensors share pages; only pages that they fill are moved.

    The system may decline: Linux before 6.1 moves pages later, other systems and switched-off huge pages never. The
    call takes a quarter of a second to two a GiB. Memory that a forked process shares with its parent becomes its own,
    so load a model before forking.
    """
    advise = _madvise()
    if advise is None:
        return 0

    def move(begin: int, size: int) -> int:
        advise(begin, size, _HUGEPAGE)
        return size if advise(begin, size, _COLLAPSE) == 0 else 0

    portions = [
        (begin, min(_PORTION, end - begin))
        for first, last in _spans(tensors)
        for end in (last // _PAGE * _PAGE,)
        for begin in range(-(-first // _PAGE) * _PAGE, end, _PORTION)
    ]
    if len(portions) < 2:
        return sum(move(*portion) for portion in portions)
    with ThreadPoolExecutor(kernel_threads(), "foretoken-huge-pages") as pool:
        return sum(pool.map(move, *zip(*portions, strict=True)))


def untouched_zeros(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros; on CPUs the system gives memory when rows are first written, a small page at a time.

    torch would write zeros, and the C library may give memory that was used before. A huge page is given as a whole:
    a short text would take the memory of a long one, and the time to clear it; see "The KV cache in huge pages" in
    `benchmarks/NOTES.md`.
    """
    num_bytes = math.prod(size) * dtype.itemsize
    if not runs_cpu_kernels(device) or not num_bytes:
        return torch.zeros(*size, dtype=dtype, device=device)
    private = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    try:
        memory = torch.frombuffer(mmap.mmap(-1, num_bytes, **private), dtype=dtype)
    except OSError as err:
        raise MemoryError(f"the system has no {num_bytes:,} bytes of memory: {err.strerror}") from err
    advise = _madvise()
    if advise is not None:
        _advise_untouched(advise, memory.data_ptr(), memory.nbytes, _NO_HUGEPAGE)
    return memory.view(*size)


def _advise_untouched(advise: Any, first: int, size: int, advice: int) -> int:
    """Asks for pages of a kind in memory that nothing wrote to, so that nothing moves; returns where they begin."""
    begin, end = -(-first // _PAGE) * _PAGE, (first + size) // _PAGE * _PAGE
    if begin < end:
        advise(begin, end - begin, advice)
    return begin


class SharedPages:
    """Blocks of huge pages for tensors that are too small to fill one; a block is freed with its last tensor.

    Matrices in 4 bits are rarely as large as a huge page. In pages of 4 KiB each, reading them takes up to twice as
    long: see "Huge pages" in `benchmarks/NOTES.md`.
    """

    def __init__(self, block_bytes: int = 1 << 24) -> None:
        """Prepares; a block is of `block_bytes`, a choice: large ones waste more at their end."""
        self._block_bytes, self._lock = block_bytes, threading.Lock()
        self._block: Callable[[], torch.UntypedStorage | None] = lambda: None
        self._next = 0  # bytes from the beginning of the block, which may lie before the first page

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns a copy beside those of earlier calls; the tensor itself where the system has no huge pages."""
        place = self._place(tensor.nbytes) if runs_cpu_kernels(tensor.device) else None
        return tensor if place is None else place.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a tensor to be filled beside those of earlier calls, on the CPU."""
        place = self._place(math.prod(shape) * dtype.itemsize)
        return torch.empty(*shape, dtype=dtype) if place is None else place.view(dtype).view(*shape)

    def _place(self, num_bytes: int) -> Tensor | None:
        """Returns (num_bytes,) uint8 in a block; None where the system has no huge pages."""
        advise = _madvise() if num_bytes else None
        if advise is None:
            return None
        size = -(-num_bytes // _LINE) * _LINE
        with self._lock:
            block = self._block()
            if block is None or self._next + size > block.nbytes():
                block = self._new_block(advise, size)
            place, self._next = self._next, self._next + size
        return torch.empty(0, dtype=torch.uint8).set_(block)[place : place + num_bytes]

    def _new_block(self, advise: Any, size: int) -> torch.UntypedStorage:
        size = -(-max(size, self._block_bytes) // _PAGE) * _PAGE
        block = torch.empty(size + _PAGE, dtype=torch.uint8).untyped_storage()
        self._next = _advise_untouched(advise, block.data_ptr(), block.nbytes(), _HUGEPAGE) - block.data_ptr()
        self._block = weakref.ref(block)
        return block


SHARED_PAGES = SharedPages()


def _madvise() -> Any | None:
    """Returns the system's `madvise`; None where huge pages cannot be had."""
    if not sys.platform.startswith("linux") or _are_switched_off():
        return None
    try:
        advise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):  # an interpreter that is linked statically
        return None
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return advise


def _are_switched_off() -> bool:
    """Decides whether the system disables huge pages for all; `madvise` would still give them."""
    try:
        return "[never]" in _SETTING.read_text(encoding="ascii")
    except OSError:
        return True


def _spans(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Returns the begins and ends of tensors, joined across small gaps."""
    spans: list[tuple[int, int]] = []
    for begin, end in sorted({(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors}):
        if spans and begin <= spans[-1][1] + _GAP:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((begin, end))
    return spans
