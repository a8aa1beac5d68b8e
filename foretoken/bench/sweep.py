"""Measures the points of a grid, some at a time in turn with plain decoding, and keeps each as soon as it is known."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from foretoken.bench.compare import measure_rounds, note_surprise
from foretoken.bench.grid import Refused
from foretoken.bench.setup_engines import SetupEngines
from foretoken.bench.sweep_results import PointResult
from foretoken.bench.workload import Workload, no_progress
from foretoken.core.errors import ForetokenError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from foretoken.bench.grid import Point, Serving
    from foretoken.bench.measurement import Measurement
    from foretoken.bench.sweep_results import SweepResults
    from foretoken.models.loading import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPlan:
    """What all points of a sweep have in common.

    Attributes:
        prompts: That every point decodes.
        max_tokens: Output tokens a prompt.
        seed: Of the first prompt; the i-th gets `seed + i`.
        repeats: How often each point is measured.
        together: Points that are measured in turn with one another and with plain decoding.
    """

    prompts: Sequence[str]
    max_tokens: int = 128
    seed: int = 0
    repeats: int = 1
    together: int = 4

    def workload(self, serving: Serving) -> Workload:
        """What the points of one serving decode."""
        return Workload(
            prompts=self.prompts, temperatures=(serving.temperature,), max_tokens=self.max_tokens, seed=self.seed
        )

    def num_batches(self, points: Iterable[Point]) -> int:
        """Batches that some points take, plain decoding's among them."""
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

    Points of one serving are measured a few at a time: each batch of prompts is decoded plainly and by each of them in
    turn before the next one, so that a drift of the machine's speed hits all alike, and each is held against plain
    decoding of the same batch at the same time.

    Args:
        points: Of a grid, by serving.
        plan: What is decoded.
        results: Gets every point as soon as it is measured.
        load: Gives target and tokenizer of a dtype; asked once for points with the same dtype in a row.
        on_progress: Called with batches done and batches in all, plain decoding's among them.
        on_results: Called with the points that were measured together.
        on_refused: Called with each point whose drafter or runner does not fit the target.
        is_stopped: Asked between points; when it says yes, the rest is left for the next time.
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
        gc.collect()  # weights of one dtype go before those of the next come


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
        """Measures points in turn with plain decoding.

        Args:
            points: Of this serving.
            on_measured: Called after each batch of each point.
            on_refused: Called with points that do not fit the target; they have no result.
        """
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
        """The engines, plain decoding's alone at first.

        Raises:
            ForetokenError: When the target cannot be decoded so.
        """
        if self._engines is None:
            serving = self._serving
            self._engines = SetupEngines(
                self._model, self._tokenizer, [], self._workload, batch_size=serving.batch_size, runner=serving.runner
            )
        return self._engines


def _result(point: Point, row: Measurement, plain: Measurement) -> tuple[Point, PointResult]:
    return point, PointResult.of(point, row, plain)


def _groups(points: Sequence[Point], size: int) -> Iterator[Sequence[Point]]:
    """A few points at a time."""
    for begin in range(0, len(points), size):
        yield points[begin : begin + size]
