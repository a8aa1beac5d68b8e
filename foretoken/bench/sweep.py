"""Measures the points of a grid, a few at a time in turn with plain decoding, and keeps each at once."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from foretoken.bench.compare import measure_rounds, note_surprise
from foretoken.bench.grid import Refused
from foretoken.bench.sweep_results import PointResult
from foretoken.bench.workload import SetupEngines, Workload, no_progress
from foretoken.core.errors import ForetokenError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from foretoken.bench.grid import Point, Serving
    from foretoken.bench.measurement import Measurement
    from foretoken.bench.sweep_results import SweepResults
    from foretoken.models.loading import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """The settings that all points of a sweep share.

    Attributes:
        prompts: Prompts that every point decodes.
        max_tokens: Output tokens a prompt.
        seed: Seed of the first prompt; the i-th gets `seed + i`.
        repeats: How often each point is measured.
        together: Points that are measured in turn with one another and with plain decoding.
    """

    prompts: Sequence[str]
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
    on_progress: Callable[[int, int], None] = no_progress,
    on_results: Callable[[Sequence[PointResult]], None] | None = None,
    on_refused: Callable[[Refused], None] | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Measures the points that the results lack.

    Points of one serving are measured a few at a time. Each batch of prompts is decoded plainly and by each point in
    turn before the next batch, so that a drift of the machine's speed affects all alike. Each point is compared with
    plain decoding of the same batch at the same time.

    Args:
        points: Points of a grid, by serving.
        plan: The settings of the sweep.
        results: Takes every point as soon as it is measured.
        load: Returns target and tokenizer for a dtype; called once for consecutive points with one dtype.
        on_progress: Called with batches done and batches in all, plain decoding's included.
        on_results: Called with the points that were measured together.
        on_refused: Called with each point whose drafter or runner does not fit the target.
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
        if on_refused is not None:
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
                if on_results is not None and measured:
                    on_results([result for _, result in measured])
                done = after  # refused points take no time
                on_progress(done, total)
        del model, tokenizer, measuring
        gc.collect()  # free the weights of one dtype before the next is loaded


class _Serving:
    """The engines of one serving; plain decoding's is made once."""

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
        """Measures points in turn with plain decoding; points that do not fit the target have no result."""
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
        return [_result(fitting[row.setup], row, plain) for row in rows]

    def _ready(self) -> SetupEngines:
        """Returns the engines, at first with plain decoding alone."""
        if self._engines is None:
            serving = self._serving
            self._engines = SetupEngines(
                self._model, self._tokenizer, [], self._workload, batch_size=serving.batch_size, runner=serving.runner
            )
        return self._engines


def _result(point: Point, row: Measurement, plain: Measurement) -> tuple[Point, PointResult]:
    return point, PointResult.of(point, row, plain)


def _groups(points: Sequence[Point], size: int) -> Iterator[Sequence[Point]]:
    for begin in range(0, len(points), size):
        yield points[begin : begin + size]
