"""Submits all prompts of a request at once, reads their results, and aborts them if the client disconnects."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import aclosing, suppress
from contextvars import ContextVar, copy_context
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from starlette.responses import Response

from foretoken.core.errors import ForetokenError, FormError, RequestError, undone_on_error
from foretoken.engine.loop import NO_TOKEN
from foretoken.engine.sequence import NOT_FOLLOWED
from foretoken.server import request_fields
from foretoken.server.answers import EchoedPrompt, Envelope, running_usage, without_tokens
from foretoken.server.edge import ApiError, api_error, dumped, dumped_in_pieces, run_while_connected
from foretoken.server.responses import ResponseEnvelope, as_chat, told_back

if TYPE_CHECKING:
    from foretoken.core.results import Logprob, RequestOutput, StreamChunk
    from foretoken.core.sampling_params import SamplingParams
    from foretoken.entrypoints.async_llm import AsyncLLM, RequestStream
    from foretoken.entrypoints.llm import LLM
    from foretoken.server.edge import Receive, Scope, Send
    from foretoken.server.message_parts import AnswerFormats
    from foretoken.server.metrics import ServerMetrics
    from foretoken.server.request_fields import Conversation, ServedRequest

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

is_large: ContextVar[bool] = ContextVar("is_large", default=False)
"""Whether the current task serves a request with a large body."""
_pools: dict[str, ThreadPoolExecutor] = {}


def _make_pools() -> None:
    """Makes pools of threads; a forked child has none of the threads that its parent's pools count on."""
    # Large requests have their own threads and processors, so that other requests never wait for them. Chat templates
    # and structured output may take seconds: such requests wait for each other and leave threads to other requests.
    sizes = {"large": max(1, (os.cpu_count() or 2) // 2), "chats": 2, "grammars": 4}
    for name, size in sizes.items():
        _pools[name] = ThreadPoolExecutor(size, thread_name_prefix=f"foretoken-{name}")


_make_pools()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_make_pools)


async def in_thread(call: Callable[_Given, _Result], *given: _Given.args, **options: _Given.kwargs) -> _Result:
    """Runs a call in a thread and returns its result; large requests share few threads. See `in_pool`."""
    return await in_pool(_pools["large"] if is_large.get() else None, partial(call, *given, **options))


async def in_pool(pool: Executor | None, call: Callable[[], _Result]) -> _Result:
    """Runs a call in a thread of a pool, None for the event loop's own, with the context variables of the caller.

    Raises `RuntimeError` when the call raises `StopIteration`, with which a future would never end.
    """
    return await asyncio.get_running_loop().run_in_executor(pool, copy_context().run, _ended, call)


def _ended(call: Callable[[], _Result]) -> _Result:
    try:
        return call()
    except StopIteration as err:
        raise RuntimeError("StopIteration out of a call in a thread") from err


async def read_body(call: Callable[_Given, _Result], *given: _Given.args, **options: _Given.kwargs) -> _Result:
    """Runs a call that reads a body; in a thread if the body is large."""
    return await in_thread(call, *given, **options) if is_large.get() else call(*given, **options)


GENERATING = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "responses": "/v1/responses"}


