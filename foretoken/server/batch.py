"""Answers a file of requests in OpenAI's batch format, some lines at a time, each line exactly once.

One engine of this process answers the lines, or several over Ray. Ray starts workers, sends them lines, restarts
workers that end, and sends their lines again. This process alone reads and writes the two files.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import uuid
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from foretoken.core.errors import ConfigError, ForetokenError, RequestError
from foretoken.files.atomic_files import put_file, told_as
from foretoken.files.bounded_reads import MIB, check_regular
from foretoken.files.processes import file_lock
from foretoken.server.edge import ApiError, api_error, check_model, dumped, parse_object
from foretoken.server.live_request import GENERATING, BodyReader, LiveRequest
from foretoken.server.message_parts import AnswerFormats

if TYPE_CHECKING:
    from foretoken.entrypoints.async_llm import AsyncLLM

_MOST_LINE_BYTES = 8 * MIB  # as `MOST_BODY_BYTES`: a line is the body of a request
_PIECE_BYTES = MIB


class Line(NamedTuple):
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


@dataclass(slots=True)
class BatchCounts:
    """The progress of a batch: lines kept from an earlier run; lines, failures and tokens of this run."""

    kept: int = 0
    answered: int = 0
    failed: int = 0
    tokens: int = 0


class OpenLines:
    """The lines of a file that have no answer yet; collects their answers.

    `counts` is the progress. Its `kept` grows with the iteration, by the lines that an earlier run answered.
    """

    def __init__(
        self, source: Path, answers: AnswerFile, on_answer: Callable[[BatchCounts], None] = lambda _: None
    ) -> None:
        self._source, self._answers, self._on_answer = source, answers, on_answer
        self._kept, self._seen, self.counts = frozenset(answers.answered), set[str](), BatchCounts()

    def __iter__(self) -> Iterator[tuple[Line, dict[str, Any]]]:
        """Yields each line with its request; answers a line without a valid request with the error."""
        for line in read_lines(self._source):
            refused = None
            try:
                asked = self._parsed(line)
            except ApiError as err:
                asked, refused = {"custom_id": None}, err
            if name_of(_identity(line, asked)) in self._kept:
                self.counts.kept += 1
            elif refused is not None:
                self.add(_answer(line, asked, refused.status, refused.body))
            else:
                yield line, asked

    def add(self, answer: dict[str, Any]) -> None:
        """Writes and counts an answer; raises as `AnswerFile.add` does."""
        self._answers.add(answer)
        counts, response = self.counts, answer["response"]
        counts.answered += 1
        if response["status_code"] == 200:
            usage = response["body"]["usage"]
            counts.tokens += usage["output_tokens" if "output_tokens" in usage else "completion_tokens"]
        else:
            counts.failed += 1
        self._on_answer(counts)

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


def _identity(line: Line, asked: dict[str, Any]) -> dict[str, Any]:
    return {"id": f"batch_req_{line.number}", "custom_id": asked["custom_id"]}


def _answer(line: Line, asked: dict[str, Any], status: int, body: dict[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": body}
    return {**_identity(line, asked), "response": response, "error": None}


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
        check_model(body.get("model"), [self._model])
        shape = await self._reader.shape(url, body)
        if shape.request.is_streamed:
            raise ApiError("A line of a batch is answered as a whole. Leave stream out.", param="stream")
        live = LiveRequest(shape)
        await live.submit(self._engine)
        answer: dict[str, Any] = await live.whole(lambda body: body)
        return answer


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
    lines, todo = LineAnswers(engine, model, chat_template), OpenLines(source, answers, on_answer)
    still_open = iter(todo)

    async def work() -> None:
        for line, asked in still_open:
            todo.add(await lines.answer(line, asked))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max_in_flight):
                group.create_task(work())
    except* ForetokenError as errors:
        raise errors.exceptions[0] from None
    return todo.counts


_OBJECT_STORE_BYTES = 100 << 20  # for a cluster of this machine alone; a choice: lines are small
# Of a line, or of loading, after a worker ended. A choice: a line that crashes every worker must not run for ever.
_MOST_RETRIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RayWorkers:
    """The workers of a batch.

    Attributes:
        number: The most workers; there are never more workers than lines.
        make_engine: Makes the engine of a worker; its queue must have room for `max_in_flight` lines.
        max_in_flight: Lines that a worker answers at once.
        uses_gpu: Whether each worker has its own GPU; None to decide by whether the cluster has GPUs.
        on_start: Called with the number of ready workers and of all workers, while they start.
    """

    number: int
    make_engine: Callable[[], AsyncLLM]
    max_in_flight: int
    num_cpus: int
    uses_gpu: bool | None
    on_start: Callable[[int, int], None]


def run_ray_batch(
    workers: RayWorkers,
    source: Path,
    answers: AnswerFile,
    *,
    model: str,
    chat_template: str | None = None,
    on_answer: Callable[[BatchCounts], None],
) -> BatchCounts:
    """Answers all lines that have no answer yet on Ray workers; arguments and result as in `run_batch`.

    Uses the cluster that this process is connected to, else the one that `RAY_ADDRESS` names, else a new one on this
    machine for this call alone. Workers start once and together; each gets lines as soon as it is ready. Raises
    `ConfigError` when Ray is not installed, otherwise as `run_batch` does, also if a worker fails.
    """
    todo = OpenLines(source, answers, on_answer)
    lines = iter(todo)
    first = list(islice(lines, workers.number))  # a worker for each line; more workers would idle
    if first:
        workers.on_start(0, len(first))
        with _cluster(workers) as ray:
            making = ray.remote(_Worker).options(
                num_cpus=workers.num_cpus, num_gpus=1 if _has_gpus(ray, workers) else 0, max_restarts=-1,
                max_task_retries=_MOST_RETRIES, max_concurrency=workers.max_in_flight,
            )  # fmt: skip
            actors = [making.remote(workers.make_engine, model, chat_template) for _ in first]
            for answer in _answered(ray, workers, actors, (line for line, _ in chain(first, lines))):
                todo.add(answer)
    return todo.counts


def _has_gpus(ray: Any, workers: RayWorkers) -> bool:
    return ray.cluster_resources().get("GPU", 0) > 0 if workers.uses_gpu is None else workers.uses_gpu


def _answered(ray: Any, workers: RayWorkers, actors: list[Any], lines: Iterator[Line]) -> Iterator[dict[str, Any]]:
    """Yields answers as they come, while some `actors` may still load; ends all workers at the end."""
    starting = {actor.__ray_ready__.remote(): actor for actor in actors}
    asked: dict[Any, Any] = {}  # the worker of each line, by the reference of its answer
    is_read = False
    try:
        while asked or (starting and not is_read):
            (done,), _ = ray.wait([*starting, *asked], num_returns=1)
            made, room = ray.get(done), 1
            if done in starting:
                actor, room = starting.pop(done), workers.max_in_flight
                workers.on_start(len(actors) - len(starting), len(actors))
            else:
                actor = asked.pop(done)
                yield json.loads(made)
            more = list(islice(lines, room))
            is_read = len(more) < room
            asked |= {actor.answer.remote(line.number, line.data): actor for line in more}
    except ray.exceptions.RayError as err:
        raise ForetokenError(f"the workers failed: {_reason(err)} Run the command again: it continues.") from err
    finally:
        for actor in actors:
            ray.kill(actor)


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{lines[-1].rstrip('.')}." if lines else f"{type(error).__name__}."


class _Worker:
    def __init__(self, make_engine: Callable[[], AsyncLLM], model: str, chat_template: str | None) -> None:
        self._lines = LineAnswers(make_engine(), model, chat_template)

    async def answer(self, number: int, data: bytes) -> bytes:
        answer = await self._lines.answer(Line(number, data), parse_object(data))
        return json.dumps(answer, ensure_ascii=False).encode()


@contextmanager
def _cluster(workers: RayWorkers) -> Iterator[Any]:
    # Ray reads these at its first import. They turn off usage reports and Ray's own messages about ended workers.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        import ray
        import ray.exceptions
    except ImportError as err:
        raise ConfigError("Ray is not installed. Run in foretoken's repository: pip install '.[ray]'.") from err
    if ray.is_initialized():  # the caller's connection, which the caller closes
        yield ray
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if "RAY_ADDRESS" in os.environ:
        ray.init(**quiet)
    else:
        ray.init(
            address="local", include_dashboard=False, num_cpus=workers.number * workers.num_cpus,
            object_store_memory=_OBJECT_STORE_BYTES, _node_ip_address="127.0.0.1", **quiet,
        )  # fmt: skip
    try:
        yield ray
    finally:
        ray.shutdown()
