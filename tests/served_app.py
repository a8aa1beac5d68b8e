"""Serves an ASGI application on a free port of the loopback device, under uvicorn in a thread."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from foretoken.server.http_server import http_server


def wait_until(is_there: Callable[[], Any]) -> None:
    """Returns once something is there; fails after a minute."""
    end = time.monotonic() + 60
    while not is_there():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.005)


def connect(url: str) -> socket.socket:
    """A connection of our own."""
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=60)


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Serves an application until the end of the block; yields its URL."""
    server = http_server(app, drain_seconds=5)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        assert server.started, "the server did not start"
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
