"""Submits all prompts of a request at once and reads their results, as a whole or as a stream."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from foretoken.core.errors import ForetokenError, undone_on_error
from foretoken.engine.loop import NO_TOKEN
from foretoken.engine.sequence import NOT_FOLLOWED
from foretoken.server.answers import EchoedPrompt, chunk_alone, prompt_alone, running_usage
from foretoken.server.errors import ApiError, api_error
from foretoken.server.replies import dumped_in_pieces
from foretoken.server.threads import in_pool, in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

    from foretoken.core.results import Logprob, RequestOutput, StreamChunk
    from foretoken.core.sampling_params import SamplingParams
    from foretoken.entrypoints.async_llm import AsyncLLM
    from foretoken.entrypoints.request_stream import RequestStream
    from foretoken.server.metrics import ServerMetrics
    from foretoken.server.request_fields import ServedRequest

_Answer = TypeVar("_Answer")
_MOST_LOGPROBS = 1 << 18  # of one answer: some 20 MB of JSON
# Compiling structured output takes long: these requests wait for each other and leave threads to other requests.
_compiling = ThreadPoolExecutor(4, thread_name_prefix="foretoken-grammars")


class AnswerShape(Protocol):
    """Builds the bodies of one answer."""

    @property
    def request(self) -> ServedRequest:
        """The request."""

    def whole(self, outputs: Sequence[RequestOutput], echoes: Sequence[EchoedPrompt], /) -> dict[str, Any]:
        """Returns the body of an answer that is not streamed; see `Envelope.whole`."""

    def first(self) -> list[dict[str, Any]]:
        """Returns the bodies before any token."""

    def part(
        self, index: int, chunk: StreamChunk, echo: EchoedPrompt | None, offset: int, /, **more: Any
    ) -> list[dict[str, Any]]:
        """Returns the bodies with new tokens; see `Envelope.part`."""

    def last(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """Returns the bodies after all tokens; outputs: one result for each prompt."""

    def failed(self, error: ApiError) -> dict[str, Any]:
        """Returns the last body of a stream that failed."""


class LiveRequest:
    """The streams of a request's prompts.

    Attributes:
        envelope: Builds the bodies of the answer.
    """

    def __init__(
        self,
        envelope: AnswerShape,
        streams: list[RequestStream],
        echoes: list[EchoedPrompt],
        metrics: ServerMetrics | None,
    ) -> None:
        """See `submit`; echoes: one for each stream, empty unless completions echo their prompt."""
        self.envelope, self._streams, self._echoes, self._metrics = envelope, streams, echoes, metrics
        self._begin = time.monotonic()

    @classmethod
    async def submit(cls, engine: AsyncLLM, envelope: AnswerShape, metrics: ServerMetrics | None) -> LiveRequest:
        """Submits every prompt, or none.

        Raises:
            ForetokenError: From `AsyncLLM.submit` and `EchoedPrompt.read`; prompts submitted before are aborted.
            ApiError: When the context has no room for the requested number of tokens.
        """
        streams: list[RequestStream] = []
        echoes: list[EchoedPrompt] = []
        request, lengths = envelope.request, list[int]()
        call = partial(engine.submit, sampling_params=request.params, client=object())  # of all prompts
        submit = in_thread if request.params.structured_outputs is None else partial(in_pool, _compiling)

        def check(num_prompt: int) -> None:
            lengths.append(num_prompt)
            _check_entries(request, lengths)
            if request.has_max_tokens:
                _check_room(num_prompt, request.params.max_tokens, engine.llm.target.context_len)

        _check_entries(request, [len(prompt.get("prompt_token_ids", ())) for prompt in request.prompts])
        with undone_on_error(lambda: _abort(streams)):
            for prompt in request.prompts:  # reading a long prompt would delay other requests' chunks
                streams.append(await submit(partial(call, prompt, check=check)))
                if request.is_echoed:
                    given = prompt.get("prompt"), streams[-1].prompt_token_ids
                    echoes.append(await in_thread(EchoedPrompt.read, engine.llm, *given))
        return cls(envelope, streams, echoes, metrics)

    def abort(self) -> None:
        """Aborts all unfinished prompts within one iteration."""
        _abort(self._streams)

    async def whole(self, make: Callable[[dict[str, Any]], _Answer]) -> _Answer:
        """Returns the whole answer; `make` builds it from the body, in a thread since log-probabilities take long.

        Raises:
            ApiError: When a completion failed.
        """
        try:
            outputs = [await stream.output() for stream in self._streams]
        finally:
            self.abort()
        self._count(outputs)
        for output in outputs:
            for completion in output.outputs:
                _check(self.envelope.request.params, completion.finish_reason, completion.error)
        return await in_thread(lambda: make(self._body(outputs)))

    def _body(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        for at, output in enumerate(outputs):
            self._score(at, output.prompt_logprobs)
        return self.envelope.whole(self._told(outputs), self._echoes)

    async def parts(self) -> AsyncGenerator[Any]:
        """Yields the bodies of a stream; bodies with log-probabilities of a prompt are JSON bytes."""
        try:
            async for body in self._parts():
                yield body
        except (ForetokenError, ApiError) as err:
            yield self.envelope.failed(api_error(err))
        finally:
            self.abort()

    async def _parts(self) -> AsyncIterator[Any]:
        request, n = self.envelope.request, self.envelope.request.params.n
        for body in self.envelope.first():
            yield body
        offsets = [len(echo.text) for echo in self._echoes for _ in range(n)] or [0] * (n * len(self._streams))
        num_tokens, unechoed = 0, set(range(len(offsets)) if self._echoes else ())
        num_prompt = sum(stream.num_prompt for stream in self._streams)
        last = self._begin
        async for at, chunk in self._chunks():
            index, now = at * n + chunk.index, time.monotonic()
            if chunk.token_ids and self._metrics is not None:
                self._metrics.saw_tokens(len(chunk.token_ids), now - last, is_first=not num_tokens)
                last = now
            num_tokens += len(chunk.token_ids)
            num_told = 0 if request.is_prompt_alone else num_tokens
            more = {"usage": running_usage(num_prompt, num_told)} if request.has_running_usage else {}
            told = chunk_alone(chunk) if request.is_prompt_alone else chunk
            echo = self._echoes[at] if index in unechoed else None
            for body in self.envelope.part(index, told, echo, offsets[index], **more):
                yield body if echo is None or echo.entries is None else await in_thread(dumped_in_pieces, body)
            unechoed.discard(index)
            offsets[index] += sum(len(next(iter(entry.values())).decoded_token or "") for entry in chunk.logprobs or ())
            _check(request.params, chunk.finish_reason, chunk.error)
        outputs = [await stream.output() for stream in self._streams]
        self._count(outputs)
        for body in self.envelope.last(self._told(outputs)):
            yield body

    async def _chunks(self) -> AsyncIterator[tuple[int, StreamChunk]]:
        """Yields the chunks of all prompts as they come, each with its prompt's position.

        The first completion brings the log-probabilities of an echoed prompt: chunks of other completions wait for
        them.
        """
        held: list[list[StreamChunk]] = [[] for _ in self._streams]
        are_scored = bool(self._echoes) and self.envelope.request.num_top_logprobs is not None
        is_open = [not are_scored] * len(held)
        async for at, chunk in _merged(self._streams):
            if chunk.index != 0 and not is_open[at]:
                held[at].append(chunk)
                continue
            if chunk.prompt_logprobs is not None:
                await in_thread(self._score, at, chunk.prompt_logprobs)
            is_open[at] = True
            yield at, chunk
            while held[at]:
                yield at, held[at].pop(0)

    def _score(self, at: int, logprobs: Sequence[dict[int, Logprob] | None] | None) -> None:
        """Stores the log-probabilities of an echoed prompt."""
        num_top = self.envelope.request.num_top_logprobs
        if self._echoes and num_top is not None and logprobs is not None:
            self._echoes[at] = self._echoes[at].scored(logprobs, num_top)

    def _told(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Removes the generated token from results if the request asks for the prompt alone."""
        return [prompt_alone(each) for each in outputs] if self.envelope.request.is_prompt_alone else outputs

    def _count(self, outputs: list[RequestOutput]) -> None:
        if self._metrics is not None:
            self._metrics.ended(outputs, time.monotonic() - self._begin)


