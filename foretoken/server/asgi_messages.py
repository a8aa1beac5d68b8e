"""An ASGI application's answer to a whole request as an iterator of messages, which can go on to another process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from foretoken.server.guards import App, Message

_PASSED_ON = ("http_version", "method", "scheme", "path", "raw_path", "root_path", "query_string", "headers")


def portable_scope(scope: Mapping[str, Any]) -> dict[str, Any]:
    """What a request says of itself, without what belongs to the process that received it."""
    return {"type": "http", **{key: scope[key] for key in _PASSED_ON if key in scope}}


async def answer_messages(app: App, scope: dict[str, Any], body: bytes) -> AsyncGenerator[Message]:
    """Messages that the application sends. Closing the iterator tells it that the client went away.

    Args:
        app: Answers.
        scope: See `portable_scope`.
        body: All of it.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    gone = asyncio.Event()

    async def receive() -> Message:
        if given:
            return given.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    task = asyncio.ensure_future(app(scope, receive, sent.put))
    task.add_done_callback(lambda _: sent.put_nowait(None))
    try:
        while (message := await sent.get()) is not None:
            yield message
        await task
    finally:
        gone.set()
        await asyncio.wait((task,))
