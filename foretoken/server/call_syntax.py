"""Finds the end of a tool call in text that comes in pieces, and reads the call: JSON, Python and XML syntax.

A reader of this module gets the text behind an opening marker. It says how far the call goes, or that the text is no
call. Any division into pieces gives the same result. Time is linear in the text.
"""

from __future__ import annotations

import ast
import json
import re
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from foretoken.core.checks import lone_surrogate
from foretoken.grammars.schemas import ParameterTypes, json_type

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Schemas = Mapping[str, Mapping[str, Any]]  # the parameters of every tool, by its name

_DEEPEST = 64  # nested brackets; a choice: bounds the work of the JSON and Python parsers
_MOST_SPACES = 64  # between the tokens of a call; a choice: bounds the text that is read again with the next piece
_LONGEST_HEAD = 512  # characters between an opening marker and the arguments; a choice
NOT_A_CALL = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)
"""What parsing raises for text that is not a call."""


class Call(NamedTuple):
    """A tool call; arguments: the text of a JSON object."""

    name: str
    arguments: str


class KnownTools:
    """The tools of a request; reads the schema of each once."""

    def __init__(self, schemas: Schemas) -> None:
        """Reads nothing yet; schemas: the parameters of every tool, by its name."""
        self._schemas, self._types = schemas, dict[str, ParameterTypes]()

    def has(self, name: str) -> bool:
        """Whether the request has a tool of this name."""
        return name in self._schemas

    def types(self, name: str) -> ParameterTypes:
        """Returns the parameters of a tool; any parameters for a tool that is not known."""
        if name not in self._types:
            self._types[name] = ParameterTypes(self._schemas.get(name, {}))
        return self._types[name]


class ReadCalls(NamedTuple):
    """The result of a reader: its first `end` characters are calls, or content if there are no calls."""

    end: int
    calls: Sequence[Call] = ()


class CallReader(Protocol):
    """Reads one call, or several in one pair of markers."""

    def feed(self, piece: str) -> ReadCalls | None:
        """Reads the next piece; returns None if more text decides. Must not be called after a result."""

    def finish(self) -> ReadCalls:
        """Ends the text and returns the result."""


class Brackets(NamedTuple):
    """The syntax of calls whose strings and brackets tell where they end.

    Attributes:
        parse: Returns the calls in the text of a head's match and a value. Raises one of `NOT_A_CALL`.
        head: What stands between the opening marker and the first bracket.
        allowed: What a text that may become a head consists of.
        outside: Characters outside strings, besides brackets and quotation marks.
        quotes: Quotation marks.
        fence: A marker that may stand between the value and the closing marker.
    """

    parse: Callable[[re.Match[str], str], list[Call]]
    head: re.Pattern[str] = re.compile(rf"\s{{0,{_MOST_SPACES}}}(?=[\[{{])")
    allowed: re.Pattern[str] = re.compile(r"\s*")
    outside: re.Pattern[str] = re.compile(r"[\s,:.0-9eE+\-a-u]*")
    quotes: str = '"'
    fence: str = ""


class BracketReader:
    """Reads a call by its brackets and strings, so that no text in a string ends the call."""

    def __init__(self, syntax: Brackets, close: str, opens: Sequence[str] = ()) -> None:
        """`close` ends the call, or its last bracket if `close` is empty; so does one of `opens`, which begins another.

        Without its closing marker a call must be the end of the text.
        """
        self._syntax, self._close, self._opens = syntax, close, opens
        self._step: Callable[[], ReadCalls | None] = self._read_head
        self._text, self._num_read = "", 0  # characters that are not read yet, and the number of those that are
        self._value: list[str] = []
        self._depth, self._quote = 0, ""
        self._calls: list[Call] = []
        self._end = 0  # of the last value

    def feed(self, piece: str) -> ReadCalls | None:
        """Reads the next piece."""
        self._text += piece
        found, before = self._step(), None
        while found is None and before != (state := (self._step, self._num_read)):
            before, found = state, self._step()
        return found

    def finish(self) -> ReadCalls:
        """Returns the calls if the last value is complete."""
        rest = self._text.strip().removeprefix(self._syntax.fence).lstrip()
        is_complete = self._step == self._read_tail and self._close.startswith(rest)
        return ReadCalls(self._num_read + len(self._text), self._calls) if is_complete else ReadCalls(0)

    def _take(self, count: int) -> str:
        taken, self._text = self._text[:count], self._text[count:]
        self._num_read += count
        return taken

    def _read_head(self) -> ReadCalls | None:
        head = self._syntax.head.match(self._text)
        if head is None:
            is_over = len(self._text) > _LONGEST_HEAD or not self._syntax.allowed.fullmatch(self._text)
            return ReadCalls(0) if is_over else None
        self._head, self._step = head, self._read_value
        self._take(head.end())
        return None

    def _read_value(self) -> ReadCalls | None:
        """Reads until the last bracket closes. `at` moves through the text, so that taking it costs once a piece."""
        at, text = 0, self._text
        while at < len(text):
            step: int | None
            if self._quote:
                step = self._in_string(text, at)
            else:
                outside = self._syntax.outside.match(text, at)
                at = at if outside is None else outside.end()
                step = self._outside(text, at) if at < len(text) else 0
            if step is None:
                return ReadCalls(0)
            if not step:
                break
            at += step
            if not self._depth:
                self._value.append(self._take(at))
                return self._end_value()
        self._value.append(self._take(at))
        return None

    def _in_string(self, text: str, at: int) -> int:
        """Returns the number of characters that are certain: of text, an escape, or the closing mark."""
        plain = _PLAIN[self._quote[0]].match(text, at)
        if plain is not None and plain.end() > at:
            return plain.end() - at
        if text[at] == "\\":
            return 2 if at + 1 < len(text) else 0
        if text.startswith(self._quote, at):
            length, self._quote = len(self._quote), ""
            return length
        return 0 if self._quote.startswith(text[at:]) else 1

    def _outside(self, text: str, at: int) -> int | None:
        """Returns as `_in_string` does; None for a character that no call has there."""
        sign = text[at]
        if sign in self._syntax.quotes:
            three = text[at : at + 3]
            if len(self._syntax.quotes) > 1 and three == sign * len(three):  # Python's strings of several lines
                if len(three) < 3:
                    return 0
                self._quote = three
                return 3
            if three.startswith(sign * 2):
                return 2
            self._quote = sign
        elif sign in "([{":
            self._depth += 1
        elif sign in ")]}":
            self._depth -= 1
        else:
            return None
        return 1 if self._depth <= _DEEPEST else None

    def _end_value(self) -> ReadCalls | None:
        value, self._value = "".join(self._value), []
        try:
            self._calls += self._syntax.parse(self._head, value)
        except NOT_A_CALL:
            return ReadCalls(0)
        self._end, self._step = self._num_read, self._read_tail
        return None if self._close else ReadCalls(self._end, self._calls)

    def _read_tail(self) -> ReadCalls | None:
        rest = self._text.lstrip().removeprefix(self._syntax.fence).lstrip()
        if len(self._text) - len(rest) > _LONGEST_HEAD:
            return ReadCalls(0)
        if rest.startswith(self._close):
            return ReadCalls(self._num_read + len(self._text) - len(rest) + len(self._close), self._calls)
        if rest.startswith(tuple(self._opens)):
            return ReadCalls(self._end, self._calls)
        if rest[:1] in ("[", "{"):
            self._take(len(self._text) - len(rest))
            self._step = self._read_value
            return None
        ends = (self._close, self._syntax.fence, *self._opens)
        return None if any(end.startswith(rest) for end in ends) else ReadCalls(0)


