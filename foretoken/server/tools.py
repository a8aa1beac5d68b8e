"""Tools of requests, and the formats in which models write calls and thoughts, each with its parser and vLLM's name."""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from foretoken.core.checks import lone_surrogate, shown
from foretoken.core.errors import ConfigError, nearest_name_hint
from foretoken.server.json_body import ApiError

if TYPE_CHECKING:
    Schemas = Mapping[str, Mapping[str, Any]]  # the parameters of every tool, by its name

_MOST_CHARACTERS = 512 * 1024  # of all tools as JSON; a choice: bounds the prompt and the grammar
_MOST_TOOLS = 128  # OpenAI's limit
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SPACE = " ?"  # white space in JSON; without a bound a model may write spaces until max_tokens
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request, their choice ("none", "auto" or "required"), and the tool that it names, or None."""

    schemas: Mapping[str, Mapping[str, Any]]
    choice: str
    forced: str | None = None
    is_parallel: bool = True

    def forced_form(self) -> dict[str, Any] | None:
        """Returns the `structured_outputs` of a forced call; None if the model may answer without a call.

        If the request names a tool, the answer is its arguments. With "required" the answer is a list of objects with
        the name and the parameters of a tool, as in vLLM.
        """
        if self.forced is not None:
            return {"json": self.schemas[self.forced], "whitespace_pattern": _SPACE}
        if self.choice != "required":
            return None
        calls = [
            {
                "type": "object", "required": ["name", "parameters"], "additionalProperties": False,
                "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{name}"}},
            }
            for name in self.schemas
        ]  # fmt: skip
        inner = {name: _moved(schema, f"#/$defs/{name}") for name, schema in self.schemas.items()}
        most = {} if self.is_parallel else {"maxItems": 1}
        schema = {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, "$defs": inner}
        return {"json": schema, "whitespace_pattern": _SPACE}


def tool_use(body: Mapping[str, Any]) -> ToolUse | None:
    """Reads the tools of a chat; returns None if there are none; raises `ApiError` for an invalid field."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools is not None and not isinstance(tools, list):
        raise ApiError(f"tools is {shown(tools)}. Expected a list of functions.", param="tools")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(f"tool_choice is {shown(choice)} without tools. Pass tools.", param="tool_choice")
        return None
    if len(tools) > _MOST_TOOLS:
        raise ApiError(f"tools has {len(tools)} items. Expected at most {_MOST_TOOLS}.", param="tools")
    schemas = dict(_schema(tool) for tool in tools)
    if len(schemas) < len(tools):
        raise ApiError("two tools have the same name. Expected a different name for each.", param="tools")
    if len(json.dumps(tools)) > _MOST_CHARACTERS:
        raise ApiError(f"tools have more than {_MOST_CHARACTERS} characters. Expected fewer.", param="tools")
    forced = _forced(choice, schemas)
    choice = "required" if forced is not None else choice or "auto"
    return ToolUse(
        schemas=schemas, choice=choice, forced=forced, is_parallel=body.get("parallel_tool_calls") is not False
    )


def _schema(tool: Any) -> tuple[str, dict[str, Any]]:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping):
        expected = (
            "Expected {'type': 'function', 'function': {'name': ..., 'parameters': ...}}, or for /v1/responses "
            "{'type': 'function', 'name': ..., 'parameters': ...}."
        )
        raise ApiError(f"tools has the item {shown(tool)}. {expected}", param="tools")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        message = f"a tool has the name {shown(name)}. Expected 1 to 64 letters, digits, underscores and dashes."
        raise ApiError(message, param="tools")
    if not isinstance(parameters, Mapping | None):
        raise ApiError(f"the tool {name} has parameters {shown(parameters)}. Expected a JSON schema.", param="tools")
    if not isinstance(function.get("strict"), bool | None):
        raise ApiError(
            f"the tool {name} has strict {shown(function['strict'])}. Expected true or false.", param="tools"
        )
    return name, {"type": "object", **(parameters or {})}


def _forced(choice: Any, schemas: Mapping[str, Any]) -> str | None:
    if choice is None or choice in _CHOICES:
        return None
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        expected = "Expected 'none', 'auto', 'required', or {'type': 'function', 'function': {'name': ...}}."
        raise ApiError(f"tool_choice is {shown(choice)}. {expected}", param="tool_choice")
    if name not in schemas:
        message = f"tool_choice names the unknown tool {shown(name)}. Expected one of {', '.join(schemas)[:400]}."
        raise ApiError(message, param="tool_choice")
    return name


