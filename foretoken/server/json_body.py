"""Reads the JSON object of a request's body, and refuses bodies that are not plain JSON."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any, NoReturn

from foretoken.core.checks import lone_surrogate
from foretoken.server.errors import ApiError

DEEPEST = 64  # nesting of containers
# Parsing more values would delay other requests. Each kind is counted by its character in the body.
_MOST = {"values": (b",", 1 << 21), "lists": (b"[", 1 << 17), "objects": (b"{", 1 << 17)}
_MOST_TEXTS = 1 << 18
_SMALL = 1 << 18  # bytes; a smaller body cannot reach these counts


def parse_object(body: bytes) -> dict[str, Any]:
    """Returns the JSON object of a body.

    Args:
        body: UTF-8, without a byte order mark.

    Raises:
        ApiError: With status 400, unless the body is one JSON object of Unicode text and finite numbers, at most
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
    _check(value)
    return value


def _check_counts(body: bytes) -> None:
    """Raises `ApiError` for a body with too many values; counts them without parsing the body."""
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # removes escaped quotes
    num_texts = bare.count(b'"') // 2
    if num_texts > _MOST_TEXTS:
        raise ApiError(f"The body has {num_texts} texts. Expected at most {_MOST_TEXTS}.")
    outside = b"".join(bare.split(b'"')[::2])
    for what, (sign, most) in _MOST.items():
        if (count := outside.count(sign)) > most:
            raise ApiError(f"The body has {count} {what}. Expected at most {most}.")


def _finite(digits: str) -> float:
    """Parses a number with a point or an exponent; refuses numbers such as 1e999, which would become infinite."""
    number = float(digits)
    if math.isinf(number):
        raise ApiError(f"The body holds {digits[:20]}, which is beyond the range of numbers. Expected finite numbers.")
    return number


def _no_number(name: str) -> NoReturn:
    """Refuses NaN and the infinities, which are not JSON."""
    raise ApiError(f"The body holds {name}, which is not JSON. Expected finite numbers.")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object; refuses a repeated key."""
    made = dict(pairs)
    if len(made) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = max(counts, key=counts.__getitem__)
        raise ApiError(f"The body has the key {twice[:80]!a} twice. Expected every key once.")
    return made


def _check(value: Any) -> None:
    """Raises `ApiError` for containers nested too deeply and for text with a lone surrogate."""
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