_PLAIN = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}


def _called(name: Any, arguments: Any) -> Call:
    if not isinstance(name, str) or not name.strip() or lone_surrogate(name) is not None:
        raise ValueError("no name")
    if isinstance(arguments, str):
        arguments = _loaded(arguments)
    if not isinstance(arguments, dict | None):
        raise ValueError("no object")
    text = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
    # A lone surrogate has no UTF-8, its escape has.
    return Call(name.strip(), text if lone_surrogate(text) is None else json.dumps(arguments))


def _loaded(text: str) -> Any:
    """Parses JSON; accepts line breaks in strings, which models write, and no key twice."""
    return json.loads(text, strict=False, parse_constant=_no_constant, object_pairs_hook=_once)


def _once(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key comes twice")
    return made


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def json_calls(head: re.Match[str], value: str) -> list[Call]:
    """Returns the calls in an object or a list of objects, or the call that the head names."""
    told, names = _loaded(value), head.groupdict()
    if names.get("name"):
        return [_called(names["name"], told)]
    calls = told if isinstance(told, list) else [told]
    if not calls or not all(isinstance(each, dict) for each in calls):
        raise ValueError("no objects")
    return [_json_call(each) for each in calls]


def _json_call(told: dict[str, Any]) -> Call:
    given = told.keys() & {"arguments", "parameters"}
    if len(given) > 1 or ("arguments" not in given and told.keys() - {"name", "parameters", "type", "id"}):
        raise ValueError("data with a name, or the description of a tool")
    return _called(told.get("name"), told[given.pop()] if given else None)


_ESCAPES = "\n\\'\"abfnrtv0123xNuU"  # characters that Python accepts after a backslash without a warning
_JSON_NAMES = {"true": True, "false": False, "null": None}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_STRING = re.compile(r"([rR]?)('''|\"{3}|['\"])(?:[^\\]|\\.)*?(?:\2|\Z)", re.DOTALL)


def _python(text: str) -> ast.expr:
    # A raw string keeps its backslashes.
    text = _STRING.sub(lambda string: string[0] if string[1] else _ESCAPE.sub(_known_escape, string[0]), text)
    parsed: ast.Expression = _WithJsonNames().visit(ast.parse(text.strip(), mode="eval"))
    return parsed.body


def _known_escape(escape: re.Match[str]) -> str:
    """Doubles the backslash of an unknown escape, for which Python would warn."""
    return escape[0] if escape[1] in _ESCAPES else "\\" + escape[0]


class _WithJsonNames(ast.NodeTransformer):
    """Replaces JSON's true, false and null by the values that they mean."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def python_calls(_head: re.Match[str], value: str) -> list[Call]:
    """Returns the calls in a list of Python calls with keywords; JSON's true, false and null are values too."""
    body = _python(value)
    if not isinstance(body, ast.List) or not body.elts:
        raise ValueError("no list")
    return [_python_call(node) for node in body.elts]


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        raise ValueError("no call with keywords")
    return _called(ast.unparse(node.func), _once([(each.arg, ast.literal_eval(each.value)) for each in node.keywords]))


JSON = Brackets(json_calls)
PYTHON = Brackets(python_calls, outside=re.compile(r"[\w\s,:.=+\-*]*"), quotes="'\"")


_NAMES = r"[^<>\n]{1,128}"
_SPACES = rf"\s{{0,{_MOST_SPACES}}}"
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
                is_open = (tag.startswith(bare) or bare.startswith(tag)) and len(piece) <= _LONGEST_HEAD
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
            calls.append(_called(name, {key: typed_value(text, types, key) for key, text in values.items()}))
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
        rest = rest[:-_LONGEST_HEAD] + _DOUBLED.sub("</parameter>", rest[-_LONGEST_HEAD:])
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
    for read in (_loaded, _literal):
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
    return ast.literal_eval(_python(text))
