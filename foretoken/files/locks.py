"""Locks: a name of a file for one process, a directory for one run, a lock that survives forks, and a fair one.

The system gives a file's lock back when the process ends, however it ends. The file is removed while it is held, so a
run that ended leaves none. A process that opened the file before that, and gets the lock after, has a file without a
name: `filelock` sees that it has no links any more, and opens the name anew.
"""

from __future__ import annotations

import os
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

_ENDING_SECONDS = 0.5  # for a run that is just giving the name back


@contextmanager
def file_lock(path: Path, *, refusal: str) -> Iterator[None]:
    """The name for this run alone while the block lasts.

    Args:
        path: Of the lock file, in a directory that exists.
        refusal: What is said when another run holds it.

    Raises:
        ConfigError: When another run holds it.
        OSError: When there can be no such file.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=_ENDING_SECONDS)
    except Timeout as err:
        raise ConfigError(refusal) from err
    try:
        yield
    finally:
        if not isinstance(lock, SoftFileLock):  # what it becomes where the file's existence is the lock
            with suppress(OSError):  # on Windows, where files that are open stay, the library removes it
                path.unlink()
        lock.release()


_LOCK = "run.lock"


@contextmanager
def run_lock(directory: Path, *, option: str) -> Iterator[None]:
    """The directory for this run alone while the block lasts; it is made where it is missing.

    Args:
        directory: Of the run.
        option: That named it, for the message.

    Raises:
        ConfigError: When another run is at work there.
    """
    directory.mkdir(parents=True, exist_ok=True)
    refusal = (
        f"another run is at work in '{directory}'. Expected one at a time. Wait for it, or choose another {option}."
    )
    with file_lock(directory / _LOCK, refusal=refusal):
        yield


class ForkLock:
    """Mutual exclusion for short work, as a context manager; not to be forked while it is held by the same thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _alive.add(self)

    def __enter__(self) -> None:
        """Waits until nobody holds it."""
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Lets others in."""
        self._lock.release()


_alive: weakref.WeakSet[ForkLock] = weakref.WeakSet()


def _after_fork() -> None:
    """In a forked child: only the thread that forked lives on."""
    for lock in _alive:
        lock._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class FairLock:
    """Mutual exclusion, first come first served, as a context manager.

    `threading.Lock` goes to whoever is awake when it is released, which in a loop is nearly always the thread that just
    released it: a thread that steps the engine again and again would keep the others from adding their requests.
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
        """Raises `ForetokenError` when the calling thread holds the lock already."""
        if self.is_mine:
            raise ForetokenError(
                "an LLM was called from within one of its own callbacks. Expected calls from outside an iteration. "
                "Collect what the callback sees, and call after it has returned."
            )

    def __enter__(self) -> None:
        """Waits for its turn.

        Raises:
            ForetokenError: When the calling thread holds the lock already, as a call from within a callback would.
        """
        self.check_not_mine()
        with self._condition:
            ticket = self._next_ticket
            self._next_ticket += 1
            try:
                self._condition.wait_for(lambda: self._serving == ticket)
                self._owner = threading.get_ident()
            finally:
                if not self.is_mine:  # interrupted while waiting: nobody may wait for this ticket for ever
                    self._abandoned.add(ticket)
                    self._skip_abandoned()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Lets the next thread in."""
        self.release()

    def release(self) -> None:
        """Gives the lock to the thread that has waited longest."""
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
        """Passes over tickets whose threads stopped waiting, and wakes the others."""
        while self._serving in self._abandoned:
            self._abandoned.remove(self._serving)
            self._serving += 1
        self._condition.notify_all()
