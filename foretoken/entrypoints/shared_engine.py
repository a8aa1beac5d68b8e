"""An engine that any number of threads use in turn: iterations are made one at a time, each serving all requests."""

from __future__ import annotations

import os
import sys
import weakref
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from foretoken.core.torch_state import own_torch_state
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
    """An engine and the turns at it.

    Attributes:
        engine: To be used within a `turn`.
        requests: Reads requests for it, in any thread at any time.
    """

    def __init__(self, engine: Engine, requests: RequestReader) -> None:
        """Nobody is at work."""
        self.engine, self.requests = engine, requests
        self._lock = FairLock()
        self._given_up: deque[Sequence] = deque()  # of calls that ended while another thread had the lock
        self._is_inherited = False  # whether this is the copy of a forked process, with its parent's requests in it
        _alive.add(self)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The calling thread's turn with engine, sequences and tokenizer, first come first served.

        Raises:
            ForetokenError: When the thread has its turn already, as within a callback of the engine.
        """
        with self._lock, own_torch_state():
            if self._is_inherited:
                self._is_inherited = False
                self.engine.abort()
            self._end_given_up()
            yield

    def check_outside(self) -> None:
        """Raises `ForetokenError` within the calling thread's turn, as `turn` would."""
        self._lock.check_not_mine()

    def step(self, interrupted: str = _INTERRUPTED) -> None:
        """One iteration, within a turn.

        One that is broken off, as by Ctrl-C, may leave any sequence half committed and ends all.

        Args:
            interrupted: What their requests are told, with a place for the type of the error.
        """
        try:
            self.engine.step()
        except BaseException as err:
            self.engine.abort(error=interrupted.format(error=type(err).__name__))
            raise

    def run(self, sequences: list[Sequence]) -> Generator[None]:
        """Runs sequences to their end, pausing after every iteration, and once more for what other calls brought."""
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
            self.give_up(sequences)

    def give_up(self, sequences: list[Sequence], *, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        """Ends what is left of some sequences: at once, or at the next turn when another thread is at work.

        Does not wait: the garbage collector closes forgotten streams wherever a thread happens to be.
        """
        if is_exiting():  # the interpreter: modules may be gone, which is why the default is bound early
            return
        self.give_up_at_next_turn(sequences)
        if self._given_up and self._lock.try_enter():
            try:
                self._end_given_up()
            finally:
                self._lock.leave()

    def give_up_at_next_turn(self, sequences: Iterable[Sequence]) -> None:
        """Ends what is left of some sequences before the next iteration. Takes no lock."""
        self._given_up.extend(s for s in sequences if s.finish_reason is None)

    def _end_given_up(self) -> None:
        """Frees the slots of sequences that nobody waits for any more."""
        given_up = []
        while self._given_up:
            given_up.append(self._given_up.popleft())
        if given_up:
            self.engine.abort(given_up)


def _after_fork() -> None:
    """In a forked child: the parent's threads, which may have held locks, are gone, and its requests are not ours."""
    for shared in _alive:
        shared._lock, shared._is_inherited = FairLock(), True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
