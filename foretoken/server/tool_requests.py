"""The tools of a request: their schemas, `tool_choice`, and the structured output of a forced call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from foretoken.core.checks import shown
from foretoken.server.errors import ApiError

_MOST_CHARACTERS = 512 * 1024  # of all tools as JSON
_MOST_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SPACE = " ?"  # white space in JSON; without a bound a model may write spaces until max_tokens
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request.

    Attributes:
        schemas: The JSON schema of each tool's parameters, by the tool's name.
        choice: "none", "auto" or "required".
        forced: The tool that `tool_choice` names; None if it names no tool.
        is_parallel: Whether an answer may have several calls.
    """

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
    """Reads the fields of a chat that concern tools; returns None if the request has no tools.

    Raises:
        ApiError: When a field is invalid.
    """
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
    is_parallel = body.get("parallel_tool_calls")
    if not isinstance(is_parallel, bool | None):
        message = f"parallel_tool_calls is {shown(is_parallel)}. Expected true or false."
        raise ApiError(message, param="parallel_tool_calls")
    forced = _forced(choice, schemas)
    choice = "required" if forced is not None else choice or "auto"
    return ToolUse(schemas=schemas, choice=choice, forced=forced, is_parallel=is_parallel is not False)


def _schema(tool: Any) -> tuple[str, dict[str, Any]]:
    """Returns the name of a tool and the schema of its parameters."""
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
    return name, {"type": "object", **(parameters or {})}


def _forced(choice: Any, schemas: Mapping[str, Any]) -> str | None:
    """Returns the tool that `tool_choice` names; None for "none", "auto" and "required"."""
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
