"""One engine for any number of threads, which take turns; the thread of an `AsyncLLM`, which serves a queue.

Iterations run one at a time. Each iteration serves the requests of all threads.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from foretoken.core.backend import own_torch_state
from foretoken.core.errors import EngineStopped, ForetokenError, QueueFull, RequestError, described
from foretoken.entrypoints.requests import QueuedRequest, Request, RequestReader
from foretoken.files.processes import ForkLock

if TYPE_CHECKING:
    from foretoken.engine.loop import Engine
    from foretoken.engine.sequence import Client, Sequence

_INTERRUPTED = (
    "another call of this LLM was interrupted by {error} in the middle of an iteration, which serves the requests of "
    "all calls. Send the request again."
)
_BROKEN_OFF = "the engine's thread was ended by {error} in the middle of an iteration, which serves all requests."
_CLOSED = "this AsyncLLM was closed. Create another AsyncLLM over the same LLM."
_FORKED = (
    "this process was forked from the one that created this AsyncLLM, and the engine thread runs only there. Create "
    "another AsyncLLM in this process."
)
_FAILED = (
    "the engine thread failed: {error}. All requests ended with it. Create another AsyncLLM over the same LLM, or "
    "reload the model."
)
_FADE = 0.98  # weight of earlier values in the moving averages
_LONGEST_RETRY_S = 600.0
_log = logging.getLogger(__name__)
_engines: weakref.WeakSet[SharedEngine] = weakref.WeakSet()
_threads: weakref.WeakSet[ServingThread] = weakref.WeakSet()


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

    def inherit(self) -> None:
        """Makes a copy in a forked process usable: its parent's requests end at the next turn."""
        self._lock, self._is_inherited = FairLock(), True

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


class Throughput:
    """Moving averages of the generated tokens per second and of the tokens per output."""

    def __init__(self) -> None:
        self._tokens = self._seconds = self._output_tokens = self._outputs = 0.0

    def add_iteration(self, tokens: int, seconds: float) -> None:
        """Adds the tokens and seconds of an iteration."""
        self._tokens = _FADE * self._tokens + tokens
        self._seconds = _FADE * self._seconds + seconds

    def add_output(self, tokens: int) -> None:
        """Adds the length of a finished completion."""
        self._output_tokens = _FADE * self._output_tokens + tokens
        self._outputs = _FADE * self._outputs + 1

    def seconds(self, remaining: Iterable[int]) -> float:
        """Estimates the seconds to write completions of at most `remaining` tokens each; 1 without measurements."""
        longest = self._output_tokens / self._outputs if self._outputs else math.inf
        tokens = sum(min(each, longest) for each in remaining)
        return tokens * self._seconds / self._tokens if self._tokens else 1.0


