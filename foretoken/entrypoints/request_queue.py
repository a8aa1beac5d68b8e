"""Requests that wait for a slot or have one, and the limit on waiting requests.

Requests join in order of arrival. While a slot is free, a request is never refused.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from foretoken.core.errors import QueueFull, RequestError
from foretoken.entrypoints.request_stream import Mailbox
from foretoken.files.locks import ForkLock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from foretoken.entrypoints.requests import Request

_FADE = 0.98  # weight of earlier values in the moving averages
_LONGEST_RETRY_S = 600.0


class QueuedRequest:
    """A request and the chunks that its reader got.

    Attributes:
        request: The request.
        mailbox: Receives the chunks.
        num_made: For each completion the output tokens that were put into chunks.
        is_told: For each completion whether its last chunk was made.
    """

    def __init__(self, request: Request) -> None:
        self.request, self.mailbox = request, Mailbox()
        self.num_made = [0] * len(request.sequences)
        self.is_told = [False] * len(request.sequences)

    @property
    def num_generated(self) -> int:
        """Output tokens so far, over all completions."""
        return sum(len(s.tokens) - s.num_prompt for s in self.request.sequences)

    def fill_mailbox(self) -> None:
        """Puts new chunks into the mailbox, and the whole result once the request is over."""
        self._make_chunks()
        if self.request.is_over:
            self.mailbox.output = self.request.output()

    def _make_chunks(self) -> None:
        """Makes chunks of new tokens unless the reader still has unread ones; always makes the last chunk."""
        is_open, chunks = self.mailbox.is_read and not self.mailbox.chunks, []
        for sequence, made in zip(self.request.sequences, self.num_made, strict=True):
            index, is_over = sequence.index, sequence.finish_reason is not None
            sequence.tell_scores()
            count = len(sequence.tokens) - sequence.num_prompt
            if self.is_told[index] or not (is_over or (is_open and count > made)):
                continue
            chunks.append(sequence.chunk(0, made))
            self.num_made[index], self.is_told[index] = count, is_over
        if chunks and self.mailbox.has_summaries:
            self.mailbox.summary = self.request.summary()  # before the chunks, which wake the reader
        self.mailbox.chunks.extend(chunks)


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

    Attributes:
        running: Requests that have begun, by id; only the engine's thread changes it.
        throughput: Measured throughput; only the engine's thread changes it.
    """

    def __init__(self, max_requests: int, max_tokens: int | None, num_free_slots: Callable[[], int]) -> None:
        """Makes an empty queue.

        Args:
            max_requests: Cap on waiting requests.
            max_tokens: Cap on the prompt tokens of waiting requests; None for no cap.
            num_free_slots: Returns the number of completions that can begin now.
        """
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

    def check_room(self) -> None:
        """Raises `QueueFull` if no other request may wait. Called before the prompt is read."""
        with self._lock:
            self._check_room(0)

    def add(self, request: Request, hand_over: Callable[[QueuedRequest], None]) -> QueuedRequest:
        """Adds a request, and passes it to `hand_over`, which may refuse by raising.

        Raises:
            RequestError: When another live request has the same id.
            QueueFull: When the request cannot wait.
        """
        with self._lock:
            if self.get(request.request_id) is not None:
                raise RequestError(
                    f"request_id '{request.request_id}' is that of a request that is not over. Expected another one. "
                    "Leave it out to be given one."
                )
            self._check_room(request.num_prompt)
            served = QueuedRequest(request)
            hand_over(served)
            self._waiting[request.request_id] = served
        return served

    def move_begun(self, *, are_all_looked_at: bool) -> None:
        """Moves requests that have begun to `running`; looks beyond the first that waits if `are_all_looked_at`."""
        with self._lock:
            for request_id, served in list(self._waiting.items()):
                if served.request.has_begun:
                    self.running[request_id] = served  # added before removed: `get` takes no lock
                    del self._waiting[request_id]
                elif not are_all_looked_at:
                    break

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

    def _check_room(self, num_prompt: int) -> None:
        """Raises `QueueFull` if a prompt of `num_prompt` tokens can neither begin nor wait."""
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
        tokens = sum(served.request.num_prompt for served in queued)
        if len(queued) >= self._max_requests:
            full = f"{len(queued)} requests are waiting. Expected at most {self._max_requests}, max_waiting_requests."
        elif self._max_tokens is not None and tokens + num_prompt > self._max_tokens:
            full = (
                f"{tokens} prompt tokens are waiting, and {num_prompt} more came. Expected at most {self._max_tokens}, "
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
