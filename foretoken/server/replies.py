"""HTTP responses: JSON bodies, and streams of server-sent events."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, MutableMapping

    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]


_LONGEST_PIECE = 128  # list items encoded in one call
_DEEPEST_PIECES = 6  # containers around log-probabilities in the bodies of completions, chats and responses


def dumped(body: Any) -> bytes:
    """Encodes a body as JSON."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def dumped_in_pieces(body: Any) -> bytes:
    """Encodes a large body as JSON in pieces; one call of `json.dumps` would hold the GIL throughout."""
    return b"".join(_pieces(body, _DEEPEST_PIECES))


def _pieces(value: Any, depth: int) -> Iterator[bytes]:
    """Yields the JSON of a value in short pieces; depth: levels of containers to encode value by value."""
    if isinstance(value, list) and (len(value) > _LONGEST_PIECE or not depth):
        slices = (value[at : at + _LONGEST_PIECE] for at in range(0, len(value), _LONGEST_PIECE))
        yield b"[" + b",".join(dumped(each)[1:-1] for each in slices) + b"]"
    elif isinstance(value, list) and depth:
        yield b"["
        for at, item in enumerate(value):
            yield b"," if at else b""
            yield from _pieces(item, depth - 1)
        yield b"]"
    elif isinstance(value, dict) and depth:
        yield b"{"
        for at, (name, item) in enumerate(value.items()):
            yield (b"," if at else b"") + dumped(name) + b":"
            yield from _pieces(item, depth - 1)
        yield b"}"
    else:
        yield dumped(value)


async def send_json(
    send: Send, body: Mapping[str, Any], status: int, headers: Mapping[str, str] | None = None, *, is_end: bool = True
) -> None:
    """Sends a JSON answer; is_end: whether the answer ends here, else the caller sends an empty last part."""
    content = dumped(body)
    named = {"Content-Type": "application/json", "Content-Length": str(len(content)), **(headers or {})}
    raw = [(name.lower().encode(), value.encode()) for name, value in named.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": content, "more_body": not is_end})


class JsonResponse(Response):
    """A body as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encodes the content, unless it is already bytes."""
        return content if isinstance(content, bytes) else dumped(content)


class EventStream(Response):
    """A stream of server-sent events; it ends if the reader disconnects."""

    media_type = "text/event-stream"

    def __init__(
        self, bodies: AsyncGenerator[Any], on_disconnect: Callable[[], None], *, has_names: bool = False
    ) -> None:
        """Prepares a stream.

        Args:
            bodies: The events' bodies; bytes are JSON already. The stream always closes this generator.
            on_disconnect: Called if the reader disconnects before the end.
            has_names: Whether each event carries its body's type as a name. Otherwise `[DONE]` ends the stream.
        """
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._bodies, self._on_disconnect, self._has_names = bodies, on_disconnect, has_names

    async def __call__(self, _: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Sends the whole stream."""
        sender = asyncio.ensure_future(self._send(send))
        watcher = asyncio.ensure_future(disconnect(receive))
        try:
            await asyncio.wait((sender, watcher), return_when=asyncio.FIRST_COMPLETED)
            if not sender.done():
                self._on_disconnect()
        finally:
            for task in (sender, watcher):
                task.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await sender

    async def _send(self, send: Send) -> None:
        async with aclosing(self._bodies) as bodies:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for body in bodies:
                name = f"event: {body['type']}\n".encode() if self._has_names else b""
                part = name + b"data: " + (body if isinstance(body, bytes) else dumped(body)) + b"\n\n"
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"" if self._has_names else b"data: [DONE]\n\n"})


async def disconnect(receive: Receive) -> None:
    """Waits until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
