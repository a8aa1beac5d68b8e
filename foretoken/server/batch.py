"""Answers a file of requests in OpenAI's batch format, some lines at a time, each line exactly once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ForetokenError
from foretoken.server.batch_lines import LineAnswers, OpenLines, refused_line
from foretoken.server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from foretoken.entrypoints.async_llm import AsyncLLM
    from foretoken.server.batch_files import AnswerFile


@dataclass(slots=True)
class BatchCounts:
    """The progress of a batch.

    Attributes:
        kept: Lines that an earlier run answered.
        answered: Lines of this run, including lines with errors.
        failed: Lines of this run with errors.
        tokens: Tokens generated in this run.
    """

    kept: int = 0
    answered: int = 0
    failed: int = 0
    tokens: int = 0

    def add(self, answer: dict[str, Any], *, kept: int) -> None:
        """Counts an answered line; kept: lines passed so far that an earlier run answered."""
        response = answer["response"]
        self.kept, self.answered = kept, self.answered + 1
        if response["status_code"] == 200:
            usage = response["body"]["usage"]
            self.tokens += usage["output_tokens" if "output_tokens" in usage else "completion_tokens"]
        else:
            self.failed += 1


async def run_batch(
    engine: AsyncLLM,
    source: Path,
    answers: AnswerFile,
    *,
    model: str,
    max_in_flight: int,
    chat_template: str | None = None,
    on_answer: Callable[[BatchCounts], None],
) -> BatchCounts:
    """Answers all lines that have no answer yet, and writes answers as they are ready.

    Args:
        engine: Serves requests; its queue must have room for all lines in flight.
        source: Lines of requests.
        answers: Takes the answers.
        model: The name of the model in requests and answers.
        max_in_flight: Lines that are served at once.
        chat_template: The chat template in Jinja; None for the tokenizer's own.
        on_answer: Called with the counts after every line.

    Returns:
        The final counts.

    Raises:
        ForetokenError: When a file cannot be read or written, or the engine fails; finished answers are kept.
    """
    lines, todo, counts = LineAnswers(engine, model, chat_template), OpenLines(source, answers), BatchCounts()
    still_open = iter(todo)

    async def work() -> None:
        for line, asked in still_open:
            answer = refused_line(line, asked) if isinstance(asked, ApiError) else await lines.answer(line, asked)
            answers.add(answer)
            counts.add(answer, kept=todo.kept)
            on_answer(counts)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max_in_flight):
                group.create_task(work())
    except* ForetokenError as errors:
        raise errors.exceptions[0] from None
    counts.kept = todo.kept
    return counts
