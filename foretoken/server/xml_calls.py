"""Reads tool calls in XML syntax, whose arguments are text without escapes: the tool's schema says their types."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any
from urllib.parse import unquote

from foretoken.server import call_syntax
from foretoken.server.call_syntax import LONGEST_HEAD, MOST_SPACES, NOT_A_CALL, Call, ReadCalls

Schemas = Mapping[str, Mapping[str, Any]]  # the parameters of every tool, by its name
_NAMES = r"[^<>\n]{1,128}"
_SPACES = rf"\s{{0,{MOST_SPACES}}}"
_OPEN = rf"<tool_call>{_SPACES}<function={_NAMES}>"
_MARK = re.compile(rf"(?P<open>{_OPEN})|</function>{_SPACES}</tool_call>")
_NEXT_CALL = re.compile(rf"\s*(?:{_OPEN}|\Z)")
_LONGEST_MARK = 256  # characters of a text that `_MARK` matches
_BEGIN = re.compile(rf"{_SPACES}<function=({_NAMES})>{_SPACES}(?=<parameter={_NAMES}>|</function>)")
_PARAMETER = re.compile(rf"<parameter=({_NAMES})>|</parameter>")
_NEXT = re.compile(rf"(?P<close></function>)\s*<function=({_NAMES})>")
_DOUBLED = re.compile(r"</parameter>\s*(?:(?:</parameter>\s*)*</function>\s*)+(?:</parameter>\s*)*\Z")
_MOST_DOUBLED = 4  # a choice: a model that repeats a closing tag more often has lost its way
# What stands before a call if the call before has no closing marker, and behind a call if the next has no opening one.
_LEFT_OPEN = re.compile(r"(?:</function>|</parameter>\s*(?:</tool_call>)?)\s*\Z")
_BEHIND = re.compile(r"\s*<(?:tool_call>|function=|parameter=)")
_CLOSING = re.compile(r"(?:\s|</parameter>|</function>|</tool_call>)*")


class XmlReader:
    """Reads the calls of `qwen3_coder`, whose values are text without escapes and may contain tags themselves.

    Tags are matched in pairs. A call is certain when the next call begins, or the text ends: further closing tags show
    that the tags before them belong to a value.
    """

    def __init__(self, tools: KnownTools) -> None:
        """Reads the text behind a first `<tool_call>`."""
        self._tools = tools
        self._held: list[str] = []
        self._length, self._tail = 0, ""  # of all text, and what may begin a mark
        self._depth = 1
        self._opens: list[int] = []  # where further calls begin
        self._ends: list[int] = []  # where calls end
        self._first_end: int | None = None  # where all calls have ended
        self._begun: re.Match[str] | None = None

    def feed(self, piece: str) -> ReadCalls | None:
        """Reads the next piece; returns None if more text decides. Must not be called after a result."""
        self._held.append(piece)
        self._length += len(piece)
        if self._begun is None:
            piece = "".join(self._held)
            self._held, self._begun = [piece], _BEGIN.match(piece)
            bare, tag = piece.lstrip(), "<function="
            if self._begun is None:
                is_open = (tag.startswith(bare) or bare.startswith(tag)) and len(piece) <= LONGEST_HEAD
                return None if is_open else ReadCalls(0)
        text, at = self._tail + piece, 0
        base = self._length - len(text)
        for mark in _MARK.finditer(text):
            at = mark.end()
            if mark["open"] is None:
                self._depth = max(0, self._depth - 1)
                self._ends.append(base + at)
                if not self._depth and self._first_end is None:
                    self._first_end = base + at
            elif self._depth:
                self._depth += 1
                self._opens.append(base + mark.start())
            else:
                return self._found(self._ends[-1])
        self._tail = text[max(at, len(text) - _LONGEST_MARK) :]
        return None

    def finish(self) -> ReadCalls:
        """Returns the calls, also without the last closing marker; text of a call that is cut off is content."""
        if self._begun is None:
            return ReadCalls(0)
        if not self._depth:
            return self._found(self._ends[-1])
        text = "".join(self._held)
        if self._ends:  # a value or a sentence mentions a tag that nothing closes, or the text is cut off
            for at in self._opens:
                if _LEFT_OPEN.search(text, max(0, at - _LONGEST_MARK), at):
                    return self._found(at)
            if "\n" not in self._begun[0] or self._begun[1].strip() not in self._tools.schemas:
                for at in self._opens:
                    begun = _BEGIN.match(text, at + len("<tool_call>"))
                    if begun is not None and "\n" in begun[0] and begun[1].strip() in self._tools.schemas:
                        return ReadCalls(at)  # prose about tags comes before the call
            end = next((end for end in self._ends if _NEXT_CALL.match(text, end)), None)
            return ReadCalls(len(text)) if end is None else self._found(end)
        is_whole = not self._opens and text.rstrip().endswith("</function>")
        return self._found(len(text)) if is_whole else ReadCalls(len(text))

    def _found(self, end: int) -> ReadCalls:
        text, first = "".join(self._held), self._first_end
        if first is not None and _BEHIND.match(text, first):
            end = first
        body = text[:end].rstrip().removesuffix("</tool_call>")
        if first is not None and first < end and _CLOSING.fullmatch(text, first, end):
            before = text[:first].rstrip().removesuffix("</tool_call>")
            if before.rstrip().removesuffix("</function>").rstrip().endswith(("</parameter>", ">")):
                body = before  # all behind it are doubled closing tags
        try:
            return ReadCalls(end, self._functions(body.rstrip()))
        except NOT_A_CALL:
            return ReadCalls(end)  # content, also where a value shows a whole call

    def _functions(self, body: str) -> list[Call]:
        """Returns the calls in the text between the markers of a call."""
        inner = [mark.end("close") for mark in _NEXT.finditer(body) if mark[2].strip() in self._tools.schemas]
        calls = []
        for start, end in pairwise([0, *inner, len(body)]):
            begun = _BEGIN.match(body, start)
            if begun is None or not body.endswith("</function>", start, end):
                raise ValueError("no function")
            name = begun[1].strip()
            types = self._tools[name]
            values = _values(body[begun.end() : end - len("</function>")], types.required)
            calls.append(
                call_syntax.as_call(name, {key: _typed_value(text, types, key) for key, text in values.items()})
            )
        return calls


def _values(text: str, required: frozenset[str]) -> dict[str, str]:
    """Returns the text of every parameter: in the reading that pairs all tags, if there is one.

    Otherwise tags within values are text, unless the last value is not closed, or a required parameter is missing then,
    and unclosed values explain it. Raises `ValueError` for tags that may be text or not.
    """
    with suppress(ValueError):
        return _read_values(text, is_nested=True)
    values = others = _read_values(text)
    with suppress(ValueError):
        others = _read_values(text, is_unclosed=True)
    if not required <= others.keys() or others == values:
        return values
    if required <= values.keys() and text.rstrip().endswith("</parameter>"):
        raise ValueError("a tag within a value, or a value that is not closed")
    return others


def _read_values(text: str, *, is_nested: bool = False, is_unclosed: bool = False) -> dict[str, str]:
    """Returns the text of every parameter; raises `ValueError` if the tags do not fit this reading.

    is_nested: tags in values come in pairs. is_unclosed: a tag on a line of its own ends the value before it.
    """
    values: dict[str, str] = {}
    name, begin, depth, is_ended = "", 0, 0, not is_nested
    for tag in _PARAMETER.finditer(text):
        if tag[1] is None:
            is_ended = is_ended or not depth
            depth = max(0, depth - 1)
            continue
        key, before = tag[1].strip(), text[begin : tag.start()]
        is_closed, is_new = before.rstrip().endswith("</parameter>"), key not in values and key != name
        is_line = before.endswith("\n") and bool(before.strip()) and text.startswith("\n", tag.end())
        if not name:
            if before.replace("</parameter>", "").strip():
                raise ValueError("text outside of parameters")
            name, begin, is_ended = key, tag.end(), not is_nested
        elif is_new and not depth and is_ended and (is_closed or (is_unclosed and is_line)):
            values[name], name, begin, is_ended = _inner(before), key, tag.end(), not is_nested
        elif is_closed and not is_new and not depth and is_ended:
            raise ValueError("a parameter comes twice")
        else:
            depth += is_nested
    rest = text[begin:]
    if rest.count("</function>") > rest.count("<function="):
        rest = rest[:-LONGEST_HEAD] + _DOUBLED.sub("</parameter>", rest[-LONGEST_HEAD:])
    if name and not depth and is_ended:
        return {**values, name: _inner(rest)}
    if name or rest.replace("</parameter>", "").replace("</function>", "").strip():
        raise ValueError("a tag is not closed, or text is outside of parameters")
    return values


def _inner(text: str) -> str:
    """Returns a value without its closing tag, which some models write twice."""
    closing = "\n</parameter>" if text.startswith("\n") else "</parameter>"
    text = text.rstrip().removesuffix("</parameter>")
    for _ in range(_MOST_DOUBLED):
        if text.rstrip().endswith(closing) and text.count("</parameter>") > text.count("<parameter="):
            text = text.rstrip().removesuffix("</parameter>")
    return text.removeprefix("\n").removesuffix("\n")


def _typed_value(text: str, types: ParameterTypes, name: str) -> Any:
    """Returns a parameter's value: JSON or a Python literal of a type that the schema allows, otherwise the text.

    Where text is allowed too, a number must be written as JSON writes it, so that no digit is lost.
    """
    allowed, texts = types.read(name)
    if allowed <= {"string"} or text in texts:
        return text
    for read in (call_syntax.loaded_json, _literal):
        try:
            value = read(text)
            written = json.dumps(value, allow_nan=False)
        except NOT_A_CALL:
            continue
        kind = _json_type(value)
        if kind in allowed and kind != "string":
            is_lossy = "string" in allowed and isinstance(value, int | float) and not isinstance(value, bool)
            return text if is_lossy and written != text else value
    return text


_PYTHON_NAMES = {"True": True, "False": False, "None": None}


def _literal(text: str) -> Any:
    text = text.strip()
    if text in _PYTHON_NAMES:
        return _PYTHON_NAMES[text]
    if not text.startswith(("{", "[")):
        raise ValueError("no literal of a type that JSON writes in another way")
    return ast.literal_eval(call_syntax.python_expression(text))


_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
# Keywords of a schema without a type, and the types that they are meant for.
_MEANT = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_MOST_VISITS = 2_000  # schemas read for one parameter; a choice: references can repeat without end


class KnownTools(dict[str, "ParameterTypes"]):
    """The parameters of each tool that a message calls, read once; any parameters for a tool without a schema."""

    def __init__(self, schemas: Schemas) -> None:
        self.schemas = schemas

    def __missing__(self, name: str) -> ParameterTypes:
        self[name] = ParameterTypes(self.schemas.get(name, {}))
        return self[name]


class ParameterTypes:
    """The parameters of one tool: their names, and the types that their schemas allow in whatever form."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """Reads the names; a schema that declares none, or allows others, takes any name."""
        self._root, self._visits = schema, 0
        required = schema.get("required")
        self.required = frozenset(map(str, required)) if isinstance(required, list) else frozenset[str]()
        self._declared: dict[str, list[Any]] = {}
        self._others: list[Any] = []  # of parameters that are not declared
        for each in self._parts(schema, 0):
            properties, others = each.get("properties"), each.get("additionalProperties")
            for name, inner in properties.items() if isinstance(properties, Mapping) else ():
                self._declared.setdefault(name, []).append(inner)
            if isinstance(others, Mapping):
                self._others.append(others)
        self._known: dict[str, tuple[frozenset[str], frozenset[str]]] = {}

    def read(self, name: str) -> tuple[frozenset[str], frozenset[str]]:
        """Returns the JSON types that a parameter may have, and the texts that its `enum` or `const` lists.

        A parameter without a schema has the type "string" alone.
        """
        if name not in self._known:
            self._visits = 0
            schemas = self._declared.get(name) or self._others
            types = frozenset[str]().union(*(self._types(each, 0) for each in schemas)) if schemas else {"string"}
            lists = [_constants(each) or [] for each in schemas if isinstance(each, Mapping)]
            texts = frozenset(value for values in lists for value in values if isinstance(value, str))
            self._known[name] = frozenset(types), texts
        return self._known[name]

    def _parts(self, schema: Any, depth: int) -> Iterator[Mapping[str, Any]]:
        """Yields a schema, and those that it is made of."""
        self._visits += 1
        if not isinstance(schema, Mapping) or depth > 16 or self._visits > _MOST_VISITS:
            return
        yield schema
        if "$ref" in schema:
            yield from self._parts(self._target(schema["$ref"]), depth + 1)
        for key in ("allOf", "anyOf", "oneOf"):
            branches = schema.get(key)
            for each in branches if isinstance(branches, list) else ():
                yield from self._parts(each, depth + 1)

    def _types(self, schema: Any, depth: int) -> frozenset[str]:
        self._visits += 1
        if not isinstance(schema, Mapping) or depth > 16 or self._visits > _MOST_VISITS:
            return _TYPES
        allowed, is_told = _TYPES, False
        for key, value in schema.items():
            of_key: frozenset[str] | None = None
            if key == "type" and isinstance(value, str | list):
                of_key = frozenset([value] if isinstance(value, str) else [each for each in value if each in _TYPES])
                of_key |= {"integer"} if "number" in of_key else frozenset()
            elif key == "$ref":
                of_key = self._types(self._target(value), depth + 1)
            elif key in ("anyOf", "oneOf") and isinstance(value, list) and value:
                of_key = frozenset().union(*(self._types(each, depth + 1) for each in value))
            elif key == "allOf" and isinstance(value, list):
                of_key = _TYPES.intersection(*(self._types(each, depth + 1) for each in value))
            if of_key is not None:
                allowed, is_told = allowed & of_key, True
        constants = _constants(schema)
        if constants is not None:
            allowed, is_told = allowed & frozenset(map(_json_type, constants)), True
        if not is_told:
            meant = {kind for kind, keys in _MEANT.items() if any(key in schema for key in keys)}
            allowed = frozenset(meant | ({"integer"} if "number" in meant else set())) or _TYPES
        return (allowed | {"null"} if schema.get("nullable") is True else allowed) or _TYPES

    def _target(self, reference: Any) -> Any:
        """Returns the schema that a reference within the tool's schema names; None for any other reference."""
        if not isinstance(reference, str):
            return None
        own = self._root.get("$id")
        if isinstance(own, str) and own:
            reference = reference.removeprefix(own.rstrip("#"))
        target: Any = self._root
        if not reference.startswith("#"):
            return None
        for part in unquote(reference[1:]).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            else:
                target = target.get(name) if isinstance(target, Mapping) else None
        return target


def _json_type(value: Any) -> str:
    """Returns the name of a value's JSON type; "integer" for a number without a fraction, "" for no JSON value."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    kinds = ((float, "number"), (str, "string"), (list, "array"), (dict, "object"), (type(None), "null"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "")


def _constants(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None
