"""What every request passes first and every answer last: API keys, limits, JSON, and errors in OpenAI's form.

Keys come from the environment and a file, never from a command line, which all users of a machine can read. The module
knows ASGI alone, no web framework.
"""

import asyncio
import hmac
import json
import math
import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from ipaddress import ip_address, ip_network
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from foretoken.core.checks import lone_surrogate, shown
from foretoken.core.errors import ConfigError, EngineStopped, QueueFull, RequestError
from foretoken.files.bounded_reads import read_named

_Result = TypeVar("_Result")
# Of ASGI.
Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "method_not_allowed",
    408: "timeout_error", 413: "request_too_large", 415: "invalid_request_error", 429: "rate_limit_error",
    503: "service_unavailable",
}  # fmt: skip


class ApiError(Exception):
    """An error answer: a status, one or two sentences, the request's field, a name for programs, and headers."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """Returns the body of the answer."""
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def api_error(error: BaseException) -> ApiError:
    """Returns the answer for an exception; an unforeseen exception reveals no details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        wait = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        return ApiError(str(error), status=429, code="queue_full", headers=wait)
    if isinstance(error, RequestError):
        return ApiError(str(error))
    if isinstance(error, EngineStopped):
        return ApiError("The engine serves no requests any more. Send the request to another server.", status=503)
    return ApiError("The server failed. The request was not completed; other requests go on.", status=500)


def check_model(name: Any, known: Sequence[str]) -> None:
    """Raises `ApiError` with status 404 for an unknown name of a model; None is any model."""
    if name is not None and name not in known:
        raise ApiError(
            f"The model {str(name)[:80]!a} does not exist here. Known: {', '.join(known)}.", status=404,
            param="model", code="model_not_found",
        )  # fmt: skip


DEEPEST = 64  # nesting of containers; a choice: Python's parser recurses
# Parsing more values would delay other requests: RESULTS, "What one client's dearest requests cost". Each kind is
# counted by its character in the body.
_MOST = {"values": (b",", 1 << 21), "lists": (b"[", 1 << 17), "objects": (b"{", 1 << 17)}
_MOST_TEXTS = 1 << 18  # strings; RESULTS, "What one client's dearest requests cost"
_SMALL = 1 << 18  # bytes; a smaller body cannot reach these counts


def parse_object(body: bytes) -> dict[str, Any]:
    """Returns the JSON object of a body in UTF-8.

    Raises `ApiError` with status 400, unless the body is one JSON object of Unicode text and finite numbers, at most
    `DEEPEST` deep, without repeated keys, and with a bounded number of values.
    """
    if len(body) > _SMALL:
        _check_counts(body)
    try:
        text = body.decode("utf-8")
        value = json.loads(text, parse_float=_finite, parse_constant=_no_number, object_pairs_hook=_without_repeats)
    except UnicodeDecodeError as err:
        raise ApiError(f"The body is not UTF-8: byte {err.start} does not fit. Expected a JSON object.") from err
    except RecursionError as err:
        raise _too_deep() from err
    except json.JSONDecodeError as err:
        raise ApiError(
            f"The body is not JSON: {err.msg} at line {err.lineno}, column {err.colno}. Expected a JSON object."
        ) from err
    except ValueError as err:  # an integer of thousands of digits
        raise ApiError("The body holds a number that is too long. Expected a JSON object.") from err
    if not isinstance(value, dict):
        raise ApiError("The body is not a JSON object. Expected {...} with the fields of the request.")
    _check_containers(value)
    return value


def _check_counts(body: bytes) -> None:
    """Raises `ApiError` for a body with too many values; counts them without parsing the body."""
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # removes escaped quotes
    num_texts = bare.count(b'"') // 2
    if num_texts > _MOST_TEXTS:
        raise ApiError(f"The body has {num_texts} strings. Expected at most {_MOST_TEXTS}. Send less in one request.")
    outside = b"".join(bare.split(b'"')[::2])
    for what, (sign, most) in _MOST.items():
        if (count := outside.count(sign)) > most:
            raise ApiError(f"The body has {count} {what}. Expected at most {most}. Send less in one request.")


def _finite(digits: str) -> float:
    """Parses a number with a point or an exponent; refuses numbers such as 1e999, which would become infinite."""
    number = float(digits)
    if math.isinf(number):
        raise ApiError(f"The body holds {digits[:20]}, which is beyond the range of numbers. Expected finite numbers.")
    return number


def _no_number(name: str) -> NoReturn:
    raise ApiError(f"The body holds {name}, which is not JSON. Expected finite numbers.")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = max(counts, key=counts.__getitem__)
        raise ApiError(f"The body has the key {twice[:80]!a} twice. Expected every key once.")
    return made


def _check_containers(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, str) and lone_surrogate(item) is not None:
                raise ApiError("The body holds text with a lone surrogate, which is not a character. Expected Unicode.")
            if isinstance(item, dict):
                inner += [*item, *item.values()]
            elif isinstance(item, list):
                inner += item
        if not inner:
            return
        level = inner
    raise _too_deep()


def _too_deep() -> ApiError:
    return ApiError(f"The body is nested too deeply. Expected at most {DEEPEST} objects or lists within each other.")


_LONGEST_PIECE = 128  # list items encoded in one call; RESULTS, "What one client's dearest requests cost"
_DEEPEST_PIECES = 6  # containers around log-probabilities in the bodies of completions, chats and responses


def dumped(body: Any) -> bytes:
    """Encodes a body as JSON."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def dumped_in_pieces(body: Any) -> bytes:
    """Encodes a large body as JSON in pieces; one call of `json.dumps` would hold the GIL throughout."""
    return b"".join(_pieces(body, _DEEPEST_PIECES))


def _pieces(value: Any, depth: int) -> Iterator[bytes]:
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
    """Sends a JSON answer; without `is_end` the caller must send an empty last part."""
    content = dumped(body)
    named = {"Content-Type": "application/json", "Content-Length": str(len(content)), **(headers or {})}
    raw = [(name.lower().encode(), value.encode()) for name, value in named.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": content, "more_body": not is_end})


async def run_while_connected(work: Coroutine[Any, Any, _Result], receive: Receive) -> asyncio.Task[_Result]:
    """Runs `work` until it ends or the client disconnects, which cancels it; returns its task, which is done."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
    return task


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


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
