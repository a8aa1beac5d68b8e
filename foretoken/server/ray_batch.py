"""Answers a file of requests over Ray: every worker holds an engine, one process reads and writes the files.

Ray starts workers, sends them lines, restarts workers that end, and sends their lines again. The process with the
files keeps the order of lines and writes exactly one answer for each.
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
from foretoken.server.batch import AnswerFile, BatchCounts, Line, LineAnswers, OpenLines, refused_line
from foretoken.server.json_body import ApiError, parse_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from foretoken.entrypoints.async_llm import AsyncLLM

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
    machine for this call alone. Workers start once and together; each gets lines as soon as it is ready. Only this
    process reads and writes the two files. A worker that ends is started again and gets its lines again. Raises
    `ConfigError` when Ray is not installed, `ForetokenError` when a file cannot be read or written, or a worker fails;
    finished answers are kept.
    """
    counts, todo = BatchCounts(), OpenLines(source, answers)

    def add(answer: dict[str, Any]) -> None:
        answers.add(answer)
        counts.add(answer, kept=todo.kept)
        on_answer(counts)

    lines = _asked(todo, add)
    first = list(islice(lines, workers.number))  # a worker for each line; more workers would idle
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
    for line, asked in todo:
        if isinstance(asked, ApiError):
            add(refused_line(line, asked))
        else:
            yield line


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
    if ray.is_initialized():  # the caller connected, and disconnects
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
