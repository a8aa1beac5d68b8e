"""JSON bodies of requests and answers, errors in OpenAI's form, and disconnects. Imports no web framework."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, MutableMapping
from typing import Any, NoReturn, TypeVar

from foretoken.core.checks import lone_surrogate
from foretoken.core.errors import EngineStopped, QueueFull, RequestError

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
