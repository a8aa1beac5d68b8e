"""Checks values from outside: types, ranges, and mappings with pydantic models; each failure is one sentence.

In Python True equals 1, and a NumPy scalar is no `int`. Values come from JSON and from NumPy. All checks refuse
booleans as numbers, and strings except as text.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeVar

from foretoken.core.errors import ConfigError, ForetokenError, RequestError, nearest_name_hint

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic_core import ErrorDetails

_LARGEST_INTEGER = 2**1000  # of either sign: Python refuses to print integers of more than 4300 digits
_LONGEST_SHOWN = 60  # characters of a refused value in a message
_PLAIN = {int, float, str, type(None)}  # types that `as_python` keeps
_MOST_SHOWN, _DEEPEST_SHOWN = 8, 3  # entries and levels of a container


def require(condition: bool, message: str) -> None:
    """Raises `ValueError` unless a condition holds. Guards memory; `python -O` would drop an `assert`."""
    if not condition:
        raise ValueError(message)


def check_integer(
    name: str, value: Any, low: float = -math.inf, high: float = math.inf, *, error: type[ForetokenError] = RequestError
) -> None:
    """Raises `error` unless `value` is an integer (of Python or numpy, not a boolean) in [low, high], within 2^1000."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise error(f"{name} is {shown(value)}. Expected an integer.")
    check_range(name, value, low, high, error=error)
    check_range(name, value, -_LARGEST_INTEGER, _LARGEST_INTEGER, error=error)


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
    """Raises `error` unless `value` is True or False, of Python or numpy."""
    if not _is_boolean(value):
        raise error(f"{name} is {shown(value)}. Expected True or False.")


def check_text(name: str, value: Any, *, error: type[ForetokenError] = RequestError) -> None:
    """Raises `error` unless `value` is text that UTF-8 can encode; a lone surrogate cannot be encoded."""
    if not isinstance(value, str):
        raise error(f"{name} is {shown(value)}. Expected text.")
    at = lone_surrogate(value)
    if at is not None:
        raise error(
            f"{name} holds a lone surrogate, {value[at]!r}, at character {at}. Expected valid Unicode text. Decode the "
            "input with errors='replace'."
        )


def check_sequence(name: str, value: Any, expected: str) -> None:
    """Raises `RequestError` unless `value` is a list, tuple, set or array; `expected` describes it in the message."""
    is_other = isinstance(value, str | bytes | bytearray | memoryview | Mapping) or getattr(value, "ndim", 1) == 0
    if is_other or not isinstance(value, Collection):
        raise RequestError(f"{name} is {shown(value)}. Expected {expected}.")


def as_python(value: Any, depth: int = 2) -> Any:
    """Returns a value with numbers, booleans and lists of Python instead of those of NumPy and other libraries.

    Copies lists, tuples and mappings `depth` levels deep. Other values (text, sets, objects, too large numbers) are
    kept.
    """
    if depth and hasattr(value, "tolist") and getattr(value, "ndim", 0) > 0:
        value = value.tolist()
    if _is_boolean(value):
        return bool(value)
    if isinstance(value, list | tuple) and depth:
        is_plain = set(map(type, value)) <= _PLAIN
        items = list(value) if is_plain else [as_python(item, depth - 1) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, Mapping) and depth:
        return {as_python(key, 0): as_python(item, 0) for key, item in value.items()}
    if not isinstance(value, Real):
        return value
    try:
        return int(value) if isinstance(value, Integral) else float(value)
    except OverflowError:
        return value


def _is_boolean(value: Any) -> bool:
    """Whether a value is a boolean of Python or numpy, without importing numpy."""
    kind = type(value)
    return kind is bool or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"))


def checked_token_ids(ids: Iterable[Any], vocab_size: int, where: str) -> list[int]:
    """Returns token ids as Python integers; raises `RequestError`, which names `where`, for ids that do not exist."""
    ids = list(ids)
    if ids and set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return ids
    checked = []
    for token in ids:
        if not isinstance(token, Integral) or isinstance(token, bool) or not 0 <= int(token) < vocab_size:
            raise RequestError(f"{where} holds token id {shown(token)}. Expected integers in 0..{vocab_size - 1}.")
        checked.append(int(token))
    return checked


def check_token_ids(name: str, ids: Collection[Any]) -> None:
    """Raises `RequestError` unless all token ids are integers of at least 0; fast for long lists."""
    if ids and set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= _LARGEST_INTEGER:
        return
    for token in ids:
        check_integer(f"a token id of {name}", token, 0)


