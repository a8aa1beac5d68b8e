"""The required form of a text, with vLLM's field names; checks types and sizes, and compiles nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from foretoken.core.checks import check_boolean, check_sequence, check_text, shown
from foretoken.core.errors import RequestError, nearest_name_hint, one_line

_LONGEST_GRAMMAR = 65_536  # characters of a schema, a grammar, or all choices together
_LONGEST_REGEX = 2_048
_LONGEST_TAG = 64
_MOST_CHOICES = 2_000  # also values of one "enum"
_DEEPEST_SCHEMA = 32  # containers within each other
_KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form of the whole output: exactly one of the first five fields is given.

    Attributes:
        json: A JSON schema, as a mapping or as text.
        regex: A regular expression, in the syntax of Rust's `regex`.
        choice: Texts; the output is one of them.
        grammar: A context-free grammar, in Lark's syntax or llama.cpp's GBNF.
        json_object: Whether the output is any JSON object.
        disable_any_whitespace: For `json` and `json_object`: no white space outside strings.
        whitespace_pattern: For `json` and `json_object`: a regular expression of the white space between tokens.
        reasoning: The opening and closing tag of thoughts, which may precede the structured output. With an empty
            opening tag the text always begins with thoughts, as after a prompt that opens them. None for no thoughts.

    Raises:
        RequestError: When a value has another type, is too large or nested too deeply. Compile errors come later, when
            the request is read.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    reasoning: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.json_object is not None:
            check_boolean("json_object", self.json_object)
        check_boolean("disable_any_whitespace", self.disable_any_whitespace)
        given = self._given()
        if len(given) != 1:
            found = " and ".join(given) or "none of its fields"
            raise RequestError(f"structured_outputs has {found}. Expected exactly one of {', '.join(_KINDS)}.")
        for name, longest in (
            ("regex", _LONGEST_REGEX), ("grammar", _LONGEST_GRAMMAR), ("whitespace_pattern", _LONGEST_REGEX),
        ):  # fmt: skip
            if getattr(self, name) is not None:
                _check_size(name, getattr(self, name), longest)
        if self.choice is not None:
            self._check_choice(self.choice)
        if self.json is not None:
            _check_schema(self.schema)
        if self.reasoning is not None:
            check_sequence("reasoning", self.reasoning, "two texts")
            if len(self.reasoning) != 2 or not self.reasoning[1]:
                raise RequestError(f"reasoning is {shown(self.reasoning)}. Expected two texts, the second not empty.")
            for text in self.reasoning:
                check_text("a text of reasoning", text)
                if len(text) > _LONGEST_TAG:
                    raise RequestError(
                        f"reasoning has a text of {len(text)} characters. Expected at most {_LONGEST_TAG}."
                    )

    @classmethod
    def read(cls, value: Any) -> Self:
        """Returns the parameters, which may be given as a mapping; raises `RequestError` for anything else."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise RequestError(f"structured_outputs is {shown(value)}. Expected StructuredOutputsParams or a mapping.")
        known = [field.name for field in fields(cls)]
        for name in value:
            if name not in known:
                raise RequestError(
                    f"structured_outputs has no field {shown(name)}. {nearest_name_hint(str(name), known)}"
                )
        return cls(**{name: item for name, item in value.items() if item is not None})

    @property
    def kind(self) -> str:
        """The name of the given field among the first five; an empty schema counts as given."""
        (kind,) = self._given()
        return kind

    def _given(self) -> list[str]:
        return [name for name in _KINDS if getattr(self, name) not in (None, False)]

    @property
    def schema(self) -> str:
        """The JSON schema as text; raises `RequestError` if the schema cannot be written as JSON."""
        if self.json_object:
            return '{"type": "object"}'
        if isinstance(self.json, str):
            return self.json
        if not isinstance(self.json, Mapping):
            raise RequestError(f"json is {shown(self.json)}. Expected a JSON schema, as a mapping or as text.")
        try:
            return json.dumps(self.json, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as err:
            raise RequestError(f"json cannot be written as JSON: {one_line(err)}. Expected a JSON schema.") from err

    @staticmethod
    def _check_choice(choice: Any) -> None:
        check_sequence("choice", choice, "a list of texts")
        if not 0 < len(choice) <= _MOST_CHOICES:
            raise RequestError(f"choice has {len(choice)} texts. Expected 1 to {_MOST_CHOICES}.")
        for text in choice:
            check_text("a text of choice", text)
        if not all(choice) or sum(map(len, choice)) > _LONGEST_GRAMMAR:
            raise RequestError(
                f"choice holds an empty text, or more than {_LONGEST_GRAMMAR} characters. Expected shorter texts."
            )


def _check_size(name: str, text: Any, longest: int) -> None:
    check_text(name, text)
    if not 0 < len(text) <= longest:
        raise RequestError(f"{name} has {len(text)} characters. Expected 1 to {longest}.")


def _check_schema(text: str) -> None:
    _check_size("json", text, _LONGEST_GRAMMAR)
    try:
        level: list[Any] = [json.loads(text)]
    except (ValueError, RecursionError) as err:
        raise RequestError(f"json is no JSON: {one_line(err)}. Expected a JSON schema.") from err
    if not isinstance(level[0], dict):
        raise RequestError(f"json is {shown(level[0])}. Expected a JSON schema: an object.")
    for _ in range(_DEEPEST_SCHEMA):
        level = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
        level = [item for item in level if isinstance(item, dict | list)]
        for item in level:
            if isinstance(item, list) and len(item) > _MOST_CHOICES:
                raise RequestError(f"json holds a list of {len(item)} values. Expected at most {_MOST_CHOICES}.")
    if level:
        raise RequestError(
            f"json nests more than {_DEEPEST_SCHEMA} objects and lists in each other. Expected at most that. Name "
            'inner schemas in "$defs".'
        )
