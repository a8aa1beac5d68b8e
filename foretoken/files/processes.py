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

from foretoken.core.errors import ConfigError, ForetokenError

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


class FairLock:
    """A lock for the thread that has waited longest, as a context manager.

    A `threading.Lock` usually goes back to the thread that just released it. A thread that steps the engine in a loop
    would then keep other threads from adding their requests.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._next_ticket = self._serving = 0
        self._abandoned: set[int] = set()
        self._owner: int | None = None

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread holds the lock."""
        return self._owner == threading.get_ident()

    def check_not_mine(self) -> None:
        """Raises `ForetokenError` if the calling thread holds the lock."""
        if self.is_mine:
            raise ForetokenError(
                "an LLM was called from within one of its own callbacks. Expected calls from outside an iteration. "
                "Collect what the callback sees, and call after it has returned."
            )

    def __enter__(self) -> None:
        self.check_not_mine()
        with self._condition:
            ticket = self._next_ticket
            self._next_ticket += 1
            try:
                self._condition.wait_for(lambda: self._serving == ticket)
                self._owner = threading.get_ident()
            finally:
                if not self.is_mine:  # interrupted while waiting: skip this ticket
                    self._abandoned.add(ticket)
                    self._skip_abandoned()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Passes the lock to the thread that has waited longest."""
        with self._condition:
            self._owner = None
            self._serving += 1
            self._skip_abandoned()

    def try_acquire(self) -> bool:
        """Takes the lock if nobody holds it or waits for it; `release` gives it back."""
        with self._condition:
            if self._serving != self._next_ticket:
                return False
            self._next_ticket += 1
            self._owner = threading.get_ident()
            return True

    def _skip_abandoned(self) -> None:
        """Skips tickets of threads that stopped waiting, and wakes the others."""
        while self._serving in self._abandoned:
            self._abandoned.remove(self._serving)
            self._serving += 1
        self._condition.notify_all()


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
