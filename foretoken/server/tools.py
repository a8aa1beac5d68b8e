"""Tools of requests, and the formats in which models write calls and thoughts, each with its parser and vLLM's name."""

import json
import re
import secrets
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urljoin

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError, FormError, RequestError, listed, nearest_name_hint
from foretoken.core.sampling_params import StructuredOutputsParams
from foretoken.server.call_syntax import JSON, PYTHON, BracketReader, Brackets
from foretoken.server.edge import ApiError
from foretoken.server.xml_calls import KnownTools, XmlReader

_MOST_CHARACTERS = 512 * 1024  # of all tools as JSON; a choice: bounds the prompt and the grammar
_MOST_TOOLS = 128  # OpenAI's limit
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SPACE = " ?"  # white space in JSON; without a bound a model may write spaces until max_tokens
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request, their choice ("none", "auto" or "required"), and the tool that it names, or None.

    `left_out` has the types of tools that other servers run themselves, such as `web_search`.
    """

    schemas: Mapping[str, Mapping[str, Any]]
    choice: str
    forced: str | None = None
    is_parallel: bool = True
    left_out: Sequence[str] = ()

    def forced_form(self) -> dict[str, Any]:
        """Returns the `structured_outputs` of a forced call; raises `ApiError` for a schema that is too large or deep.

        If the request names a tool, the answer is its arguments. Otherwise the answer is a list of objects with the
        name and the parameters of a tool, as in vLLM.
        """
        for name, schema in self.schemas.items() if self.forced is None else [(self.forced, self.schemas[self.forced])]:
            try:
                StructuredOutputsParams(json=schema)
            except RequestError as err:
                raise ApiError(f"the schema of the tool {name} cannot be followed: {err}", param="tools") from err
        if self.forced is not None:
            return {"json": self.schemas[self.forced], "whitespace_pattern": _SPACE}
        calls = [
            {
                "type": "object", "required": ["name", "parameters"], "additionalProperties": False,
                "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{name}"}},
            }
            for name in self.schemas
        ]  # fmt: skip
        inner: dict[str, dict[str, Any]] = {}
        for name, schema in self.schemas.items():
            inner[name] = _with_id(name, schema, {each["$id"] for each in inner.values()})
        most = {} if self.is_parallel else {"maxItems": 1}
        schema = {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, "$defs": inner}
        return {"json": schema, "whitespace_pattern": _SPACE}

    def form_error(self, error: FormError) -> ApiError:
        """Returns the answer to a request whose `forced_form` cannot be followed; names the tool."""
        place, names = error.path, [self.forced] if self.forced is not None else list(self.schemas)
        if self.forced is None and place[:1] == ("$defs",):
            names, place = [place[1]], place[2:]
        subject = f"the schema of the tool {names[0]}" if len(names) == 1 else f"a schema of the tools {listed(names)}"
        mend = "Leave the keyword out of the schema" if error.path else "Make the schema simpler"
        advice = f"{mend}, or set tool_choice to 'auto', which compiles no schema."
        return ApiError(error.about(subject, place, advice), param="tools")


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
    functions = functions_of(tools)
    left_out = [tool["type"] for tool in tools if tool not in functions]
    schemas = dict(_schema(tool) for tool in functions)
    if len(schemas) < len(functions):
        raise ApiError("two tools have the same name. Expected a different name for each.", param="tools")
    if len(json.dumps(tools)) > _MOST_CHARACTERS:
        raise ApiError(f"tools have more than {_MOST_CHARACTERS} characters. Expected fewer.", param="tools")
    forced = _forced(choice, schemas)
    choice = "required" if forced is not None else choice or "auto"
    if not schemas and choice == "required":
        message = f"tool_choice is 'required', and tools has no function, only {listed(left_out)}. Pass functions."
        raise ApiError(message, param="tool_choice")
    return ToolUse(
        schemas=schemas,
        choice=choice if schemas else "none",
        forced=forced,
        is_parallel=body.get("parallel_tool_calls") is not False,
        left_out=left_out,
    )


def functions_of(tools: Sequence[Any]) -> list[Any]:
    """Returns the tools without those of another type than "function", which nobody here runs."""
    return [tool for tool in tools if not isinstance(tool, Mapping) or tool.get("type") in (None, "function")
            or not isinstance(tool["type"], str)]  # fmt: skip


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


def _with_id(name: str, schema: Mapping[str, Any], taken: set[str]) -> dict[str, Any]:
    """Returns a schema that keeps its references to itself inside another schema, by an `$id` that no other has."""
    own, base = schema.get("$id"), f"https://tools.invalid/{name}/"
    named = urljoin(base, own).partition("#")[0] if isinstance(own, str) else base
    rest = {key: value for key, value in schema.items() if key not in _DIALECT}
    return {"$id": base if named in taken else named, **rest}


_DIALECT = ("$id", "$schema")  # llguidance reads no mixture of dialects


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The tool call format of a family of models.

    Attributes:
        clues: Texts that identify the family's chat templates; one of them suffices.
        syntax: The syntax between the markers; None for the XML of `qwen3_coder`.
        opens: Markers that begin a call, each with the marker that ends the call; "" if the last bracket ends it.
        weak: Markers that other text has too: their calls must name a tool of the request.
        bare: The bracket that begins a call without a marker, at the start of the text or after another call.
        between: Characters between calls without markers, besides white space.
        silent: Markers that are removed from the text.
        new_id: Makes the id of a call.
    """

    names: tuple[str, ...] = ()
    clues: tuple[str, ...] = ()
    syntax: Brackets | None = JSON
    opens: Mapping[str, str] = field(default_factory=dict)
    weak: tuple[str, ...] = ()
    bare: str = ""
    between: str = ""
    silent: tuple[str, ...] = ()
    new_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}"

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers to look for outside calls."""
        return (*self.opens, *self.silent)

    def reader(self, mark: str, tools: KnownTools) -> BracketReader | XmlReader:
        """Returns the reader of a call behind a marker, or of a call without one if `mark` is empty."""
        if self.syntax is None:
            return XmlReader(tools)
        close = self.opens.get(mark, "")
        return BracketReader(self.syntax, close, [mark] if mark and mark != close else [])


class Tags(NamedTuple):
    """The tags around thoughts; `is_certain`: every answer begins with thoughts, even without `begin`."""

    names: tuple[str, ...] = ()
    begin: str = ""
    end: str = ""
    is_certain: bool = False


def _marker(words: str) -> str:
    """Returns a marker of DeepSeek, which has full-width bars."""
    return f"<\uff5c{words.replace(' ', '▁')}\uff5c>"


def _short_id() -> str:
    """Returns nine letters and digits; Mistral's templates accept no other ids."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