def lone_surrogate(text: str) -> int | None:
    """Returns the index of the first lone surrogate, which UTF-8 cannot encode; None without any."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as err:
        return err.start
    return None


def shown(value: Any) -> str:
    """Returns any value for a message: one line of about 200 characters at most.

    Long numbers and text are cut. Lists, tuples (shown as lists) and dictionaries show their first entries, a few
    levels deep. Any other object shows its type alone, because its text may have megabytes.
    """
    return _shown(value, _DEEPEST_SHOWN)


def _shown(value: Any, depth: int) -> str:
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to print the longest integers
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, str | bytes | Real):
        text = f"{value}" if isinstance(value, Real) else repr(value)
        return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}… ({type(value).__name__})"
    if depth and type(value) is dict:
        entries = (f"{_shown(key, 0)}: {_shown(item, depth - 1)}" for key, item in value.items())
        return f"{{{_first(entries)}}}"
    if depth and type(value) in (list, tuple):
        return f"[{_first(_shown(item, depth - 1) for item in value)}]"
    return f"of type {type(value).__name__}"


def _first(parts: Iterable[str]) -> str:
    kept: list[str] = []
    for part in parts:
        if len(kept) == _MOST_SHOWN or sum(map(len, kept)) > _LONGEST_SHOWN:
            return ", ".join([*kept, "…"])
        kept.append(part)
    return ", ".join(kept)


Model = TypeVar("Model", bound="BaseModel")


def validated(
    kind: type[Model],
    values: Any,
    what: str,
    *,
    error: type[ForetokenError] = ConfigError,
    other_keys: Iterable[str] = (),
    advice: str = "",
) -> Model:
    """Returns an instance of a pydantic model.

    Args:
        values: A mapping of its fields; anything else is refused.
        what: Describes the values in messages, such as "a medusa head".
        other_keys: Further keys to suggest for an unknown key.
        advice: A sentence at the end of every message.

    Raises:
        ForetokenError: Of type `error`, about the first unknown key, else about the first invalid value.
    """
    from pydantic import ValidationError  # takes longer to import than all of this module

    end = f" {advice}" if advice else ""
    if not isinstance(values, Mapping):
        raise error(f"{what} is {shown(values)}. Expected keys and values.{end}")
    nameless = [key for key in values if not isinstance(key, str)]
    if nameless:
        raise error(f"{what} has a key {shown(nameless[0])}. Expected names.{end}")
    if kind.model_config.get("extra") == "forbid":
        unknown = sorted(key for key in values if key not in kind.model_fields)
        if unknown:
            hint = nearest_name_hint(unknown[0], {*kind.model_fields, *other_keys})
            raise error(f"{what} has no key {shown(unknown[0])}. {hint}{end}")
    try:
        return kind.model_validate(dict(values))
    except ValidationError as err:
        raise error(f"{_sentences(err.errors(), values, what)}{end}") from err


def _sentences(errors: list[ErrorDetails], values: Mapping[str, Any], what: str) -> str:
    path, value = _found(values, errors[0]["loc"])
    if errors[0]["type"] == "missing":
        return f"{shown('.'.join([*path, str(errors[0]['loc'][-1])]))} of {what} is missing. Expected a value."
    if not path:  # the message of a rule about several keys names them
        return f"{what}: {_reason(errors[0])}."
    reasons = dict.fromkeys(_reason(each) for each in errors if _found(values, each["loc"])[0] == path)
    return f"{shown('.'.join(path))} of {what} is {shown(value)}. {'; or: '.join(reasons)}."


def _found(values: Any, location: tuple[int | str, ...]) -> tuple[list[str], Any]:
    """Follows a pydantic location through keys and entries; the location ends with names of types."""
    path: list[str] = []
    for step in location:
        if isinstance(values, Mapping):
            is_there = step in values
        else:
            is_list = isinstance(values, Sequence) and not isinstance(values, str | bytes)
            is_there = is_list and isinstance(step, int) and step < len(values)
        if not is_there:
            break
        path.append(str(step))
        values = values[step]
    return path, values


def _reason(error: ErrorDetails) -> str:
    is_ours = error["type"] == "value_error"
    return (str(error["ctx"]["error"]) if is_ours else error["msg"]).rstrip(".")
