"""A progress line with rate and time left, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from foretoken.cli import terminal


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Shows how far long work is.

    Args:
        what: What is counted.

    Yields:
        A function of (done, total).
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
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def step_progress(total: int) -> Iterator[Callable[[Any], None]]:
    """Shows a training run: a line that renews itself on a terminal, else a line now and then.

    Args:
        total: Steps of the whole run.

    Yields:
        A function of a `StepReport`.
    """
    import time

    is_terminal, shown, evaluated = sys.stderr.isatty(), [0.0], [""]

    def show(report: Any) -> None:
        now = time.monotonic()
        if report.held_out_tau is not None:
            evaluated[0] = f" held-out tau {report.held_out_tau:.3f} (step {report.step})"
        if now - shown[0] < (0.2 if is_terminal else 15.0) and report.step < total:
            return
        shown[0] = now
        minutes, seconds = divmod(int(report.seconds_left), 60)
        matches = " ".join(f"{share:.3f}" for share in report.head_matches)
        line = (
            f"step {report.step}/{total} loss {report.loss:.4f} matches [{matches}]{evaluated[0]} lr {report.rate:.2e} "
            f"{report.tokens_per_s:.0f} tokens/s left {minutes}:{seconds:02d}"
        )
        terminal.side_output(f"\r\033[K{line}" if is_terminal else f"{line}\n")

    yield show
    if is_terminal:
        terminal.side_output("\n")