class RequestQueue:
    """The requests of an `AsyncLLM`, for its thread and for threads that submit.

    Requests join in order of arrival. A request is never refused while a slot is free, or while its client has less
    than an even share of a full queue.

    Attributes:
        running: Requests that have begun, by id; only the engine's thread changes it.
        throughput: Measured throughput; only the engine's thread changes it.
    """

    def __init__(self, max_requests: int, max_tokens: int | None, num_free_slots: Callable[[], int]) -> None:
        """Makes an empty queue with caps on waiting requests and prompt tokens; `num_free_slots` counts completions."""
        self.running: dict[str, QueuedRequest] = {}
        self.throughput = Throughput()
        self._waiting: dict[str, QueuedRequest] = {}
        self._max_requests, self._max_tokens, self._num_free_slots = max_requests, max_tokens, num_free_slots
        self._lock = ForkLock()

    @property
    def is_empty(self) -> bool:
        """Whether no request is alive."""
        return not self.running and not self._waiting

    def counts(self) -> tuple[int, int]:
        """Returns the numbers of requests that have begun and that wait."""
        with self._lock:
            begun = sum(served.request.has_begun for served in self._waiting.values())
            return len(self.running) + begun, len(self._waiting) - begun

    def get(self, request_id: str) -> QueuedRequest | None:
        """Returns a request that is alive, or None."""
        return self._waiting.get(request_id) or self.running.get(request_id)

    def check_room(self, client: Client) -> None:
        """Raises `QueueFull` if no other request of a client may wait. Called before the prompt is read."""
        with self._lock:
            self._check_room(0, client)

    def add(self, request: Request, hand_over: Callable[[QueuedRequest], None]) -> QueuedRequest:
        """Adds a request; raises `RequestError` if its id is in use, `QueueFull` if it cannot wait.

        `hand_over` gets the request, and may refuse it by raising.
        """
        with self._lock:
            if self.get(request.request_id) is not None:
                raise RequestError(
                    f"request_id '{request.request_id}' is in use by an unfinished request. Pass another id or omit it."
                )
            self._check_room(request.num_prompt, request.client)
            served = QueuedRequest(request)
            hand_over(served)
            self._waiting[request.request_id] = served
        return served

    def move_begun(self) -> None:
        """Moves requests that have begun to `running`: not in order of arrival where clients share slots."""
        with self._lock:
            for request_id, served in list(self._waiting.items()):
                if served.request.has_begun:
                    self.running[request_id] = served  # added before removed: `get` takes no lock
                    del self._waiting[request_id]

    def remove(self, request_id: str) -> None:
        """Removes a request that has begun."""
        with self._lock:
            del self.running[request_id]

    def take_all(self) -> list[QueuedRequest]:
        """Removes and returns all requests."""
        with self._lock:
            requests = [*self.running.values(), *self._waiting.values()]
            self.running.clear()
            self._waiting.clear()
        return requests

    def _check_room(self, num_prompt: int, client: Client) -> None:
        free, queued = self._num_free_slots(), list[QueuedRequest]()
        for served in self._waiting.values():
            if served.request.has_begun:
                continue
            if free > 0:
                free -= len(served.request.sequences)
            else:
                queued.append(served)
        if free > 0:
            return
        # A client that fills the queue keeps no other client out. The share falls with the number of clients, so
        # c of them exceed the cap at most 1 + 1/2 + ... + 1/c times.
        mine = [served for served in queued if served.request.client[:1] == client[:1]]
        share = len({client[:1], *(served.request.client[:1] for served in queued)})
        tokens, own = (sum(served.request.num_prompt for served in some) for some in (queued, mine))
        if len(queued) >= self._max_requests and len(mine) >= self._max_requests // share:
            full = f"{len(queued)} requests are waiting. Expected at most {self._max_requests}, max_waiting_requests."
        elif (most := self._max_tokens) is not None and tokens + num_prompt > most and own + num_prompt > most // share:
            full = (
                f"{tokens} prompt tokens are waiting, and {num_prompt} more came. Expected at most {most}, "
                "max_waiting_tokens."
            )
        else:
            return
        remaining = [s.remaining for served in queued for s in served.request.sequences]
        retry_after_s = min(max(self.throughput.seconds(remaining), 1.0), _LONGEST_RETRY_S)
        raise QueueFull(
            f"{full} Send the request again in {retry_after_s:.0f} s or later, or allow more.",
            retry_after_s=retry_after_s,
        )