def _moved(schema: Any, place: str) -> Any:
    """Returns a schema with its references moved to `place` in another schema."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: place + value[1:] if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
    }  # fmt: skip


_DEEPEST_CALL = 64  # nested brackets; a choice: bounds the work of the JSON and Python parsers
_IN_STRING = {quote: re.compile(rf"[\\{quote}]") for quote in "'\""}
_ESCAPES = "\n\\'\"abfnrtv0123xNuU"  # characters that Python accepts after a backslash without a warning


class Call(NamedTuple):
    """A tool call; arguments: the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The tool call format of a family of models.

    Attributes:
        clues: Texts that identify the family's chat templates; one of them suffices.
        parse: Parses the text between the markers, given the tools' schemas. Raises `ValueError`, `SyntaxError`,
            `TypeError`, `RecursionError` or `MemoryError` for a text that is not a call.
        opens: Markers that begin a call.
        close: The marker that ends a call; "" if its last bracket ends it.
        bare: Brackets that begin a call without a marker, at the start of the text or after another call.
        between: Characters between calls without markers, besides white space.
        quotes: Quotation marks. A string between them cannot end a call.
        silent: Markers that are removed from the text.
        new_id: Makes the id of a call.
    """

    names: tuple[str, ...]
    clues: tuple[str, ...]
    parse: Callable[[str, Schemas], list[Call]]
    opens: tuple[str, ...] = ()
    close: str = ""
    bare: str = ""
    between: str = ""
    quotes: str = '"'
    silent: tuple[str, ...] = ()
    new_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}"

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers to look for outside calls."""
        return (*self.opens, *self.silent)


class Tags(NamedTuple):
    """The tags around thoughts; `is_certain`: every answer begins with thoughts, even without `begin`."""

    names: tuple[str, ...]
    begin: str
    end: str
    is_certain: bool = False


class CallEnd:
    """Finds the end of a call in a text that comes in pieces, in time linear in the text."""

    def __init__(self, form: ToolFormat) -> None:
        self._close, self._quotes = form.close, form.quotes
        self._skipped = () if form.close else form.silent  # brackets in markers are not counted
        ends = form.close[0] if form.close else "()[]{}"
        self._next = re.compile(f"[{re.escape(ends + form.quotes)}]" if ends + form.quotes else "(?!)")
        self._depth, self._quote, self._tail = 0, "", ""

    def feed(self, piece: str) -> int | None:
        """Returns the number of characters up to the end of the call; None if the call goes on."""
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
        """Returns the length of an escape or a closing quote; None if the piece cuts it off."""
        if text[at] == "\\":
            return 2 if at + 1 < len(text) else None
        self._quote = ""
        return 1

    def _outside(self, text: str, at: int) -> int | None:
        """Returns the length of a marker, or 1; None if the piece cuts it off. A negative depth ends the call."""
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
    if isinstance(value, str):
        value = _loaded(value)
    if not isinstance(value, dict):
        raise ValueError("no object")
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if lone_surrogate(text) is None else json.dumps(value)  # a lone surrogate has no UTF-8, its escape has


def _loaded(text: str) -> Any:
    """Parses JSON; accepts line breaks in strings, which models write."""
    return json.loads(text, strict=False)


def _called(name: Any, arguments: Any) -> Call:
    if not isinstance(name, str) or not name.strip() or lone_surrogate(name) is not None:
        raise ValueError("no name")
    return Call(name.strip(), _arguments({} if arguments is None else arguments))


def _json_calls(text: str, _: Schemas) -> list[Call]:
    told = _loaded(text)
    calls = told if isinstance(told, list) else [told]
    if not calls or not all(isinstance(each, dict) for each in calls):
        raise ValueError("no objects")
    return [_called(each.get("name"), each.get("arguments", each.get("parameters"))) for each in calls]


def _mistral_calls(text: str, _: Schemas) -> list[Call]:
    """Parses a JSON list of calls, or one call as `NAME[CALL_ID]ID[ARGS]{...}`; `[CALL_ID]ID` may be missing."""
    if text.lstrip().startswith(("[", "{")):
        return _json_calls(text, {})
    name, bracket, rest = text.partition("{")
    return [_called(name.partition("[CALL_ID]")[0].partition("[ARGS]")[0], _loaded(bracket + rest))]


def _marker(words: str) -> str:
    """Returns a marker of DeepSeek, which has full-width bars."""
    return f"<\uff5c{words.replace(' ', '▁')}\uff5c>"


