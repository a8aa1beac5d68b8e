"""The figures of two public benchmarks, by category of prompts, from the requests of a run.

SPEED-Bench reports acceptance, and tokens per second of one user and of all. Names and definitions are those of its
measuring program, `examples/specdec_bench` in NVIDIA's Model-Optimizer. Lengths count the target's own token: a pass
without an accepted draft has length 1. Passes that only read prompts have none.

Spec-Bench's leaderboard has accepted tokens and speed-up. Definitions are those of `evaluation/speed.py` in
hemingkx/Spec-Bench. "Accepted tokens" count the target's own token, so plain decoding has 1: the figure is tau. A
question's speed is its tokens over its seconds, prefill included, all turns together. A category's speed-up is the mean
speed of its questions over plain decoding's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from foretoken.core.errors import RequestError

if TYPE_CHECKING:
    from foretoken.core.records import StepRecord
    from foretoken.text.prompt_rows import PromptRow

NO_CATEGORY = "all"  # of prompts without one
_QUANTILES = (0.25, 0.5, 0.75)


@dataclass(slots=True, kw_only=True)
class RequestRun:
    """What one request contributes."""

    category: str = NO_CATEGORY
    num_tokens: int = 0
    # Passes after prefill by the number of tokens that they gave; empty if they are not known.
    lengths: Counter[int] = field(default_factory=Counter)
    times: list[float] = field(default_factory=list)  # seconds, on any clock, at which tokens came
    question: int = 0  # number of its question; the turns of a conversation have the same
    seconds: float = 0.0  # from the call to its last token, prefill included

    @property
    def acceptance_length(self) -> float | None:
        """Mean length of its passes; None without any."""
        return _mean(self.lengths)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second after its first ones; None if all came at once."""
        seconds = self.times[-1] - self.times[0] if self.times else 0.0
        return (self.num_tokens - 1) / seconds if seconds else None


class RunLog:
    """Collects the requests of an engine from its step records."""

    def __init__(self) -> None:
        self._runs: dict[str, RequestRun] = {}

    def add(self, record: StepRecord, now: float) -> None:
        """Adds an iteration that ended at `now`, in seconds."""
        for step in record.sequences:
            run = self._runs.setdefault(step.request_id, RequestRun())
            run.num_tokens += step.num_emitted
            run.times.append(now)
            if step.num_emitted and not step.ends_prompt:
                run.lengths[step.num_emitted] += 1

    def run_of(self, request_id: str, category: str, *, question: int, begin: float) -> RequestRun:
        """Returns a request's run with the category and the question of its prompt; `begin`: time of the call."""
        run = self._runs.get(request_id, RequestRun())
        run.category, run.question = category, question
        run.seconds = run.times[-1] - begin if run.times else 0.0
        return run


def speed_report(runs: Sequence[RequestRun], seconds: float, concurrency: int | None) -> dict[str, Any]:
    """Returns the figures of some requests and, under "categories", of each category alone; JSON-ready.

    `Request_AL` and `Category_AL` are means over a request's passes and a category's requests, `Average_AL` over all
    requests. `Conditional_Acceptance_Rate` of length k is P(length >= k | length >= k - 1). A user is one request.
    `seconds` are those of the whole run, prefill included; `concurrency` is None for no limit of requests at once.
    """
    categories = sorted({run.category for run in runs})
    by_category = {name: [run for run in runs if run.category == name] for name in categories}
    return {
        "concurrency": concurrency,
        **_figures(runs, seconds),
        "Request_AL": {str(index): run.acceptance_length for index, run in enumerate(runs)},
        "Category_AL": {name: _mean_length(some) for name, some in by_category.items()},
        "categories": {name: _figures(some, seconds) for name, some in by_category.items()},
    }


