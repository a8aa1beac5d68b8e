"""Connections whose clients send or read nothing in time are closed; others stay, and get what they asked for."""

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from served_app import connect, served

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


@contextmanager
def answering(app: Callable[[Any, Any, Any], Awaitable[None]]) -> Iterator[str]:
    """A server of an application that knows requests alone."""

    async def whole(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await app(scope, receive, send)
        else:  # begin and end of the server
            for _ in range(2):
                message = await receive()
                await send({"type": f"{message['type']}.complete"})

    with served(whole) as address:
        yield address


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that waits less long than a real one."""
    monkeypatch.setattr(http_server, "_HEADER_SECONDS", _HEADER_SECONDS)

    with answering(slow_app) as address:
        yield address


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


def test_headers_that_are_too_large_close_the_connection() -> None:
    """CVE-2025-48956: within the time for headers a client could fill the memory."""
    begin = b"GET / HTTP/1.1\r\nHost: here\r\nX: "
    with answering(slow_app) as url, connect(url) as connection:
        connection.sendall(begin + b"a" * ((256 << 10) + 1 - len(begin)))
        assert b"HTTP/1.1 400" in read_all(connection)


async def measuring_app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the length of the body."""
    length, is_over = 0, False
    while not is_over:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        length, is_over = length + len(message["body"]), not message["more_body"]
    told = b"%d" % length
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(told))]})
    await send({"type": "http.response.body", "body": told})


_POST = b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"


def answer_to(url: str, data: bytes) -> bytes:
    """Whatever comes back; nothing if the connection was reset meanwhile."""
    with connect(url) as connection, suppress(OSError):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        return read_all(connection)
    return b""


@pytest.mark.parametrize(
    ("data", "most"),
    [
        (_POST + b"1\r\nx\r\n" * (1 << 18) + b"0\r\n\r\n", 0),
        (_POST + b"10;" + b"e" * (1 << 18) + b"\r\n" + b"x" * 16 + b"\r\n0\r\n\r\n", 0),
        (_POST + b"1\r\nx\r\n0\r\n" + b"a: b\r\n" * (1 << 16) + b"\r\n", 0),
        (b"GET / HTTP/1.1\r\nHost: here\r\nX: " + b"a" * 300_000 + b"\r\n\r\n", 0),
        (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 5000, 100),
    ],
    ids=["tiny chunks", "extensions of chunks", "trailers", "headers that come whole", "pipelined requests"],
)
def test_requests_that_are_long_to_parse_are_refused(data: bytes, most: int) -> None:
    with answering(measuring_app) as url:
        assert answer_to(url, data).count(b"HTTP/1.1 200") <= most
        ordinary = [b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 4, _POST + b"1\r\nx\r\n" * 2000 + b"0\r\na: b\r\n\r\n"]
        assert [answer_to(url, each).count(b"HTTP/1.1 200") for each in ordinary] == [4, 1]


@pytest.mark.parametrize("size", [512, 4096, 1 << 20])
def test_bodies_in_ordinary_chunks_come_whole(size: int) -> None:
    chunk = b"%x\r\n" % size + b"x" * size + b"\r\n"
    with answering(measuring_app) as url:
        assert answer_to(url, _POST + chunk * ((8 << 20) // size) + b"0\r\n\r\n").endswith(b"\r\n\r\n8388608")


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


def read_all(connection: socket.socket) -> bytes:
    """What comes until the connection is closed, however that is."""
    parts = []
    with suppress(ConnectionError):
        while part := connection.recv(1 << 20):
            parts.append(part)
    return b"".join(parts)


async def large_app(scope: Any, receive: Any, send: Any) -> None:
    """An answer of as many MiB as its path says."""
    size = int(scope["path"][1:]) << 20
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
    await send({"type": "http.response.body", "body": b"x" * size})


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once the server has lost, or given up, a connection that brought a request."""
    seen, original = threading.Event(), http_server.GuardedProtocol.connection_lost

    def noted(self: Any, error: Exception | None) -> None:
        original(self, error)
        if self.cycle is not None:
            seen.set()

    monkeypatch.setattr(http_server.GuardedProtocol, "connection_lost", noted)
    return seen


def ask(url: str, size: int) -> socket.socket:
    """A connection that has asked for an answer of some MiB, and has room for little of it."""
    connection = socket.socket()
    connection.settimeout(60)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    connection.connect((urlsplit(url).hostname, urlsplit(url).port))
    connection.sendall(b"GET /%d HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n" % size)
    return connection


def test_an_answer_that_nobody_reads_is_dropped(lost: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_READ_SECONDS", 0.3)
    with answering(large_app) as url, ask(url, 32) as connection:
        assert lost.wait(60)
        assert len(read_all(connection)) < 32 << 20


def test_an_answer_that_is_read_slowly_comes_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_READ_SECONDS", 0.3)
    with answering(large_app) as url, ask(url, 8) as connection:
        got = b""
        for _ in range(8):  # longer than an answer may lie unread
            time.sleep(0.1)
            for _ in range(8):
                got += connection.recv(1 << 16)
        assert len(got + read_all(connection)) > 8 << 20


def test_unread_answers_are_bounded_together(lost: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_MOST_UNREAD_BYTES", 40 << 20)
    with answering(large_app) as url, ask(url, 32) as large, ask(url, 16) as small:
        assert lost.wait(60)
        assert len(read_all(small)) > 16 << 20
        assert len(read_all(large)) < 32 << 20


def test_a_client_that_sends_no_more_gets_its_answer(url: str) -> None:
    with connect(url) as connection:
        connection.sendall(_REQUEST)
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == 1
    assert answer.endswith(b"012")


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_client_that_left_is_told_from_one_that_sends_no_more(has_begun: bool) -> None:
    asked, left = threading.Event(), threading.Event()

    async def waiting_app(scope: Any, receive: Any, send: Any) -> None:
        if has_begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        asked.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    with answering(waiting_app) as url:
        with connect(url) as connection:
            connection.sendall(_REQUEST)
            assert asked.wait(60)
        assert left.wait(60)
