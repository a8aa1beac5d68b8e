"""How models write tool calls and thoughts: a table of formats with vLLM's names, and how each is read."""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from foretoken.core.checks import lone_surrogate
from foretoken.core.errors import ConfigError, nearest_name_hint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Schemas = Mapping[str, Mapping[str, Any]]  # the parameters of every tool, by its name

_DEEPEST_CALL = 64  # brackets within each other; Python's own parser is slow far beyond
_IN_STRING = {quote: re.compile(rf"[\\{quote}]") for quote in "'\""}
_ESCAPES = "\n\\'\"abfnrtv0123xNuU"  # what may stand behind a backslash in Python without a warning


class Call(NamedTuple):
    """A call that a model wrote; arguments: a JSON object, as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family of models writes calls.

    Attributes:
        names: vLLM's names of it.
        clues: Texts of which one stands in chat templates of such models.
        read: The calls in a text between the markers, given the tools; raises `ValueError`, `SyntaxError`,
            `TypeError`, `RecursionError` or `MemoryError` where these are none.
        opens: Markers that begin a call.
        close: The marker that ends one; "" where it ends with its last bracket.
        bare: Brackets that begin a call without a marker, at the beginning of a text or behind another call.
        between: Characters between such calls, besides white space.
        quotes: Begin and end strings, within which nothing ends a call.
        silent: Markers that say nothing.
        new_id: Names a call.
    """

    names: tuple[str, ...]
    clues: tuple[str, ...]
    read: Callable[[str, Schemas], list[Call]]
    opens: tuple[str, ...] = ()
    close: str = ""
    bare: str = ""
    between: str = ""
    quotes: str = '"'
    silent: tuple[str, ...] = ()
    new_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}"

    @property
    def markers(self) -> tuple[str, ...]:
        """Those that are looked for outside of calls."""
        return (*self.opens, *self.silent)


class Tags(NamedTuple):
    """How a family of models writes its thoughts.

    Attributes:
        names: vLLM's names of it.
        begin: Before them; a chat template may write it already.
        end: Behind them.
        is_certain: Whether an answer begins with thoughts whether or not `begin` is there.
    """

    names: tuple[str, ...]
    begin: str
    end: str
    is_certain: bool = False


class CallEnd:
    """Finds where a call ends in a text that comes in pieces, in time linear in the text."""

    def __init__(self, form: ToolFormat) -> None:
        """Begins behind the marker of a call."""
        self._close, self._quotes = form.close, form.quotes
        self._skipped = () if form.close else form.silent  # brackets of markers close nothing
        ends = form.close[0] if form.close else "()[]{}"
        self._next = re.compile(f"[{re.escape(ends + form.quotes)}]" if ends + form.quotes else "(?!)")
        self._depth, self._quote, self._tail = 0, "", ""

    def feed(self, piece: str) -> int | None:
        """The characters of a piece up to the end of the call; None while it goes on."""
        text, start, at = self._tail + piece, len(self._tail), 0
        self._tail = ""
        while at < len(text):
            found = (_IN_STRING[self._quote] if self._quote else self._next).search(text, at)
            if found is None:
                return None
            at = found.start()
            step = self._in_string(text, at) if self._quote else self._outside(text, at)
            if step is None:  # the next piece decides
                self._tail = text[at:]
                return None
            at += step
            if self._depth < 0:
                return max(0, at - start)
        return None

    def _in_string(self, text: str, at: int) -> int | None:
        """Characters that an escape or the end of a string has; None where it is cut off."""
        if text[at] == "\\":
            return 2 if at + 1 < len(text) else None
        self._quote = ""
        return 1

    def _outside(self, text: str, at: int) -> int | None:
        """Characters of a marker, or 1; a negative depth says that the call has ended."""
        for marker in filter(None, (self._close, *self._skipped)):
            if text.startswith(marker, at):
                self._depth = -1 if marker == self._close else self._depth
                return len(marker)
            if marker.startswith(text[at : at + len(marker)]):
                return None
        if text[at] in self._quotes:
            self._quote = text[at]
        elif not self._close:
            self._depth += 1 if text[at] in "([{" else -1
            if not 0 < self._depth <= _DEEPEST_CALL:
                self._depth = -1
        return 1


