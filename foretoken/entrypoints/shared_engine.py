"""An engine that any number of threads use in turn: iterations run one at a time, each serving all requests."""

from __future__ import annotations

import os
import sys
import weakref
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from foretoken.core.backend import own_torch_state
from foretoken.files.locks import FairLock

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from foretoken.engine.loop import Engine
    from foretoken.engine.sequence import Sequence
    from foretoken.entrypoints.requests import RequestReader

_INTERRUPTED = (
    "another call of this LLM was interrupted by {error} in the middle of an iteration, which serves the requests of "
    "all calls. Send the request again."
)
_alive: weakref.WeakSet[SharedEngine] = weakref.WeakSet()


class SharedEngine:
    """An engine that threads use in turn.

    Attributes:
        engine: The engine; use it within a `turn`.
        requests: Reads requests; any thread may use it at any time.
    """

    def __init__(self, engine: Engine, requests: RequestReader) -> None:
        self.engine, self.requests = engine, requests
        self._lock = FairLock()
        self._to_abort: deque[Sequence] = deque()  # of calls that ended while another thread held the lock
        self._is_inherited = False  # whether this copy, in a forked process, has its parent's requests
        _alive.add(self)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Gives the calling thread the engine, first come first served; raises `ForetokenError` inside its own turn."""
        with self._lock, own_torch_state():
            if self._is_inherited:
                self._is_inherited = False
                self.engine.abort()
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
        """Aborts unfinished sequences: at once, or at the next turn if another thread is at work.

        Never waits, because the garbage collector may close a stream at any point of any thread.
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
    for shared in _alive:
        shared._lock, shared._is_inherited = FairLock(), True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
