"""How many threads the native kernels run on, and what becomes of OpenMP's threads when the process forks.

OpenMP keeps its threads from one pass to the next. A forked child inherits its notes about them but not the threads,
and waits for them for ever. So they are ended before a fork, and each process starts new ones when it next needs them.
"""

from __future__ import annotations

import ctypes
import logging
import os
from typing import TYPE_CHECKING

import torch

from foretoken.core.errors import ConfigError
from foretoken.decoder.lean.build import native_library

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_THREADS = 4 * (os.cpu_count() or 1)
_PAUSE_HARD = 2  # omp_pause_hard: the threads end
_log = logging.getLogger(__name__)
_fork = {"ended": True, "limit": MAX_THREADS}  # whether OpenMP's threads were ended before the last fork


def kernel_threads() -> int:
    """Threads that a kernel runs on: as many as torch, but at most `MAX_THREADS`.

    One in a forked child whose parent could not end its OpenMP threads.
    """
    return min(torch.get_num_threads(), _fork["limit"])


def set_num_threads(count: int) -> None:
    """Sets torch's number of threads, which is the kernels' too.

    Raises:
        ConfigError: When it is below 1 or above `MAX_THREADS`.
    """
    if not 1 <= count <= MAX_THREADS:
        raise ConfigError(
            f"threads is {count}. Expected 1..{MAX_THREADS} on this machine of {os.cpu_count()} processors. Pass no "
            "more than the cores that are really free."
        )
    torch.set_num_threads(count)


def _pauses() -> Iterator[ctypes._NamedFuncPointer | None]:
    """`omp_pause_resource_all` of torch's OpenMP and of the kernels', mostly the same one; None where it is missing."""
    libraries = [ctypes.CDLL(torch._C.__file__)]
    if native_library.cache_info().currsize:
        libraries.append(native_library())
    for library in libraries:
        yield getattr(library, "omp_pause_resource_all", None)


def _before_fork() -> None:
    """Ends the OpenMP threads of the thread that forks: the only one that lives on in the child."""
    _fork["ended"] = all(pause is not None and pause(_PAUSE_HARD) == 0 for pause in _pauses())


def _after_fork_in_child() -> None:
    """Leaves the child with threads that it can use, or with one."""
    count = torch.get_num_threads()
    if not _fork["ended"] and count > 1:
        _fork["limit"] = count = 1
        _log.warning("the OpenMP threads could not be ended before a fork; the child process runs on one thread.")
    # Torch replaces a pool of its own that the fork has broken at the first call, which must not come from two threads.
    torch.set_num_threads(count)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