def _check_entries(request: ServedRequest, num_prompt: Sequence[int]) -> None:
    """Raises `ApiError` for an answer with too many log-probabilities.

    Counts the log-probabilities of prompts, and of all completions at their largest; num_prompt: tokens of each prompt.
    """
    params, n = request.params, request.params.n
    is_several = n * len(request.prompts) > 1 and not request.is_streamed
    generated = (params.max_tokens or 0) if is_several and params.logprobs is not None else 0
    of_prompt = 0 if params.prompt_logprobs is None else params.prompt_logprobs + 1
    count = n * sum(length * of_prompt + generated * ((params.logprobs or 0) + 1) for length in num_prompt)
    if count > _MOST_LOGPROBS:
        raise ApiError(
            f"the answer would have {count} log-probabilities. Expected at most {_MOST_LOGPROBS}, those of prompts and "
            "of all completions together. Ask for fewer prompts, completions, tokens or alternatives."
        )


def _check_room(num_prompt: int, max_tokens: int | None, context_len: int) -> None:
    """Raises `ApiError` unless `max_tokens` tokens fit behind the prompt."""
    if max_tokens is not None and num_prompt + max_tokens > context_len:
        raise ApiError(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}, more together than the context of "
            f"{context_len} tokens. Ask for at most {context_len - num_prompt}, or leave max_tokens out.",
            param="max_tokens", code="context_length_exceeded",
        )  # fmt: skip


async def _merged(streams: list[RequestStream]) -> AsyncIterator[tuple[int, StreamChunk]]:
    """Yields the chunks of several streams as they come, each with the stream's position."""
    if len(streams) == 1:
        async for chunk in streams[0]:
            yield 0, chunk
        return
    waiting = {asyncio.ensure_future(_next(stream)): at for at, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                at, came = waiting.pop(task), task.result()
                if came is not None:
                    waiting[asyncio.ensure_future(_next(streams[at]))] = at
                    yield at, came
    finally:
        for task in waiting:
            task.cancel()


def _abort(streams: Sequence[RequestStream]) -> None:
    for stream in streams:
        stream.abort()


async def _next(stream: RequestStream) -> StreamChunk | None:
    """Returns the next chunk of a stream; None after the last one."""
    try:
        return await stream.__anext__()
    except StopAsyncIteration:
        return None


def _check(params: SamplingParams, finish_reason: str | None, error: str | None) -> None:
    """Raises `ApiError` if a completion failed; with status 400 if its parameters may be the cause."""
    if error == NO_TOKEN and not params.is_plain:
        raise ApiError(
            "The completion failed: the request's parameters leave no token that is possible. Allow more.",
            code="no_token_possible",
        )
    if error is not None and error.startswith(NOT_FOLLOWED):
        raise ApiError(f"The completion failed: {error} Ask for a simpler form.", code="grammar_too_large")
    if finish_reason == "error":
        raise ApiError(f"The completion failed: {error}", status=500)
    if finish_reason == "abort":
        raise ApiError("The server ended the request. Send it again.", status=503, headers={"Retry-After": "1"})
