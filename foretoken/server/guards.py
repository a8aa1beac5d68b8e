"""What stands before every route: keys, sizes and times of bodies; a pure ASGI middleware, so that nothing buffers."""

from __future__ import annotations

import asyncio
import hmac
from typing import TYPE_CHECKING, Any

from foretoken.server.errors import ApiError
from foretoken.server.replies import send_json

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping, Sequence

    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

MOST_BODY_BYTES = 8 << 20
_BODY_SECONDS = 30.0
_MOST_HEADERS = 256
OPEN_PATHS = frozenset({"/", "/health", "/health/live", "/health/ready"})


class Guards:
    """Refuses what no route has to see: wrong keys, too many headers, encoded, too large and too slow bodies."""

    def __init__(self, app: App, *, api_keys: Sequence[str], refused: Callable[[int], None]) -> None:
        """Stands before an application.

        Args:
            app: What is guarded.
            api_keys: Any of them is asked for, except on `OPEN_PATHS`; none for an open server.
            refused: Told the status of every refusal.
        """
        self._app, self._keys, self._refused = app, [key.encode() for key in api_keys], refused

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serves one connection's request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
            body = await _body(receive)
        except ApiError as err:
            self._refused(err.status)
            await send_json(send, err.body, err.status, {**err.headers, "Connection": "close"})
            return
        if body is None:  # the client went away
            return
        given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return given.pop() if given else await receive()

        await self._app(scope, receive_again, send)

    def _check(self, scope: MutableMapping[str, Any]) -> None:
        """Raises `ApiError` by what the headers say."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if len(headers) > _MOST_HEADERS:
            raise ApiError(f"The request has {len(headers)} headers. Expected at most {_MOST_HEADERS}.", status=431)
        # Never by a URL, which the Host header is a part of.
        if self._keys and scope["path"] not in OPEN_PATHS and not self._has_key(headers):
            message = "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY'."
            raise ApiError(message, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        named = dict(headers)
        if named.get(b"content-encoding", b"identity").lower() not in (b"identity", b""):
            raise ApiError("The body is compressed. Expected a body without Content-Encoding.", status=415)
        length = named.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > MOST_BODY_BYTES:
            raise _too_large()

    def _has_key(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Whether a known key came, in a time that tells nothing about the keys."""
        given = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return any(matches) and scheme.lower() == b"bearer"


async def _body(receive: Receive) -> bytes | None:
    """The whole body; None when the client went away before its end.

    Raises:
        ApiError: When it is too large, or does not come in time.
    """
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > MOST_BODY_BYTES:
                    raise _too_large()
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError as err:
        raise ApiError(f"The body did not come within {_BODY_SECONDS:.0f} seconds.", status=408) from err


def _too_large() -> ApiError:
    """What is said of a body that is too large."""
    return ApiError(f"The body is larger than {MOST_BODY_BYTES >> 20} MiB. Send less at a time.", status=413)
