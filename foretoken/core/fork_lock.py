"""A lock that a forked child finds free: the parent's thread that held it is not there to release it."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


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