def _arguments(value: Any) -> str:
    """Arguments as text; raises `ValueError` unless they are a JSON object."""
    if isinstance(value, str):
        value = _loaded(value)
    if not isinstance(value, dict):
        raise ValueError("no object")
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if lone_surrogate(text) is None else json.dumps(value)  # one cannot be sent, its escape can


def _loaded(text: str) -> Any:
    """JSON with line breaks within strings, which models write."""
    return json.loads(text, strict=False)


def _called(name: Any, arguments: Any) -> Call:
    """A call; raises `ValueError` where it names no function."""
    if not isinstance(name, str) or not name.strip() or lone_surrogate(name) is not None:
        raise ValueError("no name")
    return Call(name.strip(), _arguments({} if arguments is None else arguments))


def _json_calls(text: str, _: Schemas) -> list[Call]:
    """Calls as a JSON object with a name and arguments, or a list of such."""
    told = _loaded(text)
    calls = told if isinstance(told, list) else [told]
    if not calls or not all(isinstance(each, dict) for each in calls):
        raise ValueError("no objects")
    return [_called(each.get("name"), each.get("arguments", each.get("parameters"))) for each in calls]


def _mistral_calls(text: str, _: Schemas) -> list[Call]:
    """Calls as a JSON list, or one as its name, perhaps an id, and its arguments."""
    if text.lstrip().startswith(("[", "{")):
        return _json_calls(text, {})
    name, bracket, rest = text.partition("{")
    return [_called(name.partition("[CALL_ID]")[0].partition("[ARGS]")[0], _loaded(bracket + rest))]


def _marker(words: str) -> str:
    """A marker of DeepSeek's, in full-width bars."""
    return f"<\uff5c{words.replace(' ', '▁')}\uff5c>"


def _deepseek_calls(text: str, _schemas: Schemas) -> list[Call]:
    """A call of V3, as a name and a block of code, or of V3.1, as a name and its arguments."""
    name, separator, rest = text.partition(_marker("tool sep"))
    if not separator:
        raise ValueError("no separator")
    if not rest.lstrip().startswith("{"):
        name, _, block = rest.partition("```json")
        rest = block.rstrip().removesuffix("```")
    return [_called(name, _loaded(rest))]


def _python_calls(text: str, _: Schemas) -> list[Call]:
    """Calls as a list of Python calls with keywords, which are parsed and never run."""
    # Escapes that Python does not know stand for themselves; it would warn of each.
    text = re.sub(r"\\(.)", lambda found: found[0] if found[1] in _ESCAPES else "\\" + found[0], text, flags=re.DOTALL)
    body = ast.parse(text.strip(), mode="eval").body
    if not isinstance(body, ast.List) or not body.elts:
        raise ValueError("no list")
    return [_python_call(node) for node in body.elts]


def _python_call(node: ast.expr) -> Call:
    """One of them."""
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        raise ValueError("no call with keywords")
    return _called(ast.unparse(node.func), {each.arg: ast.literal_eval(each.value) for each in node.keywords})


def _xml_calls(text: str, schemas: Schemas) -> list[Call]:
    """Calls as `<function=NAME>` around a `<parameter=NAME>` each."""
    calls = []
    before, *functions = text.split("<function=")
    if before.strip() or not functions:
        raise ValueError("no function")
    for function in functions:
        inner, end, behind = function.partition("</function>")
        name, has_name, rest = inner.partition(">")
        if not end or not has_name or behind.strip():
            raise ValueError("no function")
        known = schemas.get(name.strip(), {}).get("properties", {})
        parts = [part.partition(">") for part in rest.split("<parameter=")[1:]]
        if not all(separator for _, separator, _ in parts):
            raise ValueError("no name")
        calls.append(_called(name, {key: _xml_value(value, known, key) for key, _, value in parts}))
    return calls


