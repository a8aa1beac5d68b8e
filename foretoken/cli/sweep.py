"""`foretoken sweep`: measures every combination of drafter and serving options; prints tables and draws pictures."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options, terminal
from foretoken.cli.terminal import ProgressBar
from foretoken.core.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.bench.grid import Point, Refused, Serving
    from foretoken.bench.sweep import PointResult, SweepPlan, SweepResults

_NAMES = "Name; may be repeated."


def sweep(
    model: Annotated[
        str,
        typer.Argument(
            parser=options.local_path,
            help="Target, as `foretoken bench` takes it; or the directory of a sweep, to show it again.",
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Directory of the results; the same command continues.")] = None,
    axes: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="KEY=VALUES",
            help="An axis: a key of speculative_config (dotted for an inner key) and comma-separated values. May be "
            "repeated.",
        ),
    ] = None,
    grid: Annotated[Path | None, typer.Option(help="Axes as a JSON or TOML file.")] = None,
    speculative_config: Annotated[
        list[str] | None,
        options.drafter_option(help="A drafter that the axes change, as `foretoken bench` takes it. May be repeated."),
    ] = None,
    *,
    asked: options.PromptOptions,
    batch_size: options.BatchSizes = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often every point is measured.")] = 1,
    together: Annotated[
        int,
        typer.Option(min=1, help="Points measured in turn with plain decoding; each holds a drafter and a KV cache."),
    ] = 4,
    seed: options.Seed = 0,
    dtype: Annotated[list[str] | None, typer.Option(metavar="NAME", help=f"{_NAMES} See `foretoken bench`.")] = None,
    device: options.Device = "auto",
    runner: Annotated[
        list[str] | None, typer.Option("--runner", metavar="NAME", help=f"{_NAMES} See `foretoken bench`.")
    ] = None,
    threads: options.Threads = None,
    wide: options.Wide = False,
    as_json: options.AsJson = False,
) -> None:
    """Measure every combination of drafters' options and ways of serving; show what tree nodes bring.

    Axes come from --sweep, from a file, or from a repeated --dtype, --runner, --batch-size or --temperature. A
    combination that a method refuses is named and left out. A few points at a time are measured in turn with plain
    decoding, batch of prompts by batch. Speed-up and tokens/s are medians over these rounds, with quartiles.

    Each point is written to results.jsonl as soon as it is measured; the same command continues an interrupted sweep.
    At the end the command writes a table, results.parquet and pictures, which need the extra `report`. In the table,
    `front by` marks the Pareto fronts of each dtype, runner, batch size and temperature: the points that reach their
    tau, or their tokens/s, with the fewest drafted nodes a pass.
    """
    from foretoken.bench.sweep import RESULTS, SweepResults

    if (Path(model) / RESULTS).is_file():
        _check_alone(out, axes, grid, speculative_config)
        _show(SweepResults(Path(model)), Path(model), wide=wide, as_json=as_json)
        return
    from foretoken.bench.grid import SETUP_AXIS, expand, joined_axes, parse_axis, read_grid
    from foretoken.bench.sweep import OUTPUT, SweepPlan

    if out is None:
        raise ConfigError("the results need a directory. Pass --out DIR.")
    OUTPUT.check(out, force=True)
    from_options = {
        "dtype": dtype, "runner": runner, "batch_size": batch_size, "temperature": asked.temperature,
        SETUP_AXIS: speculative_config,
    }  # fmt: skip
    given = joined_axes(
        read_grid(grid) if grid is not None else {},
        {key: values for key, values in from_options.items() if values},
        *(dict([parse_axis(text)]) for text in axes or ()),
    )
    given.setdefault("temperature", [0.0, 0.8])
    points, refused = expand(given, model)
    if not points:
        reasons = dict.fromkeys(each.reason for each in refused)
        raise ConfigError(f"every combination is refused: {' '.join(reasons)}")
    rows, first = asked.rows(), points[0].serving
    run = _Run(model, device, threads)
    workload = asked.workload(rows, *run.load_target(first.dtype), runner=first.runner)
    plan = SweepPlan(
        prompts=workload.prompts, max_tokens=asked.max_tokens, seed=seed, repeats=repeats, together=together
    )
    conditions = run.conditions(plan, first.dtype, prompts=asked.prompts) | {"axes": given}
    _measure(run, out, conditions, points, refused, plan)
    _show(SweepResults(out), out, wide=wide, as_json=as_json)


class _Run:
    def __init__(self, model: str, device: str, threads: int | None) -> None:
        self._model, self._device, self._threads = model, device, threads
        self._loaded: tuple[str, Any] = ("", None)

    def load_target(self, dtype: str) -> Any:
        if self._loaded[0] != dtype:
            self._loaded = ("", None)  # free the last weights before loading others
            loading = options.LoadOptions(dtype=dtype, device=self._device, threads=self._threads)
            self._loaded = (dtype, loading.load(self._model))
        return self._loaded[1]

    def conditions(self, plan: SweepPlan, dtype: str, *, prompts: str) -> dict[str, Any]:
        import hashlib

        from foretoken.bench.compare import processor_name
        from foretoken.formats.checkpoint import TargetFingerprint

        loaded, _ = self.load_target(dtype)
        header = options.run_header(
            loaded, processor=processor_name(), prompts=prompts, num_prompts=len(plan.prompts),
            max_tokens=plan.max_tokens, repeats=plan.repeats, seed=plan.seed,
        )  # fmt: skip
        del header["dtype"]  # dtype is an axis
        texts = hashlib.sha256("\0".join(map(str, plan.prompts)).encode()).hexdigest()[:16]
        target = TargetFingerprint.of(loaded).model_dump(mode="json", exclude={"name"})
        return {**header, "prompts_sha256": texts, "target": target}


def _check_alone(*others: object) -> None:
    if any(other is not None for other in others):
        raise ConfigError(
            "MODEL is the directory of a sweep, which is shown without measuring. Expected none of --out, --sweep, "
            "--grid and -s with it. To measure, pass the target as MODEL."
        )


def _measure(
    run: _Run, out: Path, conditions: dict[str, Any], points: Sequence[Point], refused: Sequence[Refused],
    plan: SweepPlan,
) -> None:  # fmt: skip
    """Measures the missing points; raises `typer.Exit` after SIGINT or SIGTERM, with all measured points kept."""
    from foretoken.bench.sweep import SweepResults, run_sweep
    from foretoken.files.processes import run_lock, stop_signals

    with run_lock(out, option="--out"), stop_signals() as received:
        results = SweepResults(out, conditions)
        for each in refused:
            results.refuse(each)
        for reason, number in Counter(each.reason for each in refused).items():
            terminal.print_note(f"{number} combination{'s' * (number > 1)} left out: {reason}")
        already = sum(map(results.holds, points))
        if already:
            terminal.print_note(f"{already} of {len(points)} points are measured; continuing")
        told = [False]
        with ProgressBar("batches") as on_progress:

            def advance(done: int, total: int) -> None:
                on_progress(done, total)
                if received and not told[0]:
                    told[0] = True
                    terminal.print_note("stopping after the current points")

            run_sweep(
                points, plan, results, run.load_target, on_progress=advance, on_results=_reporter(already, len(points)),
                on_refused=lambda each: terminal.print_note(f"left out: {each.point.setup.name}: {each.reason}"),
                is_stopped=lambda: bool(received),
            )  # fmt: skip
        left = sum(not results.holds(point) for point in points)
        if received and left:
            terminal.print_note(
                f"stopped with {left} of {len(points)} points left; the same command continues from '{out}'"
            )
            raise typer.Exit(128 + received[0])


def _reporter(already: int, total: int) -> Callable[[Sequence[PointResult]], None]:
    begin, done = time.monotonic(), 0

    def report(measured: Sequence[PointResult]) -> None:
        nonlocal done
        for result in measured:
            terminal.print_note(
                f"{result.name}: {result.tokens_per_s.median:.1f} tokens/s, {result.speed_up.median:.2f}x, tau "
                f"{result.tau:.2f}, {result.nodes:.1f} nodes ({_spelled(result.serving)})"
            )
        done += len(measured)
        seconds = (time.monotonic() - begin) / done
        minutes, rest = divmod(round(seconds * (total - already - done)), 60)
        terminal.print_note(
            f"{already + done} of {total} points, {60 / seconds:.1f} a minute, about {minutes}:{rest:02d} left"
        )

    return report


def _show(results: SweepResults, directory: Path, *, wide: bool, as_json: bool) -> None:
    from foretoken.bench.plots import write_plots
    from foretoken.bench.sweep import fronts, write_parquet

    panels = results.by_serving()
    if not panels:
        raise ConfigError(f"'{directory}' holds no measured point yet. Expected at least one. Run the sweep again.")
    marks = {
        serving: {name: set(front) for name, front in fronts(points).items()} for serving, points in panels.items()
    }
    rows = [
        {**result.as_columns(), **{f"on_{key.replace('/', '_per_')}_front": index in each for key, each in own.items()}}
        for (serving, points), own in zip(panels.items(), marks.values(), strict=True)
        for index, result in enumerate(points)
    ]
    facts = {"date": results.date, **results.conditions}
    what = ", ".join(
        [str(facts["model"]), str(facts["processor"]), f"{facts['threads']} CPU thread{'s' * (facts['threads'] > 1)}"]
    )
    files: list[Path] = []
    for make in (partial(write_parquet, rows, directory, facts), partial(write_plots, panels, directory, what)):
        try:
            files += make()
        except ConfigError as err:  # the table is useful without pictures
            terminal.print_note(str(err))
    if as_json:
        refused = [{"name": name, "reason": reason} for name, reason in results.refused.items()]
        options.print_json({
            **facts, "command": options.command_line(), "points": rows, "refused": refused,
            "files": [str(file) for file in files],
        })  # fmt: skip
        return
    terminal.conditions({key: value for key, value in facts.items() if key not in ("target", "axes")})
    for serving, points in panels.items():
        _print_table(serving, points, marks[serving], wide=wide)
    terminal.prose(
        "front by: no other point has as much tau, or as many tokens/s, with fewer drafted nodes a pass (Pareto front)"
    )
    for reason in dict.fromkeys(results.refused.values()):
        terminal.prose(f"left out: {reason}")
        for name in (name for name, its in results.refused.items() if its == reason):
            terminal.print_line(f"  {name}")
    if files:
        terminal.prose("written: " + ", ".join(str(file) for file in files))


def _print_table(serving: Serving, results: Sequence[PointResult], marks: dict[str, set[int]], *, wide: bool) -> None:
    rows = []
    for index, result in enumerate(results):
        rate, speed_up = result.tokens_per_s, result.speed_up
        more = [
            f"{result.tree_utilisation:.0%}", f"{result.declined:.0%}", f"{result.efficiency:.2f}",
            *(f"{result.shares[name]:.0%}" for name in ("draft", "verify", "host")),
            terminal.percent_by_depth(result.acceptance_by_depth),
        ]  # fmt: skip
        rows.append([
            result.name,
            f"{result.nodes:.1f}",
            f"{result.tau:.2f}",
            f"{rate.median:.1f}",
            f"{rate.low:.1f}-{rate.high:.1f}",
            f"{speed_up.median:.2f}",
            f"{speed_up.low:.2f}-{speed_up.high:.2f}",
            *(more if wide else ()),
            f"{result.num_identical}/{result.num_texts}",
            ", ".join(name for name, front in marks.items() if index in front),
        ])  # fmt: skip
    more_columns = ["used", "not drafted", "effic.", "draft", "verify", "host", "% at depth 1, 2, ..."] if wide else []
    columns = ["point", "nodes", "tau", "tokens/s", "quartiles", "speed-up", "quartiles", *more_columns, "same text"]
    plain = sum(result.plain_tokens_per_s.median for result in results) / len(results)
    title = f"{_spelled(serving)}; plain decoding {plain:.1f} tokens/s"
    terminal.print_table([*columns, "front by"], rows, title=title)


def _spelled(serving: Serving) -> str:
    return (
        f"dtype {serving.dtype}, runner {serving.runner}, batch size {serving.batch_size}, "
        f"temperature {serving.temperature:g}"
    )
