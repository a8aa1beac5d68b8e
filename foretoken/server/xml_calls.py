"""Reads tool calls in XML syntax, whose arguments are text without escapes; see `call_syntax`."""

from __future__ import annotations

import ast
import json
import re
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from foretoken.grammars.schemas import json_type
from foretoken.server.call_syntax import (
    LONGEST_HEAD,
    MOST_SPACES,
    NOT_A_CALL,
    Call,
    KnownTools,
    ReadCalls,
    as_call,
    loaded_json,
    python_expression,
)

if TYPE_CHECKING:
    from foretoken.grammars.schemas import ParameterTypes

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
        """Reads the next piece."""
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
            if "\n" not in self._begun[0] or not self._tools.has(self._begun[1].strip()):
                for at in self._opens:
                    begun = _BEGIN.match(text, at + len("<tool_call>"))
                    if begun is not None and "\n" in begun[0] and self._tools.has(begun[1].strip()):
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
        inner = [mark.end("close") for mark in _NEXT.finditer(body) if self._tools.has(mark[2].strip())]
        calls = []
        for start, end in pairwise([0, *inner, len(body)]):
            begun = _BEGIN.match(body, start)
            if begun is None or not body.endswith("</function>", start, end):
                raise ValueError("no function")
            name = begun[1].strip()
            types = self._tools.types(name)
            values = _values(body[begun.end() : end - len("</function>")], types.required)
            calls.append(as_call(name, {key: typed_value(text, types, key) for key, text in values.items()}))
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
    """Returns a value without its closing tag, which may be doubled in the same layout."""
    closing = "\n</parameter>" if text.startswith("\n") else "</parameter>"
    text = text.rstrip().removesuffix("</parameter>")
    for _ in range(_MOST_DOUBLED):
        if text.rstrip().endswith(closing) and text.count("</parameter>") > text.count("<parameter="):
            text = text.rstrip().removesuffix("</parameter>")
    return text.removeprefix("\n").removesuffix("\n")


def typed_value(text: str, types: ParameterTypes, name: str) -> Any:
    """Returns a parameter's value: JSON or a Python literal of a type that the schema allows, otherwise the text.

    Where text is allowed too, a number must be written as JSON writes it, so that no digit is lost.
    """
    allowed = types.types(name)
    if allowed <= {"string"} or text in types.texts(name):
        return text
    for read in (loaded_json, _literal):
        try:
            value = read(text)
            written = json.dumps(value, allow_nan=False)
        except NOT_A_CALL:
            continue
        kind = json_type(value)
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
    return ast.literal_eval(python_expression(text))
