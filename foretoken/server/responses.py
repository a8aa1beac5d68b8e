"""/v1/responses: translates its bodies into bodies of a chat, and builds its answers, whole or as numbered events."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foretoken.core.checks import shown
from foretoken.server.answers import EchoedPrompt, Envelope, token_entries, usage
from foretoken.server.edge import ApiError, dumped
from foretoken.server.message_parts import MessageParts, MessageReader
from foretoken.server.request_fields import checked_integer, structured_outputs, supported

if TYPE_CHECKING:
    from foretoken.core.results import CompletionOutput, Logprob, RequestOutput, StreamChunk

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
    """Returns the fields of an equivalent chat request; raises `ApiError` when a field is invalid or not supported."""
    given = supported(body, _REFUSED)
    chat = {name: value for name, value in given.items() if name not in _OWN | _IGNORED}
    chat["messages"] = _instructions(given.get("instructions")) + _messages(given.get("input"))
    chat["max_completion_tokens"] = checked_integer(given, "max_output_tokens", 1, 1 << 31)
    chat["response_format"] = _format(given.get("text", {}))
    chat["tools"], chat["tool_choice"] = _tools(given.get("tools")), _tool_choice(given.get("tool_choice"))
    chat["logprobs"] = _has_logprobs(given)
    if given.get("store") is None:
        chat["store"] = False  # as the answers say
    return chat


def told_back(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that an answer repeats, after `as_chat`; raises `ApiError` if metadata are wrong or large."""
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
        form = {"type": "json_schema", "json_schema": {name: form.get(name) for name in ("schema", "strict")}}
    structured_outputs(form, "text.format")
    return form


def _has_logprobs(given: Mapping[str, Any]) -> bool:
    include = given.get("include", [])
    if not isinstance(include, list) or not all(isinstance(each, str) for each in include):
        raise ApiError(f"include is {shown(include)}. Expected a list of names.", param="include")
    if given.get("top_logprobs") and _LOGPROBS not in include:
        raise ApiError(f"top_logprobs needs include = ['{_LOGPROBS}'].", param="top_logprobs")
    return _LOGPROBS in include


# For each type of item: the prefix of its id, and what events call its text.
_TYPES = {
    "reasoning": ("rs", "reasoning_text"), "message": ("msg", "output_text"),
    "function_call": ("fc", "function_call_arguments"),
}  # fmt: skip


