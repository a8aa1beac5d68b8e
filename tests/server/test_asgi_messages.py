"""An application's answer as messages: the same ones, and a client that goes away ends it."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

pytest.importorskip("ray.serve", reason="needs the extra [ray]")

from foretoken.server.ray_forwarding import answer_messages, portable_scope

SCOPE = {"type": "http", "method": "POST", "path": "/echo", "query_string": b"", "headers": [(b"x-name", b"a")]}


def test_an_answer_comes_in_its_messages() -> None:
    async def echo(request: Request) -> PlainTextResponse:
        return PlainTextResponse(request.headers["x-name"].encode() + await request.body())

    async def run() -> list[Any]:
        app = Starlette(routes=[Route("/echo", echo, methods=["POST"])])
        scope = portable_scope({**SCOPE, "app": object(), "state": {}})
        assert pickle.loads(pickle.dumps(scope)) == SCOPE
        return [message async for message in answer_messages(app, scope, b"bc")]

    start, body = asyncio.run(run())
    assert (start["status"], body["body"]) == (200, b"abc")


def test_closing_tells_the_application() -> None:
    ended: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        ended.append((await receive())["type"])

    async def run() -> None:
        messages = answer_messages(app, dict(SCOPE), b"")
        assert (await anext(messages))["status"] == 200
        await messages.aclose()

    asyncio.run(run())
    assert ended == ["http.disconnect"]


def test_what_the_application_raises_comes_through() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("broken")

    async def run() -> None:
        _ = [message async for message in answer_messages(app, dict(SCOPE), b"")]

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(run())