def _xml_value(value: str, known: Any, key: str) -> Any:
    """The value of a parameter: as it stands where it may be text, else what JSON makes of it."""
    text = value.rstrip().removesuffix("</parameter>").removeprefix("\n").removesuffix("\n")
    schema = known.get(key) if isinstance(known, dict) else None
    kinds = _kinds(schema) if isinstance(schema, dict) else ["string"]
    if "string" in kinds and not (text == "null" and "null" in kinds):
        return text
    try:
        return _loaded(text)
    except ValueError:
        return text


def _kinds(schema: Mapping[str, Any]) -> list[Any]:
    """The types that a JSON schema names itself."""
    if "$ref" in schema:
        return []
    kinds, several = schema.get("type"), schema.get("anyOf")
    if kinds is None and isinstance(several, list):
        kinds = [kind for each in several if isinstance(each, dict) for kind in _kinds(each)]
    return kinds if isinstance(kinds, list) else [kinds or "string"]


def _short_id() -> str:
    """Nine letters and digits: Mistral's templates take no other ids."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


FORCED = ToolFormat(names=(), clues=(), read=_json_calls, bare="{", between="[],")
"""What `forced_schema` makes of a text: a list of objects."""

TOOL_FORMATS = (
    ToolFormat(
        names=("qwen3_coder", "qwen3_xml"), clues=("<function=",), read=_xml_calls, opens=("<tool_call>",),
        close="</tool_call>", quotes="",
    ),
    ToolFormat(
        names=("hermes",), clues=("<tool_call>",), read=_json_calls, opens=("<tool_call>",), close="</tool_call>",
    ),
    ToolFormat(
        names=("mistral",), clues=("[TOOL_CALLS]",), read=_mistral_calls, opens=("[TOOL_CALLS]",),
        silent=("[ARGS]", "[CALL_ID]"), new_id=_short_id,
    ),
    ToolFormat(
        names=("deepseek_v3", "deepseek_v31"), clues=(_marker("tool calls begin"),), read=_deepseek_calls,
        opens=(_marker("tool call begin"),), close=_marker("tool call end"), quotes="",
        silent=(_marker("tool calls begin"), _marker("tool calls end")),
    ),
    ToolFormat(
        names=("pythonic", "llama4_pythonic"), clues=("func_name1(", "<|python_start|>"), read=_python_calls, bare="[",
        quotes="'\"", silent=("<|python_start|>", "<|python_end|>"),
    ),
    ToolFormat(
        names=("llama3_json", "llama4_json"), clues=("<|python_tag|>", '"parameters": dictionary of argument name'),
        read=_json_calls, opens=("<|python_tag|>",), bare="{", between=";",
    ),
)  # fmt: skip
TAGS = (
    Tags(("qwen3", "deepseek_v3", "glm45"), "<think>", "</think>"),
    Tags(("deepseek_r1",), "<think>", "</think>", is_certain=True),
    Tags(("mistral",), "[THINK]", "[/THINK]"),
)


def tool_format(name: str, template: str) -> ToolFormat | None:
    """The format of calls.

    Args:
        name: vLLM's; "auto" for the one that the template shows, "none" for no format.
        template: The chat template.

    Raises:
        ConfigError: When there is no such name.
    """
    _check_name("tool-call-parser", name, [each for form in TOOL_FORMATS for each in form.names])
    for form in TOOL_FORMATS:
        if any(clue in template for clue in form.clues) if name == "auto" else name in form.names:
            return form
    return None


def thinking_tags(name: str, template: str) -> Tags | None:
    """How thoughts are written, likewise."""
    _check_name("reasoning-parser", name, [each for tags in TAGS for each in tags.names])
    return next((tags for tags in TAGS if (tags.end in template if name == "auto" else name in tags.names)), None)


def _check_name(option: str, name: str, known: list[str]) -> None:
    """Raises `ConfigError` for a name that is not known."""
    if name not in ("auto", "none", *known):
        raise ConfigError(f"--{option} is '{name[:80]}'. {nearest_name_hint(name, ['auto', 'none', *known])}")
