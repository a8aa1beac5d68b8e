"""The thread that runs iterations while there is work, and hands the results to readers."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from enum import Enum
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from foretoken.core.errors import EngineStopped, ForetokenError, described
from foretoken.entrypoints.request_queue import QueuedRequest

if TYPE_CHECKING:
    from foretoken.entrypoints.request_queue import RequestQueue
    from foretoken.entrypoints.shared_engine import SharedEngine

_CLOSED = "this AsyncLLM was closed. Expected one that is open. Make another over the same LLM."
_FORKED = (
    "this process was forked from the one that made this AsyncLLM, and has no copy of its thread. Expected calls in "
    "the process that made it. Make another AsyncLLM in the child."
)
_FAILED = (
    "the engine's thread ended with {error}, and with it all requests. Expected none to end it. Make another AsyncLLM "
    "over the same LLM, or load the model anew."
)
_BROKEN_OFF = "the engine's thread was ended by {error} in the middle of an iteration, which serves all requests."
_log = logging.getLogger(__name__)
_alive: weakref.WeakSet[ServingThread] = weakref.WeakSet()


class _Order(Enum):
    """Orders to the thread besides new requests."""

    ABORT = "move aborted requests out of the queue"
    CLOSE = "end all requests, and yourself"


class ServingThread:
    """Serves the requests of a queue on an engine, until it is closed or fails.

    Attributes:
        stopped: Why requests are not served any more, or None.
    """

    def __init__(self, shared: SharedEngine, queue: RequestQueue) -> None:
        self.stopped: str | None = None
        self._shared, self._queue = shared, queue
        self._inbox: SimpleQueue[QueuedRequest | _Order] = SimpleQueue()  # `put` may be called anywhere
        self._iteration_began: float | None = None  # monotonic seconds; None between iterations
        self._thread = threading.Thread(target=self._serve, name="foretoken-engine", daemon=True)
        _alive.add(self)
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
        self._inbox.put(_Order.ABORT)

    def close(self) -> None:
        """Orders the thread to end all requests and itself. Takes no lock."""
        self._inbox.put(_Order.CLOSE)

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
        """Takes requests in, runs an iteration if there is work, hands out results; returns whether to go on."""
        orders = self._orders()
        if _Order.CLOSE in orders:
            return False
        with self._shared.turn():
            for served in orders:
                if isinstance(served, QueuedRequest):
                    for sequence in served.request.sequences:
                        if sequence.finish_reason is None:  # else it was aborted before it arrived
                            self._shared.engine.add(sequence)
            if self._shared.engine.has_work:
                self._step()
            self._queue.move_begun(are_all_looked_at=_Order.ABORT in orders)
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

    def _orders(self) -> list[QueuedRequest | _Order]:
        """Returns all new orders; waits for one while no request is alive."""
        orders = []
        if self._queue.is_empty:
            orders.append(self._inbox.get())
        try:
            while True:
                orders.append(self._inbox.get_nowait())
        except Empty:
            return orders

    def _hand_out(self, requests: list[QueuedRequest]) -> None:
        """Gives readers their new chunks, and removes requests that are over."""
        for served in requests:
            box, request = served.mailbox, served.request
            error = _fill(served)
            if error is not None:
                self._shared.engine.abort(request.sequences, error=f"decoding failed: {error}.")
                self._fill_at_last(served)
            if box.is_complete:
                self._queue.remove(request.request_id)
                for sequence in request.sequences:
                    self._queue.throughput.add_output(len(sequence.tokens) - sequence.num_prompt)
            if box.chunks or box.is_complete:
                box.wake()

    @staticmethod
    def _fill_at_last(served: QueuedRequest) -> None:
        """Gives a reader the result of a finished request, or the reason why there is none."""
        error = _fill(served)
        if error is not None:
            name = served.request.request_id
            served.mailbox.error = ForetokenError(f"the result of request '{name}' cannot be made: {error}.")

    def _stop(self, reason: str, *, error: str | None) -> None:
        """Ends all requests: with `error`, or aborted if it is None. Later calls raise `EngineStopped(reason)`."""
        self.stopped = reason
        requests = self._queue.take_all()
        try:
            with self._shared.turn():
                self._shared.engine.abort([s for served in requests for s in served.request.sequences], error=error)
                for served in requests:
                    self._fill_at_last(served)
        except BaseException as err:  # noqa: BLE001 - the cause may still fail
            _log.error("requests could not be ended: %s", described(err))
        for served in requests:
            if not served.mailbox.is_complete:
                served.mailbox.error = EngineStopped(reason)
            served.mailbox.wake()

    def _after_fork(self) -> None:
        """Ends the requests in a forked child, which has no copy of the thread."""
        self.stopped = _FORKED
        for served in self._queue.take_all():
            served.mailbox.error = EngineStopped(_FORKED)
            served.mailbox.wake_after_fork()


def _fill(served: QueuedRequest) -> str | None:
    """Fills a reader's mailbox; returns the description of an error, or None."""
    try:
        served.fill_mailbox()
    except Exception as err:  # noqa: BLE001 - a tokenizer that fails must cost its request alone
        return described(err)
    return None


def _at_exit() -> None:
    """Ends the threads before the interpreter would stop them in the middle of an iteration."""
    threads = list(_alive)
    for thread in threads:
        thread.close()
    for thread in threads:
        thread.join()


def _after_fork() -> None:
    for thread in _alive:
        thread._after_fork()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
