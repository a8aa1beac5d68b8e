"""`foretoken report`: makes one HTML page of traces and sweeps, readable offline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foretoken.cli import options, terminal


def report(
    run: Annotated[
        Path,
        typer.Argument(help="A file of `foretoken generate --trace`, or a directory with such files or with sweeps."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="The page. Default: RUN with the ending .html, or RUN/report.html."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the page.")] = False,
) -> None:
    """Show a generation token by token, with the tree of every iteration and why its nodes were rejected.

    The page is one file that needs no network: summary, text, trees, and the results and pictures of sweeps in RUN.
    """
    from foretoken.core.errors import ConfigError
    from foretoken.files.atomic_files import told_as, write_file
    from foretoken.report.page import render
    from foretoken.report.sources import read_run

    place = out or (run / "report.html" if run.is_dir() else run.with_suffix(".html"))
    found = read_run(run)
    options.check_new_file(place, "the page", force=force)
    with told_as(ConfigError, f"'{place}'", "Expected a place for a file that may be written to. Name one with --out."):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_file(place, render(found))
    terminal.say(str(place))
