"""A file of requests over Ray Data: workers that hold an engine each, and one process that reads and writes the files.

Ray starts workers, sends them lines, restarts those that end, and sends their lines again. The order of lines and the
guarantee of one answer each stay with the process that holds the files.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ConfigError, ForetokenError
from foretoken.server.batch import BatchCounts
from foretoken.server.batch_files import Line, name_of
from foretoken.server.batch_lines import LineAnswers, OpenLines, refused_line
from foretoken.server.errors import ApiError
from foretoken.server.json_body import parse_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pyarrow as pa

    from foretoken.engine.async_llm import AsyncLLM
    from foretoken.server.batch_files import AnswerFile

_OBJECT_STORE_BYTES = 100 << 20  # of a cluster on this machine alone; lines beyond that go to disk
_BLOCKS_AT_ONCE = 2  # of a worker: while the last lines of one are answered, those of the other keep the engine busy


@dataclass(frozen=True, slots=True, kw_only=True)
class RayWorkers:
    """The workers of a batch.

    Attributes:
        number: How many.
        make_engine: Called in each of them; as many requests may wait as `max_in_flight` lines have.
        max_in_flight: Lines that a worker has at once.
        num_cpus: Processors of each.
        uses_gpu: Whether each has a GPU of its own; None where the cluster has any.
    """

    number: int
    make_engine: Callable[[], AsyncLLM]
    max_in_flight: int
    num_cpus: int
    uses_gpu: bool | None


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
    machine for this call alone. Only this process
    reads and writes the two files. A worker that ends is started again and gets its lines again.

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
    counts = BatchCounts()

    def add(answer: dict[str, Any]) -> None:
        if name_of(answer) not in answers.answered:  # a block that was done twice may come twice
            answers.add(answer)
            counts.add(answer, kept=todo.kept)
            on_answer(counts)

    todo = OpenLines(source, answers)
    with _cluster(workers) as ray:
        blocks, expected = [], set[str]()
        for block in _blocks(todo, max(1, workers.max_in_flight // _BLOCKS_AT_ONCE), add, expected):
            blocks.append(ray.put(block))
        counts.kept = todo.kept
        for answer in _answered(ray, workers, blocks, (workers.make_engine, model, chat_template)):
            add(answer)
    missing = len(expected - answers.answered)
    if missing:
        raise ForetokenError(f"{missing} lines have no answer. Run the command again: it goes on.")
    return counts


def _blocks(
    todo: OpenLines, size: int, add: Callable[[dict[str, Any]], None], expected: set[str]
) -> Iterator[pa.Table]:
    """Lines for the workers, some in a table; the others are answered at once.

    Args:
        todo: All lines.
        size: Lines of a table.
        add: Takes answers.
        expected: Gets the names of the lines for the workers.
    """
    numbers: list[int] = []
    texts: list[bytes] = []
    for line, asked in todo:
        if isinstance(asked, ApiError):
            add(refused_line(line, asked))
            continue
        assert line.data is not None, "what a line asks for was read from its bytes"
        expected.add(f"={asked['custom_id']}")
        numbers.append(line.number)
        texts.append(line.data)
        if len(texts) == size:
            yield _table(number=numbers, data=texts)
            numbers, texts = [], []
    if texts:
        yield _table(number=numbers, data=texts)


def _table(**columns: list[Any]) -> pa.Table:
    """Values by column."""
    import pyarrow as pa

    return pa.table(columns)


def _answered(ray: Any, workers: RayWorkers, blocks: list[Any], arguments: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """Answers to blocks as they come.

    Args:
        ray: The package, connected.
        workers: Who answers.
        blocks: References to tables of lines.
        arguments: Of `_Worker`.

    Raises:
        ForetokenError: When a worker cannot be started, or cannot answer.
    """
    if not blocks:
        return
    uses_gpu = workers.uses_gpu if workers.uses_gpu is not None else ray.cluster_resources().get("GPU", 0) > 0
    data = ray.data.from_arrow_refs(blocks).map_batches(
        _Worker, fn_constructor_args=arguments, batch_size=None, batch_format="pyarrow", num_cpus=workers.num_cpus,
        num_gpus=1 if uses_gpu else None,
        compute=ray.data.ActorPoolStrategy(
            size=workers.number, max_concurrent_calls_per_actor=min(_BLOCKS_AT_ONCE, workers.max_in_flight),
            enable_true_multi_threading=True,
        ),
    )  # fmt: skip
    try:
        for table in data.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0):
            for answer in table["answer"].to_pylist():
                yield json.loads(answer)
    except (ray.exceptions.RayError, ray.data.exceptions.RayDataUserCodeException) as err:
        raise ForetokenError(f"the workers failed: {_reason(err)} Run the command again: it goes on.") from err


def _reason(error: BaseException) -> str:
    """The last line of an error that came from another process, as a sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{lines[-1].rstrip('.')}." if lines else f"{type(error).__name__}."


class _Worker:
    """Answers blocks of lines with an engine of its own, two of them at once."""

    def __init__(self, make_engine: Callable[[], AsyncLLM], model: str, chat_template: str | None) -> None:
        self._lines = LineAnswers(make_engine(), model, chat_template)

    def __call__(self, block: pa.Table) -> pa.Table:
        """Answers in the order of the lines, so that a block that is done again has the same ones."""
        lines = [Line(row["number"], row["data"]) for row in block.to_pylist()]
        return _table(answer=asyncio.run(self._answers(lines)))

    async def _answers(self, lines: list[Line]) -> list[bytes]:
        """The answers as JSON."""
        made = await asyncio.gather(*(self._lines.answer(line, parse_object(line.data or b"")) for line in lines))
        return [json.dumps(answer, ensure_ascii=False).encode() for answer in made]


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
        import ray.data
        import ray.exceptions
    except ImportError as err:
        raise ConfigError("Ray is not installed. Run in foretoken's repository: pip install '.[ray]'.") from err
    if ray.is_initialized():  # by who calls this, and who ends it
        yield _quiet(ray)
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
        yield _quiet(ray)
    finally:
        ray.shutdown()


def _quiet(ray: Any) -> Any:
    """The package, which tells nothing of how far it is: the caller of `run_ray_batch` is told."""
    ray.data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray
