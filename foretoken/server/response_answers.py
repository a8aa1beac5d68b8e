"""Bodies of answers of /v1/responses: one message of text, whole or as numbered events."""

from __future__ import annotations

import uuid
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foretoken.server.answers import draft_metrics, seconds_since_1970, token_entries

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
        name: Unique; the response and its message are called by it.
        created: Seconds since 1970.
    """

    request: ServedRequest
    told: Mapping[str, Any]
    model: str
    has_draft_metrics: bool = False
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=seconds_since_1970)

    def whole(self, outputs: Sequence[RequestOutput], _echoes: Sequence[EchoedPrompt], /) -> dict[str, Any]:
        """The response of a request that was not streamed, which echoes nothing; outputs: of its prompt."""
        return self._ended(outputs)

    def first(self) -> list[dict[str, Any]]:
        """Events before any token: the response, its message, and the message's text are begun."""
        begun = self._response("in_progress", [])
        return [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
            {"type": "response.output_item.added", "output_index": 0, "item": self._message("in_progress", [])},
            self._event("response.content_part.added", part=_text("", [])),
        ]

    def part(
        self, _index: int, chunk: StreamChunk, _echo: EchoedPrompt | None, _offset: int, /, **_more: Any
    ) -> list[dict[str, Any]]:
        """An event with further text; a response has one message, and tells its usage at the end."""
        return [self._event("response.output_text.delta", delta=chunk.text, logprobs=self._logprobs(chunk.logprobs))]

    def last(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """Events that end the text, the message and the response; outputs: of its prompt."""
        ended = self._ended(outputs)
        (message,) = ended["output"]
        (part,) = message["content"]
        return [
            self._event("response.output_text.done", text=part["text"], logprobs=part["logprobs"]),
            self._event("response.content_part.done", part=part),
            {"type": "response.output_item.done", "output_index": 0, "item": message},
            {"type": f"response.{ended['status']}", "response": ended},
        ]

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The last event of a response that came to no end."""
        told = {"code": "server_error", "message": error.message}
        return {"type": "response.failed", "response": {**self._response("failed", []), "error": told}}

    def _ended(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response with its text, which is incomplete where it ran out of tokens."""
        completion: CompletionOutput = outputs[0].outputs[0]
        is_cut = completion.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        part = _text(completion.text, self._logprobs(completion.logprobs))
        response = {
            **self._response(status, [self._message(status, [part])]),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": _usage(outputs[0]),
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
            "parallel_tool_calls": True, "previous_response_id": None, "tool_choice": "auto", "tools": [],
            "truncation": "disabled", **self.told,
        }  # fmt: skip

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        """The message of the response."""
        return {
            "id": f"msg_{self.name}", "type": "message", "role": "assistant", "status": status, "content": content,
        }  # fmt: skip

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        """An event that concerns the message's text."""
        return {"type": kind, "item_id": f"msg_{self.name}", "output_index": 0, "content_index": 0, **more}

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


def _text(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """The one part of a message's content."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(output: RequestOutput) -> dict[str, Any]:
    """Tokens used."""
    num_input, num_output = len(output.prompt_token_ids), sum(len(each.token_ids) for each in output.outputs)
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": output.num_cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": num_output, "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_input + num_output,
    }  # fmt: skip
