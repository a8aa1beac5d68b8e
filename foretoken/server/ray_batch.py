"""Answers a file of requests over Ray: each worker holds an engine, one process reads and writes the files.

Ray starts workers, sends them lines, restarts those that end, and sends their lines again. The order of lines and the
guarantee of one answer each stay with the process that holds the files.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ConfigError, ForetokenError
from foretoken.server.batch import BatchCounts
from foretoken.server.batch_files import Line
from foretoken.server.batch_lines import LineAnswers, OpenLines, refused_line
from foretoken.server.errors import ApiError
from foretoken.server.json_body import parse_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from foretoken.entrypoints.async_llm import AsyncLLM
    from foretoken.server.batch_files import AnswerFile

_OBJECT_STORE_BYTES = 100 << 20  # for a cluster on this machine alone
_MOST_RETRIES = 4  # of a line, or of loading, after a worker ended; a line that ends every worker must not run for ever


@dataclass(frozen=True, slots=True, kw_only=True)
class RayWorkers:
    """The workers of a batch.

    Attributes:
        number: The most workers; there are never more workers than lines.
        make_engine: Called in each of them; as many requests may wait as `max_in_flight` lines have.
        max_in_flight: Lines that a worker has at once.
        num_cpus: Processors of each.
        uses_gpu: Whether each has a GPU of its own; None where the cluster has any.
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
    """Answers all lines that have no answer yet, as `run_batch` does, on Ray workers.

    The cluster is the one that this process is connected to, else the one that `RAY_ADDRESS` names, else one on this
    machine for this call alone. Workers start once and together; each gets lines as soon as it is ready. Only this
    process reads and writes the two files. A worker that ends is started again and gets its lines again.

    Args:
        workers: Who answers.
        source: Lines of requests.
        answers: Takes the answers.
        model: Its name in requests and answers.
        chat_template: How conversations are rendered, in Jinja; None for the tokenizer's own way.
        on_answer: Told how far it is after every line.

    Returns:
        What became of the lines.

    Raises:
        ConfigError: When Ray is not installed.
        ForetokenError: When a file cannot be read or written, or a worker cannot do its work; what was answered is
            kept.
    """
    counts, todo = BatchCounts(), OpenLines(source, answers)

    def add(answer: dict[str, Any]) -> None:
        answers.add(answer)
        counts.add(answer, kept=todo.kept)
        on_answer(counts)

    lines = _asked(todo, add)
    first = list(islice(lines, workers.number))  # a worker for each; more workers than lines would idle
    if first:
        workers.on_start(0, len(first))
        with _cluster(workers) as ray:
            making = ray.remote(_Worker).options(
                num_cpus=workers.num_cpus, num_gpus=1 if _has_gpus(ray, workers) else 0, max_restarts=-1,
                max_task_retries=_MOST_RETRIES, max_concurrency=workers.max_in_flight,
            )  # fmt: skip
            actors = [making.remote(workers.make_engine, model, chat_template) for _ in first]
            for answer in _answered(ray, workers, actors, chain(first, lines)):
                add(answer)
    counts.kept = todo.kept
    return counts


def _asked(todo: OpenLines, add: Callable[[dict[str, Any]], None]) -> Iterator[Line]:
    """Yields the lines for the workers; answers invalid lines at once.

    Args:
        todo: All lines.
        add: Takes answers.
    """
    for line, asked in todo:
        if isinstance(asked, ApiError):
            add(refused_line(line, asked))
        else:
            yield line


def _has_gpus(ray: Any, workers: RayWorkers) -> bool:
    """Whether each worker gets a GPU."""
    return ray.cluster_resources().get("GPU", 0) > 0 if workers.uses_gpu is None else workers.uses_gpu


def _answered(ray: Any, workers: RayWorkers, actors: list[Any], lines: Iterator[Line]) -> Iterator[dict[str, Any]]:
    """Yields answers in the order in which they come; ends all workers at the end, also those that are still loading.

    Args:
        ray: The package, connected.
        workers: Who answers.
        actors: The workers; some may still load.
        lines: The requests.

    Raises:
        ForetokenError: When a worker cannot be started, or cannot answer.
    """
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
        raise ForetokenError(f"the workers failed: {_reason(err)} Run the command again: it goes on.") from err
    finally:
        for actor in actors:
            ray.kill(actor)


def _reason(error: BaseException) -> str:
    """The last line of an error that came from another process, as a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{lines[-1].rstrip('.')}." if lines else f"{type(error).__name__}."


class _Worker:
    """A worker: answers many lines at once with an engine of its own."""

    def __init__(self, make_engine: Callable[[], AsyncLLM], model: str, chat_template: str | None) -> None:
        self._lines = LineAnswers(make_engine(), model, chat_template)

    async def answer(self, number: int, data: bytes) -> bytes:
        """Returns the answer to a line as JSON."""
        answer = await self._lines.answer(Line(number, data), parse_object(data))
        return json.dumps(answer, ensure_ascii=False).encode()


@contextmanager
def _cluster(workers: RayWorkers) -> Iterator[Any]:
    """The package `ray`, connected to a cluster.

    Raises:
        ConfigError: When Ray is not installed.
    """
    # Read at the first import: nothing is sent to anybody, and what ends workers is told below, not by Ray's core.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        import ray
        import ray.exceptions
    except ImportError as err:
        raise ConfigError("Ray is not installed. Run in foretoken's repository: pip install '.[ray]'.") from err
    if ray.is_initialized():  # by who calls this, and who ends it
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
