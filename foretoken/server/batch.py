"""Answers a file of requests in OpenAI's batch format, some lines at a time, each line exactly once."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from codecs import BOM_UTF8
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ConfigError, ForetokenError, RequestError
from foretoken.files.atomic_files import put_file, told_as
from foretoken.files.bounded_reads import MIB, check_regular
from foretoken.files.processes import file_lock
from foretoken.server.json_body import ApiError, api_error, dumped, parse_object
from foretoken.server.live_request import GENERATING, BodyReader, LiveRequest
from foretoken.server.message_parts import AnswerFormats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from foretoken.entrypoints.async_llm import AsyncLLM

_MOST_LINE_BYTES = 8 * MIB  # as `MOST_BODY_BYTES`: a line is the body of a request
_PIECE_BYTES = MIB


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a batch, counted from 1; data: its bytes, or None if the line is longer than a request may be."""

    number: int
    data: bytes | None


def count_lines(path: Path) -> int:
    """Returns the number of lines that are not empty; raises as `read_lines` does."""
    return sum(1 for _ in read_lines(path))


def read_lines(path: Path) -> Iterator[Line]:
    """Yields the lines that are not empty, one in memory at a time; raises `RequestError` without a regular file."""
    try:
        check_regular(path, error=RequestError)
        with path.open("rb") as file:
            number = 0
            while data := file.readline(_MOST_LINE_BYTES + 1):
                number += 1
                is_too_long = len(data) > _MOST_LINE_BYTES
                while is_too_long and not data.endswith(b"\n"):
                    data = file.readline(_PIECE_BYTES)
                    if not data:
                        break
                data = data.removeprefix(BOM_UTF8)  # of editors on Windows, also between files put together
                if is_too_long or data.strip():
                    yield Line(number, None if is_too_long else data)
    except OSError as err:
        raise RequestError(f"'{path}' cannot be read: {err.strerror}. Expected a file of JSON lines.") from err


class AnswerFile:
    """Collects answers in `OUT.part`, which is renamed to `OUT` when all answers are there.

    `answered` names the answered lines: the custom_id, or the id of a line without one.
    """

    def __init__(self, out: Path, model: str) -> None:
        """Opens or starts the file, and cuts an unfinished line; raises `ConfigError` if it holds other data."""
        self._out, self._part, self._model = out, out.with_name(f"{out.name}.part"), model
        self.answered: set[str] = set()
        with told_as(ConfigError, f"'{self._part}'", "Choose another OUT, or remove it to start again."):
            length = self._read_answers() if self._part.exists() else 0
            self._file = self._part.open("ab", buffering=0)  # a buffer would be written again at close
            self._file.truncate(length)

    def add(self, answer: dict[str, Any]) -> None:
        """Appends an answer, which then survives the end of the process; raises `ConfigError`, as on a full disk."""
        with told_as(ConfigError, f"'{self._part}'", "Make room, and run the command again: it continues."):
            left = memoryview(dumped(answer) + b"\n")
            while left:  # a nearly full disk takes a part
                left = left[self._file.write(left) :]
        self.answered.add(name_of(answer))

    def finish(self) -> None:
        """Writes all data to disk and renames the file."""
        with told_as(ConfigError, f"'{self._out}'", "Run the command again: it continues."):
            self._file.close()
            put_file(self._part, self._out)

    def close(self) -> None:
        """Keeps the partial file for a later run."""
        self._file.close()

    def _read_answers(self) -> int:
        """Collects the names of answered lines; returns the length in bytes of all complete lines."""
        length = 0
        with self._part.open("rb") as file:
            for data in file:
                if not data.endswith(b"\n"):
                    break
                length += len(data)
                self.answered.add(self._checked(data))
        return length

    def _checked(self, data: bytes) -> str:
        try:
            answer = json.loads(data)
            name, theirs = name_of(answer), answer["response"]["body"].get("model", self._model)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as err:
            raise ConfigError(f"'{self._part}' holds data other than answers. Choose another OUT.") from err
        if theirs != self._model:
            raise ConfigError(
                f"'{self._part}' holds answers of the model '{theirs}', but this run uses '{self._model}'. Choose "
                "another OUT, or remove the file to start again."
            )
        return name


def name_of(answer: dict[str, Any]) -> str:
    """Returns the name of a line: its custom_id, or the id of a line without one; the two never collide."""
    return str(answer["id"]) if answer["custom_id"] is None else f"={answer['custom_id']}"


@contextmanager
def held(out: Path) -> Iterator[None]:
    """Locks the file for this run until the block ends; raises `ConfigError` when another run writes the file."""
    with told_as(ConfigError, f"'{out}'", "Choose another OUT."):
        out.parent.mkdir(parents=True, exist_ok=True)
    refusal = f"another run writes '{out}'. Wait for it, or choose another OUT."
    with file_lock(out.with_name(f"{out.name}.lock"), refusal=refusal):
        yield


_NO_TEMPLATE = "Pass --chat-template FILE, or ask /v1/completions for the text."
_log = logging.getLogger(__name__)


class OpenLines:
    """The lines of a file that have no answer yet; `kept` counts lines that an earlier run answered."""

    def __init__(self, source: Path, answers: AnswerFile) -> None:
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
        self._engine, self._model, llm = engine, model, engine.llm
        formats = AnswerFormats.of_llm(llm, chat_template)
        self._reader = BodyReader(llm, model=model, template=chat_template, advice=_NO_TEMPLATE, formats=formats)

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
        if not isinstance(url, str) or url not in GENERATING.values():
            known = ", ".join(GENERATING.values())
            raise ApiError(f"url is {str(url)[:80]!a}. Expected one of {known}.", status=404, param="url")
        if not isinstance(body, dict):
            raise ApiError("body is missing. Expected an object with the fields of the request.", param="body")
        if body.get("model") not in (None, self._model):
            raise ApiError(
                f"The model {str(body['model'])[:80]!a} does not exist here. Known: {self._model}.", status=404,
                param="model", code="model_not_found",
            )  # fmt: skip
        shape = await self._reader.shape(url, body)
        if shape.request.is_streamed:
            raise ApiError("A line of a batch is answered as a whole. Leave stream out.", param="stream")
        live = await LiveRequest.submit(self._engine, shape, None)
        return await live.whole(lambda body: body)


def refused_line(line: Line, error: ApiError) -> dict[str, Any]:
    """Returns the output line for a line without a valid request."""
    return _answer(line, error, error.status, error.body)


def _answer(line: Line, asked: dict[str, Any] | ApiError, status: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": body}
    return {**_identity(line, asked), "response": response, "error": None}


def _identity(line: Line, asked: dict[str, Any] | ApiError) -> dict[str, Any]:
    custom = None if isinstance(asked, ApiError) else asked["custom_id"]
    return {"id": f"batch_req_{line.number}", "custom_id": custom}


@dataclass(slots=True)
class BatchCounts:
    """The progress of a batch: lines kept from an earlier run; lines, failures and tokens of this run."""

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
    """Answers all lines that have no answer yet, writes answers as they are ready, and returns the final counts.

    `engine`: serves requests; its queue must have room for all lines in flight. Raises `ForetokenError` when a file
    cannot be read or written, or the engine fails; finished answers are kept.
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
