"""What processes and threads share: locks, stop signals, and memory that stays with the process.

The system releases a file's lock at the end of the process. The holder removes the file, so finished runs leave none.
Another process may have opened the removed file: `filelock` then sees no links, and opens the name anew.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from filelock import FileLock, SoftFileLock, Timeout

from foretoken.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

_ENDING_SECONDS = 0.5  # waits for a run that is just ending; a choice


@contextmanager
def file_lock(path: Path, *, refusal: str) -> Iterator[None]:
    """Holds a lock file for this run alone during the block; raises `ConfigError(refusal)` if another run holds it."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=_ENDING_SECONDS)
    except Timeout as err:
        raise ConfigError(refusal) from err
    try:
        yield
    finally:
        if not isinstance(lock, SoftFileLock):  # a soft lock is the file itself
            with suppress(OSError):  # Windows keeps open files; the library removes it there
                path.unlink()
        lock.release()


_LOCK = "run.lock"


def is_lock(path: Path) -> bool:
    """Whether a file is the lock of `run_lock`, left by a killed process."""
    return path.name == _LOCK


@contextmanager
def run_lock(directory: Path, *, option: str) -> Iterator[None]:
    """Holds a directory, made if needed, for this run alone; raises `ConfigError` if another run holds it."""
    directory.mkdir(parents=True, exist_ok=True)
    refusal = (
        f"another run is at work in '{directory}'. Expected one at a time. Wait for it, or choose another {option}."
    )
    with file_lock(directory / _LOCK, refusal=refusal):
        yield


class ForkLock:
    """A lock for short work that a forked child finds released, as a context manager."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _alive.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()


_alive: weakref.WeakSet[ForkLock] = weakref.WeakSet()


def _after_fork() -> None:
    """Renews the locks in a forked child; only the forking thread lives on there."""
    for lock in _alive:
        lock._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


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
