"""One engine for any number of threads, which take turns.

Iterations run one at a time. Each iteration serves the requests of all threads.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from foretoken.core.backend import own_torch_state
from foretoken.core.errors import ForetokenError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from foretoken.engine.loop import Engine
    from foretoken.engine.sequence import Sequence
    from foretoken.entrypoints.requests import RequestReader

_INTERRUPTED = (
    "another call of this LLM was interrupted by {error} in the middle of an iteration, which serves the requests of "
    "all calls. Send the request again."
)
_engines: weakref.WeakSet[SharedEngine] = weakref.WeakSet()


class FairLock:
    """A lock for the thread that has waited longest: `threading.Lock` usually goes back to the last holder."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._next_ticket = self._serving = 0
        self._abandoned: set[int] = set()
        self._owner: int | None = None

    def check_not_mine(self) -> None:
        """Raises `ForetokenError` if the calling thread holds the lock."""
        if self._owner == threading.get_ident():
            raise ForetokenError(
                "an LLM was called from within one of its own callbacks. Expected calls from outside an iteration. "
                "Collect what the callback sees, and call after it has returned."
            )

    def __enter__(self) -> None:
        self.check_not_mine()
        me = threading.get_ident()
        with self._condition:
            ticket = self._next_ticket
            self._next_ticket += 1
            try:
                while self._serving != ticket:
                    self._condition.wait()
                self._owner = me
            finally:
                if self._owner != me:  # interrupted while waiting: skip this ticket
                    self._abandoned.add(ticket)
                    self._skip_abandoned()

    def __exit__(self, *_: object) -> None:
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
        while self._serving in self._abandoned:
            self._abandoned.remove(self._serving)
            self._serving += 1
        self._condition.notify_all()


class SharedEngine:
    """An engine that threads use in turn: `engine` may be used only within a `turn`, `requests` at any time."""

    def __init__(self, engine: Engine, requests: RequestReader) -> None:
        self.engine, self.requests = engine, requests
        self._lock = FairLock()
        self._to_abort: deque[Sequence] = deque()  # of calls that ended while another thread held the lock
        self._is_inherited = False  # whether this copy, in a forked process, has its parent's requests
        _engines.add(self)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Gives the calling thread the engine, first come first served; raises `ForetokenError` inside its own turn."""
        with self._lock, own_torch_state():
            if self._is_inherited:
                self._is_inherited = False
                self.engine.abort()
            if self._to_abort:
                self._abort_pending()
            yield

    def check_outside(self) -> None:
        """Raises `ForetokenError` if the calling thread has its turn."""
        self._lock.check_not_mine()

    def step(self, interrupted: str = _INTERRUPTED) -> None:
        """Runs one iteration within a turn.

        An interrupted iteration, as by Ctrl-C, may leave any sequence half committed. It ends all sequences with the
        error `interrupted`, which has a field for the type of the exception.
        """
        try:
            self.engine.step()
        except BaseException as err:
            self.engine.abort(error=interrupted.format(error=type(err).__name__))
            raise

    def run(self, sequences: list[Sequence]) -> Generator[None]:
        """Runs sequences to their end; yields after every iteration of this thread, and once more at the end."""
        waiting_for = sequences[::-1]
        try:
            with self.turn():
                for sequence in sequences:
                    self.engine.add(sequence)
            while waiting_for:
                if waiting_for[-1].finish_reason is not None:
                    waiting_for.pop()
                    continue
                with self.turn():
                    self.step()
                yield
            yield
        finally:
            self.abort(sequences)

    def abort(self, sequences: list[Sequence], *, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        """Aborts unfinished sequences, without waiting: at once, or at the next turn if another thread is at work.

        The garbage collector may close a stream at any point of any thread.
        """
        if is_exiting():  # modules may be gone; the default argument is bound early for that reason
            return
        self.abort_at_next_turn(sequences)
        if self._to_abort and self._lock.try_acquire():
            try:
                self._abort_pending()
            finally:
                self._lock.release()

    def abort_at_next_turn(self, sequences: Iterable[Sequence]) -> None:
        """Aborts unfinished sequences before the next iteration. Takes no lock."""
        self._to_abort.extend(s for s in sequences if s.finish_reason is None)

    def _abort_pending(self) -> None:
        sequences = []
        while self._to_abort:
            sequences.append(self._to_abort.popleft())
        if sequences:
            self.engine.abort(sequences)


def _after_fork() -> None:
    """Replaces the locks in a forked child, which lacks the threads that may have held them."""
    for shared in _engines:
        shared._lock, shared._is_inherited = FairLock(), True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
