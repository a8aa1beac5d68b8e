"""Finds the end of a tool call in text that comes in pieces, and reads the call: JSON and Python syntax.

A reader of this module gets the text behind an opening marker. It says how far the call goes, or that the text is no
call. Any division into pieces gives the same result. Time is linear in the text.
"""

import ast
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from foretoken.core.checks import lone_surrogate

_DEEPEST = 64  # nested brackets; a choice: bounds the work of the JSON and Python parsers
MOST_SPACES = 64  # between the tokens of a call; a choice: bounds the text that is read again with the next piece
LONGEST_HEAD = 512  # characters between an opening marker and the arguments; a choice
NOT_A_CALL = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)
"""What parsing raises for text that is not a call."""


class Call(NamedTuple):
    """A tool call; arguments: the text of a JSON object."""

    name: str
    arguments: str


class ReadCalls(NamedTuple):
    """The result of a reader: its first `end` characters are calls, or content if there are no calls."""

    end: int
    calls: Sequence[Call] = ()


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
    head: re.Pattern[str] = re.compile(rf"\s{{0,{MOST_SPACES}}}(?=[\[{{])")
    allowed: re.Pattern[str] = re.compile(r"\s*")
    outside: re.Pattern[str] = re.compile(r"[\s,:.0-9eE+\-a-u]*")
    quotes: str = '"'
    fence: str = ""


class BracketReader:
    """Reads a call by its brackets and strings, so that no text in a string ends the call."""

    def __init__(self, syntax: Brackets, close: str, opens: Sequence[str] = ()) -> None:
        """Reads a call that ends with `close`, or with its last bracket if `close` is empty.

        One of `opens` also ends the call, and begins another. At the end of the text `close` may be missing.
        """
        self._syntax, self._close, self._opens = syntax, close, opens
        self._step: Callable[[], ReadCalls | None] = self._read_head
        self._text, self._num_read = "", 0  # characters that are not read yet, and the number of those that are
        self._value: list[str] = []
        self._depth, self._quote = 0, ""
        self._calls: list[Call] = []
        self._end = 0  # of the last value

    def feed(self, piece: str) -> ReadCalls | None:
        """Reads the next piece; returns None if more text decides. Must not be called after a result."""
        self._text += piece
        found, before = self._step(), None
        while found is None and before != (state := (self._step, self._num_read)):
            before, found = state, self._step()
        return found

    def finish(self) -> ReadCalls:
        """Ends the text; returns the calls if the last value is complete."""
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
            is_over = len(self._text) > LONGEST_HEAD or not self._syntax.allowed.fullmatch(self._text)
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
        if len(self._text) - len(rest) > LONGEST_HEAD:
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


def as_call(name: Any, arguments: Any) -> Call:
    """Returns a call; raises `ValueError` without a name or an object of arguments, which may be text of JSON."""
    if not isinstance(name, str) or not name.strip() or lone_surrogate(name) is not None:
        raise ValueError("no name")
    if isinstance(arguments, str):
        arguments = loaded_json(arguments)
    if not isinstance(arguments, dict | None):
        raise ValueError("no object")
    text = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
    # A lone surrogate has no UTF-8, its escape has.
    return Call(name.strip(), text if lone_surrogate(text) is None else json.dumps(arguments))


def loaded_json(text: str) -> Any:
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
    told, names = loaded_json(value), head.groupdict()
    if names.get("name"):
        return [as_call(names["name"], told)]
    calls = told if isinstance(told, list) else [told]
    if not calls or not all(isinstance(each, dict) for each in calls):
        raise ValueError("no objects")
    return [_json_call(each) for each in calls]


def _json_call(told: dict[str, Any]) -> Call:
    given = told.keys() & {"arguments", "parameters"}
    if len(given) > 1 or ("arguments" not in given and told.keys() - {"name", "parameters", "type", "id"}):
        raise ValueError("data with a name, or the description of a tool")
    return as_call(told.get("name"), told[given.pop()] if given else None)


_ESCAPES = "\n\\'\"abfnrtv0123xNuU"  # characters that Python accepts after a backslash without a warning
_JSON_NAMES = {"true": True, "false": False, "null": None}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_STRING = re.compile(r"([rR]?)('''|\"{3}|['\"])(?:[^\\]|\\.)*?(?:\2|\Z)", re.DOTALL)


def python_expression(text: str) -> ast.expr:
    """Parses a Python expression; JSON's true, false and null are values. Raises one of `NOT_A_CALL`."""
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
    body = python_expression(value)
    if not isinstance(body, ast.List) or not body.elts:
        raise ValueError("no list")
    return [_python_call(node) for node in body.elts]


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        raise ValueError("no call with keywords")
    return as_call(ast.unparse(node.func), _once([(each.arg, ast.literal_eval(each.value)) for each in node.keywords]))


JSON = Brackets(json_calls)
PYTHON = Brackets(python_calls, outside=re.compile(r"[\w\s,:.=+\-*]*"), quotes="'\"")
