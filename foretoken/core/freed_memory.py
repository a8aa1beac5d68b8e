"""Keeping freed memory in the process, for programs that ask for the same large tensors again and again.

The C library returns large freed blocks to the system, which hands out zeroed pages one by one when they are asked for
again: tens of thousands of page faults for each step of a training.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_NEVER, _LARGE, _LARGEST_OF_OLD = 2**31 - 1, 1 << 30, 32 << 20  # bytes; glibc before 2.35 takes at most the last


def keep_freed_memory() -> bool:
    """Makes the whole process keep what it frees, about as much as its peak; False where the C library is not glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # Without the first one the second would only switch off what glibc learns of a program's sizes by itself.
    if not (mallopt(_MMAP_THRESHOLD, _LARGE) or mallopt(_MMAP_THRESHOLD, _LARGEST_OF_OLD)):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _NEVER))
