"""The leaderboard of Spec-Bench: accepted tokens and speed-up by category of questions.

Definitions are those of its program, `evaluation/speed.py` in hemingkx/Spec-Bench. "Accepted tokens" count the target's
own token, so plain decoding has 1: the figure is tau. A question's speed is its tokens over its seconds, prefill
included, all turns together. A category's speed-up is the mean speed of its questions over plain decoding's.
"""

from __future__ import annotations

from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from foretoken.bench.speed_report import RequestRun
    from foretoken.text.prompt_rows import PromptRow

SUITE, ALL = "spec-bench", "all"
_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
GROUPS: Mapping[str, str] = MappingProxyType(dict.fromkeys(_MT_BENCH, "mt-bench"))
"""The leaderboard's name for categories of the file."""

CATEGORIES: Mapping[str, str] = MappingProxyType({
    "mt-bench": "mt-bench", "translation": "translation", "summarization": "summ.", "qa": "qa",
    "math_reasoning": "math", "rag": "rag",
})  # fmt: skip
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
    return {name: _figures(*([r for r in runs if name in (r.category, ALL)] for runs in (measured, plain)))
            for name in (*present, ALL)}  # fmt: skip


def _figures(measured: Sequence[RequestRun], plain: Sequence[RequestRun]) -> dict[str, Any]:
    speeds = _speeds(measured)
    passes = sum(run.lengths.total() for run in measured)
    tokens = sum(length * count for run in measured for length, count in run.lengths.items())
    return {
        "speed_up": fmean(speeds) / fmean(_speeds(plain)),
        "tau": tokens / passes if passes else None,
        "questions": len(speeds),
    }


def _speeds(runs: Sequence[RequestRun]) -> list[float]:
    """Returns the tokens per second of each question."""
    tokens: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for run in runs:
        tokens[run.question] = tokens.get(run.question, 0) + run.num_tokens
        seconds[run.question] = seconds.get(run.question, 0.0) + run.seconds
    return [tokens[question] / seconds[question] for question in tokens]
