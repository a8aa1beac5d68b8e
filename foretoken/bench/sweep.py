"""Sweeps: measures the points of a grid, a few at a time in turn with plain decoding, and keeps each at once.

Results are lines of a journal, one a point, and are compared among the points of one serving.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from foretoken.bench.compare import Measurement, SetupEngines, measure_rounds, note_surprise
from foretoken.bench.grid import Point, Refused, Serving
from foretoken.bench.workload import Asked, Workload
from foretoken.core.errors import ConfigError, ForetokenError
from foretoken.files.atomic_files import JournalFile, OutputDirectory, is_begun, new_file, told_as
from foretoken.files.processes import is_lock

if TYPE_CHECKING:
    from foretoken.models.loaded import LoadedModel


@dataclass(frozen=True, slots=True)
class Quartiles:
    """A median between the first and the third quartile."""

    median: float
    low: float
    high: float

    @classmethod
    def of_values(cls, values: Iterable[float]) -> Quartiles:
        """Returns the quartiles of at least one value, with linear interpolation between values."""
        known = list(values)
        if len(known) == 1:
            return cls(known[0], known[0], known[0])
        low, middle, high = quantiles(known, n=4, method="inclusive")
        return cls(middle, low, high)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the indices of the (cost, value) points that no other point beats, by ascending cost.

    A point beats another when it costs no more and brings no less, and is better in one of the two. Equal points do not
    beat each other and keep their order. Raises `ValueError` for a number that is not finite.
    """
    if not all(math.isfinite(number) for point in points for number in point):
        raise ValueError("points of a Pareto front must be finite")
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if not front or points[index][1] > points[front[-1]][1] or points[index] == points[front[-1]]:
            front.append(index)
    return front


RESULTS = "results.jsonl"


def _holds_sweep(directory: Path) -> bool:
    """Whether a directory holds results, or only what a run leaves that was killed before the first line."""
    own = (is_lock(path) or is_begun(path, RESULTS) for path in directory.iterdir())
    return (directory / RESULTS).is_file() or all(own)


