"""One streamed request to a server with OpenAI's API, and when its parts came."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

from foretoken.core.errors import described

if TYPE_CHECKING:
    from collections.abc import Mapping

_LONGEST_ERROR = 300  # characters of an answer that is kept


@dataclass(slots=True, kw_only=True)
class Answer:
    """What a request brought; filled while its parts come.

    Attributes:
        start: When it was sent, on the clock of `time.perf_counter`.
        latency: Seconds until it was over.
        times: Seconds from its start to each part with text.
        parts: Their texts.
        num_input: Prompt tokens; None where the server does not tell.
        num_output: Tokens written, as the server tells; None where it does not.
        drafting: vLLM's figures of speculative decoding, where the server sends them.
        status: HTTP status of a refusal, "stream" for an answer that broke off or ended in an error, "connection" or
            "timeout"; None where the answer is whole.
        error: What went wrong, "" for nothing.
    """

    start: float
    latency: float = 0.0
    times: list[float] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    num_input: int | None = None
    num_output: int | None = None
    drafting: dict[str, Any] | None = None
    status: str | None = None
    error: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether it was answered to the end."""
        return self.status is None

    @property
    def output_len(self) -> int:
        """Tokens written; parts with text where the server does not count tokens."""
        return len(self.times) if self.num_output is None else self.num_output

    @property
    def ttft(self) -> float:
        """Seconds to the first text; to the end of an answer without any."""
        return self.times[0] if self.times else self.latency

    @property
    def itls(self) -> list[float]:
        """Seconds between parts, which may hold several tokens each."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


async def ask(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> Answer:
    """Sends a request and reads its stream.

    Args:
        client: Knows the server and its key.
        path: "/v1/completions" or "/v1/chat/completions".
        body: Its fields; `stream` is set.

    Returns:
        What came; failures are part of that and raise nothing.
    """
    answer = Answer(start=time.perf_counter())
    try:
        async with client.stream("POST", path, json=dict(body)) as response:
            if response.status_code == 200:
                await _read(response, answer)
            else:
                await response.aread()
                _fail(answer, str(response.status_code), response.text)
    except httpx.TimeoutException as err:
        _fail(answer, "timeout", described(err))
    except httpx.HTTPError as err:
        _fail(answer, "stream" if answer.times else "connection", described(err))
    answer.latency = time.perf_counter() - answer.start
    return answer


async def _read(response: httpx.Response, answer: Answer) -> None:
    """Reads server-sent events to their end. Changes `answer`."""
    is_over = False
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        try:
            part = json.loads(data)
        except ValueError:
            _fail(answer, "stream", f"not JSON: {data}")
            return
        if not isinstance(part, dict) or part.get("error") is not None:
            _fail(answer, "stream", data)
            return
        choices = part.get("choices") or []
        if text := "".join(map(_text, choices)):
            answer.times.append(time.perf_counter() - answer.start)
            answer.parts.append(text)
        is_over = is_over or any(choice.get("finish_reason") is not None for choice in choices)
        _note_figures(part, answer)
    if not is_over:
        _fail(answer, "stream", "the stream ended before the answer did")


def _text(choice: Mapping[str, Any]) -> str:
    """The text of a part of a choice; that of a chat's reasoning before that of its answer."""
    delta = choice.get("delta") or {}
    texts = (delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content"), choice.get("text"))
    return "".join(text for text in texts if text)


def _note_figures(part: Mapping[str, Any], answer: Answer) -> None:
    """Keeps the figures that a part tells, of which the last are those of the whole answer. Changes `answer`."""
    usage = part.get("usage") or {}
    answer.num_input = usage.get("prompt_tokens", answer.num_input)
    answer.num_output = usage.get("completion_tokens", answer.num_output)
    answer.drafting = (part.get("metrics") or {}).get("speculative_decoding") or answer.drafting


def _fail(answer: Answer, status: str, text: str) -> None:
    """Notes why an answer is not whole. Changes it."""
    answer.status, answer.error = status, f"{status}: {text[:_LONGEST_ERROR].strip()}"
