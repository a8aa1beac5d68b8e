"""Answers a file of requests in OpenAI's batch format, some at a time, each line exactly once."""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ForetokenError
from foretoken.server.answers import Envelope
from foretoken.server.batch_files import name_of, read_lines
from foretoken.server.errors import ApiError, api_error
from foretoken.server.json_body import parse_object
from foretoken.server.live_request import LiveRequest
from foretoken.server.request_fields import UnknownFields, chat_form, chat_request, completion_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from foretoken.engine.async_llm import AsyncLLM
    from foretoken.server.batch_files import AnswerFile, Line
    from foretoken.server.request_fields import ServedRequest

_log = logging.getLogger(__name__)
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(slots=True)
class BatchCounts:
    """How far a batch is.

    Attributes:
        kept: Lines that an earlier run answered.
        answered: Lines of this run, those with errors included.
        failed: Of these, the ones with errors.
        tokens: Generated in this run.
    """

    kept: int = 0
    answered: int = 0
    failed: int = 0
    tokens: int = 0


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
    """Answers all lines that have no answer yet, in the order in which they are ready.

    Args:
        engine: Serves requests; as many may wait as lines in flight have.
        source: Lines of requests.
        answers: Takes the answers.
        model: Its name in requests and answers.
        max_in_flight: Lines that are served at once.
        chat_template: How conversations are rendered, in Jinja; None for the tokenizer's own way.
        on_answer: Told how far it is after every line.

    Returns:
        What became of the lines.

    Raises:
        ForetokenError: When a file cannot be read or written, or the engine failed; what was answered is kept.
    """
    batch = _Batch(engine, answers, model, chat_template)
    todo = batch.todo(source)

    async def work() -> None:
        for line, asked in todo:
            answers.add(await batch.answer(line, asked))
            on_answer(batch.counts)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max_in_flight):
                group.create_task(work())
    except* ForetokenError as errors:
        raise errors.exceptions[0] from None
    return batch.counts


class _Batch:
    """What the lines share."""

    def __init__(self, engine: AsyncLLM, answers: AnswerFile, model: str, chat_template: str | None) -> None:
        self._engine, self._answers, self._model, self._template = engine, answers, model, chat_template
        self._unknown, self._kept, self._seen = UnknownFields(), frozenset(answers.answered), set[str]()
        self.counts = BatchCounts()

    def todo(self, source: Path) -> Iterator[tuple[Line, dict[str, Any] | ApiError]]:
        """Lines without an answer: what each asks for, or why that cannot be told."""
        for line in read_lines(source):
            try:
                asked: dict[str, Any] | ApiError = self._parsed(line)
            except ApiError as err:
                asked = err
            if name_of(_identity(line, asked)) in self._kept:
                self.counts.kept += 1
            else:
                yield line, asked

    def _parsed(self, line: Line) -> dict[str, Any]:
        """A line that has a custom_id of its own."""
        if line.data is None:
            raise ApiError(f"line {line.number} is too long. Send less in one request.", status=413)
        asked = parse_object(line.data)
        custom = asked.get("custom_id")
        if not isinstance(custom, str) or not 0 < len(custom) <= 512:
            raise ApiError(f"line {line.number} has no custom_id. Expected text of 1 to 512 characters.")
        if custom in self._seen:
            raise ApiError(f"line {line.number} has the custom_id {custom!a} of a line before. Expected its own.")
        self._seen.add(custom)
        return asked

    async def answer(self, line: Line, asked: dict[str, Any] | ApiError) -> dict[str, Any]:
        """The line of an answer.

        Raises:
            ForetokenError: When the engine serves no requests any more.
        """
        status = 200
        try:
            if isinstance(asked, ApiError):
                raise asked
            body = await self._served(asked)
            self.counts.tokens += body["usage"]["completion_tokens"]
        except Exception as err:  # whatever it is, other lines are served on
            if not isinstance(err, ApiError | ForetokenError):
                _log.exception("line %d failed", line.number)
            error = api_error(err)
            if error.status == 503:
                raise ForetokenError(
                    "the engine serves no requests any more. Run the command again: it goes on."
                ) from err
            status, body = error.status, error.body
            self.counts.failed += 1
        self.counts.answered += 1
        response = {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": body}
        return {**_identity(line, asked), "response": response, "error": None}

    async def _served(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The body of an answer."""
        if asked.get("method", "POST") != "POST":
            raise ApiError(f"method is {asked['method']!a}. Expected POST.", param="method")
        body, url = asked.get("body"), asked.get("url")
        if url not in (_CHAT, _COMPLETIONS):
            raise ApiError(f"url is {str(url)[:80]!a}. Expected {_CHAT} or {_COMPLETIONS}.", status=404, param="url")
        if not isinstance(body, dict):
            raise ApiError("body is missing. Expected an object with the fields of the request.", param="body")
        if body.get("model") not in (None, self._model):
            raise ApiError(
                f"The model {str(body['model'])[:80]!a} does not exist here. Known: {self._model}.", status=404,
                param="model", code="model_not_found",
            )  # fmt: skip
        request = await self._request(body, is_chat=url == _CHAT)
        if request.is_streamed:
            raise ApiError("A line of a batch is answered as a whole. Leave stream out.", param="stream")
        envelope = Envelope(request=request, model=self._model, has_draft_metrics=bool(request.has_draft_metrics))
        live = await LiveRequest.submit(self._engine, envelope, None)
        return await live.whole()

    async def _request(self, body: dict[str, Any], *, is_chat: bool) -> ServedRequest:
        """What a body asks for."""
        if not is_chat:
            return completion_request(body, self._unknown)
        messages, form = chat_form(body)
        (prompt,) = await asyncio.to_thread(
            self._engine.llm.chat_prompts, messages, chat_template=self._template, **form
        )
        return chat_request(body, self._unknown, prompt)


def _identity(line: Line, asked: dict[str, Any] | ApiError) -> dict[str, Any]:
    """What names a line: its custom_id, None where it has none of its own, and an id by its number."""
    custom = None if isinstance(asked, ApiError) else asked["custom_id"]
    return {"id": f"batch_req_{line.number}", "custom_id": custom}
