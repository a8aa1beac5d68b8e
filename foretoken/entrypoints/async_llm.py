"""`AsyncLLM`: submits, streams and aborts requests of an `LLM` one by one, from any thread or task.

One thread runs the iterations. Submitting never waits for an iteration. Reading waits in the reader's event loop alone.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from foretoken.core.checks import check_integer, check_text, shown
from foretoken.core.errors import BuiltPerProcess, ConfigError, RequestError, undone_on_error
from foretoken.core.results import CompletionOutput, RequestOutput, StreamChunk
from foretoken.core.sampling_params import RequestOutputKind, SamplingParams, check_other_keywords
from foretoken.entrypoints.llm import LLM, EngineArgs
from foretoken.entrypoints.serving import RequestQueue, ServingThread

if TYPE_CHECKING:
    from foretoken.entrypoints.requests import QueuedRequest
    from foretoken.text.prompts import Prompt


class RequestStream:
    """The reader's end of a request: an asynchronous iterator of chunks, and the whole result.

    One reader at a time may use it, in any event loop. Leaving `async for`, cancelling the reader, or dropping the
    stream aborts the request. Chunks are made as they are read: tokens that come while a chunk is unread go into the
    next chunk, so a slow reader costs neither memory nor time.
    """

    def __init__(self, engine: object, served: QueuedRequest, abort: Callable[[], None]) -> None:
        self.request_id, self.prompt_token_ids = served.request.request_id, served.request.prompt_token_ids
        self._engine, self._served, self._abort = engine, served, abort

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
        await self._wait(lambda: self._served.is_complete)
        if self._served.output is None:
            assert self._served.error is not None, "what is complete has one of the two"
            raise self._served.error
        return self._served.output

    async def outputs(self) -> AsyncIterator[RequestOutput]:
        """Yields results on the way, each with all completions, in the form of `SamplingParams.output_kind`.

        A result covers all tokens since the reader took the result before. Raises as `async for` over the stream does.
        """
        box, prompt_logprobs, sequences = self._served, None, self._served.request.sequences
        kind = sequences[0].params.output_kind
        if kind == RequestOutputKind.FINAL_ONLY:
            yield await self.output()
            return
        completions = [_Growing(index) for index in range(len(sequences))]
        box.has_summaries = True
        async for first in self:
            for chunk in (first, *(box.chunks.popleft() for _ in range(len(box.chunks)))):
                completions[chunk.index].add(chunk)
                prompt_logprobs = chunk.prompt_logprobs or prompt_logprobs
            summary = box.output or box.summary
            if summary is not None:  # None if a completion ended before the first read
                outputs = [each.output(is_new_only=kind == RequestOutputKind.DELTA) for each in completions]
                yield replace(summary, outputs=outputs, prompt_logprobs=prompt_logprobs)

    def abort(self) -> None:
        """Ends the request before the next iteration. Does nothing if it is over."""
        if not self._served.is_complete:
            self._abort()

    def __del__(self) -> None:
        self.abort()

    async def _next(self) -> StreamChunk | None:
        box = self._served
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
            await self._served.wait(is_there)


class RequestOutputs(Coroutine[Any, Any, "RequestOutput"]):
    """A request, submitted at the first use: `await` gives the whole result, `async for` results on the way."""

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


_LONGEST_ID = 256  # characters


class AsyncLLM(BuiltPerProcess):
    """Serves requests on an `LLM`; the `LLM`'s own calls go on working.

    Requests join in order of arrival, as soon as a slot is free. Other requests wait; when too many wait, further
    requests are refused.

    ```python
    async with AsyncLLM(LLM("models/tinycode")) as engine:
        async for chunk in engine.submit("def main():", SamplingParams(max_tokens=32)):
            print(chunk.text, end="")
    ```
    """

    def __init__(self, llm: LLM, *, max_waiting_requests: int = 256, max_waiting_tokens: int | None = None) -> None:
        """Starts the engine's thread.

        Args:
            llm: Other callers may use it meanwhile, another `AsyncLLM` too.
            max_waiting_requests: Requests that may wait for a slot, 0 or more.
            max_waiting_tokens: Prompt tokens of all waiting requests, 0 or more; None for no cap.

        Raises:
            ConfigError: When an argument is invalid.
        """
        if not isinstance(llm, LLM):
            raise ConfigError(f"llm is {shown(llm)}. Expected an LLM: AsyncLLM(LLM(model, ...)).")
        check_integer("max_waiting_requests", max_waiting_requests, 0, error=ConfigError)
        if max_waiting_tokens is not None:
            check_integer("max_waiting_tokens", max_waiting_tokens, 0, error=ConfigError)
        self.llm = llm
        engine = llm.shared.engine
        self._queue = RequestQueue(max_waiting_requests, max_waiting_tokens, lambda: engine.num_free_slots)
        self._thread = ServingThread(llm.shared, self._queue)
        weakref.finalize(self, self._thread.close).atexit = False  # `_at_exit` closes the thread

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Builds an `AsyncLLM` over a new `LLM`; raises what `LLM(...)` raises."""
        return cls(LLM.from_engine_args(engine_args))

    @property
    def num_running(self) -> int:
        """Number of requests with a slot."""
        return self._queue.counts()[0]

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return self._queue.counts()[1]

    @property
    def is_alive(self) -> bool:
        """Whether it takes requests: not after `close`, after a failure of its thread, or in a forked child."""
        return self._thread.is_alive

    @property
    def iteration_seconds(self) -> float:
        """Seconds since the present iteration began; very large if a drafter or a device hangs."""
        return self._thread.iteration_seconds

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        client: object = None,
        check: Callable[[int], None] | None = None,
    ) -> RequestStream:
        """Submits a request. Returns at once, in any thread, with or without an event loop.

        Args:
            prompt: One prompt, in any of the forms of `LLM.generate`.
            sampling_params: None for `llm.get_default_sampling_params()`.
            request_id: Name in results; no other live request may have it. None for a new name.
            client: Any value that can be a key of a dictionary. Clients share slots and the queue evenly, however many
                requests and completions each has. A tuple names a client and a part of its requests: the parts share
                the client's slots evenly. None for a client of its own.
            check: Called with the number of prompt tokens before the request waits; may refuse by raising.

        Returns:
            The stream of its results.

        Raises:
            RequestError: When the request cannot be served.
            QueueFull: When too many requests wait.
            EngineStopped: When no requests are served any more.
        """
        return self._begin("submit", prompt, sampling_params, request_id, client=client, check=check)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **others: Any,
    ) -> RequestOutputs:
        """Returns a request: `await` gives its whole result, `async for` the results on the way.

        ```python
        output = await engine.generate("def main():", SamplingParams(max_tokens=32))
        async for output in engine.generate("def main():", SamplingParams(output_kind=RequestOutputKind.DELTA)):
            print(output.outputs[0].text, end="")
        ```

        The first `await` or `async for` submits it. Arguments and errors as in `submit`. Cancelling the task, or
        leaving the loop, aborts the request.

        Args:
            others: Other arguments of vLLM, at neutral values.
        """
        check_other_keywords("generate", others, ("prompt", "sampling_params", "request_id"))
        return RequestOutputs(lambda: self._begin(None, prompt, sampling_params, request_id))

    def _begin(
        self,
        call: str | None,
        prompt: Any,
        sampling_params: Any,
        request_id: Any,
        *,
        client: object = None,
        check: Callable[[int], None] | None = None,
    ) -> RequestStream:
        """Submits a request; `call` is the name of a caller that yields only new parts, else None."""
        if request_id is not None:
            check_text("request_id", request_id)
            if not 0 < len(request_id) <= _LONGEST_ID:
                raise RequestError(f"request_id has {len(request_id)} characters. Expected 1 to {_LONGEST_ID}.")
        who = client if isinstance(client, tuple) and client else (object() if client is None else client,)
        self._thread.check_alive()
        self._queue.check_room(who)  # before the prompt is read, which is slower
        request_id = self._new_id() if request_id is None else str(request_id)
        request = self.llm.shared.requests.read_one(prompt, sampling_params, request_id)
        if call is not None:
            request.check_new_parts(call)
        if check is not None:
            check(request.num_prompt)
        for sequence in request.sequences:
            sequence.client = who
        served = self._queue.add(request, self._thread.hand_over)
        return RequestStream(self, served, partial(self._thread.abort, served))

    def abort(self, request_id: str) -> None:
        """Ends a request before the next iteration, with finish reason "abort"; no error if there is none."""
        served = self._queue.get(request_id)
        if served is not None:
            self._thread.abort(served)

    def close(self) -> None:
        """Ends all requests, with finish reason "abort", and the thread. The `LLM` stays usable."""
        self._thread.close()
        self._thread.join()

    shutdown = close  # vLLM's name

    def _new_id(self) -> str:
        names = iter(self.llm.shared.requests.new_id, None)
        return next(name for name in names if self._queue.get(name) is None)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes without blocking the event loop."""
        await asyncio.to_thread(self.close)
