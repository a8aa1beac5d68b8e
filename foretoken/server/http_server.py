"""The HTTP server under the API: uvicorn, with time limits on clients that send or read nothing."""

import asyncio
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from foretoken.server.edge import MOST_HEADER_BYTES

_DRAIN_SECONDS = 30  # for running answers after a signal; a choice: supervisors kill after 30 seconds or more
_KEEP_ALIVE_SECONDS = 30  # a choice: clients use connections again, idle ones hold a descriptor
_HEADER_SECONDS = 10.0  # a choice: a client that sends headers slowly holds a connection for no longer
# Bytes around a body: sizes of chunks, trailers. A choice: 8 MiB in chunks of one byte occupied the server for seconds.
_MOST_FRAMING_BYTES, _FRAMING_SHARE = 32 << 10, 64  # and a 64th of the body: chunks of 512 bytes or more always pass
_MOST_PIPELINED = 16  # requests that a connection may send before it gets an answer; a choice: clients send one
_PIECE_BYTES = 16 << 10  # of received data; a choice: limits are checked after each piece
_READ_SECONDS = 30.0  # without any progress of a client that reads an answer; a choice
_SEND_BUFFER_BYTES = 256 << 10  # SO_SNDBUF of each connection; a choice: larger hides that a client does not read
_MOST_UNREAD_BYTES = 256 << 20  # unread bytes of all clients together; a choice: bounds memory
_PROBE_SECONDS = 0.5  # between two looks at what a client has read; a choice
_HTTPProtocol: Any = AutoHTTPProtocol  # httptools if it is installed, else h11


def http_server(app: Any, *, port: int = 0, drain_seconds: int = _DRAIN_SECONDS) -> uvicorn.Server:
    """Makes a server; `serve` or `run` starts the server, on a free port if `port` is 0.

    After a signal, running requests have `drain_seconds`.
    """
    return uvicorn.Server(
        uvicorn.Config(
            app, port=port, http=GuardedProtocol, access_log=False, log_config=None, server_header=False,
            timeout_graceful_shutdown=drain_seconds, timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        )
    )  # fmt: skip


class GuardedProtocol(_HTTPProtocol):
    """An HTTP connection with limits on slow clients.

    Closes the connection if the request headers are incomplete 10 seconds after the connection or after their first
    byte, or are larger than 256 KiB. Closes it if a body comes in tiny chunks or with large trailers, or if many
    requests come before the first is answered: parsing them would delay other requests. Drops it, and the answer, if
    the client reads nothing for 30 seconds. If the unread bytes of all connections exceed a bound, drops the
    connections with most of them. A client that only ends its sending gets its answer.
    """

    pipeline: Any = ()  # requests that wait for the answer before them; the protocol for h11 has none
    _header_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None  # the next check whether the client reads
    _has_read = False  # since the last check
    _num_header_bytes = 0  # since the last request
    _num_body_bytes = _num_framing_bytes = 0  # of the present request

    def connection_made(self, transport: Any) -> None:
        """Starts to wait for headers."""
        super().connection_made(transport)
        # With megabytes in the kernel's buffer a client that reads slowly looks like one that reads nothing.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the timers."""
        self._stop_header_timer()
        if self._read_timer is not None:
            self._read_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Passes bytes on, and closes the connection at the first piece beyond a limit."""
        for at in range(0, len(data), _PIECE_BYTES):
            if self.transport.is_closing():
                return
            self._receive(data[at : at + _PIECE_BYTES])

    def _receive(self, data: bytes) -> None:
        cycle, is_body = self.cycle, self._is_answering() and self.cycle.more_body
        before = len(cycle.body) if is_body else 0
        super().data_received(data)
        self._num_header_bytes += len(data)
        if self.cycle is not cycle:
            self._num_body_bytes = self._num_framing_bytes = 0
        elif is_body:
            self._num_body_bytes += len(cycle.body) - before
            self._num_framing_bytes += len(data) - (len(cycle.body) - before)
        if self._is_answering():
            self._stop_header_timer()
            self._num_header_bytes = 0
        elif self._header_timer is None:
            self._start_header_timer()
        if self._num_header_bytes > MOST_HEADER_BYTES:  # httptools keeps all
            self._refuse(f"The headers are larger than {MOST_HEADER_BYTES >> 10} KiB.")
        elif self._num_framing_bytes > _MOST_FRAMING_BYTES + self._num_body_bytes // _FRAMING_SHARE:
            self._refuse("The body comes in too small chunks, or with too large trailers. Send larger chunks.")
        elif len(self.pipeline) > _MOST_PIPELINED:
            self._refuse(f"More than {_MOST_PIPELINED} requests came before an answer. Send one after the other.")

    def _refuse(self, reason: str) -> None:
        if self.transport.is_closing():
            return
        if self._is_answering() and (self.cycle.response_started or not self.cycle.more_body):
            self.transport.close()
        else:
            self.send_400_response(reason)

    def eof_received(self) -> bool:
        """Returns True, which keeps the connection, if a complete request is being answered."""
        if not self._is_answering() or self.cycle.more_body:
            return False
        self.cycle.keep_alive = False
        self._probe()
        return True

    def pause_writing(self) -> None:
        """Watches whether the client reads, and drops connections beyond the common bound on unread bytes."""
        super().pause_writing()
        if self._read_timer is None:
            self._start_read_timer()
        waiting = {each: each.num_unread for each in self.connections if isinstance(each, GuardedProtocol)}
        while sum(waiting.values()) > _MOST_UNREAD_BYTES:
            most = max(waiting, key=waiting.__getitem__)
            del waiting[most]
            most.transport.abort()

    def resume_writing(self) -> None:
        """Stops watching: the client has read most of the unread bytes."""
        self._has_read = True
        super().resume_writing()

    @property
    def num_unread(self) -> int:
        """Returns the bytes of answers that the client has not read."""
        return int(self.transport.get_write_buffer_size())

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_header_timer(self) -> None:
        self._header_timer = asyncio.get_running_loop().call_later(_HEADER_SECONDS, self.transport.close)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _start_read_timer(self) -> None:
        self._has_read = False
        self._read_timer = asyncio.get_running_loop().call_later(_READ_SECONDS, self._check_reader, self.num_unread)

    def _check_reader(self, before: int) -> None:
        """Drops the connection if the client has read nothing; before: unread bytes at the last check."""
        self._read_timer = None
        if not self._has_read and self.num_unread >= before:
            self.transport.abort()  # `close` would wait for the client
        elif self.num_unread:
            self._start_read_timer()

    def _probe(self) -> None:
        """Writes bytes without meaning at intervals; a write fails only if the client has closed both directions."""
        if self.transport.is_closing() or not self._is_answering():
            return
        cycle = self.cycle
        if not cycle.response_started and not self.pipeline and cycle.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif cycle.response_started and getattr(cycle, "chunked_encoding", False) and not self.num_unread:
            self.transport.write(b"3\r\n:\n\n\r\n")  # a chunk with a comment of server-sent events
        asyncio.get_running_loop().call_later(_PROBE_SECONDS, self._probe)
