"""What one request brings, on its way from the engine's thread to a reader in an event loop of any thread.

Neither side takes a lock: the queues that both touch are deques, whose operations are atomic. So a reader never waits
for the engine's thread, which never waits for a reader.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from foretoken.core.undoing import undone_on_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from foretoken.core.errors import ForetokenError
    from foretoken.core.results import RequestOutput, StreamChunk


class Mailbox:
    """What was made and not read yet, and who waits for more.

    Attributes:
        chunks: Unread ones.
        output: The whole result, once the request is over.
        error: Why there is none, where there will be none.
        is_read: Whether anybody reads chunks, which are not made before the end else.
    """

    def __init__(self) -> None:
        """Nothing has come."""
        self.chunks: deque[StreamChunk] = deque()
        self.output: RequestOutput | None = None
        self.error: ForetokenError | None = None
        self.is_read = False
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

    def __init__(
        self,
        engine: object,
        request_id: str,
        prompt_token_ids: list[int],
        mailbox: Mailbox,
        give_up: Callable[[], None],
    ) -> None:
        """A stream that nobody has read.

        Args:
            engine: What serves the request, kept alive as long as the stream is.
            request_id: The request's name.
            prompt_token_ids: Its prompt.
            mailbox: Where chunks come.
            give_up: Ends the request; does nothing when it is over. Takes no lock, and may be called anywhere.
        """
        self.request_id, self.prompt_token_ids = request_id, prompt_token_ids
        self._engine, self._mailbox, self._give_up = engine, mailbox, give_up

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


def _resolve(reader: asyncio.Future[None]) -> None:
    """Ends a reader's wait, unless it was cancelled."""
    if not reader.done():
        reader.set_result(None)
