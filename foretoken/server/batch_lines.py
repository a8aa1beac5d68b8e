"""Finds the lines of a batch that have no answer yet, and answers one line."""

from __future__ import annotations

import logging
import uuid
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ForetokenError
from foretoken.server.answers import Envelope
from foretoken.server.batch_files import name_of, read_lines
from foretoken.server.errors import ApiError, api_error
from foretoken.server.json_body import parse_object
from foretoken.server.live_request import LiveRequest
from foretoken.server.message_parts import AnswerFormats
from foretoken.server.request_fields import UnknownFields, chat_form, chat_request, completion_request
from foretoken.server.response_answers import ResponseEnvelope
from foretoken.server.response_fields import as_chat, told_back
from foretoken.server.threads import rendered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from foretoken.entrypoints.async_llm import AsyncLLM
    from foretoken.server.batch_files import AnswerFile, Line
    from foretoken.server.live_request import AnswerShape

_NO_TEMPLATE = "Pass --chat-template FILE, or ask /v1/completions for the text."
_log = logging.getLogger(__name__)
_COMPLETIONS, _CHAT, _RESPONSES = _URLS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


class OpenLines:
    """The lines of a file that have no answer yet.

    Attributes:
        kept: Lines passed so far that an earlier run answered.
    """

    def __init__(self, source: Path, answers: AnswerFile) -> None:
        """Keeps both files; answers: of an earlier run."""
        self._source, self._answered, self._seen, self.kept = source, frozenset(answers.answered), set[str](), 0

    def __iter__(self) -> Iterator[tuple[Line, dict[str, Any] | ApiError]]:
        """Yields each line with its request, or with the error of a line that holds no valid request."""
        for line in read_lines(self._source):
            try:
                asked: dict[str, Any] | ApiError = self._parsed(line)
            except ApiError as err:
                asked = err
            if name_of(_identity(line, asked)) in self._answered:
                self.kept += 1
            else:
                yield line, asked

    def _parsed(self, line: Line) -> dict[str, Any]:
        """Parses a line; raises `ApiError` unless its custom_id is unique."""
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


class LineAnswers:
    """Answers lines with one engine."""

    def __init__(self, engine: AsyncLLM, model: str, chat_template: str | None) -> None:
        """See `foretoken.server.batch.run_batch`."""
        self._engine, self._model, self._template, self._unknown = engine, model, chat_template, UnknownFields()
        self._formats = AnswerFormats.of(engine.llm, chat_template)
        self._defaults = engine.llm.sampling_defaults

    async def answer(self, line: Line, asked: dict[str, Any]) -> dict[str, Any]:
        """Returns the output line for a request; raises `ForetokenError` when the engine has stopped."""
        status = 200
        try:
            body = await self._served(asked)
        except Exception as err:  # any failure: other lines go on
            if not isinstance(err, ApiError | ForetokenError):
                _log.exception("line %d failed", line.number)
            error = api_error(err)
            if error.status == 503:
                raise ForetokenError(
                    "the engine serves no requests any more. Run the command again: it continues."
                ) from err
            status, body = error.status, error.body
        return _answer(line, asked, status, body)

    async def _served(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked.get("method", "POST") != "POST":
            raise ApiError(f"method is {asked['method']!a}. Expected POST.", param="method")
        body, url = asked.get("body"), asked.get("url")
        if url not in _URLS:
            raise ApiError(f"url is {str(url)[:80]!a}. Expected one of {', '.join(_URLS)}.", status=404, param="url")
        if not isinstance(body, dict):
            raise ApiError("body is missing. Expected an object with the fields of the request.", param="body")
        if body.get("model") not in (None, self._model):
            raise ApiError(
                f"The model {str(body['model'])[:80]!a} does not exist here. Known: {self._model}.", status=404,
                param="model", code="model_not_found",
            )  # fmt: skip
        shape = await self._shape(url, body)
        if shape.request.is_streamed:
            raise ApiError("A line of a batch is answered as a whole. Leave stream out.", param="stream")
        live = await LiveRequest.submit(self._engine, shape, None)
        return await live.whole(lambda body: body)

    async def _shape(self, url: str, body: dict[str, Any]) -> AnswerShape:
        """Checks a body and returns the shape of its answer."""
        if url == _COMPLETIONS:
            request = completion_request(body, self._unknown, self._defaults)
        else:
            chat = as_chat(body) if url == _RESPONSES else body
            request = chat_request(chat, self._unknown, self._defaults, await self._conversation(chat), self._formats)
        has_metrics = bool(request.has_draft_metrics)
        if url == _RESPONSES:
            return ResponseEnvelope(
                request=request, told=told_back(body), model=self._model, has_draft_metrics=has_metrics
            )
        return Envelope(request=request, model=self._model, has_draft_metrics=has_metrics)

    async def _conversation(self, chat: dict[str, Any]) -> dict[str, Any]:
        messages, form = chat_form(chat)
        return await rendered(self._engine.llm, messages, form, self._template, _NO_TEMPLATE)


def refused_line(line: Line, error: ApiError) -> dict[str, Any]:
    """Returns the output line for a line without a valid request."""
    return _answer(line, error, error.status, error.body)


def _answer(line: Line, asked: dict[str, Any] | ApiError, status: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": body}
    return {**_identity(line, asked), "response": response, "error": None}


def _identity(line: Line, asked: dict[str, Any] | ApiError) -> dict[str, Any]:
    """Returns the fields that name a line: its custom_id, or None, and an id from its number."""
    custom = None if isinstance(asked, ApiError) else asked["custom_id"]
    return {"id": f"batch_req_{line.number}", "custom_id": custom}
