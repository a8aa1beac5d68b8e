"""What one request brings, on its way from the engine's thread to a reader in an event loop of any thread.

Neither side takes a lock: the queues that both touch are deques, whose operations are atomic. So a reader never waits
for the engine's thread, which never waits for a reader.
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
    """What was made and not read yet, and who waits for more.

    Attributes:
        chunks: Unread ones.
        output: The whole result, once the request is over.
        error: Why there is none, where there will be none.
        is_read: Whether anybody reads chunks, which are not made before the end else.
        has_summaries: Whether a summary is made with chunks.
        summary: The request as it was when chunks were last made, without its completions.
    """

    def __init__(self) -> None:
        """Nothing has come."""
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
        """Wakes all readers, in whichever loops they are."""
        while self._readers:
            reader = self._readers.popleft()
            with suppress(RuntimeError):  # its loop is closed: nobody is there any more
                reader.get_loop().call_soon_threadsafe(_resolve, reader)

    def wake_after_fork(self) -> None:
        """Wakes readers of the only thread of a forked child, past the loops' channels, which the parent shares."""
        while self._readers:
            reader = self._readers.popleft()
            with suppress(RuntimeError):
                _resolve(reader)

    async def wait(self, is_there: Callable[[], bool]) -> None:
        """Waits until something has come.

        Args:
            is_there: Whether it has.
        """
        while not is_there():
            reader = asyncio.get_running_loop().create_future()
            self._readers.append(reader)
            if not is_there():  # else it came before there was anybody to wake
                await reader


class RequestStream:
    """The reader's end of a request: an asynchronous iterator of chunks, and the whole result.

    For one reader at a time, in any event loop. A reader that ends early, by leaving `async for` or by being cancelled,
    ends the request; so does dropping the stream. Chunks are made as they are read: what comes while one is unread will
    be part of the next, so a slow reader costs neither memory nor time.

    Attributes:
        request_id: The request's name.
        prompt_token_ids: Its prompt.
    """

    def __init__(self, engine: object, request: Request, mailbox: Mailbox, give_up: Callable[[], None]) -> None:
        """A stream that nobody has read.

        Args:
            engine: What serves the request, kept alive as long as the stream is.
            request: The request.
            mailbox: Where chunks come.
            give_up: Ends the request; does nothing when it is over. Takes no lock, and may be called anywhere.
        """
        self.request_id, self.prompt_token_ids = request.request_id, request.prompt_token_ids
        self._engine, self._mailbox, self._give_up = engine, mailbox, give_up
        self._num_completions, self._kind = len(request.sequences), request.sequences[0].params.output_kind

    @property
    def num_prompt(self) -> int:
        """Tokens of its prompt."""
        return len(self.prompt_token_ids)

    async def __aiter__(self) -> AsyncIterator[StreamChunk]:
        """Chunks of all completions until the last one's end.

        Raises:
            EngineStopped: When the request could not be brought to an end.
        """
        try:
            while (chunk := await self._next()) is not None:
                yield chunk
        finally:
            self.abort()

    async def __anext__(self) -> StreamChunk:
        """The next chunk; raises what `async for` does, and `StopAsyncIteration` after the last one."""
        chunk = await self._next()
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def output(self) -> RequestOutput:
        """The whole result once the request is over, however it ended, whatever of it was read before.

        Raises:
            EngineStopped: When the request could not be brought to an end.
        """
        await self._wait(lambda: self._mailbox.is_complete)
        if self._mailbox.output is None:
            assert self._mailbox.error is not None, "what is complete has one of the two"
            raise self._mailbox.error
        return self._mailbox.output

    async def outputs(self) -> AsyncIterator[RequestOutput]:
        """Yields results on the way, each with all completions, in the form of `SamplingParams.output_kind`.

        A result covers all tokens since the reader took the last one.

        Raises:
            EngineStopped: When the request could not be brought to an end.
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
            if summary is not None:  # else a completion ended before anybody read, and others go on
                outputs = [each.output(is_new_only=self._kind == RequestOutputKind.DELTA) for each in completions]
                yield replace(summary, outputs=outputs, prompt_logprobs=prompt_logprobs)

    def abort(self) -> None:
        """Ends the request within one iteration. No error when it is over."""
        if not self._mailbox.is_complete:
            self._give_up()

    def __del__(self) -> None:
        """Nobody can read what a forgotten stream would bring."""
        self.abort()

    async def _next(self) -> StreamChunk | None:
        """The next chunk; None after the last one."""
        box = self._mailbox
        box.is_read = True
        await self._wait(lambda: bool(box.chunks) or box.is_complete)
        if box.chunks:
            return box.chunks.popleft()
        if box.error is not None:
            raise box.error
        return None

    async def _wait(self, is_there: Callable[[], bool]) -> None:
        """Waits for something; being cancelled meanwhile ends the request."""
        with undone_on_error(self.abort):
            await self._mailbox.wait(is_there)


class RequestOutputs(Coroutine[Any, Any, "RequestOutput"]):
    """A request: `await` gives the whole result, `async for` the results on the way.

    The first `await` or `async for` submits it.
    """

    def __init__(self, submit: Callable[[], RequestStream]) -> None:
        """Makes a request; submit: submits it and returns its stream."""
        self._submit = submit
        self._whole: Coroutine[Any, Any, RequestOutput] | None = None

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """See `RequestStream.outputs`."""
        return self._submit().outputs()

    def __await__(self) -> Generator[Any, Any, RequestOutput]:
        return self._begun().__await__()

    def send(self, value: Any) -> Any:
        """See `collections.abc.Coroutine`, also for the next two: tasks and `asyncio.run` accept only coroutines."""
        return self._begun().send(value)

    def throw(self, *error: Any) -> Any:
        """Raises an error inside the wait."""
        return self._begun().throw(*error)

    def close(self) -> None:
        """Ends the wait, and with it the request."""
        if self._whole is not None:
            self._whole.close()

    def _begun(self) -> Coroutine[Any, Any, RequestOutput]:
        """Returns the coroutine that waits for the whole result."""
        if self._whole is None:
            self._whole = self._submit().output()
        return self._whole


class _Growing:
    """Collects the chunks of one completion."""

    def __init__(self, index: int) -> None:
        """Starts without chunks; index: see `CompletionOutput`."""
        self._index = index
        self._new: list[StreamChunk] = []
        self._last: StreamChunk | None = None
        self._logprob = 0.0

    def add(self, chunk: StreamChunk) -> None:
        """Adds a chunk."""
        self._new.append(chunk)
        self._last = chunk
        self._logprob += sum(next(iter(each.values())).logprob for each in chunk.logprobs or ())

    def output(self, *, is_new_only: bool) -> CompletionOutput:
        """Returns the completion so far, or with `is_new_only` its part since the last call."""
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
    """Ends a reader's wait, unless it was cancelled."""
    if not reader.done():
        reader.set_result(None)
