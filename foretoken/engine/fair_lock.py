"""A lock that serves threads in the order in which they asked for it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from foretoken.core.errors import ForetokenError

if TYPE_CHECKING:
    from types import TracebackType


class FairLock:
    """Mutual exclusion, first come first served, as a context manager.

    `threading.Lock` goes to whoever is awake when it is released, which in a loop is nearly always the thread that just
    released it: a thread that steps the engine again and again would keep the others from adding their requests.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._next_ticket = self._serving = 0
        self._given_up: set[int] = set()
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
                    self._given_up.add(ticket)
                    self._skip_given_up()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Lets the next thread in."""
        self.leave()

    def leave(self) -> None:
        """Gives the lock to the thread that has waited longest."""
        with self._condition:
            self._owner = None
            self._serving += 1
            self._skip_given_up()

    def try_enter(self) -> bool:
        """Takes the lock if nobody holds it or waits for it; `leave` gives it back."""
        with self._condition:
            if self._serving != self._next_ticket:
                return False
            self._next_ticket += 1
            self._owner = threading.get_ident()
            return True

    def _skip_given_up(self) -> None:
        """Passes over tickets whose threads stopped waiting, and wakes the others."""
        while self._serving in self._given_up:
            self._given_up.remove(self._serving)
            self._serving += 1
        self._condition.notify_all()