def _deepseek_calls(text: str, _schemas: Schemas) -> list[Call]:
    name, separator, rest = text.partition(_marker("tool sep"))
    if not separator:
        raise ValueError("no separator")
    if not rest.lstrip().startswith("{"):
        name, _, block = rest.partition("```json")
        rest = block.rstrip().removesuffix("```")
    return [_called(name, _loaded(rest))]


def _python_calls(text: str, _: Schemas) -> list[Call]:
    # Doubles the backslash of unknown escapes, for which Python would warn.
    text = re.sub(r"\\(.)", lambda found: found[0] if found[1] in _ESCAPES else "\\" + found[0], text, flags=re.DOTALL)
    body = ast.parse(text.strip(), mode="eval").body
    if not isinstance(body, ast.List) or not body.elts:
        raise ValueError("no list")
    return [_python_call(node) for node in body.elts]


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        raise ValueError("no call with keywords")
    return _called(ast.unparse(node.func), {each.arg: ast.literal_eval(each.value) for each in node.keywords})


def _xml_calls(text: str, schemas: Schemas) -> list[Call]:
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
    if "$ref" in schema:
        return []
    kinds, several = schema.get("type"), schema.get("anyOf")
    if kinds is None and isinstance(several, list):
        kinds = [kind for each in several if isinstance(each, dict) for kind in _kinds(each)]
    return kinds if isinstance(kinds, list) else [kinds or "string"]


def _short_id() -> str:
    """Returns nine letters and digits; Mistral's templates accept no other ids."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


FORCED = ToolFormat(names=(), clues=(), parse=_json_calls, bare="{", between="[],")
"""The list of objects that `ToolUse.forced_form` demands."""

TOOL_FORMATS = (
    ToolFormat(
        names=("qwen3_coder", "qwen3_xml"), clues=("<function=",), parse=_xml_calls, opens=("<tool_call>",),
        close="</tool_call>", quotes="",
    ),
    ToolFormat(
        names=("hermes",), clues=("<tool_call>",), parse=_json_calls, opens=("<tool_call>",), close="</tool_call>",
    ),
    ToolFormat(
        names=("mistral",), clues=("[TOOL_CALLS]",), parse=_mistral_calls, opens=("[TOOL_CALLS]",),
        silent=("[ARGS]", "[CALL_ID]"), new_id=_short_id,
    ),
    ToolFormat(
        names=("deepseek_v3", "deepseek_v31"), clues=(_marker("tool calls begin"),), parse=_deepseek_calls,
        opens=(_marker("tool call begin"),), close=_marker("tool call end"), quotes="",
        silent=(_marker("tool calls begin"), _marker("tool calls end")),
    ),
    ToolFormat(
        names=("pythonic", "llama4_pythonic"), clues=("func_name1(", "<|python_start|>"), parse=_python_calls, bare="[",
        quotes="'\"", silent=("<|python_start|>", "<|python_end|>"),
    ),
    ToolFormat(
        names=("llama3_json", "llama4_json"), clues=("<|python_tag|>", '"parameters": dictionary of argument name'),
        parse=_json_calls, opens=("<|python_tag|>",), bare="{", between=";",
    ),
)  # fmt: skip
TAGS = (
    Tags(("qwen3", "deepseek_v3", "glm45"), "<think>", "</think>"),
    Tags(("deepseek_r1",), "<think>", "</think>", is_certain=True),
    Tags(("mistral",), "[THINK]", "[/THINK]"),
)


def tool_format(name: str, template: str) -> ToolFormat | None:
    """Returns the format of tool calls by vLLM's name of its parser; None if there is none, or for "none".

    "auto" takes the format that the chat template shows. Raises `ConfigError` when the name is unknown.
    """
    _check_name("tool-call-parser", name, [each for form in TOOL_FORMATS for each in form.names])
    for form in TOOL_FORMATS:
        if any(clue in template for clue in form.clues) if name == "auto" else name in form.names:
            return form
    return None


def thinking_tags(name: str, template: str) -> Tags | None:
    """Returns the tags of thoughts, by the same arguments as `tool_format`."""
    _check_name("reasoning-parser", name, [each for tags in TAGS for each in tags.names])
    return next((tags for tags in TAGS if (tags.end in template if name == "auto" else name in tags.names)), None)


def _check_name(option: str, name: str, known: list[str]) -> None:
    if name not in ("auto", "none", *known):
        raise ConfigError(f"--{option} is '{name[:80]}'. {nearest_name_hint(name, ['auto', 'none', *known])}")
