"""A load generator for servers with OpenAI's API: as many requests at once as allowed, or requests at random times.

Figures have the keys of vLLM's `bench serve --save-result`, so that its readers accept ours. They are over complete
answers: TTFT is the time to the first text, TPOT the time a token after that, E2EL the time of a whole request, ITL the
time between parts of a stream. Drafts are counted by the server: on its /metrics page, or in its answers.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import accumulate, pairwise
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from foretoken.bench.speed_report import NO_CATEGORY, RequestRun, acceptance_rates, speed_report
from foretoken.bench.workload import no_progress
from foretoken.core.errors import ConfigError, described

_LINE = re.compile(
    r"^(?P<origin>\w+):spec_decode_num_(?P<name>drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(_total)?"
    r"(\{(?P<labels>.*)\})?\s+(?P<value>[0-9.eE+-]+)(\s+\d+)?$"
)
_POSITION = re.compile(r'position="(\d+)"')
_ORIGINS = ("vllm", "foretoken")  # a server may show the same figures under both names


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counters of a server."""

    drafts: float = 0  # verified drafts, or trees
    draft_tokens: float = 0
    accepted_tokens: float = 0  # accepted drafted tokens, without the target's own
    by_position: Mapping[int, float] = field(default_factory=dict)  # accepted drafted tokens by depth

    @property
    def lengths(self) -> Counter[int]:
        """Verified drafts by acceptance length, the target's own token included; empty without `by_position`."""
        if not self.by_position:
            return Counter()
        at_least = [self.drafts, *(self.by_position[depth] for depth in sorted(self.by_position)), 0]
        return Counter({length: int(more - fewer) for length, (more, fewer) in enumerate(pairwise(at_least), start=1)})

    def since(self, before: DraftCounts) -> DraftCounts:
        """Returns the counts that were added since `before`."""
        return DraftCounts(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted_tokens - before.accepted_tokens,
            {depth: count - before.by_position.get(depth, 0) for depth, count in self.by_position.items()},
        )

    def as_results(self) -> dict[str, Any]:
        """Returns vLLM's keys: rates in percent by token and as shares by position; no keys if nothing was drafted."""
        if not self.drafts or not self.draft_tokens:
            return {}
        return {
            "spec_decode_acceptance_rate": 100 * self.accepted_tokens / self.draft_tokens,
            "spec_decode_acceptance_length": 1 + self.accepted_tokens / self.drafts,
            "spec_decode_num_drafts": int(self.drafts),
            "spec_decode_draft_tokens": int(self.draft_tokens),
            "spec_decode_accepted_tokens": int(self.accepted_tokens),
            "spec_decode_per_position_acceptance_rates": [
                self.by_position[depth] / self.drafts for depth in sorted(self.by_position)
            ],
        }


async def server_counts(client: httpx.AsyncClient) -> DraftCounts | None:
    """Returns the counters at /metrics; None if the server shows none."""
    try:
        response = await client.get("/metrics", timeout=30)
    except httpx.HTTPError:
        return None
    return page_counts(response.text) if response.status_code == 200 else None


def page_counts(page: str) -> DraftCounts | None:
    """Returns the counters of a Prometheus page, summed over engines; None if it has none."""
    found = [match for match in map(_LINE.match, page.splitlines()) if match and match["origin"] in _ORIGINS]
    if not found:
        return None
    totals, by_position = defaultdict[str, float](float), defaultdict[int, float](float)
    for match in (each for each in found if each["origin"] == found[0]["origin"]):
        position = _POSITION.search(match["labels"] or "")
        if match["name"] != "accepted_tokens_per_pos":
            totals[match["name"]] += float(match["value"])
        elif position:
            by_position[int(position[1])] += float(match["value"])
    return DraftCounts(**totals, by_position=by_position)


def answered_counts(figures: Iterable[Mapping[str, Any] | None]) -> DraftCounts | None:
    """Returns the sum of the figures in answers, in vLLM's form; None if no answer has any."""
    told = [each for each in figures if each]
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    steps, drafted, accepted = (sum(each.get(name) or 0 for each in told) for name in names)
    return DraftCounts(steps, drafted, accepted) if told else None