class OutputItems:
    """Builds the output items of a response; the last item is open until `close`."""

    def __init__(self, name: str) -> None:
        """Starts without items; name: a unique part of every item's id."""
        self._name, self._fields, self._texts, self._logprobs = name, dict[str, Any](), list[str](), list[Any]()
        self._waiting: list[Any] = []  # log-probabilities of tokens whose text is held back
        self.done: list[dict[str, Any]] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is no item, closed or open."""
        return not self.done and not self._fields

    def add_parts(self, parts: MessageParts, logprobs: Sequence[Any]) -> list[dict[str, Any]]:
        """Adds the parts of a text and returns the events; `logprobs` go to the message that is open or comes next."""
        self._waiting += logprobs
        events = self.add("reasoning", parts.reasoning) if parts.reasoning else []
        if parts.content:
            events += self.add("message", parts.content, self._taken())
        for call in parts.calls:
            named = {"call_id": call["id"], "name": call["function"]["name"]} if "id" in call else {}
            events += self.add("function_call", call["function"]["arguments"], **named)
        return events

    def add(self, kind: str, text: str, logprobs: Sequence[Any] = (), **named: str) -> list[dict[str, Any]]:
        """Adds text to the open item of a kind, or to a new one; returns the events. `call_id` begins a new call."""
        events = []
        if named or self._fields.get("type") != kind:
            events = self.close("completed")
            begin = f"{_TYPES[kind][0]}_{self._name}"
            self._fields = {"id": f"{begin}_{len(self.done)}" if self.done else begin, "type": kind, **named}
            item = {**self._item("in_progress"), **({} if kind == "function_call" else {"content": []})}
            events.append({"type": "response.output_item.added", "output_index": len(self.done), "item": item})
            if kind != "function_call":
                events.append(self._event("response.content_part.added", part=self._part()))
        self._texts.append(text)
        self._logprobs += logprobs
        if text or logprobs:
            told = {"logprobs": list(logprobs)} if kind == "message" else {}
            events.append(self._event(f"response.{_TYPES[kind][1]}.delta", delta=text, **told))
        return events

    def close(self, status: str) -> list[dict[str, Any]]:
        """Closes the open item, if any, and returns the events."""
        if not self._fields:
            return []
        kind = self._fields["type"]
        events = self.add(kind, "", self._taken()) if kind == "message" else []
        item = self._item(status)
        if kind == "function_call":
            told = {"arguments": item["arguments"], "name": item["name"]}
            ends = []
        else:
            part = self._part()
            told = {key: part[key] for key in ("text", "logprobs") if key in part}
            ends = [self._event("response.content_part.done", part=part)]
        events += [self._event(f"response.{_TYPES[kind][1]}.done", **told), *ends]
        events.append({"type": "response.output_item.done", "output_index": len(self.done), "item": item})
        self.done.append(item)
        self._fields, self._texts, self._logprobs = {}, [], []
        return events

    def _taken(self) -> list[Any]:
        taken, self._waiting = self._waiting, []
        return taken

    def _item(self, status: str) -> dict[str, Any]:
        item = {**self._fields, "status": status}
        if item["type"] == "function_call":
            return {**item, "arguments": "".join(self._texts)}
        return {**item, **({"role": "assistant"} if item["type"] == "message" else {"summary": []}), "content": [
            self._part()
        ]}  # fmt: skip

    def _part(self) -> dict[str, Any]:
        text = {"type": _TYPES[self._fields["type"]][1], "text": "".join(self._texts)}
        return text if self._fields["type"] == "reasoning" else {**text, "annotations": [], "logprobs": self._logprobs}

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        content = {} if self._fields["type"] == "function_call" else {"content_index": 0}
        return {"type": kind, "item_id": self._fields["id"], "output_index": len(self.done), **content, **more}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseEnvelope(Envelope):
    """Builds the bodies of a response, as `Envelope` does for a chat; every body repeats the fields `told`."""

    told: Mapping[str, Any]
    items: OutputItems = field(default_factory=lambda: OutputItems(uuid.uuid4().hex))

    def whole(self, outputs: Sequence[RequestOutput], _echoes: Sequence[EchoedPrompt], /) -> dict[str, Any]:
        """Returns the body of a response that is not streamed; outputs: the result of its prompt."""
        completion: CompletionOutput = outputs[0].outputs[0]
        form = self.request.message_form
        logprobs = self._entries(completion.logprobs)
        if form is None:
            self.items.add_parts(MessageParts(content=completion.text), logprobs)
        else:
            reader = MessageReader(form)
            self.items.add_parts(reader.push(completion.text), logprobs)
            self.items.add_parts(reader.finish(), [])  # a call that was cut off is content
        self._close_items(outputs)
        return self._ended(outputs)

    def first(self) -> list[dict[str, Any]]:
        """Returns the events before any token; they begin a message if the answer can be nothing else."""
        begun = self._response("in_progress", [])
        return [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
            *(self.items.add("message", "") if self.request.message_form is None else ()),
        ]

    def part(
        self, index: int, chunk: StreamChunk, _echo: EchoedPrompt | None, _offset: int, /, **_more: Any
    ) -> list[dict[str, Any]]:
        """Returns the events of further text; `usage` is sent at the end."""
        logprobs = self._entries(chunk.logprobs)
        if self.request.message_form is None:
            return self.items.add("message", chunk.text, logprobs)
        reader = self.readers.setdefault(index, MessageReader(self.request.message_form))
        events = self.items.add_parts(reader.push(chunk.text), logprobs)
        return events if chunk.finish_reason is None else [*events, *self.items.add_parts(reader.finish(), [])]

    def last(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """Returns the events that end the last item and the response; outputs: the request's results."""
        events, ended = self._close_items(outputs), self._ended(outputs)
        return [*events, {"type": f"response.{ended['status']}", "response": ended}]

    def failed(self, error: ApiError) -> dict[str, Any]:
        """Returns the last event of a response that failed."""
        told = {"code": "server_error", "message": error.message}
        return {"type": "response.failed", "response": {**self._response("failed", []), "error": told}}

    def _close_items(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """Closes the last item and returns the events; a response without text gets an empty message."""
        begun = self.items.add("message", "") if self.items.is_empty else []
        return [*begun, *self.items.close(_status(outputs))]

    def _ended(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        status = _status(outputs)
        return {
            **self._response(status, self.items.done),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": self._usage(outputs[0]),
            **self._metrics(outputs),
        }

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        told = usage([output], self.request.message_form)
        num_thoughts = told["completion_tokens_details"]["reasoning_tokens"]
        return {
            "input_tokens": told["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": output.num_cached_tokens or 0, "cache_write_tokens": 0},
            "output_tokens": told["completion_tokens"], "output_tokens_details": {"reasoning_tokens": num_thoughts},
            "total_tokens": told["total_tokens"],
        }  # fmt: skip

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        params = self.request.params
        return {
            "id": f"resp_{self.name}", "object": "response", "created_at": self.created, "status": status,
            "model": self.model, "output": output, "error": None, "incomplete_details": None, "usage": None,
            "temperature": params.temperature, "top_p": params.top_p, "background": False, "store": False,
            "previous_response_id": None,
            "truncation": "disabled", **self.told, "metadata": {**self.told["metadata"], **self.request.warning},
        }  # fmt: skip

    def _entries(self, entries: Sequence[dict[int, Logprob]] | None) -> list[dict[str, Any]]:
        num_top = self.request.num_top_logprobs
        return [] if entries is None or num_top is None else token_entries(entries, num_top)


def _status(outputs: Sequence[RequestOutput]) -> str:
    return "incomplete" if outputs[0].outputs[0].finish_reason == "length" else "completed"
