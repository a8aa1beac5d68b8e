"""Carries the results of one request from the engine's thread to a reader in an event loop of any thread.

Both sides share deques, whose operations are atomic, and take no lock. Reader and engine never wait for each other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import undone_on_error
from foretoken.core.results import CompletionOutput
from foretoken.core.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator

    from foretoken.core.errors import ForetokenError
    from foretoken.core.results import RequestOutput, StreamChunk
    from foretoken.entrypoints.requests import Request


class Mailbox:
    """Unread results of a request, and the readers that wait for more.

    Attributes:
        chunks: Unread chunks.
        output: The whole result, once the request is over.
        error: The reason if there will be no result.
        is_read: Whether anybody reads chunks; if not, chunks are made only at the end.
        has_summaries: Whether a summary is made with chunks.
        summary: The request when chunks were last made, without its completions.
    """

    def __init__(self) -> None:
        self.chunks: deque[StreamChunk] = deque()
        self.output: RequestOutput | None = None
        self.error: ForetokenError | None = None
        self.is_read = self.has_summaries = False
        self.summary: RequestOutput | None = None
        self._readers: deque[asyncio.Future[None]] = deque()

    @property
    def is_complete(self) -> bool:
        """Whether nothing more will come."""
        return self.output is not None or self.error is not None

    def wake(self) -> None:
        """Wakes all readers, in any event loop."""
        while self._readers:
            reader = self._readers.popleft()
            with suppress(RuntimeError):  # the loop is closed: the reader is gone
                reader.get_loop().call_soon_threadsafe(_resolve, reader)

    def wake_after_fork(self) -> None:
        """Wakes readers in a forked child directly; the child's event loops share wake-up channels with the parent."""
        while self._readers:
            reader = self._readers.popleft()
            with suppress(RuntimeError):
                _resolve(reader)

    async def wait(self, is_there: Callable[[], bool]) -> None:
        """Waits until `is_there()` is true."""
        while not is_there():
            reader = asyncio.get_running_loop().create_future()
            self._readers.append(reader)
            if not is_there():  # checked again: it may have come before the reader was in the queue
                await reader


class RequestStream:
    """The reader's end of a request: an asynchronous iterator of chunks, and the whole result.

    One reader at a time may use it, in any event loop. Leaving `async for`, cancelling the reader, or dropping the
    stream aborts the request. Chunks are made as they are read: tokens that come while a chunk is unread go into the
    next chunk, so a slow reader costs neither memory nor time.

    Attributes:
        request_id: Name of the request.
        prompt_token_ids: Token ids of the prompt.
    """

    def __init__(self, engine: object, request: Request, mailbox: Mailbox, abort: Callable[[], None]) -> None:
        self.request_id, self.prompt_token_ids = request.request_id, request.prompt_token_ids
        self._engine, self._mailbox, self._abort = engine, mailbox, abort
        self._num_completions, self._kind = len(request.sequences), request.sequences[0].params.output_kind

    @property
    def num_prompt(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt_token_ids)

    async def __aiter__(self) -> AsyncIterator[StreamChunk]:
        """Yields chunks of all completions until the last one ends; raises `EngineStopped` if the engine stops."""
        try:
            while (chunk := await self._next()) is not None:
                yield chunk
        finally:
            self.abort()

    async def __anext__(self) -> StreamChunk:
        """Returns the next chunk; raises as `async for` does, and `StopAsyncIteration` after the last one."""
        chunk = await self._next()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def output(self) -> RequestOutput:
        """Waits for the end and returns the whole result, with chunks that were read; raises as `async for` does."""
        await self._wait(lambda: self._mailbox.is_complete)
        if self._mailbox.output is None:
            assert self._mailbox.error is not None, "what is complete has one of the two"
            raise self._mailbox.error
        return self._mailbox.output

    async def outputs(self) -> AsyncIterator[RequestOutput]:
        """Yields results on the way, each with all completions, in the form of `SamplingParams.output_kind`.

        A result covers all tokens since the reader took the last one. Raises as `async for` over the stream does.
        """
        if self._kind == RequestOutputKind.FINAL_ONLY:
            yield await self.output()
            return
        box, prompt_logprobs = self._mailbox, None
        completions = [_Growing(index) for index in range(self._num_completions)]
        box.has_summaries = True
        async for first in self:
            for chunk in (first, *(box.chunks.popleft() for _ in range(len(box.chunks)))):
                completions[chunk.index].add(chunk)
                prompt_logprobs = chunk.prompt_logprobs or prompt_logprobs
            summary = box.output or box.summary
            if summary is not None:  # None if a completion ended before the first read
                outputs = [each.output(is_new_only=self._kind == RequestOutputKind.DELTA) for each in completions]
                yield replace(summary, outputs=outputs, prompt_logprobs=prompt_logprobs)

    def abort(self) -> None:
        """Ends the request before the next iteration. Does nothing if it is over."""
        if not self._mailbox.is_complete:
            self._abort()

    def __del__(self) -> None:
        self.abort()

    async def _next(self) -> StreamChunk | None:
        box = self._mailbox
        box.is_read = True
        await self._wait(lambda: bool(box.chunks) or box.is_complete)
        if box.chunks:
            return box.chunks.popleft()
        if box.error is not None:
            raise box.error
        return None

    async def _wait(self, is_there: Callable[[], bool]) -> None:
        """Waits; a reader that is cancelled meanwhile aborts the request."""
        with undone_on_error(self.abort):
            await self._mailbox.wait(is_there)


