"""The HTTP server under the API: uvicorn, with connections that end where a client sends or takes nothing in time."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

_DRAIN_SECONDS = 30
_KEEP_ALIVE_SECONDS = 30
_HEADER_SECONDS = 10.0
_READ_SECONDS = 30.0  # for a client to take anything of an answer
_SEND_BUFFER_BYTES = 256 << 10  # of one connection, in the kernel
_MOST_UNREAD_BYTES = 256 << 20  # of all clients together
_PROBE_SECONDS = 0.5
_HTTPProtocol: Any = AutoHTTPProtocol  # h11's or httptools', whichever is there


def http_server(app: Any, *, port: int = 0, drain_seconds: int = _DRAIN_SECONDS) -> uvicorn.Server:
    """A server that does not run yet.

    Args:
        app: An ASGI application.
        port: To listen on, where `serve` is given no sockets; 0 for a free one.
        drain_seconds: How long running requests may go on after a signal to end.
    """
    return uvicorn.Server(
        uvicorn.Config(
            app, port=port, http=GuardedProtocol, access_log=False, log_config=None, server_header=False,
            timeout_graceful_shutdown=drain_seconds, timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        )
    )  # fmt: skip


class GuardedProtocol(_HTTPProtocol):
    """An HTTP connection that no client holds open, or fills with answers, without end.

    One whose request headers are not whole ten seconds after their first byte is closed; nothing sent yet counts as
    headers that have begun. One whose client takes nothing of an answer for 30 seconds is dropped with the answer, and
    so are those with most unread bytes while all together are above a bound. A client that ends its own sending, and
    nothing else, still gets its answer.
    """

    _timer: asyncio.TimerHandle | None = None
    _reader: asyncio.TimerHandle | None = None  # looks whether the client reads
    _has_read = False  # since that was looked at

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        super().connection_made(transport)
        # A kernel that holds megabytes takes no more for long: a client that reads slowly would seem to read nothing.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self._stop_watching()
        if self._reader is not None:
            self._reader.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes have come: of headers, where no request is being answered."""
        super().data_received(data)
        if self._is_answering():
            self._stop_watching()
        elif self._timer is None:
            self._watch()

    def eof_received(self) -> bool:
        """The client sends nothing more; whether the connection stays, for the answer to a whole request."""
        if not self._is_answering() or self.cycle.more_body:
            return False
        self.cycle.keep_alive = False
        self._probe()
        return True

    def pause_writing(self) -> None:
        """More waits for the client to read it than should."""
        super().pause_writing()
        if self._reader is None:
            self._look_again()
        waiting = {each: each.num_unread for each in self.connections if isinstance(each, GuardedProtocol)}
        while sum(waiting.values()) > _MOST_UNREAD_BYTES:
            most = max(waiting, key=waiting.__getitem__)
            del waiting[most]
            most.transport.abort()

    def resume_writing(self) -> None:
        """The client has read nearly all."""
        self._has_read = True
        super().resume_writing()

    @property
    def num_unread(self) -> int:
        """Bytes that wait for the client to read."""
        return int(self.transport.get_write_buffer_size())

    def _is_answering(self) -> bool:
        """Whether the headers of a request have come whose answer is not over."""
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        """Closes the connection later on, unless stopped."""
        self._timer = asyncio.get_running_loop().call_later(_HEADER_SECONDS, self.transport.close)

    def _stop_watching(self) -> None:
        """The headers have come."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_again(self) -> None:
        """Looks later on whether the client has read anything."""
        self._has_read = False
        self._reader = asyncio.get_running_loop().call_later(_READ_SECONDS, self._check_reader, self.num_unread)

    def _check_reader(self, before: int) -> None:
        """Drops the connection where nothing was read; before: bytes that waited when the time began."""
        self._reader = None
        if not self._has_read and self.num_unread >= before:
            self.transport.abort()  # closing it would wait for the client
        elif self.num_unread:
            self._look_again()

    def _probe(self) -> None:
        """Writes what means nothing, now and then: only that tells a client that left from one that sends no more."""
        if self.transport.is_closing() or not self._is_answering():
            return
        cycle = self.cycle
        if not cycle.response_started and not self.pipeline and cycle.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif cycle.response_started and getattr(cycle, "chunked_encoding", False) and not self.num_unread:
            self.transport.write(b"3\r\n:\n\n\r\n")  # a comment among events
        asyncio.get_running_loop().call_later(_PROBE_SECONDS, self._probe)
