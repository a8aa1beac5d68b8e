"""The routes of the server: an ASGI application over an `AsyncLLM`."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

import foretoken
from foretoken.core.errors import ForetokenError
from foretoken.server.answers import Envelope, seconds_since_1970
from foretoken.server.errors import ApiError, api_error
from foretoken.server.guards import Guards, check_origins, open_to
from foretoken.server.json_body import parse_object
from foretoken.server.live_request import LiveRequest
from foretoken.server.message_parts import AnswerFormats
from foretoken.server.metrics import ServerMetrics
from foretoken.server.page import documentation_of, page_response
from foretoken.server.replies import EventStream, JsonResponse, disconnect, dumped_in_pieces
from foretoken.server.request_fields import UnknownFields, chat_form, chat_request, completion_request, token_request
from foretoken.server.response_answers import ResponseEnvelope, numbered
from foretoken.server.response_fields import as_chat, told_back
from foretoken.server.threads import has_template, in_thread, is_large, rendered

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from foretoken.entrypoints.async_llm import AsyncLLM
    from foretoken.server.guards import App
    from foretoken.server.request_fields import ServedRequest

_LARGE_BODY = 256 * 1024  # bytes; a larger body is read in a thread, so that other requests' chunks are not delayed
_NO_TEMPLATE = "Start the server with --chat-template FILE, or send the text to /v1/completions."
_LONGEST_ITERATION_S = 300.0  # after which /health fails, so that a supervisor may restart the server
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The configuration of a server.

    Attributes:
        names: The names of the model; answers carry the first.
        api_keys: Requests need one of these keys; empty for an open server.
        allowed_origins: Origins whose pages may read answers, "*" for all; empty for the server's own page alone.
        has_vllm_metrics: Whether /metrics also shows figures under vLLM's names.
        has_draft_metrics: Whether answers have draft metrics, unless a request says otherwise.
        chat_template: The chat template in Jinja; None for the tokenizer's own.
        tool_call_parser: The format of tool calls: vLLM's name, "auto" to tell it by the chat template, or "none".
        reasoning_parser: The format of thoughts: vLLM's name, "auto" or "none".
        engine_name: The label `engine` of figures, which tells servers on one page apart.
    """

    names: Sequence[str]
    api_keys: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    has_vllm_metrics: bool = False
    has_draft_metrics: bool = False
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    engine_name: str = "0"

    def __post_init__(self) -> None:
        """Builds the application; raises `ConfigError` for an invalid origin."""
        check_origins(self.allowed_origins)


