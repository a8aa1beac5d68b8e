"""Serves an ASGI application on a free port of the loopback device, under uvicorn in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from foretoken.server.http_server import http_server


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Serves an application until the end of the block; yields its URL."""
    server = http_server(app, drain_seconds=5)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        end = time.monotonic() + 60
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            assert time.monotonic() < end, "the server did not start in time"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