# The name of a tool stands between the marker and the arguments.
_MISTRAL = JSON._replace(
    head=re.compile(
        r"\s{0,64}(?:(?P<name>[\w.\-]{1,64})\s{0,64}(?:\[CALL_ID\][\w\-]{1,64}\s{0,64})?(?:\[ARGS\]\s{0,64})?(?=\{)"
        r"|(?=[\[{]))"
    ),
    allowed=re.compile(r"[\w.\-\s\[\]]*"),
)
_SEP = _marker("tool sep")
_DEEPSEEK = JSON._replace(
    head=re.compile(
        rf"\s{{0,64}}(?P<kind>[\w\-]{{1,64}}{_SEP})?(?P<name>[\w.\-]{{1,64}})(?(kind)\s{{0,64}}```json|{_SEP})\s{{0,64}}(?=\{{)"
    ),
    allowed=re.compile(r"[^{]*"),
    fence="```",
)
_FENCED = JSON._replace(
    head=re.compile(r"(?:json)?\s{0,64}(?=[\[{])"), allowed=re.compile(r"[json\s]*")
)  # Qwen2.5-Coder's block of code

FORCED = ToolFormat(bare="{", between="[],")
"""The list of objects that `ToolUse.forced_form` demands."""

TOOL_FORMATS = (
    ToolFormat(
        names=("qwen3_coder", "qwen3_xml"), clues=("<function=",), syntax=None, opens={"<tool_call>": "</tool_call>"},
    ),
    ToolFormat(
        names=("hermes", "qwen2_5_coder"), clues=("<tool_call>",), syntax=_FENCED,
        opens={"<tool_call>": "</tool_call>", "<tools>": "</tools>", "```": "```"}, weak=("<tools>", "```"),
    ),
    ToolFormat(
        names=("mistral",), clues=("[TOOL_CALLS]",), syntax=_MISTRAL, opens={"[TOOL_CALLS]": ""},
        silent=("[ARGS]", "[CALL_ID]"), new_id=_short_id,
    ),
    ToolFormat(
        names=("deepseek_v3", "deepseek_v31"), clues=(_marker("tool calls begin"),), syntax=_DEEPSEEK,
        opens={_marker("tool call begin"): _marker("tool call end")},
        silent=(_marker("tool calls begin"), _marker("tool calls end")),
    ),
    ToolFormat(
        names=("pythonic", "llama4_pythonic"), clues=("func_name1(", "<|python_start|>"), syntax=PYTHON, bare="[",
        silent=("<|python_start|>", "<|python_end|>"),
    ),
    ToolFormat(
        names=("llama3_json", "llama4_json"), clues=("<|python_tag|>", '"parameters": dictionary of argument name'),
        opens={"<|python_tag|>": ""}, bare="{", between=";",
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
