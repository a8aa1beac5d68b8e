"""Process-wide settings of long work: collect stop signals, and keep freed memory."""

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
    """Collects the numbers of stop signals in a list instead of ending the process; works in the main thread alone."""
    received: list[int] = []
    try:
        before = {number: signal.signal(number, lambda got, _: received.append(got)) for number in STOP_SIGNALS}
    except ValueError:  # not the main thread: the calling program handles signals
        before = {}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_NEVER, _LARGE, _LARGEST_OF_OLD = (
    2**31 - 1,
    1 << 30,
    32 << 20,
)  # bytes; glibc before 2.35 accepts at most `_LARGEST_OF_OLD`


def keep_freed_memory() -> bool:
    """Makes the whole process keep freed memory, up to about its peak; returns False if the C library is not glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # Both are needed: the trim threshold alone would only switch off glibc's own tuning.
    if not (mallopt(_MMAP_THRESHOLD, _LARGE) or mallopt(_MMAP_THRESHOLD, _LARGEST_OF_OLD)):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _NEVER))
