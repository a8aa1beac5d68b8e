"""API keys, and ASGI middleware that checks keys, headers and bodies, and sets CORS headers.

Keys come from the environment and a file, never from a command line, which all users of a machine can read.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import re
from contextlib import suppress
from ipaddress import ip_address, ip_network
from itertools import chain
from typing import TYPE_CHECKING

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError
from foretoken.files.bounded_reads import read_named
from foretoken.server.json_body import ApiError, send_json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from foretoken.server.json_body import App, Message, Receive, Scope, Send

KEY_VARIABLE = "FORETOKEN_API_KEY"


def api_keys(path: Path | None) -> list[str]:
    """Returns the key in `KEY_VARIABLE`, if set, and the keys of a file, one a line, if there is one.

    Raises `ConfigError` when a key is empty or not plain ASCII, or the file cannot be read or has no key.
    """
    given = [os.environ[KEY_VARIABLE]] if KEY_VARIABLE in os.environ else []
    if path is not None:
        given += _keys_of(path)
    for key in given:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"an API key of {KEY_VARIABLE} or --api-key-file is empty or has other than ASCII characters."
            )
    return given


def _keys_of(path: Path) -> list[str]:
    try:
        text = read_named(path, error=ConfigError).decode("utf-8", "replace")  # no ASCII: refused later
    except OSError as err:
        raise ConfigError(f"'{path}' cannot be read: {err.strerror}. Expected a file with one API key a line.") from err
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"'{path}' has no API key. Expected one a line.")
    return lines


MOST_BODY_BYTES = 8 << 20  # RESULTS, "What one client's dearest requests cost"
_BODY_SECONDS = 30.0  # a choice: a client that sends slowly holds a connection for no longer
_MOST_DROPPED_BYTES, _DROP_SECONDS = 64 << 20, 5.0  # choices: bounds on reading the rest of a refused body
_MOST_HEADERS = 256  # a choice: clients and proxies send a few dozens
MOST_HEADER_BYTES = 256 << 10  # a choice, far above what proxies allow
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s*]+", re.IGNORECASE)
CLIENT = "foretoken.client"  # key of ASGI scopes
OPEN_PATHS = frozenset({"/", "/health", "/health/live", "/health/ready"})


class Guards:
    """Refuses requests with wrong keys or too many headers, and compressed, too large and too slow bodies.

    Tells the application in `CLIENT` of the scope whose request it is: that of an API key, else of an address.
    """

    def __init__(self, app: App, *, api_keys: Sequence[str], refused: Callable[[int], None]) -> None:
        """Guards an ASGI application, if there are keys; calls `refused` with the status of every refusal."""
        self._app, self._keys, self._refused = app, [key.encode() for key in api_keys], refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection's request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        incoming = _Body(receive)
        try:
            key = self._check_headers(scope)
            scope.setdefault(CLIENT, key or _address(scope))  # in a replica the front has told it
            body = await incoming.whole()
        except ApiError as err:
            self._refused(err.status)
            await send_json(send, err.body, err.status, {**err.headers, "Connection": "close"}, is_end=False)
            await incoming.discard_rest()
            await send({"type": "http.response.body"})
            return
        if body is None:  # the client went away
            return
        given: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return given.pop() if given else await receive()

        await self._app(scope, receive_again, send)

    def _check_headers(self, scope: Scope) -> str | None:
        """Returns a name for the API key, None without keys; raises `ApiError` if the headers are refused."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        size = sum(len(each) for each in (scope["path"], scope.get("query_string", b""), *chain(*headers)))
        if len(headers) > _MOST_HEADERS or size > MOST_HEADER_BYTES:
            message = f"The request has {len(headers)} headers and {size} bytes in address and headers."
            expected = f"Expected at most {_MOST_HEADERS} headers and {MOST_HEADER_BYTES} bytes."
            raise ApiError(f"{message} {expected}", status=431)
        num_hosts = sum(name == b"host" for name, _ in headers)
        if scope.get("http_version") == "1.1" and num_hosts != 1:
            raise ApiError(f"The request has {num_hosts} Host headers. Expected one.")
        # Compares `scope["path"]`, not a URL: the client chooses the Host header in a URL.
        key = self._key(headers)
        if self._keys and scope["path"] not in OPEN_PATHS and key is None:
            message = "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY'."
            raise ApiError(message, status=401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        named = dict(headers)
        if named.get(b"content-encoding", b"identity").lower() not in (b"identity", b""):
            raise ApiError("The body is compressed. Expected a body without Content-Encoding.", status=415)
        length = named.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > MOST_BODY_BYTES:
            raise _too_large()
        return key

    def _key(self, headers: list[tuple[bytes, bytes]]) -> str | None:
        """Returns a name for the accepted key of a request. The time of the comparison does not depend on the keys."""
        given = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return f"key {matches.index(True)}" if any(matches) and scheme.lower() == b"bearer" else None


def _address(scope: Scope) -> str:
    """Returns the address of the client; of IPv6 the network, in which one machine has all addresses."""
    address = (scope.get("client") or ("",))[0]
    with suppress(ValueError):
        if ip_address(address).version == 6:
            return str(ip_network((address.partition("%")[0], 64), strict=False))
    return str(address)


def check_origins(origins: Sequence[str]) -> None:
    """Raises `ConfigError` for an invalid origin."""
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"an allowed origin is {shown(origin)}. Expected '*', or scheme and host as in https://example.org or "
                "http://localhost:3000, without a path."
            )


def open_to(origins: Sequence[str], app: App) -> App:
    """Returns an application that allows pages of some origins, "*" for all, to read all answers, refusals included.

    The application accepts no cookies, so a page must send an API key of its own. Preflight requests, which carry no
    key, do not reach `app`.
    """
    if not origins:
        return app
    from starlette.middleware.cors import CORSMiddleware  # `serve --help` works without the extra `serve`

    opened: App = CORSMiddleware(
        app, allow_origins=origins, allow_methods=("GET", "POST"), allow_headers=("*",), expose_headers=("Retry-After",)
    )  # fmt: skip
    return opened


class _Body:
    def __init__(self, receive: Receive) -> None:
        self._receive, self._is_over = receive, False

    async def whole(self) -> bytes | None:
        """Returns the body; None if the client disconnects; raises `ApiError` if the body is too large or slow."""
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                while not self._is_over:
                    part = await self._part()
                    if part is None:
                        return None
                    parts.append(part)
                    size += len(part)
                    if size > MOST_BODY_BYTES:
                        raise _too_large()
        except TimeoutError as err:
            raise ApiError(f"The body did not come within {_BODY_SECONDS:.0f} seconds.", status=408) from err
        return b"".join(parts)

    async def discard_rest(self) -> None:
        """Reads the rest of the body, within bounds: a client that still sends at the close never sees the answer."""
        size = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(_DROP_SECONDS):
                while not self._is_over and size < _MOST_DROPPED_BYTES:
                    size += len(await self._part() or b"")

    async def _part(self) -> bytes | None:
        message = await self._receive()
        self._is_over = not message.get("more_body", False)
        return message.get("body", b"") if message["type"] == "http.request" else None


def _too_large() -> ApiError:
    return ApiError(f"The body is larger than {MOST_BODY_BYTES >> 20} MiB. Send less at a time.", status=413)
