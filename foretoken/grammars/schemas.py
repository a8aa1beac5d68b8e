"""Reads JSON schemas: where their keywords stand, and which types the parameters of a tool may have."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

# Keywords whose value is a schema, a list of schemas, or schemas by name. The value of any other keyword is data.
_ONE = frozenset({
    "additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not",
    "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
})  # fmt: skip
_LIST = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
# Of llguidance 1.9; a tuple, since any value may be compared with it.
_KNOWN_FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")


def subschemas(schema: Any, *place: str) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Yields every schema inside a schema with its place, the schema itself first.

    `const`, `enum`, `default` and other data are not searched. `place` is the beginning of each place.
    """
    if not isinstance(schema, Mapping):
        return
    yield place, schema
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            for name, each in value.items():
                yield from subschemas(each, *place, key, str(name))
        elif key in _LIST and isinstance(value, list):
            for at, each in enumerate(value):
                yield from subschemas(each, *place, key, str(at))
        elif key in _ONE:
            yield from subschemas(value, *place, key)


def without_unknown_formats(text: str) -> str:
    """Returns a schema without `format` keywords that llguidance would refuse; `format` is an annotation."""
    schema = json.loads(text)
    for _, each in subschemas(schema):
        if isinstance(each, dict) and each.get("format", "date") not in _KNOWN_FORMATS:
            del each["format"]
    return json.dumps(schema)


def refused_place(schema: Any, reason: str) -> tuple[str, ...]:
    """Returns the place of the keyword that a message of llguidance speaks of; () if no keyword fits the message."""
    for place, each in subschemas(schema):
        for key, value in each.items():
            texts = value if key == "patternProperties" else [value] if key in _QUOTED else []
            if f'"{key}"' in reason or (
                isinstance(texts, list | Mapping) and any(_is_in(text, reason) for text in texts)
            ):
                return (*place, key)
    return ()


_QUOTED = ("$ref", "$schema", "pattern", "type")  # keywords whose value messages quote


def _is_in(text: Any, reason: str) -> bool:
    marked = f"{reason}\n"
    return isinstance(text, str) and any(
        f"{before}{text.lstrip('#')}{after}" in marked for before, after in (("'", "'"), (": ", "\n"), ("\n    ", "\n"))
    )


_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
# Keywords of a schema without a type, and the types that they are meant for.
_MEANT = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_MOST_VISITS = 2_000  # schemas read for one parameter; a choice: references can repeat without end


class ParameterTypes:
    """The parameters of one tool: their names, and the types that their schemas allow in whatever form."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """Reads the names; a schema that declares none, or allows others, takes any name."""
        self._root, self._visits = schema, 0
        required = schema.get("required")
        self.required = frozenset(map(str, required)) if isinstance(required, list) else frozenset[str]()
        self._declared: dict[str, list[Any]] = {}
        self._others: list[Any] = []  # schemas of parameters that are not declared
        for each in self._parts(schema, 0):
            properties, others = each.get("properties"), each.get("additionalProperties")
            for name, inner in properties.items() if isinstance(properties, Mapping) else ():
                self._declared.setdefault(name, []).append(inner)
            if others is True or isinstance(others, Mapping):
                self._others.append(others)
        self._known: dict[str, tuple[frozenset[str], frozenset[str]]] = {}

    def types(self, name: str) -> frozenset[str]:
        """Returns the JSON types that a parameter may have; "string" alone for a parameter without a schema."""
        return self._read(name)[0]

    def texts(self, name: str) -> frozenset[str]:
        """Returns the texts that a parameter's `enum` or `const` lists."""
        return self._read(name)[1]

    def _read(self, name: str) -> tuple[frozenset[str], frozenset[str]]:
        if name not in self._known:
            self._visits = 0
            schemas = self._declared.get(name) or [each for each in self._others if isinstance(each, Mapping)]
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
            allowed, is_told = allowed & frozenset(map(json_type, constants)), True
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


def json_type(value: Any) -> str:
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