class BodyReader:
    """Checks the bodies of requests to the paths of `GENERATING`; `has_template`: can render conversations."""

    def __init__(
        self,
        llm: LLM,
        *,
        model: str,
        template: str | None,
        advice: str,
        formats: AnswerFormats,
        has_draft_metrics: bool = False,
    ) -> None:
        """Makes a reader; `template` is None for the tokenizer's own, `advice` ends the error about a missing one."""
        self._llm, self._model, self._template, self._advice, self._formats = llm, model, template, advice, formats
        self._unknown, self._draft_metrics = request_fields.UnknownFields(), "summary" if has_draft_metrics else "none"
        self.has_template = bool(template or getattr(llm.tokenizer, "chat_template", None))

    async def shape(self, path: str, body: dict[str, Any]) -> Envelope:
        """Checks a body and returns the shape of its answer; raises `ApiError` or `RequestError` for invalid fields."""
        request_fields.check_booleans(body)
        if body.get("spec_decode_metrics") is None:
            body = {**body, "spec_decode_metrics": self._draft_metrics}
        is_response = path == GENERATING["responses"]
        log, defaults = self._unknown, self._llm.sampling_defaults
        if path == GENERATING["completions"]:
            request = await read_body(request_fields.completion_request, body, log, defaults)
        else:
            chat = await read_body(as_chat, body) if is_response else body
            talk = await read_body(request_fields.read_conversation, chat)
            prompt = await self._rendered(talk.messages, talk.form)
            form = self._formats.form(
                await self._begun(talk, prompt["prompt"]), talk.tools, is_continued=talk.continued is not None
            )
            form_name = "text.format" if is_response else "response_format"
            request = await read_body(
                request_fields.chat_request, chat, log, defaults, prompt, talk.tools, form, form_name
            )
        if not is_response:
            return Envelope(request=request, model=self._model)
        return ResponseEnvelope(request=request, model=self._model, told=await read_body(told_back, body))

    async def conversation(self, chat: dict[str, Any]) -> dict[str, Any]:
        """Renders the messages of a body and returns the prompt; raises as `shape` does."""
        talk = await read_body(request_fields.read_conversation, chat)
        return await self._rendered(talk.messages, talk.form)

    async def _rendered(self, messages: Any, form: Mapping[str, Any]) -> dict[str, Any]:
        if self._llm.tokenizer is not None and not self.has_template:
            raise ApiError(f"The model has no chat template. {self._advice}", param="messages")
        render = partial(self._llm.chat_prompts, messages, chat_template=self._template, **form)
        (prompt,) = await in_pool(_pools["large" if is_large.get() else "chats"], render)
        return prompt

    async def _begun(self, talk: Conversation, prompt: str) -> str:
        """Returns the assistant's part of a prompt: what it has in common with the same answer to a short question."""
        if self._formats.tags is None:
            return ""
        messages = [{"role": "user", "content": _QUESTION}, *([] if talk.continued is None else [talk.continued])]
        form = {name: value for name, value in talk.form.items() if name != "tools"}
        try:
            short = await self._rendered(messages, form)
        except RequestError:  # a template that renders some conversations alone
            return prompt[-_LONGEST_END:]
        end = short["prompt"].rpartition(_QUESTION)[2]
        same = takewhile(lambda signs: signs[0] == signs[1], zip(reversed(prompt), reversed(end), strict=False))
        return prompt[len(prompt) - sum(1 for _ in same) :]


_QUESTION = "question 7f3a"  # any text that no template has
_LONGEST_END = 32  # characters of a prompt that may open or close thoughts; a choice
_MOST_LOGPROBS = 1 << 18  # of one answer, some 20 MB of JSON; RESULTS, "What one client's dearest requests cost"


