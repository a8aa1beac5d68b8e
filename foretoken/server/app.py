"""The routes of the server: an ASGI application over an `AsyncLLM`, with the page at `/`."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

import foretoken
from foretoken.core.errors import ForetokenError
from foretoken.report.page import render_inlined
from foretoken.server.answers import seconds_since_1970
from foretoken.server.edge import CLIENT, ApiError, Guards, api_error, check_model, check_origins, open_to, parse_object
from foretoken.server.live_request import GENERATING, BodyReader, LiveRequest, in_thread, is_large, read_body
from foretoken.server.message_parts import AnswerFormats
from foretoken.server.metrics import ServerMetrics
from foretoken.server.request_fields import check_booleans, token_request

if TYPE_CHECKING:
    from foretoken.entrypoints.async_llm import AsyncLLM
    from foretoken.server.distillation import OnlineDistillation
    from foretoken.server.edge import App

    _Handler = Callable[[Request], Awaitable[Response]]

_ANSWERS = {"/": HTMLResponse, "/metrics": PlainTextResponse}


class _Error(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: Any = None


class _ErrorBody(BaseModel):
    error: _Error


_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": _ErrorBody, "description": "Refused: `error` says why."},
    "5XX": {"model": _ErrorBody, "description": "Failed, or not ready: `error` says why."},
}
_NAME = {"parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]}
# The page sends requests to this server alone, cannot be framed, and never parses text as markup.
_POLICY = "connect-src 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"


_page = cache(partial(render_inlined, "foretoken.server", "page"))


def page_response() -> Response:
    """Returns the page, which reads the name of the model from /v1/models."""
    content, policy = _page()
    headers = {
        "Content-Security-Policy": f"{policy}; {_POLICY}", "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache",
    }  # fmt: skip
    return Response(content, media_type="text/html", headers=headers)


# Bytes; a choice: a larger body is read in a thread, so that chunks of other requests are not delayed.
_LARGE_BODY = 256 * 1024
_NO_TEMPLATE = "Start the server with --chat-template FILE, or send the text to /v1/completions."
_LONGEST_ITERATION_S = 300.0  # after which /health fails, so that a supervisor may restart the server; a choice
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The configuration of a server.

    Attributes:
        names: The names of the model; answers carry the first.
        api_keys: Requests need one of these keys; empty for an open server.
        allowed_origins: Origins of pages that may read answers, "*" for all; empty for the server's own page alone.
        has_vllm_metrics: Whether /metrics also shows figures under vLLM's names.
        has_draft_metrics: Whether answers have draft metrics; a request may say otherwise.
        chat_template: The chat template in Jinja; None for the tokenizer's own.
        tool_call_parser: See `tool_format`.
        reasoning_parser: See `thinking_tags`.
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
        """Raises `ConfigError` for an invalid origin."""
        check_origins(self.allowed_origins)


def make_app(engine: AsyncLLM, config: ServerConfig, distillation: OnlineDistillation | None = None) -> App:
    """Makes the ASGI application; when uvicorn closes the application, engine and distillation end."""
    server = _Server(engine, config, distillation)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await in_thread(engine.close)
        if distillation is not None:
            await in_thread(distillation.close)

    app = FastAPI(
        title="foretoken", version=foretoken.__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        redirect_slashes=False,
    )  # fmt: skip
    for path, method, handler in server.routes():
        app.add_api_route(
            path, handler, methods=[method], response_model=None, responses=_ERRORS,
            response_class=_ANSWERS.get(path, JSONResponse), openapi_extra=_NAME if "{name" in path else None,
        )  # fmt: skip
    app.add_exception_handler(HTTPException, server.not_routed)
    guarded = Guards(app, api_keys=config.api_keys, refused=server.metrics.refused)
    return open_to(config.allowed_origins, guarded)


class _Server:
    def __init__(self, engine: AsyncLLM, config: ServerConfig, distillation: OnlineDistillation | None) -> None:
        self._engine, self._config, self._created, llm = engine, config, seconds_since_1970(), engine.llm
        self._distillation = distillation
        template = config.chat_template
        formats = AnswerFormats.of_llm(
            llm, template, tool_parser=config.tool_call_parser, reasoning_parser=config.reasoning_parser
        )
        _log.info("parsers, by the chat template or the options: %s", formats)
        self._reader = BodyReader(
            llm, model=config.names[0], template=template, advice=_NO_TEMPLATE, formats=formats,
            has_draft_metrics=config.has_draft_metrics,
        )  # fmt: skip
        self.metrics = ServerMetrics(
            engine, config.names[0], has_vllm_names=config.has_vllm_metrics, name=config.engine_name,
            more=tuple if distillation is None else distillation.metrics,
        )  # fmt: skip

    def routes(self) -> list[tuple[str, str, _Handler]]:
        handlers = {
            "/": self.page, "/v1/models": self.models, "/v1/models/{name:path}": self.model,
            "/health": self.health, "/health/live": self.health, "/health/ready": self.health,
            "/metrics": self.show_metrics, "/version": self.version,
        }  # fmt: skip
        return [
            *((path, "GET", self._answering(handler, handler.__name__)) for path, handler in handlers.items()),
            *((path, "POST", self._answering(partial(self.generate, path), name)) for name, path in GENERATING.items()),
            ("/tokenize", "POST", self._answering(self.tokenize, "tokenize")),
            ("/detokenize", "POST", self._answering(self.detokenize, "detokenize")),
        ]

    def _answering(self, handler: _Handler, name: str) -> _Handler:
        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except (ApiError, ForetokenError) as err:
                return self._error(api_error(err))
            except Exception as err:  # noqa: BLE001 - any failure: other requests go on
                _log.exception("a request to %s failed", request.scope["path"])
                return self._error(api_error(err))

        answer.__name__ = name
        return answer

    async def not_routed(self, request: Request, error: Exception) -> Response:
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
        return JSONResponse(error.body, error.status, error.headers)

    async def page(self, _: Request) -> Response:
        return page_response()

    async def generate(self, path: str, request: Request) -> Response:
        shape = await self._reader.shape(path, await self._body(request))
        distillation = self._distillation if shape.request.may_be_learned else None
        on_end = None if distillation is None else distillation.add
        live = LiveRequest(shape, self.metrics, on_end)
        await live.submit(self._engine, request.scope[CLIENT])
        return await live.response(request.receive)

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self._config.names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        check_model(name, self._config.names)
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        llm = self._engine.llm
        return {
            "id": name, "object": "model", "created": self._created, "owned_by": "foretoken",
            "root": self._config.names[0], "parent": None, "max_model_len": llm.target.context_len,
            "drafters": [drafter.name for drafter in llm.drafters], "is_lossless": not llm.is_lossy,
            "acceptance": llm.acceptance,
            "has_chat_template": self._reader.has_template,
        }  # fmt: skip

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request)
        check_booleans(body)
        llm = self._engine.llm
        if body.get("messages") is not None:
            tokens: list[int] = (await self._reader.conversation(body))["prompt_token_ids"]
        else:
            has_special = body.get("add_special_tokens", True) is not False
            tokens = await in_thread(
                llm.encode, body.get("prompt", ""), add_special_tokens=has_special, most_tokens=llm.target.context_len
            )
        return JSONResponse({"count": len(tokens), "max_model_len": llm.target.context_len, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        tokens = await read_body(token_request, await self._body(request))
        return JSONResponse({"prompt": await in_thread(self._engine.llm.decode, tokens)})

    async def health(self, _: Request) -> Response:
        """GET /health: status 200 unless the engine has stopped or an iteration takes minutes."""
        if not self._engine.is_alive:
            raise ApiError("The engine serves no requests any more.", status=503)
        seconds = self._engine.iteration_seconds
        if seconds > _LONGEST_ITERATION_S:
            raise ApiError(f"An iteration has not ended for {seconds:.0f} seconds: something hangs.", status=503)
        return JSONResponse({"status": "ok"})

    async def show_metrics(self, _: Request) -> Response:
        page = await in_thread(self.metrics.page)
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": foretoken.__version__})

    async def _body(self, request: Request) -> dict[str, Any]:
        is_large.set(len(await request.body()) > _LARGE_BODY)
        body = await read_body(parse_object, await request.body())
        check_model(body.get("model"), self._config.names)
        return body
