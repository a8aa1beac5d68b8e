"""Sends requests to a server, as many at once as allowed (closed loop) or at random times (open loop)."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from foretoken.bench.serving.draft_counts import DraftCounts, answered_counts, server_counts
from foretoken.bench.workload import no_progress
from foretoken.core.errors import ConfigError, described

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def arrival_times(count: int, rate: float, *, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds after the begin at which each of some requests is sent; the first at 0.

    Times between two requests have a gamma distribution with mean 1 / rate: of a Poisson process where `burstiness` is
    1, more in bursts below that, more even above.

    Args:
        count: Requests.
        rate: Requests a second, above 0; infinite to send all at once.
        burstiness: Shape of the gamma distribution, above 0.
        seed: The same seed gives the same times.
    """
    gaps = np.random.default_rng(seed).gamma(shape=burstiness, scale=1.0 / (rate * burstiness), size=count)
    gaps[:1] = 0.0
    return [float(time) for time in gaps.cumsum()]


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


PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_CONNECT_SECONDS = 30.0
_SILENCE_SECONDS = 600.0  # after which a request counts as failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent to a server, and how.

    Attributes:
        base_url: Of the server, with or without /v1 at its end.
        prompts: One a request.
        endpoint: "completions", or "chat" where each prompt is a user's message.
        model: Its name at the server; None for the first one there.
        max_tokens: Most tokens of an answer.
        temperature: 0 for greedy.
        max_concurrency: Requests under way at once (closed loop); None for no limit.
        request_rate: Requests a second (open loop); infinite to send all at once.
        burstiness: See `arrival_times`.
        seed: Of the first request and of the times; the i-th request gets seed + i.
        api_key: Sent with every request; None for none.

    Raises:
        ConfigError: When something does not fit.
    """

    base_url: str
    prompts: Sequence[str]
    endpoint: str = "completions"
    model: str | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    max_concurrency: int | None = None
    request_rate: float = float("inf")
    burstiness: float = 1.0
    seed: int = 0
    api_key: str | None = None

    def __post_init__(self) -> None:
        """Checks it."""
        if self.endpoint not in PATHS:
            raise ConfigError(f"the endpoint is '{self.endpoint}'. Expected {' or '.join(PATHS)}.")
        _check_url(self.base_url)
        for name in ("request_rate", "burstiness"):
            if not getattr(self, name) > 0:  # NaN neither
                raise ConfigError(f"{name} is {getattr(self, name)}. Expected a number above 0.")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"the temperature is {self.temperature}. Expected 0 or more.")
        if self.max_concurrency is not None and self.request_rate < float("inf"):
            raise ConfigError(
                "max_concurrency and request_rate exclude each other: requests of an open loop wait for no answers. "
                "Pass one of them."
            )

    def body(self, index: int, model: str) -> dict[str, Any]:
        """The fields of one request."""
        prompt = self.prompts[index]
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.endpoint == "chat" else {"prompt": prompt}
        return {
            "model": model, **asked, "max_tokens": self.max_tokens, "temperature": self.temperature,
            "seed": self.seed + index, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """What a server did under a load.

    Attributes:
        model: The name that was asked for.
        answers: One a request, in their order.
        duration: Seconds from the first request to the end of the last.
        drafting: What the server counted about drafts meanwhile, for all its clients; None where it does not tell.
    """

    model: str
    answers: list[Answer]
    duration: float
    drafting: DraftCounts | None


async def run_load(load: Load, on_progress: Callable[[int, int], None] = no_progress) -> LoadRun:
    """Sends all requests and waits for their ends.

    Args:
        load: What to send.
        on_progress: Called with (done, total) after every request.

    Raises:
        ConfigError: When there is no server, or it serves no models or not to this key.
    """
    headers = {} if load.api_key is None else {"Authorization": f"Bearer {load.api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(_SILENCE_SECONDS, connect=_CONNECT_SECONDS)
    url = load.base_url.rstrip("/").removesuffix("/v1")
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=timeout) as client:
        model = await _served_model(client, load.model)
        before = await server_counts(client)
        begin = time.perf_counter()
        answers = await _send_all(client, load, model, on_progress)
        duration = time.perf_counter() - begin
        after = await server_counts(client)
    counted = None if before is None or after is None else after.since(before)
    return LoadRun(
        model=model,
        answers=answers,
        duration=duration,
        drafting=counted or answered_counts(answer.drafting for answer in answers),
    )


async def _send_all(
    client: httpx.AsyncClient, load: Load, model: str, on_progress: Callable[[int, int], None]
) -> list[Answer]:
    """The answers of all requests, in the order of the requests."""
    total, num_done = len(load.prompts), 0
    times = arrival_times(total, load.request_rate, burstiness=load.burstiness, seed=load.seed)
    places = asyncio.Semaphore(load.max_concurrency or total)
    begin = time.perf_counter()

    async def send(index: int) -> Answer:
        nonlocal num_done
        await asyncio.sleep(begin + times[index] - time.perf_counter())
        async with places:
            answer = await ask(client, PATHS[load.endpoint], load.body(index, model))
        num_done += 1
        on_progress(num_done, total)
        return answer

    return list(await asyncio.gather(*(send(index) for index in range(total))))


async def _served_model(client: httpx.AsyncClient, name: str | None) -> str:
    """The model to ask for; shows at once whether there is a server."""
    try:
        response = await client.get("/v1/models", timeout=_CONNECT_SECONDS)
    except httpx.HTTPError as err:
        raise ConfigError(
            f"there is no server at {client.base_url}: {described(err)}. Start one, as with `foretoken serve MODEL`."
        ) from err
    if response.status_code in (401, 403):
        raise ConfigError(f"the server at {client.base_url} refuses the API key with status {response.status_code}.")
    if name is not None:
        return name
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as err:
        raise ConfigError(
            f"the server at {client.base_url} does not tell its models (status {response.status_code}). Name one with "
            "--model."
        ) from err


def _check_url(url: str) -> None:
    """Raises `ConfigError` unless it is a server's."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        is_url = False
    if not is_url:
        raise ConfigError(f"the base URL is '{url}'. Expected one as http://127.0.0.1:8000.")
