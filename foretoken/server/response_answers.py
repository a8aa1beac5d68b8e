"""Bodies of answers of /v1/responses, whole or as numbered events."""

from __future__ import annotations

import uuid
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foretoken.server.answers import draft_metrics, num_thoughts, seconds_since_1970, token_entries
from foretoken.server.message_parts import MessageParts, MessageReader
from foretoken.server.response_items import OutputItems

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from foretoken.core.results import CompletionOutput, Logprob, RequestOutput, StreamChunk
    from foretoken.server.echoes import EchoedPrompt
    from foretoken.server.errors import ApiError
    from foretoken.server.request_fields import ServedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseEnvelope:
    """What all parts of one response share.

    Attributes:
        request: What was asked.
        told: Fields of the request that every body of the response repeats.
        model: The name under which the model is served.
        has_draft_metrics: Whether it says how drafting went.
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
        """The response of a request that was not streamed, which echoes nothing; outputs: of its prompt."""
        completion: CompletionOutput = outputs[0].outputs[0]
        form = self.request.message_form
        logprobs = self._logprobs(completion.logprobs)
        if form is None:
            self.items.add_parts(MessageParts(content=completion.text), logprobs)
        else:
            reader = MessageReader(form)
            self.items.add_parts(reader.push(completion.text), logprobs)
            self.items.add_parts(reader.finish(), [])  # a call that is cut off is content behind the others
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
        """The last event of a response that came to no end."""
        told = {"code": "server_error", "message": error.message}
        return {"type": "response.failed", "response": {**self._response("failed", []), "error": told}}

    def _end(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """Closes the last item and returns the events; an answer without text has an empty message."""
        begun = self.items.add("message", "") if self.items.is_empty else []
        return [*begun, *self.items.close(_status(outputs))]

    def _ended(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Returns the ended response; `incomplete` if it reached the most tokens."""
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
        """A response in some state."""
        params = self.request.params
        return {
            "id": f"resp_{self.name}", "object": "response", "created_at": self.created, "status": status,
            "model": self.model, "output": output, "error": None, "incomplete_details": None, "usage": None,
            "temperature": params.temperature, "top_p": params.top_p, "background": False, "store": False,
            "previous_response_id": None,
            "truncation": "disabled", **self.told,
        }  # fmt: skip

    def _logprobs(self, entries: Sequence[dict[int, Logprob]] | None) -> list[dict[str, Any]]:
        """Log-probabilities of tokens, one entry each; none where they were not asked for."""
        num_top = self.request.num_top_logprobs
        return [] if entries is None or num_top is None else token_entries(entries, num_top)


async def numbered(events: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[dict[str, Any]]:
    """Events with their place in the stream, from 0; events: closed at the end, however that comes."""
    number = 0
    async with aclosing(events) as each:
        async for event in each:
            yield {**event, "sequence_number": number}
            number += 1


def _status(outputs: Sequence[RequestOutput]) -> str:
    """Returns the status of an ended response."""
    return "incomplete" if outputs[0].outputs[0].finish_reason == "length" else "completed"


def _usage(output: RequestOutput, num_thoughts: int) -> dict[str, Any]:
    """Returns `usage`; num_thoughts: tokens of the answer's thoughts."""
    num_input, num_output = len(output.prompt_token_ids), sum(len(each.token_ids) for each in output.outputs)
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": output.num_cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": num_output, "output_tokens_details": {"reasoning_tokens": num_thoughts},
        "total_tokens": num_input + num_output,
    }  # fmt: skip