def arrival_times(count: int, rate: float, *, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Returns the seconds at which `count` requests are sent; the first at 0.

    Times between two requests have a gamma distribution with mean 1 / rate, in seconds, and the shape `burstiness`: a
    Poisson process for 1, burstier below 1, more even above. An infinite rate sends all at once.
    """
    gaps = np.random.default_rng(seed).gamma(shape=burstiness, scale=1.0 / (rate * burstiness), size=count)
    gaps[:1] = 0.0
    return [float(time) for time in gaps.cumsum()]


_LONGEST_ERROR = 300  # characters kept of an error; a choice


@dataclass(slots=True, kw_only=True)
class Answer:
    """The answer to a request, filled as its parts arrive."""

    start: float  # the time of sending, on the clock of `time.perf_counter`
    latency: float = 0.0  # seconds to the end
    times: list[float] = field(default_factory=list)  # seconds from the start to each part with text
    parts: list[str] = field(default_factory=list)  # the texts of these parts
    num_input: int | None = None  # prompt tokens; None if the server does not say
    num_output: int | None = None  # output tokens; None if the server does not say
    drafting: dict[str, Any] | None = None  # vLLM's figures of speculative decoding, if the server sends them
    # HTTP status of a refusal, "stream" for an interrupted stream or an error in it, "connection" or "timeout"; None
    # for a complete answer.
    status: str | None = None
    error: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether the answer is complete."""
        return self.status is None

    @property
    def output_len(self) -> int:
        """Output tokens; parts with text if the server does not count tokens."""
        return len(self.times) if self.num_output is None else self.num_output

    @property
    def ttft(self) -> float:
        """Seconds to the first text; to the end of an answer without text."""
        return self.times[0] if self.times else self.latency

    @property
    def itls(self) -> list[float]:
        """Seconds between parts, which may hold several tokens each."""
        return [after - before for before, after in pairwise(self.times)]


async def ask(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> Answer:
    """Sends a request to a path such as "/v1/completions" and reads its stream; failures are part of the answer."""
    answer = Answer(start=time.perf_counter())
    try:
        async with client.stream("POST", path, json=dict(body)) as response:
            if response.status_code == 200:
                await _read_stream(response, answer)
            else:
                await response.aread()
                _fail(answer, str(response.status_code), response.text)
    except httpx.TimeoutException as err:
        _fail(answer, "timeout", described(err))
    except httpx.HTTPError as err:
        _fail(answer, "stream" if answer.times else "connection", described(err))
    answer.latency = time.perf_counter() - answer.start
    return answer


async def _read_stream(response: httpx.Response, answer: Answer) -> None:
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
        if text := "".join(map(_text_of, choices)):
            answer.times.append(time.perf_counter() - answer.start)
            answer.parts.append(text)
        is_over = is_over or any(choice.get("finish_reason") is not None for choice in choices)
        usage = part.get("usage") or {}
        answer.num_input = usage.get("prompt_tokens", answer.num_input)
        answer.num_output = usage.get("completion_tokens", answer.num_output)
        answer.drafting = (part.get("metrics") or {}).get("speculative_decoding") or answer.drafting
    if not is_over:
        _fail(answer, "stream", "the stream ended before the answer did")


def _text_of(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta") or {}
    texts = (delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content"), choice.get("text"))
    return "".join(text for text in texts if text)


def _fail(answer: Answer, status: str, text: str) -> None:
    answer.status, answer.error = status, f"{status}: {text[:_LONGEST_ERROR].strip()}"


PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_CONNECT_SECONDS = 30.0  # a choice
_SILENCE_SECONDS = 600.0  # then a request counts as failed; a choice: longer than any queue of a measured load


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests to a server, and when they are sent; raises `ConfigError` for an invalid value."""

    base_url: str  # URL of the server, with or without /v1
    prompts: Sequence[str]  # one prompt a request
    endpoint: str = "completions"  # "completions", or "chat" to send each prompt as a user's message
    model: str | None = None  # name of the model at the server; None for its first one
    max_tokens: int = 128
    temperature: float = 0.0
    max_concurrency: int | None = None  # requests in flight at once (closed loop); None for no limit
    request_rate: float = float("inf")  # requests a second (open loop); infinite to send all at once
    burstiness: float = 1.0
    seed: int = 0  # seed of the first request and of the times; the i-th request gets seed + i
    api_key: str | None = None
    categories: Sequence[str] = ()  # category of each prompt; empty if they have none

    def __post_init__(self) -> None:
        if self.endpoint not in PATHS:
            raise ConfigError(f"the endpoint is '{self.endpoint}'. Expected {' or '.join(PATHS)}.")
        _check_url(self.base_url)
        for name in ("request_rate", "burstiness"):
            if not getattr(self, name) > 0:  # also refuses NaN
                raise ConfigError(f"{name} is {getattr(self, name)}. Expected a number above 0.")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"the temperature is {self.temperature}. Expected 0 or more.")
        if self.max_concurrency is not None and self.request_rate < float("inf"):
            raise ConfigError(
                "max_concurrency and request_rate exclude each other: requests of an open loop do not wait for "
                "answers. Pass one of them."
            )

    def body(self, index: int, model: str) -> dict[str, Any]:
        """Returns the fields of one request."""
        prompt = self.prompts[index]
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.endpoint == "chat" else {"prompt": prompt}
        return {
            "model": model, **asked, "max_tokens": self.max_tokens, "temperature": self.temperature,
            "seed": self.seed + index, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRun:
    """The results of a load."""

    model: str
    answers: list[Answer]  # one a request, in their order
    duration: float  # seconds from the first request to the end of the last
    drafting: DraftCounts | None  # drafts during the run, of all clients; None if the server does not say
    acceptance: str | None = None  # the acceptance rule that the model's card names, if any


async def run_load(load: Load, on_progress: Callable[[int, int], None] = no_progress) -> LoadRun:
    """Sends all requests and waits for their ends; calls `on_progress(done, total)` after every request.

    Raises `ConfigError` when there is no server, it serves no models, or it refuses the key.
    """
    headers = {} if load.api_key is None else {"Authorization": f"Bearer {load.api_key}"}
    timeout = httpx.Timeout(_SILENCE_SECONDS, connect=_CONNECT_SECONDS)
    url = load.base_url.rstrip("/").removesuffix("/v1")
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=httpx.Limits(), timeout=timeout) as client:
        model, acceptance = await _served_model(client, load.model)
        before = await server_counts(client)
        begin = time.perf_counter()
        answers = await _send_all(client, load, model, on_progress)
        duration = time.perf_counter() - begin
        after = await server_counts(client)
    counted = None if before is None or after is None else after.since(before)
    drafting = counted or answered_counts(answer.drafting for answer in answers)
    return LoadRun(model=model, answers=answers, duration=duration, drafting=drafting, acceptance=acceptance)


async def _send_all(
    client: httpx.AsyncClient, load: Load, model: str, on_progress: Callable[[int, int], None]
) -> list[Answer]:
    total, num_done = len(load.prompts), 0
    times = arrival_times(total, load.request_rate, burstiness=load.burstiness, seed=load.seed)
    slots = asyncio.Semaphore(load.max_concurrency or total)
    begin = time.perf_counter()

    async def send(index: int) -> Answer:
        nonlocal num_done
        await asyncio.sleep(begin + times[index] - time.perf_counter())
        async with slots:
            answer = await ask(client, PATHS[load.endpoint], load.body(index, model))
        num_done += 1
        on_progress(num_done, total)
        return answer

    return list(await asyncio.gather(*(send(index) for index in range(total))))


async def _served_model(client: httpx.AsyncClient, name: str | None) -> tuple[str, str | None]:
    """Returns the model's name and its acceptance rule, None if unknown; raises `ConfigError` without a server."""
    try:
        response = await client.get("/v1/models", timeout=_CONNECT_SECONDS)
    except httpx.HTTPError as err:
        raise ConfigError(
            f"there is no server at {client.base_url}: {described(err)}. Start one, as with `foretoken serve MODEL`."
        ) from err
    if response.status_code in (401, 403):
        raise ConfigError(f"the server at {client.base_url} refuses the API key with status {response.status_code}.")
    try:
        cards = {str(card["id"]): card for card in response.json()["data"]}
    except (ValueError, LookupError, TypeError):
        cards = {}
    if name is None and not cards:
        raise ConfigError(
            f"the server at {client.base_url} does not name its models (status {response.status_code}). Name one with "
            "--model."
        )
    model = next(iter(cards)) if name is None else name
    acceptance = cards.get(model, {}).get("acceptance")
    return model, acceptance if isinstance(acceptance, str) else None


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number
        is_url = False
    if not is_url:
        raise ConfigError(f"the base URL is '{url}'. Expected one as http://127.0.0.1:8000.")


_PERCENTILES = (50, 90, 99)
LATENCIES = ("ttft", "tpot", "itl", "e2el")


def load_results(load: Load, run: LoadRun) -> dict[str, Any]:
    """Returns all figures, JSON-ready.

    Besides vLLM's keys: `foretoken_schema`; `acceptance`, see `LoadRun`; `errors_by_status`, see `Answer`; `rejected`,
    the requests answered with 429; and `output_len_source`, how tokens were counted: "usage", "chunks" (if the server
    sends no usage), or "mixed". Prompt tokens are null if the server does not send them. `speed_bench` has the figures
    of `speed_report`. Without `acceptance_histogram` in answers, its rates are those of the server's counters, over
    passes with drafts, and lengths of requests and categories are null.
    """
    answers, whole = run.answers, [answer for answer in run.answers if answer.is_whole]
    errors = Counter(answer.status for answer in answers if answer.status is not None)
    num_output = sum(answer.output_len for answer in whole)
    inputs = [answer.num_input for answer in whole if answer.num_input is not None]
    num_input = sum(inputs) if len(inputs) == len(whole) else None
    return {
        "foretoken_schema": 1,
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "backend": "openai-chat" if load.endpoint == "chat" else "openai",
        "model_id": run.model,
        "acceptance": run.acceptance,
        "num_prompts": len(answers),
        "max_tokens": load.max_tokens,
        "temperature": load.temperature,
        "seed": load.seed,
        "request_rate": load.request_rate if load.request_rate < float("inf") else "inf",
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        "duration": run.duration,
        "completed": len(whole),
        "failed": len(answers) - len(whole),
        "rejected": errors["429"],
        "errors_by_status": dict(errors),
        "output_len_source": _source(whole),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(whole) / run.duration,
        "request_goodput": None,
        "output_throughput": num_output / run.duration,
        "total_token_throughput": None if num_input is None else (num_input + num_output) / run.duration,
        "max_output_tokens_per_s": _busiest_second(whole),
        "max_concurrent_requests": _most_at_once(answers),
        **_latencies(whole),
        **({} if run.drafting is None else run.drafting.as_results()),
        "speed_bench": _speed_bench(load, run),
        "input_lens": [answer.num_input for answer in answers],
        "output_lens": [answer.output_len for answer in answers],
        "ttfts": [answer.ttft if answer.is_whole else 0.0 for answer in answers],
        "itls": [answer.itls for answer in answers],
        "latencies": [answer.latency for answer in answers],
        "generated_texts": ["".join(answer.parts) for answer in answers],
        "start_times": [answer.start for answer in answers],
        "errors": [answer.error for answer in answers],
    }


def _speed_bench(load: Load, run: LoadRun) -> dict[str, Any]:
    categories = load.categories or [NO_CATEGORY] * len(run.answers)
    runs = [
        RequestRun(category=category, num_tokens=answer.output_len, lengths=_lengths(answer), times=answer.times)
        for answer, category in zip(run.answers, categories, strict=True)
        if answer.is_whole
    ]
    report = speed_report(runs, run.duration, load.max_concurrency)
    if run.drafting is not None and not any(each.lengths for each in runs):
        report |= acceptance_rates(run.drafting.lengths)
    return report


def _lengths(answer: Answer) -> Counter[int]:
    """Returns the passes of an answer by acceptance length; empty if the server does not send them."""
    histogram = (answer.drafting or {}).get("acceptance_histogram") or []
    return Counter({accepted + 1: count for accepted, count in enumerate(histogram) if count})


def _latencies(whole: Sequence[Answer]) -> dict[str, float | None]:
    samples = {
        "ttft": [answer.ttft for answer in whole],
        "tpot": [(a.latency - a.ttft) / (a.output_len - 1) for a in whole if a.output_len > 1],
        "itl": [itl for answer in whole for itl in answer.itls],
        "e2el": [answer.latency for answer in whole],
    }
    figures: dict[str, Callable[[Any], Any]] = {"mean": np.mean, "median": np.median, "std": np.std}
    figures |= {f"p{percent}": partial(np.percentile, q=percent) for percent in _PERCENTILES}
    made: dict[str, float | None] = {}
    for name in LATENCIES:
        values = np.array(samples[name]) * 1e3
        for figure, compute in figures.items():
            made[f"{figure}_{name}_ms"] = float(compute(values)) if len(values) else None
    return made


def _source(whole: Sequence[Answer]) -> str | None:
    kinds = {"chunks" if answer.num_output is None else "usage" for answer in whole}
    return "mixed" if len(kinds) > 1 else next(iter(kinds), None)


def _busiest_second(whole: Sequence[Answer]) -> float:
    """Returns the most tokens of any second; the tokens of an answer are spread evenly over its parts."""
    tokens = defaultdict[int, float](float)
    begin = min((answer.start for answer in whole), default=0.0)
    for answer in whole:
        for came in answer.times:
            tokens[int(answer.start + came - begin)] += answer.output_len / len(answer.times)
    return max(tokens.values(), default=0.0)


def _most_at_once(answers: Sequence[Answer]) -> int:
    changes = [(answer.start, 1) for answer in answers]
    changes += [(answer.start + answer.latency, -1) for answer in answers]
    return max(accumulate(change for _, change in sorted(changes)), default=0)
