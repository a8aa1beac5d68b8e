"""Translates a body of /v1/responses into the body of a chat; nothing is stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretoken.core.checks import shown
from foretoken.server.errors import ApiError
from foretoken.server.replies import dumped
from foretoken.server.request_fields import checked_integer, structured_outputs

_LOGPROBS = "message.output_text.logprobs"
_TEXT_PARTS = ("input_text", "output_text", "text")
# Fields that are translated, and fields that change no answer here.
_OWN = frozenset({"input", "instructions", "max_output_tokens", "text", "include", "metadata", "tools", "tool_choice"})
_IGNORED = frozenset(
    {"reasoning", "max_tool_calls", "prompt_cache_retention", "prompt_cache_options", "stream_options"}
)
_MOST_TEXT_BYTES = 1 << 18  # a schema of 65,536 characters, 4 bytes each in UTF-8
_NOTHING_STORED = "Responses are not stored. Send the whole conversation as input."
# For each unsupported field: the neutral values, besides null, and what to do instead.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "previous_response_id": ((), _NOTHING_STORED),
    "conversation": ((), _NOTHING_STORED),
    "background": ((False,), "Responses are not stored. Leave it out, and set stream where the answer takes long."),
    "prompt": ((), "There are no stored prompts. Send instructions and input."),
    "truncation": (("disabled",), "A conversation that does not fit is answered with an error. Shorten it."),
    "context_management": (([],), "Shorten the conversation before sending it."),
    "moderation": ((), "Texts are not judged. Leave it out."),
    "messages": ((), "Send them as input."),
    "max_tokens": ((), "Pass max_output_tokens."),
    "max_completion_tokens": ((), "Pass max_output_tokens."),
    "response_format": ((), "Pass text.format."),
    "logprobs": ((False,), f"Pass include = ['{_LOGPROBS}']."),
    "n": ((1,), "A response has one message. Ask a chat for several."),
    "best_of": ((1,), "A response has one message. Ask a chat for several."),
    "return_token_ids": ((False,), "Ask for them with completions or a chat."),
    "return_token_origins": ((False,), "Ask for them with completions or a chat."),
    "prompt_logprobs": ((), "Ask for them with completions or a chat."),
}  # fmt: skip


def as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of an equivalent chat request, with all sampling and speculation fields.

    Raises:
        ApiError: When a field is invalid or not supported.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name in _REFUSED.keys() & given.keys():
        neutral, instead = _REFUSED[name]
        if given.pop(name) not in neutral:
            raise ApiError(f"{name} = {shown(body[name])} is not supported. {instead}", param=name)
    chat = {name: value for name, value in given.items() if name not in _OWN | _IGNORED}
    chat["messages"] = _instructions(given.get("instructions")) + _messages(given.get("input"))
    chat["max_completion_tokens"] = checked_integer(given, "max_output_tokens", 1, 1 << 31)
    chat["response_format"] = _format(given.get("text", {}))
    chat["tools"], chat["tool_choice"] = _tools(given.get("tools")), _tool_choice(given.get("tool_choice"))
    chat["logprobs"] = _has_logprobs(given)
    return chat


def told_back(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a request that its answer repeats.

    Args:
        body: The fields, checked by `as_chat`.

    Raises:
        ApiError: When the metadata are invalid, or the repeated fields are too large.
    """
    metadata, text = body.get("metadata"), body.get("text") or {}
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, Mapping) or len(metadata) > 16 or not all(map(_is_pair, metadata.items())):
        expected = "Expected at most 16 keys of at most 64 characters, each with text of at most 512."
        raise ApiError(f"metadata is {shown(metadata)}. {expected}", param="metadata")
    if len(dumped(text)) > _MOST_TEXT_BYTES:
        raise ApiError(f"text has more than {_MOST_TEXT_BYTES} bytes as JSON. Expected a smaller form.", param="text")
    return {
        "instructions": body.get("instructions"), "max_output_tokens": body.get("max_output_tokens"),
        "metadata": metadata, "text": {**text, "format": text.get("format") or {"type": "text"}},
        "top_logprobs": body.get("top_logprobs") or 0, "tools": body.get("tools") or [],
        "tool_choice": body.get("tool_choice") or "auto",
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
    }  # fmt: skip