class RequestOutputs(Coroutine[Any, Any, "RequestOutput"]):
    """A request: `await` gives the whole result, `async for` the results on the way.

    The first `await` or `async for` submits it.
    """

    def __init__(self, submit: Callable[[], RequestStream]) -> None:
        self._submit = submit
        self._whole: Coroutine[Any, Any, RequestOutput] | None = None

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self._submit().outputs()

    def __await__(self) -> Generator[Any, Any, RequestOutput]:
        return self._begun().__await__()

    def send(self, value: Any) -> Any:
        """Resumes the wait; with `throw` and `close` part of `Coroutine`, which tasks and `asyncio.run` need."""
        return self._begun().send(value)

    def throw(self, *error: Any) -> Any:
        """Raises an error inside the wait."""
        return self._begun().throw(*error)

    def close(self) -> None:
        """Ends the wait, and with it the request."""
        if self._whole is not None:
            self._whole.close()

    def _begun(self) -> Coroutine[Any, Any, RequestOutput]:
        if self._whole is None:
            self._whole = self._submit().output()
        return self._whole


class _Growing:
    """Collects the chunks of one completion."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._new: list[StreamChunk] = []
        self._last: StreamChunk | None = None
        self._logprob = 0.0

    def add(self, chunk: StreamChunk) -> None:
        self._new.append(chunk)
        self._last = chunk
        self._logprob += sum(next(iter(each.values())).logprob for each in chunk.logprobs or ())

    def output(self, *, is_new_only: bool) -> CompletionOutput:
        last, logprobs = self._last, [each for chunk in self._new for each in chunk.logprobs or ()]
        has_logprobs = last is not None and last.logprobs is not None
        made = CompletionOutput(
            index=self._index,
            text="".join(chunk.text for chunk in self._new),
            token_ids=[token for chunk in self._new for token in chunk.token_ids],
            cumulative_logprob=self._logprob if has_logprobs else None,
            logprobs=logprobs if has_logprobs else None,
            finish_reason=None if last is None else last.finish_reason,
            stop_reason=None if last is None else last.stop_reason,
            error=None if last is None else last.error,
        )
        if is_new_only:
            self._new.clear()
        return made


def _resolve(reader: asyncio.Future[None]) -> None:
    if not reader.done():
        reader.set_result(None)