OUTPUT = OutputDirectory("results of a sweep", _holds_sweep)
TAU_FRONT, SPEED_FRONT = "tau", "tokens/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class PointResult:
    """The measurement of one point. A round is a batch of prompts; figures with quartiles are medians over rounds."""

    name: str
    method: str  # the drafter before the axes changed it
    changes: dict[str, Any]  # the values that the axes set in it, by dotted key
    serving: Serving  # the requested settings of decoding
    speculative_config: dict[str, Any]
    runner: str
    runner_choice: str  # why that runner, in a sentence
    num_rounds: int  # batches of prompts, over all repeats
    tokens_per_s: Quartiles  # output tokens per second of decoding, without prefill
    plain_tokens_per_s: Quartiles  # the same for plain decoding in the same rounds
    speed_up: Quartiles  # ratio of the two, round by round
    tau: float  # tokens per target pass over all passes, the target's own included
    tau_by_round: Quartiles
    nodes: float  # drafted nodes per target pass, mean
    tree_utilisation: float  # accepted share of the drafted nodes
    acceptance_by_depth: list[float] = field(default_factory=list)  # P(accepted at d | the tree reached d), d = 1, …
    declined: float  # share of the passes in which the controller chose not to draft
    efficiency: float  # speed-up over tau
    shares: dict[str, float]  # shares of the time of decoding in "draft", "verify" and "host"
    num_identical: int  # texts equal to plain decoding's, of `num_texts`
    num_texts: int
    nats_per_token: float | None  # see `Measurement`
    draft_errors: int  # passes with a draft that was dropped because the drafter failed

    @classmethod
    def of_measurement(cls, point: Point, measured: Measurement, plain: Measurement) -> PointResult:
        """Makes the result from the rounds of a point and of plain decoding."""
        metrics = measured.metrics
        return cls(
            name=point.setup.name,
            method=point.method,
            changes=dict(point.changes),
            serving=point.serving,
            speculative_config=dict(point.setup.config or {}),
            runner=measured.runner,
            runner_choice=measured.runner_choice,
            num_rounds=len(measured.seconds),
            tokens_per_s=Quartiles.of_values(measured.rates),
            plain_tokens_per_s=Quartiles.of_values(plain.rates),
            speed_up=Quartiles.of_values(measured.speed_ups),
            tau=measured.tau,
            tau_by_round=Quartiles.of_values(measured.taus),
            nodes=metrics.tree_nodes,
            tree_utilisation=metrics.tree_utilisation,
            acceptance_by_depth=metrics.acceptance_by_depth,
            declined=metrics.num_declined / max(metrics.steps, 1),
            efficiency=measured.efficiency,
            shares=measured.wall_shares,
            num_identical=measured.num_identical or 0,
            num_texts=len(measured.texts),
            nats_per_token=measured.nats_per_token,
            draft_errors=metrics.draft_errors,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PointResult:
        """Reads a line of the journal; raises `TypeError` for any other mapping."""
        types: dict[str, Any] = dict.fromkeys(
            ("tokens_per_s", "plain_tokens_per_s", "speed_up", "tau_by_round"), Quartiles
        )
        read = {key: kind(**values[key]) for key, kind in {**types, "serving": Serving}.items() if key in values}
        return cls(**{**values, **read})

    def as_columns(self) -> dict[str, Any]:
        """Returns all values under dotted names, for tables: numbers, text, and one list of numbers."""
        return _flat(asdict(self))


class SweepResults:
    """The results of a sweep in its directory, which began on `date`."""

    def __init__(self, directory: Path, conditions: Mapping[str, Any] | None = None) -> None:
        """Opens or creates the results; removes a line that an interruption cut off.

        `conditions` are JSON-ready; None opens existing results with any conditions. Raises `ConfigError` for results
        of other conditions, for damaged results, and for missing results if `conditions` is None.
        """
        path = directory / RESULTS
        self._file = JournalFile(path, conditions, advice="Choose another directory, or remove this one.")
        self.conditions, self.date = self._file.conditions, self._file.date
        self.points: list[PointResult] = []  # in the order of measuring
        self.refused: dict[str, str] = {}  # name and reason of points that cannot be measured
        self._done: set[str] = set()
        try:
            for line in self._file.lines:
                self._keep_line(line)
        except (TypeError, KeyError) as err:
            raise ConfigError(
                f"'{path}' has a line that is not a point of a sweep. Expected results that this version wrote. Choose "
                "another directory, or remove this one."
            ) from err

    def holds(self, point: Point) -> bool:
        """Returns whether a point is measured."""
        return point.key in self._done

    def add(self, point: Point, result: PointResult) -> None:
        """Writes a point's result to disk."""
        self._add_line({"key": point.key, "result": asdict(result)})

    def refuse(self, refused: Refused) -> None:
        """Writes why a point cannot be measured, unless that is known; a later run may measure the point."""
        name = refused.point.setup.name
        if self.refused.get(name) != refused.reason:
            self._add_line({"refused": name, "reason": refused.reason})

    def by_serving(self) -> dict[Serving, list[PointResult]]:
        """Returns comparable points, the fastest first; servings in the order of measuring."""
        found: dict[Serving, list[PointResult]] = {}
        for result in self.points:
            found.setdefault(result.serving, []).append(result)
        return {key: sorted(each, key=lambda r: -r.tokens_per_s.median) for key, each in found.items()}

    def _add_line(self, line: dict[str, Any]) -> None:
        self._file.add(line)
        self._keep_line(self._file.lines[-1])

    def _keep_line(self, line: Mapping[str, Any]) -> None:
        if "refused" in line:
            self.refused[str(line["refused"])] = str(line["reason"])
            return
        result = PointResult.from_dict(line["result"])
        self._done.add(str(line["key"]))
        self.refused.pop(result.name, None)
        self.points.append(result)


def fronts(results: Sequence[PointResult]) -> dict[str, list[int]]:
    """Returns the Pareto fronts over drafted nodes per pass, for points of one serving.

    Indices into `results` by ascending nodes: "tau" for the points that reach their tau with the fewest nodes,
    "tokens/s" for those that reach their speed with the fewest.
    """
    return {
        TAU_FRONT: pareto_front([(result.nodes, result.tau) for result in results]),
        SPEED_FRONT: pareto_front([(result.nodes, result.tokens_per_s.median) for result in results]),
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """The settings of a sweep: `together` points are measured in turn; prompt i gets `seed + i`."""

    prompts: Sequence[Asked]
    max_tokens: int = 128
    seed: int = 0
    repeats: int = 1
    together: int = 4

    def workload(self, serving: Serving) -> Workload:
        """Returns the workload of one serving."""
        return Workload(
            prompts=self.prompts, temperatures=(serving.temperature,), max_tokens=self.max_tokens, seed=self.seed
        )

    def num_batches(self, points: Iterable[Point]) -> int:
        """Returns the number of batches for some points, with plain decoding's."""
        total = 0
        for serving, own in groupby(points, key=lambda point: point.serving):
            for group in _groups(list(own), self.together):
                total += self.repeats * len(self.workload(serving).batches(serving.batch_size)) * (len(group) + 1)
        return total


def run_sweep(
    points: Sequence[Point],
    plan: SweepPlan,
    results: SweepResults,
    load: Callable[[str], tuple[LoadedModel, Any]],
    *,
    on_progress: Callable[[int, int], None],
    on_results: Callable[[Sequence[PointResult]], None],
    on_refused: Callable[[Refused], None],
    is_stopped: Callable[[], bool],
) -> None:
    """Measures the points that the results lack.

    Points of one serving are measured a few at a time. Each batch of prompts is decoded plainly and by each point in
    turn before the next batch, so that a drift of the machine's speed affects all alike. Each point is compared with
    plain decoding of the same batch at the same time.

    Args:
        results: Takes every point as soon as it is measured.
        load: Returns target and tokenizer for a dtype; called once for consecutive points with one dtype.
        on_progress: Called with batches done and batches in all, plain decoding's included.
        on_results: Called with the points that were measured together.
        on_refused: Called with each point that does not fit the target.
        is_stopped: Called between points; True leaves the rest for the next run.
    """
    missing = [point for point in points if not results.holds(point)]
    done, total = 0, plan.num_batches(missing)
    on_progress(done, total)

    def count() -> None:
        nonlocal done
        done += 1
        on_progress(done, total)

    def refuse(point: Point, err: ForetokenError) -> None:
        refused = Refused(point, str(err))
        results.refuse(refused)
        on_refused(refused)

    for dtype, of_dtype in groupby(missing, key=lambda point: point.serving.dtype):
        model, tokenizer = load(dtype)
        for serving, own in groupby(of_dtype, key=lambda point: point.serving):
            measuring = _Serving(model, tokenizer, serving, plan)
            for group in _groups(list(own), plan.together):
                if is_stopped():
                    return
                after = done + plan.num_batches(group)
                measured = measuring.measure(group, on_measured=count, on_refused=refuse)
                for point, result in measured:
                    results.add(point, result)
                if measured:
                    on_results([result for _, result in measured])
                done = after  # refused points take no time
                on_progress(done, total)
        del model, tokenizer, measuring
        gc.collect()  # free the weights of one dtype before the next is loaded


class _Serving:
    def __init__(self, model: LoadedModel, tokenizer: Any, serving: Serving, plan: SweepPlan) -> None:
        self._model, self._tokenizer, self._serving, self._plan = model, tokenizer, serving, plan
        self._workload = plan.workload(serving)
        self._engines: SetupEngines | None = None

    def measure(
        self,
        points: Sequence[Point],
        *,
        on_measured: Callable[[], None],
        on_refused: Callable[[Point, ForetokenError], None],
    ) -> list[tuple[Point, PointResult]]:
        fitting: dict[str, Point] = {}
        for point in points:
            try:
                self._ready().add(point.setup)
                fitting[point.setup.name] = point
            except ForetokenError as err:
                on_refused(point, err)
        if not fitting:
            return []
        engines = self._ready()
        batches = self._workload.batches(self._serving.batch_size)
        plain, *rows = measure_rounds(
            engines, self._serving.temperature, batches, repeats=self._plan.repeats, on_measured=on_measured
        )
        if engines.is_lossy:
            note_surprise(self._model, self._tokenizer, self._workload, rows)
        for name in fitting:
            engines.remove(name)
        return [(fitting[row.setup], PointResult.of_measurement(fitting[row.setup], row, plain)) for row in rows]

    def _ready(self) -> SetupEngines:
        if self._engines is None:
            serving = self._serving
            self._engines = SetupEngines(
                self._model, self._tokenizer, [], self._workload, batch_size=serving.batch_size, runner=serving.runner
            )
        return self._engines


def _groups(points: Sequence[Point], size: int) -> Iterator[Sequence[Point]]:
    for begin in range(0, len(points), size):
        yield points[begin : begin + size]


def write_parquet(rows: Sequence[Mapping[str, Any]], directory: Path, facts: Mapping[str, Any]) -> list[Path]:
    """Writes or replaces the table of a directory, results.parquet, for pandas, polars or DuckDB; returns the file.

    Args:
        rows: Values by column: numbers, text, booleans, None, or lists of numbers. Missing values are null. A column of
            several types, such as trees given by name and by shape, is written as JSON text.
        directory: The directory of the table.
        facts: JSON-ready conditions of all rows, stored as JSON text under "foretoken" in the metadata of the file.

    Raises:
        ConfigError: When pyarrow is not installed, or the file cannot be written.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as err:
        raise ConfigError(
            "a parquet table needs the package 'pyarrow', which is not installed. Run in foretoken's "
            "repository: pip install '.[report]'."
        ) from err
    path = directory / "results.parquet"
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.table({name: _column([row.get(name) for row in rows]) for name in names})
    table = table.replace_schema_metadata({"foretoken": json.dumps(facts)})
    with told_as(ConfigError, f"'{path}'", "Expected room for the table. Make some."), new_file(path) as new:
        pq.write_table(table, new)
    return [path]


def _column(values: list[Any]) -> list[Any]:
    """Returns values of one type: numbers, text, booleans or number lists as they are, mixtures as JSON text."""
    known = [value for value in values if value is not None]
    kinds = {type(value) for value in known}
    if kinds <= {int, float}:
        return [None if value is None else float(value) for value in values] if float in kinds else values
    if len(kinds) == 1 and not kinds & {dict, list, tuple}:
        return values
    if kinds == {list} and all(type(entry) in (int, float) for value in known for entry in value):
        return values
    return [None if value is None else json.dumps(value) for value in values]
