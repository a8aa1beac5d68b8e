"""A progress line with rate and time left, for terminals."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from foretoken.cli import terminal


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Shows the progress of long work, from the first report on; what: names the counted things.

    Yields a function of (done, total).
    """
    from foretoken.bench.workload import no_progress

    if not sys.stderr.isatty():
        yield no_progress
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(),
    )  # fmt: skip
    bar = Progress(*columns, console=Console(stderr=True), transient=True)

    def show(done: int, total: int) -> None:
        if not bar.tasks:
            bar.add_task(what)
            bar.start()
        bar.update(bar.task_ids[0], completed=done, total=total)

    try:
        yield show
    finally:
        bar.stop()


@contextmanager
def step_progress(total: int) -> Iterator[Callable[[Any], None]]:
    """Shows a training run of `total` steps: one renewed line on a terminal, else a line now and then.

    Yields a function of a `StepReport`.
    """
    is_terminal, is_open, shown, evaluated = sys.stderr.isatty(), False, 0.0, ""  # is_open: the line has no end yet
    begin, begun_at = time.monotonic(), -1  # the clock, and the steps done at that time

    def show(report: Any) -> None:
        nonlocal shown, evaluated, begin, begun_at, is_open
        now = time.monotonic()
        is_first = begun_at < 0
        pace = (now - begin) / (report.step - (report.step - 1 if is_first else begun_at))
        if is_first:
            begin, begun_at = now, report.step  # the first step warms up and is not counted once there is another
        if report.held_out_tau is not None:
            evaluated = f"held-out tau {report.held_out_tau:.3f} (step {report.step})"
        if now - shown < (0.2 if is_terminal else 15.0) and report.step < total:
            return
        shown = now
        minutes, seconds = divmod(round(pace * (total - report.step) + (report.seconds_after or 0.0)), 60)
        parts = [
            f"step {report.step}/{total}",
            f"{minutes}:{seconds:02d} left",
            f"loss {report.loss:.4f}",
            *([evaluated] if evaluated else ()),
            f"matches {' '.join(f'{share:.0%}' for share in report.head_matches)}",
            f"{report.tokens_per_s:.0f} tokens/s",
            f"lr {report.rate:.1e}",
        ]
        terminal.side_output(f"\r\033[K{_fitted(parts)}" if is_terminal else f"{', '.join(parts)}\n")
        is_open = is_terminal and report.step < total
        if is_terminal and not is_open:
            terminal.side_output("\n")

    try:
        yield show
    finally:
        if is_open:
            terminal.side_output("\n")


def _fitted(parts: list[str]) -> str:
    """Joins the parts that fit a terminal line, the most important first: a wrapped line cannot be renewed."""
    room = shutil.get_terminal_size().columns - 1
    line = parts[0][:room]
    for part in parts[1:]:
        line += f", {part}" if len(line) + 2 + len(part) <= room else ""
    return line
