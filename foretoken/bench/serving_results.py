"""Figures of a load in the keys of vLLM's `bench serve --save-result`, so that its readers accept ours.

TTFT is the time to the first text, TPOT the time a token after that, E2EL the time of a whole request. ITL is the time
between parts of a stream; a part holds several tokens if drafts were accepted. All are over complete answers.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from foretoken.bench.speed_report import NO_CATEGORY, RequestRun, acceptance_rates, speed_report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.bench.serving_load import Answer, Load, LoadRun

PERCENTILES = (50, 90, 99)
LATENCIES = ("ttft", "tpot", "itl", "e2el")


def load_results(load: Load, run: LoadRun) -> dict[str, Any]:
    """Returns all figures, JSON-ready.

    Besides vLLM's keys: `foretoken_schema`; `acceptance`, the server's acceptance rule, null if it does not say;
    `errors_by_status`, by HTTP status, "stream", "connection" or "timeout";
    `rejected`, the requests answered with 429; and `output_len_source`, how tokens were counted: "usage", "chunks" (if
    the server sends no usage), or "mixed". Prompt tokens are null if the server does not send them. `speed_bench` has
    the figures of `speed_report`. Without `acceptance_histogram` in answers, its rates are those of the server's
    counters, over passes with drafts, and lengths of requests and categories are null.
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
    made: dict[str, float | None] = {}
    for name in LATENCIES:
        values = np.array(samples[name]) * 1e3
        made |= {
            f"mean_{name}_ms": float(values.mean()) if len(values) else None,
            f"median_{name}_ms": float(np.median(values)) if len(values) else None,
            f"std_{name}_ms": float(values.std()) if len(values) else None,
        }
        for place in PERCENTILES:
            made[f"p{place}_{name}_ms"] = float(np.percentile(values, place)) if len(values) else None
    return made


def _source(whole: Sequence[Answer]) -> str | None:
    kinds = {"chunks" if answer.num_output is None else "usage" for answer in whole}
    return "mixed" if len(kinds) > 1 else next(iter(kinds), None)


def _busiest_second(whole: Sequence[Answer]) -> float:
    """Returns the most tokens of any second; the tokens of an answer are spread evenly over its parts."""
    tokens: dict[int, float] = {}
    begin = min((answer.start for answer in whole), default=0.0)
    for answer in whole:
        for came in answer.times:
            second = int(answer.start + came - begin)
            tokens[second] = tokens.get(second, 0.0) + answer.output_len / len(answer.times)
    return max(tokens.values(), default=0.0)


def _most_at_once(answers: Sequence[Answer]) -> int:
    changes = sorted(
        [(answer.start, 1) for answer in answers] + [(answer.start + answer.latency, -1) for answer in answers]
    )
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most
