"""What long work asks of its process: to end at a point of its own choosing, and to keep the memory that it frees."""

from __future__ import annotations

import ctypes
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collects signals instead of dying of them, in the main thread; elsewhere the list stays empty.

    Yields:
        The numbers of those that came, which grows while the block lasts.
    """
    received: list[int] = []
    try:
        before = {number: signal.signal(number, lambda got, _: received.append(got)) for number in STOP_SIGNALS}
    except ValueError:  # not the main thread: the program that started it handles signals
        before = {}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