class ServingThread:
    """A thread that serves the requests of a queue until it is closed or fails; `stopped` says why, or is None."""

    def __init__(self, shared: SharedEngine, queue: RequestQueue) -> None:
        self.stopped: str | None = None
        self._shared, self._queue = shared, queue
        self._inbox: SimpleQueue[QueuedRequest | None] = SimpleQueue()  # None: the end. `put` may be called anywhere
        self._iteration_began: float | None = None  # monotonic seconds; None between iterations
        self._thread = threading.Thread(target=self._serve, name="foretoken-engine", daemon=True)
        _threads.add(self)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether it serves requests."""
        return self.stopped is None and self._thread.is_alive()

    @property
    def iteration_seconds(self) -> float:
        """Seconds since the present iteration began; 0 between iterations."""
        began = self._iteration_began
        return 0.0 if began is None else time.monotonic() - began

    def hand_over(self, served: QueuedRequest) -> None:
        """Gives a request to the thread; raises `EngineStopped` if the thread has stopped."""
        self.check_alive()
        self._inbox.put(served)

    def check_alive(self) -> None:
        """Raises `EngineStopped` if the thread has stopped."""
        if self.stopped is not None:
            raise EngineStopped(self.stopped)

    def abort(self, served: QueuedRequest) -> None:
        """Aborts a request before the next iteration. Takes no lock."""
        self._shared.abort_at_next_turn(served.request.sequences)

    def close(self) -> None:
        """Orders the thread to end all requests and itself. Takes no lock."""
        self._inbox.put(None)

    def join(self) -> None:
        """Waits for the end of the thread; returns at once in the thread itself."""
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _serve(self) -> None:
        try:
            while self._serve_once():
                pass
            self._stop(_CLOSED, error=None)
        except BaseException as err:  # noqa: BLE001 - readers must learn of any error
            _log.critical("the engine's thread failed: %s", described(err), exc_info=err)
            self._stop(_FAILED.format(error=described(err)), error=_BROKEN_OFF.format(error=described(err)))

    def _serve_once(self) -> bool:
        new = self._new_requests()
        if None in new:
            return False
        with self._shared.turn():
            for served in filter(None, new):
                for sequence in served.request.sequences:
                    if sequence.finish_reason is None:  # else it was aborted before it arrived
                        self._shared.engine.add(sequence)
            if self._shared.engine.has_work:
                self._step()
            self._queue.move_begun()
            self._hand_out(list(self._queue.running.values()))
        return True

    def _step(self) -> None:
        running = self._queue.running.values()
        begin, before = time.perf_counter(), sum(served.num_generated for served in running)
        self._iteration_began = time.monotonic()
        self._shared.step(_BROKEN_OFF)
        self._iteration_began = None
        generated = sum(served.num_generated for served in running) - before
        self._queue.throughput.add_iteration(generated, time.perf_counter() - begin)

    def _new_requests(self) -> list[QueuedRequest | None]:
        """Returns all new requests; waits for one while no request is alive."""
        new = []
        if self._queue.is_empty:
            new.append(self._inbox.get())
        try:
            while True:
                new.append(self._inbox.get_nowait())
        except Empty:
            return new

    def _hand_out(self, requests: list[QueuedRequest]) -> None:
        for served in requests:
            error = served.fill()
            if error is not None:
                self._shared.engine.abort(served.request.sequences, error=f"decoding failed: {error}.")
                served.fill_at_last()
            if served.is_complete:
                self._queue.remove(served.request.request_id)
                for sequence in served.request.sequences:
                    self._queue.throughput.add_output(len(sequence.tokens) - sequence.num_prompt)
            if served.chunks or served.is_complete:
                served.wake()

    def _stop(self, reason: str, *, error: str | None) -> None:
        """Ends all requests: with `error`, or aborted if it is None. Later calls raise `EngineStopped(reason)`."""
        self.stopped = reason
        requests = self._queue.take_all()
        try:
            with self._shared.turn():
                self._shared.engine.abort([s for served in requests for s in served.request.sequences], error=error)
                for served in requests:
                    served.fill_at_last()
        except BaseException as err:  # noqa: BLE001 - the cause may still fail
            _log.error("requests could not be ended: %s", described(err))
        for served in requests:
            if not served.is_complete:
                served.error = EngineStopped(reason)
            served.wake()

    def end_after_fork(self) -> None:
        """Ends the requests in a forked child, which has no copy of the thread."""
        self.stopped = _FORKED
        for served in self._queue.take_all():
            served.error = EngineStopped(_FORKED)
            served.wake(is_forked=True)


def _at_exit() -> None:
    """Ends the threads before the interpreter would stop them in the middle of an iteration."""
    threads = list(_threads)
    for thread in threads:
        thread.close()
    for thread in threads:
        thread.join()


def _after_fork() -> None:
    """Prepares a forked child, which lacks the threads: replaces locks that they may hold, ends their requests."""
    for shared in _engines:
        shared.inherit()
    for thread in _threads:
        thread.end_after_fork()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