def make_app(engine: AsyncLLM, config: ServerConfig) -> App:
    """Makes the ASGI application; when uvicorn closes the application, the engine's thread ends."""
    server = _Server(engine, config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await in_thread(engine.close)

    app = FastAPI(
        title="foretoken", version=foretoken.__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        redirect_slashes=False,
    )  # fmt: skip
    for path, method, handler in server.routes():
        app.add_api_route(path, handler, methods=[method], response_model=None, **documentation_of(path))
    app.add_exception_handler(HTTPException, server.not_routed)
    guarded = Guards(app, api_keys=config.api_keys, refused=server.metrics.refused)
    return open_to(config.allowed_origins, guarded)


class _Server:
    """The handlers of all routes."""

    def __init__(self, engine: AsyncLLM, config: ServerConfig) -> None:
        self._engine, self._config, self._unknown = engine, config, UnknownFields()
        self._defaults, self._created = engine.llm.sampling_defaults, seconds_since_1970()
        self._formats = AnswerFormats.of(
            engine.llm, config.chat_template, tool_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
        )  # fmt: skip
        _log.info("parsers, by the chat template or the options: %s", self._formats)
        self.metrics = ServerMetrics(
            engine, config.names[0], has_vllm_names=config.has_vllm_metrics, name=config.engine_name
        )

    def routes(self) -> list[tuple[str, str, Callable[[Request], Awaitable[Response]]]]:
        return [
            ("/", "GET", self._answering(self.page)),
            ("/v1/completions", "POST", self._answering(self.completions)),
            ("/v1/chat/completions", "POST", self._answering(self.chat)),
            ("/v1/responses", "POST", self._answering(self.responses)),
            ("/v1/models", "GET", self._answering(self.models)),
            ("/v1/models/{name:path}", "GET", self._answering(self.model)),
            ("/tokenize", "POST", self._answering(self.tokenize)),
            ("/detokenize", "POST", self._answering(self.detokenize)),
            ("/health", "GET", self._answering(self.health)),
            ("/health/live", "GET", self._answering(self.health)),
            ("/health/ready", "GET", self._answering(self.health)),
            ("/metrics", "GET", self._answering(self.show_metrics)),
            ("/version", "GET", self._answering(self.version)),
        ]

    def _answering(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Wraps a handler: exceptions become answers."""

        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except (ApiError, ForetokenError) as err:
                return self._error(api_error(err))
            except Exception as err:  # noqa: BLE001 - any failure: other requests go on
                _log.exception("a request to %s failed", request.scope["path"])
                return self._error(api_error(err))

        answer.__name__ = handler.__name__
        return answer

    async def not_routed(self, request: Request, error: Exception) -> Response:
        """Answers an unknown path or method."""
        status = getattr(error, "status_code", 404)
        paths = sorted({path for path, *_ in self.routes()})
        message = (
            f"{request.method} is not answered here. Look at the methods of the Allow header."
            if status == 405
            else f"There is no such path. Known: {', '.join(paths)}."
        )
        return self._error(ApiError(message, status=status, headers=getattr(error, "headers", None)))

    def _error(self, error: ApiError) -> Response:
        self.metrics.refused(error.status)
        return JsonResponse(error.body, error.status, error.headers)

    async def page(self, _: Request) -> Response:
        return page_response()

    async def completions(self, request: Request) -> Response:
        body = await self._body(request)
        return await self._served(request, await _read(completion_request, body, self._unknown, self._defaults))

    async def chat(self, request: Request) -> Response:
        body = await self._body(request)
        prompt = await self._conversation(body)
        return await self._served(request, await self._asked(body, prompt))

    async def _asked(self, chat: dict[str, Any], prompt: dict[str, Any]) -> ServedRequest:
        return await _read(chat_request, chat, self._unknown, self._defaults, prompt, self._formats)

    async def _conversation(self, body: dict[str, Any]) -> dict[str, Any]:
        messages, form = await _read(chat_form, body)
        return await rendered(self._engine.llm, messages, form, self._config.chat_template, _NO_TEMPLATE)

    async def responses(self, request: Request) -> Response:
        body = await self._body(request)
        chat = await _read(as_chat, body)
        prompt = await self._conversation(chat)
        asked = await self._asked(chat, prompt)
        envelope = ResponseEnvelope(
            request=asked, told=await _read(told_back, body), model=self._config.names[0],
            has_draft_metrics=self._has_metrics(asked),
        )  # fmt: skip
        live = await LiveRequest.submit(self._engine, envelope, self.metrics)
        if asked.is_streamed:
            return EventStream(numbered(live.parts()), self.metrics.count_disconnect, has_names=True)
        return await self._whole(request, live)

    async def _served(self, request: Request, asked: ServedRequest) -> Response:
        envelope = Envelope(request=asked, model=self._config.names[0], has_draft_metrics=self._has_metrics(asked))
        live = await LiveRequest.submit(self._engine, envelope, self.metrics)
        if asked.is_streamed:
            return EventStream(live.parts(), self.metrics.count_disconnect)
        return await self._whole(request, live)

    def _has_metrics(self, asked: ServedRequest) -> bool:
        return self._config.has_draft_metrics if asked.has_draft_metrics is None else asked.has_draft_metrics

    async def _whole(self, request: Request, live: LiveRequest) -> Response:
        """Answers in one piece; aborts the request if the client disconnects."""
        answer = asyncio.ensure_future(live.whole(dumped_in_pieces))
        gone = asyncio.ensure_future(disconnect(request.receive))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return JsonResponse(answer.result())
            self.metrics.count_disconnect()
            return Response(status_code=499)  # the client has disconnected
        finally:
            answer.cancel()
            gone.cancel()
            live.abort()

    async def models(self, _: Request) -> Response:
        return JsonResponse({"object": "list", "data": [self._card(name) for name in self._config.names]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JsonResponse(self._card(request.path_params["name"]))

    def _card(self, name: str) -> dict[str, Any]:
        """Returns the entry of /v1/models."""
        llm = self._engine.llm
        return {
            "id": name, "object": "model", "created": self._created, "owned_by": "foretoken",
            "root": self._config.names[0], "parent": None, "max_model_len": llm.target.context_len,
            "drafters": [drafter.name for drafter in llm.drafters], "is_lossless": not llm.is_lossy,
            "has_chat_template": has_template(llm, self._config.chat_template),
        }  # fmt: skip

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize, of `prompt` or of `messages`."""
        body = await self._body(request)
        llm = self._engine.llm
        if body.get("messages") is not None:
            tokens: list[int] = (await self._conversation(body))["prompt_token_ids"]
        else:
            has_special = body.get("add_special_tokens", True) is not False
            tokens = await in_thread(
                llm.encode, body.get("prompt", ""), add_special_tokens=has_special, most_tokens=llm.target.context_len
            )
        return JsonResponse({"count": len(tokens), "max_model_len": llm.target.context_len, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        tokens = await _read(token_request, await self._body(request))
        return JsonResponse({"prompt": await in_thread(self._engine.llm.decode, tokens)})

    async def health(self, _: Request) -> Response:
        """GET /health: status 200 unless the engine has stopped or an iteration takes minutes."""
        if not self._engine.is_alive:
            raise ApiError("The engine serves no requests any more.", status=503)
        seconds = self._engine.iteration_seconds
        if seconds > _LONGEST_ITERATION_S:
            raise ApiError(f"An iteration has not ended for {seconds:.0f} seconds: something hangs.", status=503)
        return JsonResponse({"status": "ok"})

    async def show_metrics(self, _: Request) -> Response:
        page = await in_thread(self.metrics.page)
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, _: Request) -> Response:
        return JsonResponse({"version": foretoken.__version__})

    async def _body(self, request: Request) -> dict[str, Any]:
        is_large.set(len(await request.body()) > _LARGE_BODY)
        body = await _read(parse_object, await request.body())
        if body.get("model") is not None:
            self._check_model(body["model"])
        return body

    def _check_model(self, name: Any) -> None:
        if name not in self._config.names:
            shown = ascii(str(name)[:80])
            known = ", ".join(self._config.names)
            raise ApiError(
                f"The model {shown} does not exist here. Known: {known}.", status=404, param="model",
                code="model_not_found",
            )  # fmt: skip


async def _read(call: Callable[_Given, _Result], *given: _Given.args, **more: _Given.kwargs) -> _Result:
    """Runs a call that reads a body; in a thread if the body is large."""
    return await in_thread(call, *given, **more) if is_large.get() else call(*given, **more)
