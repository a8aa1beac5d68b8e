"""The front of a Ray Serve deployment: an ASGI application that forwards requests to replicas.

Requests with the same beginning go to the same replica. If the replica ends before the client received anything,
another replica gets the whole request. A stream that has begun ends with an error: no text comes from two replicas.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import ray.exceptions
import ray.serve.exceptions

from foretoken.server.guards import CLIENT
from foretoken.server.json_body import ApiError, disconnect, send_json

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Mapping, MutableMapping

    from foretoken.server.json_body import App, Message, Receive, Send


def prefix_key(body: bytes, length: int) -> str | None:
    """Returns a key that prompts with the same first characters and the same `cache_salt` share.

    Only the beginning of a conversation counts, up to the first user message: all its turns have one key. `length`
    counts characters; for prompts of token ids, tokens. The key is a hash, which reveals nothing of the prompt; None
    for a body without a prompt.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):  # the engine's server reports the error
        return None
    beginning = _beginning(asked, length) if isinstance(asked, dict) else None
    if not beginning:
        return None
    told = json.dumps([asked.get("cache_salt"), beginning])
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


def _beginning(asked: dict[str, Any], length: int) -> Any:
    messages = asked.get("messages", asked.get("input"))
    if isinstance(messages, list) and messages and isinstance(messages[0], dict):
        at = next((at for at, each in enumerate(messages) if isinstance(each, dict) and each.get("role") == "user"), 0)
        opening = [asked.get("instructions"), asked.get("tools"), messages[: at + 1]]
        return json.dumps(opening, ensure_ascii=False)[:length]
    prompt = asked.get("prompt", messages)
    while isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
        prompt = prompt[0]  # all prompts of a request go to one replica
    if isinstance(prompt, str) and isinstance(asked.get("instructions"), str):
        prompt = asked["instructions"] + prompt
    return prompt[:length] if isinstance(prompt, str | list) else None


_PASSED_ON = ("http_version", "method", "scheme", "path", "raw_path", "root_path", "query_string", "headers", CLIENT)


def portable_scope(scope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parts of an ASGI scope that another process can use."""
    return {"type": "http", **{key: scope[key] for key in _PASSED_ON if key in scope}}


async def answer_messages(app: App, scope: dict[str, Any], body: bytes) -> AsyncGenerator[Message]:
    """Yields an application's messages; closing the iterator tells it that the client disconnected."""
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


def merged_pages(pages: Iterable[str]) -> str:
    """Merges pages in Prometheus' text format: each family appears once, with the samples of all pages."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for page in pages:
        name = ""
        for line in page.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
            heading, samples = families.setdefault(name, ([], []))
            if not line.startswith("#"):
                samples.append(line)
            elif line not in heading:
                heading.append(line)
    return "".join(f"{line}\n" for heading, samples in families.values() for line in (*heading, *samples))


_log = logging.getLogger(__name__)
_MOST_ATTEMPTS = 4  # a choice: a request that crashes replicas cannot crash all of them
_METRICS_SECONDS = 10.0  # for the figures of all replicas; the default timeout of Prometheus
_LOST = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, ray.exceptions.WorkerCrashedError)


class _Stopped(Exception):
    """The replica has stopped and serves no requests."""


class _Begun(Exception):
    """The replica ended after the client received a part of the answer."""


class Forwarding:
    """Forwards every request to one of the replicas."""

    def __init__(self, replicas: Any, *, prefix_characters: int) -> None:
        """Forwards to `replicas`, a handle of `Replica`; the first `prefix_characters` of a prompt choose one."""
        self._replicas, self._length = replicas, prefix_characters

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answers one request; its body comes in one message."""
        body = (await receive()).get("body", b"")
        is_page = scope["path"] == "/metrics"
        answer = self._page(send) if is_page else self._answered(portable_scope(scope), body, send)
        answering, gone = asyncio.ensure_future(answer), asyncio.ensure_future(disconnect(receive))
        try:
            await asyncio.wait((answering, gone), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            for task in (answering, gone):
                task.cancel()
            await asyncio.wait((answering,))

    async def _page(self, send: Send) -> None:
        response = self._replicas.broadcast("metrics_page")
        pages = await response.results_async(timeout_s=_METRICS_SECONDS, return_exceptions=True)
        page = merged_pages(page for page in pages if isinstance(page, str)).encode()
        headers = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": page})

    async def _answered(self, scope: dict[str, Any], body: bytes, send: Send) -> None:
        key = prefix_key(body, self._length) or uuid.uuid4().hex
        for attempt in range(_MOST_ATTEMPTS):
            try:
                async with aclosing(self._messages(key, scope, body)) as messages:
                    await self._forward(messages, send)
            except (*_LOST, _Stopped) as err:
                _log.warning("a replica ended while it served a request (%s)", type(err).__name__)
                key = uuid.uuid4().hex  # another replica
                await asyncio.sleep(0.2 * (attempt + 1))
            except _Begun:
                await self._break_off(scope["path"], send)
                return
            except ray.serve.exceptions.BackPressureError:
                error = ApiError("Too many requests wait.", status=429, code="queue_full", headers={"Retry-After": "1"})
                await send_json(send, error.body, error.status, error.headers)
                return
            except (ray.exceptions.RayError, ray.serve.exceptions.RayServeException):
                _log.exception("a request could not be served")
                break
            else:
                return
        error = ApiError("No replica could serve the request. Send it again.", status=503, headers={"Retry-After": "1"})
        await send_json(send, error.body, error.status, error.headers)

    async def _messages(self, key: str, scope: dict[str, Any], body: bytes) -> AsyncGenerator[Message]:
        """Yields the messages of the replica for this key; tells the replica if the reader stops."""
        handle = self._replicas.options(stream=True, method_name="answer", session_id=key)
        response = handle.remote(scope, body)
        try:
            async for message in response:
                yield message
        finally:
            response.cancel()

    async def _forward(self, messages: AsyncGenerator[Message], send: Send) -> None:
        """Forwards messages; holds the status until the first part of the body: another replica may still answer."""
        held: list[Message] = []
        has_begun = False
        try:
            async for message in messages:
                held.append(message)
                if message.get("status") == 503:
                    raise _Stopped
                if message["type"] == "http.response.body":
                    has_begun = True
                    while held:
                        await send(held.pop(0))
        except _LOST as err:
            if has_begun:
                raise _Begun from err
            raise

    async def _break_off(self, path: str, send: Send) -> None:
        error = ApiError("The server that wrote this answer ended. Send the request again.", status=503)
        told, name = error.body, ""
        if path.endswith("/responses"):
            told, name = {"type": "error", "code": "server_error", "message": error.message, "param": None}, "error"
        event = (f"event: {name}\n" if name else "") + f"data: {json.dumps(told)}\n\n"
        await send({"type": "http.response.body", "body": event.encode(), "more_body": False})
