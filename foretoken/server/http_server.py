"""The HTTP server under the API: uvicorn, which closes connections whose request headers do not come in time."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

_DRAIN_SECONDS = 30
_KEEP_ALIVE_SECONDS = 30
_HEADER_SECONDS = 10.0
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
            app, port=port, http=TimedHeadersProtocol, access_log=False, log_config=None, server_header=False,
            timeout_graceful_shutdown=drain_seconds, timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        )
    )  # fmt: skip


class TimedHeadersProtocol(_HTTPProtocol):
    """An HTTP connection; a request whose headers are not whole ten seconds after their first byte closes it.

    A connection on which nothing was sent yet counts as one whose headers have begun.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """A client has connected."""
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes have come: of headers, where no request is being answered."""
        super().data_received(data)
        if self._is_answering():
            self._stop_watching()
        elif self._timer is None:
            self._watch()

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
