"""Limits of this process for the time of a with statement."""

import gc
import resource
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch and the native kernels run on that many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def limit_memory(num_bytes: int) -> AbstractContextManager[None]:
    """Lets this process take that much more address space than it has: what is asked for in vain raises an error."""
    gc.collect()  # else what is collected meanwhile makes room
    used = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
    return _limited(resource.RLIMIT_AS, used + num_bytes)


def full_disk(room: int = 1024) -> AbstractContextManager[None]:
    """No file of this process can be longer than `room` bytes: the kernel refuses the write, as on a full disk."""
    return _limited(resource.RLIMIT_FSIZE, room)


@contextmanager
def _limited(kind: int, most: int) -> Iterator[None]:
    """Sets the soft limit of a resource."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))