def _is_pair(pair: tuple[str, Any]) -> bool:
    """Decides whether a key and its value are valid metadata, by OpenAI's bounds."""
    key, value = pair
    return len(key) <= 64 and isinstance(value, str) and len(value) <= 512


def _instructions(text: Any) -> list[dict[str, Any]]:
    if text is None:
        return []
    if not isinstance(text, str):
        raise ApiError(f"instructions are {shown(text)}. Expected text.", param="instructions")
    return [{"role": "system", "content": text}]


def _messages(asked: Any) -> list[dict[str, Any]]:
    """Returns the conversation as a chat's messages; thoughts and calls join the assistant's message."""
    if isinstance(asked, str):
        return [{"role": "user", "content": asked}]
    if not isinstance(asked, list) or not asked:
        raise ApiError(f"input is {shown(asked)}. Expected text, or a list of messages.", param="input")
    messages: list[dict[str, Any]] = []
    for item in asked:
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _result(item)})
        elif kind in ("reasoning", "function_call"):
            last = messages[-1] if messages else {}
            if last.get("role") != "assistant" or (kind == "reasoning" and "content" in last):
                messages.append({"role": "assistant"})
            _add_to(messages[-1], item)
        else:
            message = _message(item)
            if messages and set(messages[-1]) == {"role", "reasoning_content"} and message["role"] == "assistant":
                message = {**messages.pop(), **message}
            messages.append(message)
    return messages


def _result(item: Mapping[str, Any]) -> Any:
    output = item.get("output")
    if isinstance(output, str):
        return output
    if not isinstance(output, list):
        raise ApiError(f"input has a result of a call that is {shown(output)}. Expected text.", param="input")
    return [_part(part) for part in output]


def _add_to(message: dict[str, Any], item: Mapping[str, Any]) -> None:
    if item["type"] == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)
        return
    parts = item.get("content") or []
    if not isinstance(parts, list) or not all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in parts):
        raise ApiError(f"input has thoughts {shown(parts)}. Expected parts with text.", param="input")
    message["reasoning_content"] = "".join(part["text"] for part in parts)


def _tools(tools: Any) -> Any:
    """Returns functions in a chat's form; `tool_use` refuses other tools."""
    if not isinstance(tools, list):
        return tools
    return [
        {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
        if isinstance(tool, Mapping) and tool.get("type") == "function" else tool
        for tool in tools
    ]  # fmt: skip


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _message(item: Any) -> dict[str, Any]:
    if not isinstance(item, Mapping) or item.get("type", "message") != "message":
        raise ApiError(f"input has the item {shown(item)}. Expected messages with role and content.", param="input")
    content = item.get("content")
    if not isinstance(content, str):
        content = [_part(part) for part in content] if isinstance(content, list) else None
    if not content and content != "":
        expected = "Expected text, or a list of parts of type 'input_text'."
        raise ApiError(f"input has a message with content {shown(item.get('content'))}. {expected}", param="input")
    return {"role": item.get("role"), "content": content}


def _part(part: Any) -> dict[str, Any]:
    if not isinstance(part, Mapping) or part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
        expected = "Expected type 'input_text' or 'output_text', and text."
        raise ApiError(f"input has a message with the part {shown(part)}. {expected}", param="input")
    return {"type": "text", "text": part["text"]}


def _format(text: Any) -> Any:
    form = (text.get("format") or {"type": "text"}) if isinstance(text, Mapping) else text
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    structured_outputs(form, "text.format")
    return form


def _has_logprobs(given: Mapping[str, Any]) -> bool:
    """Decides whether `include` asks for log-probabilities; other names in `include` have no effect."""
    include = given.get("include", [])
    if not isinstance(include, list) or not all(isinstance(each, str) for each in include):
        raise ApiError(f"include is {shown(include)}. Expected a list of names.", param="include")
    if given.get("top_logprobs") and _LOGPROBS not in include:
        raise ApiError(f"top_logprobs needs include = ['{_LOGPROBS}'].", param="top_logprobs")
    return _LOGPROBS in include
