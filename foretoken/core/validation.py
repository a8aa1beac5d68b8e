"""Checks a mapping of a user's values against a pydantic model; an error is one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError, ForetokenError, nearest_name_hint

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic_core import ErrorDetails

Model = TypeVar("Model", bound=BaseModel)


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
        kind: The model.
        values: A mapping of its fields; anything else is refused.
        what: Describes the values in messages, such as "a medusa head".
        error: The exception type.
        other_keys: Further keys to suggest for an unknown key.
        advice: A sentence at the end of every message.

    Raises:
        ForetokenError: Of type `error`, about the first unknown key, else about the first invalid value.
    """
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
    """Describes the first invalid value; for a value of several types names all that is allowed."""
    path, value = _found(values, errors[0]["loc"])
    if errors[0]["type"] == "missing":
        return f"{shown('.'.join([*path, str(errors[0]['loc'][-1])]))} of {what} is missing. Expected a value."
    if not path:  # the message of a rule about several keys names them
        return f"{what}: {_reason(errors[0])}."
    reasons = dict.fromkeys(_reason(each) for each in errors if _found(values, each["loc"])[0] == path)
    return f"{shown('.'.join(path))} of {what} is {shown(value)}. {'; or: '.join(reasons)}."


def _found(values: Any, place: tuple[int | str, ...]) -> tuple[list[str], Any]:
    """Follows a pydantic location through keys and entries; the location ends with names of types."""
    path: list[str] = []
    for step in place:
        is_there = step in values if isinstance(values, Mapping) else _is_index(values, step)
        if not is_there:
            break
        path.append(str(step))
        values = values[step]
    return path, values


def _is_index(values: Any, step: int | str) -> bool:
    is_list = isinstance(values, Sequence) and not isinstance(values, str | bytes)
    return is_list and isinstance(step, int) and step < len(values)


def _reason(error: ErrorDetails) -> str:
    """Returns the message of pydantic or of a rule of ours, without the final stop."""
    is_ours = error["type"] == "value_error"
    return (str(error["ctx"]["error"]) if is_ours else error["msg"]).rstrip(".")
