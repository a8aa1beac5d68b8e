"""Connections that send their headers slowly, or never, are closed; others stay."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from served_app import served

from foretoken.server import http_server

_HEADER_SECONDS = 0.3
_REQUEST = b"GET /slow HTTP/1.1\r\nHost: here\r\n\r\n"


async def slow_app(scope: Any, receive: Any, send: Any) -> None:
    """Answers in three parts, which take longer than headers may."""
    assert scope["type"] == "http"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
    for part in range(3):
        await asyncio.sleep(_HEADER_SECONDS)
        await send({"type": "http.response.body", "body": b"%d" % part, "more_body": part < 2})


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that waits less long than a real one."""
    monkeypatch.setattr(http_server, "_HEADER_SECONDS", _HEADER_SECONDS)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await slow_app(scope, receive, send)
        else:  # begin and end of the server
            for _ in range(2):
                message = await receive()
                await send({"type": f"{message['type']}.complete"})

    with served(app) as address:
        yield address


def connect(url: str) -> socket.socket:
    """A connection of our own."""
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=60)


@pytest.mark.parametrize("begin", [b"", b"GET / HTTP/1.1\r\n", _REQUEST[:-2]])
def test_headers_that_do_not_end_close_the_connection(url: str, begin: bytes) -> None:
    with connect(url) as connection:
        connection.sendall(begin)
        assert connection.recv(100) == b""


def test_headers_that_drip_close_the_connection(url: str) -> None:
    """Every byte would set a timer of silence back."""

    def drip(connection: socket.socket) -> None:
        for _ in range(1000):
            connection.sendall(b"X")
            time.sleep(0.02)

    with connect(url) as connection, pytest.raises(ConnectionError):
        drip(connection)


def test_answers_may_take_longer_than_headers(url: str) -> None:
    with httpx.Client(base_url=url) as client:
        assert [client.get("/slow").text for _ in range(2)] == ["012", "012"]


def test_a_second_request_of_a_connection_is_watched_too(url: str) -> None:
    with connect(url) as connection:
        connection.sendall(_REQUEST)
        answer = b""
        while not answer.endswith(b"012"):
            answer += connection.recv(100)
        connection.sendall(_REQUEST[:-2])
        assert connection.recv(100) == b""