class LiveRequest:
    """The streams of a request's prompts; `envelope` builds the bodies of the answer."""

    def __init__(
        self,
        envelope: Envelope,
        metrics: ServerMetrics | None = None,
        on_end: Callable[[Sequence[RequestOutput]], None] | None = None,
    ) -> None:
        """Prepares a request; `on_end` gets its results when all of them are there."""
        self.envelope, self._metrics, self._on_end = envelope, metrics, on_end
        self._streams: list[RequestStream] = []
        self._echoes: list[EchoedPrompt] = []  # one for each stream; empty unless completions echo their prompt
        self._begin = 0.0  # when all prompts were submitted, monotonic seconds

    async def submit(self, engine: AsyncLLM, client: str | None = None) -> None:
        """Submits every prompt, or none.

        Requests of one `client` share its slots evenly; None for a client of its own.

        Raises errors of `AsyncLLM.submit` and `EchoedPrompt.of_prompt`, and `ApiError` when the context has no room for
        the requested tokens. Prompts submitted before are aborted.
        """
        request, lengths = self.envelope.request, list[int]()
        call = partial(engine.submit, sampling_params=request.params, client=(client or object(), object()))
        submit = in_thread if request.params.structured_outputs is None else partial(in_pool, _pools["grammars"])

        def check(num_prompt: int) -> None:
            lengths.append(num_prompt)
            _check_entries(request, lengths)
            if request.has_max_tokens:
                _check_room(num_prompt, request.params.max_tokens, engine.llm.target.context_len)

        _check_entries(request, [len(prompt.get("prompt_token_ids", ())) for prompt in request.prompts])
        with undone_on_error(self.abort):
            for prompt in request.prompts:  # reading a long prompt would delay other requests' chunks
                try:
                    stream = await submit(partial(call, prompt, check=check))
                except FormError as err:
                    raise request.form_error(err) from err
                self._streams.append(stream)
                if request.is_echoed:
                    given = prompt.get("prompt"), stream.prompt_token_ids
                    self._echoes.append(await in_thread(EchoedPrompt.of_prompt, engine.llm, *given))
        self._begin = time.monotonic()

    def abort(self) -> None:
        """Aborts all unfinished prompts within one iteration."""
        for stream in self._streams:
            stream.abort()

    async def response(self, receive: Receive) -> Response:
        """Returns the answer for a client: a stream, or the whole body; aborts the request if the client disconnects.

        `receive` gives the client's further messages.
        """
        if self.envelope.request.is_streamed:
            is_numbered = isinstance(self.envelope, ResponseEnvelope)
            return EventStream(self.parts(), self._count_disconnect, is_numbered=is_numbered)
        try:
            answer = await run_while_connected(self.whole(dumped_in_pieces), receive)
        finally:
            self.abort()
        if answer.cancelled():
            self._count_disconnect()
            return Response(status_code=499)  # the client has disconnected
        return Response(answer.result(), media_type="application/json")

    async def whole(self, make: Callable[[dict[str, Any]], Any]) -> Any:
        """Returns the answer, built by `make` in a thread; raises `ApiError` when a completion failed."""
        try:
            outputs = [await stream.output() for stream in self._streams]
        finally:
            self.abort()
        self._count_outputs(outputs)
        for output in outputs:
            for completion in output.outputs:
                _check_completion(self.envelope.request.params, completion.finish_reason, completion.error)
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
            told = without_tokens(chunk, is_drafted=(), parts=()) if request.is_prompt_alone else chunk
            echo = self._echoes[at] if index in unechoed else None
            for body in self.envelope.part(index, told, echo, offsets[index], **more):
                yield body if echo is None or echo.entries is None else await in_thread(dumped_in_pieces, body)
            unechoed.discard(index)
            offsets[index] += sum(len(next(iter(entry.values())).decoded_token or "") for entry in chunk.logprobs or ())
            _check_completion(request.params, chunk.finish_reason, chunk.error)
        outputs = [await stream.output() for stream in self._streams]
        self._count_outputs(outputs)
        for body in await in_thread(self.envelope.last, self._told(outputs)):  # counts the tokens of thoughts
            yield body

    async def _chunks(self) -> AsyncIterator[tuple[int, StreamChunk]]:
        """Yields chunks with their prompt's position; they wait for the log-probabilities of an echoed prompt."""
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
        num_top = self.envelope.request.num_top_logprobs
        if self._echoes and num_top is not None and logprobs is not None:
            self._echoes[at] = self._echoes[at].scored(logprobs, num_top)

    def _told(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        if not self.envelope.request.is_prompt_alone:
            return outputs
        return [replace(output, outputs=list(map(without_tokens, output.outputs))) for output in outputs]

    def _count_disconnect(self) -> None:
        if self._metrics is not None:
            self._metrics.count_disconnect()

    def _count_outputs(self, outputs: list[RequestOutput]) -> None:
        if self._metrics is not None:
            self._metrics.ended(outputs, time.monotonic() - self._begin)
        if self._on_end is not None:
            self._on_end(outputs)


def _check_entries(request: ServedRequest, num_prompt: Sequence[int]) -> None:
    """Refuses an answer with too many log-probabilities, those of prompts included."""
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
    if max_tokens is not None and num_prompt + max_tokens > context_len:
        raise ApiError(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}, more together than the context of "
            f"{context_len} tokens. Ask for at most {context_len - num_prompt}, or leave max_tokens out.",
            param="max_tokens", code="context_length_exceeded",
        )  # fmt: skip


async def _merged(streams: list[RequestStream]) -> AsyncIterator[tuple[int, StreamChunk]]:
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


async def _next(stream: RequestStream) -> StreamChunk | None:
    try:
        return await stream.__anext__()
    except StopAsyncIteration:
        return None


def _check_completion(params: SamplingParams, finish_reason: str | None, error: str | None) -> None:
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


class EventStream(Response):
    """A stream of server-sent events; it ends if the reader disconnects."""

    media_type = "text/event-stream"

    def __init__(
        self, bodies: AsyncGenerator[Any], on_disconnect: Callable[[], None], *, is_numbered: bool = False
    ) -> None:
        """Prepares a stream, which always closes `bodies`; bytes are JSON already.

        `on_disconnect` is called if the reader disconnects before the end. With `is_numbered` each event has its body's
        type as a name, and a `sequence_number` from 0. Otherwise `[DONE]` ends the stream.
        """
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._bodies, self._on_disconnect, self._is_numbered = bodies, on_disconnect, is_numbered

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Sends the whole stream."""
        sender = await run_while_connected(self._send(send), receive)
        if sender.cancelled():
            self._on_disconnect()
            return
        with suppress(OSError):
            sender.result()

    async def _send(self, send: Send) -> None:
        async with aclosing(self._bodies) as bodies:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            number = 0
            async for body in bodies:
                told = {**body, "sequence_number": number} if self._is_numbered else body
                name = f"event: {body['type']}\n".encode() if self._is_numbered else b""
                if self._is_numbered and "delta" not in body:  # the last events repeat all log-probabilities
                    told = await in_thread(dumped_in_pieces, told)
                part = name + b"data: " + (told if isinstance(told, bytes) else dumped(told)) + b"\n\n"
                await send({"type": "http.response.body", "body": part, "more_body": True})
                number += 1
            await send({"type": "http.response.body", "body": b"" if self._is_numbered else b"data: [DONE]\n\n"})
