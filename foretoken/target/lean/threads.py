"""How many threads the native kernels run on."""

from __future__ import annotations

import os

import torch

from foretoken.core.errors import ConfigError

MAX_THREADS = 4 * (os.cpu_count() or 1)


def kernel_threads() -> int:
    """Threads that a kernel runs on: as many as torch, but at most `MAX_THREADS`."""
    return min(torch.get_num_threads(), MAX_THREADS)


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
