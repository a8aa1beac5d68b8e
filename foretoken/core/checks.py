"""Checking values that come from outside: types and ranges, each failure in one sentence.

Python takes True for 1 and an array library's scalar is no `int`; requests come from JSON and from numpy alike. Every
check here refuses booleans where numbers are meant, and strings everywhere but where text is meant.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from foretoken.core.errors import ForetokenError, RequestError

_LONGEST_SHOWN = 60  # characters of a refused value in a message


def require(condition: bool, message: str) -> None:
    """Raises `ValueError` unless a condition holds: guards memory where `python -O` would drop an `assert`."""
    if not condition:
        raise ValueError(message)


def check_integer(
    name: str, value: Any, low: float = -math.inf, high: float = math.inf, *, error: type[ForetokenError] = RequestError
) -> None:
    """Raises `error` unless `value` is an integer (of Python or numpy, not a boolean) in [low, high]."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise error(f"{name} is {shown(value)}. Expected an integer.")
    check_range(name, value, low, high, error=error)


def check_number(
    name: str,
    value: Any,
    low: float,
    high: float,
    *,
    low_open: bool = False,
    error: type[ForetokenError] = RequestError,
) -> None:
    """Raises `error` unless `value` is a real number, not a boolean, in [low, high], or (low, high] when `low_open`."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise error(f"{name} is {shown(value)}. Expected a number.")
    check_range(name, value, low, high, low_open=low_open, error=error)


def check_range(
    name: str,
    value: Any,
    low: float,
    high: float,
    *,
    low_open: bool = False,
    error: type[ForetokenError] = RequestError,
) -> None:
    """Raises `error` unless a number lies in [low, high], or (low, high] when `low_open`; NaN never does."""
    inside = (low < value if low_open else low <= value) and value <= high
    if not inside:
        below = "above" if low_open else "at least"
        upper = "" if high == math.inf else f" and at most {high:.10g}"
        raise error(f"{name} is {shown(value)}. Expected {below} {low:.10g}{upper}.")


def check_boolean(name: str, value: Any, *, error: type[ForetokenError] = RequestError) -> None:
    """Raises `error` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise error(f"{name} is {shown(value)}. Expected True or False.")


def check_text(name: str, value: Any, *, error: type[ForetokenError] = RequestError) -> None:
    """Raises `error` unless `value` is text that UTF-8 can encode: a lone surrogate is half a character."""
    if not isinstance(value, str):
        raise error(f"{name} is {shown(value)}. Expected text.")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as err:
            raise error(
                f"{name} holds a lone surrogate, {value[err.start]!a}, at character {err.start}. Expected valid "
                "Unicode text. Decode the input with errors='replace'."
            ) from err


def check_sequence(name: str, value: Any, expected: str, *, error: type[ForetokenError] = RequestError) -> None:
    """Raises `error` unless `value` is a list, tuple, set or array, not text; expected: what, in words."""
    is_other = isinstance(value, str | bytes | bytearray | memoryview | Mapping) or getattr(value, "ndim", 1) == 0
    if is_other or not isinstance(value, Collection):
        raise error(f"{name} is {shown(value)}. Expected {expected}.")


def as_python(value: Any, depth: int = 2) -> Any:
    """A value with Python's own numbers in it: other numbers become int or float, arrays and tensors lists.

    Lists, tuples and mappings are copied, `depth` levels deep, so that nobody changes them afterwards. What has no such
    form (booleans, text, sets, objects, numbers too large for a float) stays as it is.
    """
    if depth and hasattr(value, "tolist") and getattr(value, "ndim", 0) > 0:
        value = value.tolist()
    if isinstance(value, list | tuple) and depth:
        items = [as_python(item, depth - 1) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Mapping) and depth:
        return {as_python(key, 0): as_python(item, 0) for key, item in value.items()}
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    try:
        return int(value) if isinstance(value, Integral) else float(value)
    except OverflowError:
        return value


def checked_token_ids(ids: Iterable[Any], vocab_size: int, where: str) -> list[int]:
    """Token ids as Python integers.

    Args:
        ids: Integers of Python or numpy.
        vocab_size: V; ids are 0..V-1.
        where: What holds them, for the message.

    Raises:
        RequestError: For anything that is no integer (booleans are none) or outside the vocabulary.
    """
    checked = []
    for token in ids:
        if not isinstance(token, Integral) or isinstance(token, bool) or not 0 <= int(token) < vocab_size:
            raise RequestError(f"{where} holds token id {shown(token)}. Expected integers in 0..{vocab_size - 1}.")
        checked.append(int(token))
    return checked


def shown(value: Any) -> str:
    """A value for a message: short, on one line, and by its type alone where its text could be anything.

    Numbers and text are shown; of containers and objects only the type is, since their text may be megabytes.
    """
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to write out the longest ones
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, str | bytes | Real):
        text = f"{value}" if isinstance(value, Real) else ascii(value) if _is_odd(value) else repr(value)
        return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}… ({type(value).__name__})"
    return f"of type {type(value).__name__}"


def _is_odd(value: Any) -> bool:
    """Whether text holds what UTF-8 cannot encode."""
    return isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value)