def _figures(runs: Sequence[RequestRun], seconds: float) -> dict[str, Any]:
    lengths = sum((run.lengths for run in runs), Counter[int]())
    return {
        "num_requests": len(runs),
        "Average_AL": _mean_length(runs),
        **acceptance_rates(lengths),
        "Output TPS": sum(run.num_tokens for run in runs) / seconds if seconds else None,
        "Request Generation Tokens Per Second": _statistics(
            run.tokens_per_s for run in runs if run.tokens_per_s is not None
        ),
    }


def acceptance_rates(lengths: Counter[int]) -> dict[str, Any]:
    """Returns SPEED-Bench's histogram of acceptance lengths, and its conditional and joint rates, by length."""
    seen = range(1, max(+lengths, default=0) + 1)  # +: without lengths that never occurred
    at_least = {length: sum(lengths[each] for each in seen if each >= length) for length in seen}
    total = lengths.total()
    return {
        "Acceptance_Length_Histogram": {str(length): lengths[length] for length in seen},
        "Conditional_Acceptance_Rate": {
            str(length): at_least[length] / at_least.get(length - 1, total) for length in seen
        },
        "Joint_Acceptance_Rate": {str(length): at_least[length] / total for length in seen},
    }


def _mean(lengths: Counter[int]) -> float | None:
    passes = lengths.total()
    return sum(length * count for length, count in lengths.items()) / passes if passes else None


def _mean_length(runs: Sequence[RequestRun]) -> float | None:
    known = [length for run in runs if (length := run.acceptance_length) is not None]
    return fmean(known) if known else None


def _statistics(values: Iterable[float]) -> dict[str, Any] | None:
    data = np.array(list(values))
    if not len(data):
        return None
    return {
        "min": float(data.min()), "max": float(data.max()), "mean": float(data.mean()), "std": float(data.std()),
        "quantiles": {str(each): float(np.quantile(data, each)) for each in _QUANTILES},
    }  # fmt: skip


SUITE, ALL = "spec-bench", "all"
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
GROUPS = dict.fromkeys(_MT_BENCH, "mt-bench")
"""The leaderboard's name for categories of the file."""

CATEGORIES = {
    "mt-bench": "mt-bench", "translation": "translation", "summarization": "summ.", "qa": "qa",
    "math_reasoning": "math", "rag": "rag",
}  # fmt: skip
"""The leaderboard's categories in its order, with headings of columns."""


def check_rows(rows: Sequence[PromptRow]) -> None:
    """Raises `RequestError` for a row of another category than Spec-Bench's, after `GROUPS`."""
    for row in rows:
        if row.category not in CATEGORIES:
            raise RequestError(
                f"{row.where} has the category '{row.category}', which Spec-Bench does not have. Expected "
                f"{', '.join([*CATEGORIES, *_MT_BENCH])}. Pass data/spec_bench/question.jsonl of hemingkx/Spec-Bench, "
                "or leave out --suite."
            )


def leaderboard(measured: Sequence[RequestRun], plain: Sequence[RequestRun]) -> dict[str, dict[str, Any]]:
    """Returns figures of each category that occurs and of all questions: "speed_up", "tau" and "questions".

    `plain` are plain decoding's runs of the same questions.
    """
    present = [name for name in CATEGORIES if any(run.category == name for run in measured)]
    return {name: _board_figures(*([r for r in runs if name in (r.category, ALL)] for runs in (measured, plain)))
            for name in (*present, ALL)}  # fmt: skip


def _board_figures(measured: Sequence[RequestRun], plain: Sequence[RequestRun]) -> dict[str, Any]:
    speeds = _speeds(measured)
    tau = _mean(sum((run.lengths for run in measured), Counter[int]()))
    return {"speed_up": fmean(speeds) / fmean(_speeds(plain)), "tau": tau, "questions": len(speeds)}


def _speeds(runs: Sequence[RequestRun]) -> list[float]:
    """Returns the tokens per second of each question."""
    tokens, seconds = Counter[int](), defaultdict[int, float](float)
    for run in runs:
        tokens[run.question] += run.num_tokens
        seconds[run.question] += run.seconds
    return [tokens[question] / seconds[question] for question in tokens]
