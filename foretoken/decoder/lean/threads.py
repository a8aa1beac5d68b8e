"""Threads of the native kernels, also after a fork, and huge pages for weights."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from foretoken.core.errors import ConfigError
from foretoken.decoder.lean.build import native_library

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor

MAX_THREADS = 4 * (os.cpu_count() or 1)
_PAUSE_HARD = 2  # omp_pause_hard: ends the threads
_log = logging.getLogger(__name__)
_fork = {"ended": True, "limit": MAX_THREADS}  # whether OpenMP's threads were ended before the last fork


def kernel_threads() -> int:
    """Returns the number of threads of a kernel: torch's, but at most `MAX_THREADS`.

    Returns 1 in a forked child whose parent could not end its OpenMP threads.
    """
    return min(torch.get_num_threads(), _fork["limit"])


def set_num_threads(count: int) -> None:
    """Sets the number of threads of torch and the kernels; raises `ConfigError` outside 1..`MAX_THREADS`."""
    if not 1 <= count <= MAX_THREADS:
        raise ConfigError(
            f"threads is {count}. Expected 1..{MAX_THREADS} on this machine of {os.cpu_count()} processors. Pass no "
            "more than the cores that are really free."
        )
    torch.set_num_threads(count)


def _pauses() -> Iterator[ctypes._NamedFuncPointer | None]:
    """Returns `omp_pause_resource_all` of torch's OpenMP and of the kernels', usually the same one; None without it."""
    libraries = [ctypes.CDLL(torch._C.__file__)]
    if native_library.cache_info().currsize:
        libraries.append(native_library())
    for library in libraries:
        yield getattr(library, "omp_pause_resource_all", None)


def _before_fork() -> None:
    """Ends the OpenMP threads of the forking thread, which alone lives on in the child."""
    _fork["ended"] = all(pause is not None and pause(_PAUSE_HARD) == 0 for pause in _pauses())


def _after_fork_in_child() -> None:
    count = torch.get_num_threads()
    if not _fork["ended"] and count > 1:
        _fork["limit"] = count = 1
        _log.warning("the OpenMP threads could not be ended before a fork; the child process runs on one thread.")
    # Torch replaces a thread pool that the fork broke at the first call, which must not come from two threads.
    torch.set_num_threads(count)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PAGE = 1 << 21
_PORTION = 1 << 26  # bytes that one thread moves
_GAP = 1 << 16  # largest gap of an allocator between two tensors
_HUGEPAGE, _COLLAPSE = 14, 25  # of madvise, see linux/mman.h


def use_huge_pages(tensors: Iterable[Tensor]) -> int:
    """Moves the memory of tensors into huge pages if the system has them; contents and addresses stay.

    Adjacent tensors share pages; only pages that they fill are moved. The system may decline: Linux before 6.1 moves
    pages later, other systems and switched-off huge pages never. The call takes a quarter of a second to two a GiB.
    Memory that a forked process shares with its parent becomes its own, so load a model before forking.

    Args:
        tensors: Strided, on a CPU, and already written: the call would allocate untouched memory.

    Returns:
        Bytes in huge pages.
    """
    if not sys.platform.startswith("linux") or _are_switched_off():
        return 0
    try:
        advise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):  # an interpreter that is linked statically
        return 0
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

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
