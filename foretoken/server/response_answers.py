"""Builds answers of /v1/responses, whole or as numbered events."""

from __future__ import annotations

import uuid
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foretoken.server.answers import draft_metrics, num_thoughts, seconds_since_1970, token_entries
from foretoken.server.message_parts import MessageParts, MessageReader

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from foretoken.core.results import CompletionOutput, Logprob, RequestOutput, StreamChunk
    from foretoken.server.answers import EchoedPrompt
    from foretoken.server.errors import ApiError
    from foretoken.server.request_fields import ServedRequest

# For each type of item: the prefix of its id, and the name of its text in events.
_TYPES = {
    "reasoning": ("rs", "reasoning_text"), "message": ("msg", "output_text"),
    "function_call": ("fc", "function_call_arguments"),
}  # fmt: skip


class OutputItems:
    """Builds the output items of a response; the last item is open until `close`.

    Attributes:
        done: The closed items.
    """

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
        """Adds text to the open item, or to a new one, and returns the events.

        Args:
            kind: The type of the item. An open item of another type is closed first.
            text: The text to add.
            logprobs: Log-probabilities of its tokens.
            named: `call_id` and `name`, which begin a new call.
        """
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
        """Returns and forgets the log-probabilities that wait for a message."""
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
class ResponseEnvelope:
    """The fields that all parts of one response share.

    Attributes:
        request: The request.
        told: Fields of the request that every body of the response repeats.
        model: The name under which the model is served.
        has_draft_metrics: Whether the response has draft metrics.
        name: A unique name, part of the response's id.
        created: Seconds since 1970.
        items: The items of the response's output.
        readers: The readers of its text, once a stream has begun.
    """

    request: ServedRequest
    told: Mapping[str, Any]
    model: str
    has_draft_metrics: bool = False
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=seconds_since_1970)
    items: OutputItems = field(default_factory=lambda: OutputItems(uuid.uuid4().hex))
    readers: dict[int, MessageReader] = field(default_factory=dict)

    def whole(self, outputs: Sequence[RequestOutput], _echoes: Sequence[EchoedPrompt], /) -> dict[str, Any]:
        """Returns the body of a response that is not streamed; outputs: the result of its prompt."""
        completion: CompletionOutput = outputs[0].outputs[0]
        form = self.request.message_form
        logprobs = self._logprobs(completion.logprobs)
        if form is None:
            self.items.add_parts(MessageParts(content=completion.text), logprobs)
        else:
            reader = MessageReader(form)
            self.items.add_parts(reader.push(completion.text), logprobs)
            self.items.add_parts(reader.finish(), [])  # a call that was cut off is content
        self._end(outputs)
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
        logprobs = self._logprobs(chunk.logprobs)
        if self.request.message_form is None:
            return self.items.add("message", chunk.text, logprobs)
        reader = self.readers.setdefault(index, MessageReader(self.request.message_form))
        events = self.items.add_parts(reader.push(chunk.text), logprobs)
        return events if chunk.finish_reason is None else [*events, *self.items.add_parts(reader.finish(), [])]

    def last(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """Returns the events that end the last item and the response; outputs: the request's results."""
        events, ended = self._end(outputs), self._ended(outputs)
        return [*events, {"type": f"response.{ended['status']}", "response": ended}]

    def failed(self, error: ApiError) -> dict[str, Any]:
        """Returns the last event of a response that failed."""
        told = {"code": "server_error", "message": error.message}
        return {"type": "response.failed", "response": {**self._response("failed", []), "error": told}}

    def _end(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """Closes the last item and returns the events; a response without text gets an empty message."""
        begun = self.items.add("message", "") if self.items.is_empty else []
        return [*begun, *self.items.close(_status(outputs))]

    def _ended(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Returns the ended response; `incomplete` if it reached the token limit."""
        status = _status(outputs)
        response = {
            **self._response(status, self.items.done),
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": _usage(outputs[0], num_thoughts(self.request.message_form, outputs[0].outputs[0])),
        }
        if self.has_draft_metrics:
            response["metrics"] = {"speculative_decoding": draft_metrics(outputs)}
        return response

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        params = self.request.params
        return {
            "id": f"resp_{self.name}", "object": "response", "created_at": self.created, "status": status,
            "model": self.model, "output": output, "error": None, "incomplete_details": None, "usage": None,
            "temperature": params.temperature, "top_p": params.top_p, "background": False, "store": False,
            "previous_response_id": None,
            "truncation": "disabled", **self.told,
        }  # fmt: skip

    def _logprobs(self, entries: Sequence[dict[int, Logprob]] | None) -> list[dict[str, Any]]:
        num_top = self.request.num_top_logprobs
        return [] if entries is None or num_top is None else token_entries(entries, num_top)


async def numbered(events: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[dict[str, Any]]:
    """Adds `sequence_number` to events, from 0; always closes `events`."""
    number = 0
    async with aclosing(events) as each:
        async for event in each:
            yield {**event, "sequence_number": number}
            number += 1


def _status(outputs: Sequence[RequestOutput]) -> str:
    return "incomplete" if outputs[0].outputs[0].finish_reason == "length" else "completed"


def _usage(output: RequestOutput, num_thoughts: int) -> dict[str, Any]:
    num_input, num_output = len(output.prompt_token_ids), sum(len(each.token_ids) for each in output.outputs)
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": output.num_cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": num_output, "output_tokens_details": {"reasoning_tokens": num_thoughts},
        "total_tokens": num_input + num_output,
    }  # fmt: skip
