"""Runs `foretoken …` through its entry point in this process: what a user calls, without importing torch anew."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from foretoken.cli.main import main

ROOT = Path(__file__).parents[2]
MODEL = "models/tinycode"


class Finished(NamedTuple):
    """What a call left behind."""

    returncode: int
    stdout: str
    stderr: str


def run(*arguments: str, stdin: str = "") -> Finished:
    """Calls the entry point from the repository's root."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        contextlib.chdir(ROOT),
        mock.patch.object(sys, "argv", ["foretoken", *arguments]),
        mock.patch.object(sys, "stdin", io.StringIO(stdin)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Finished(code, out.getvalue(), err.getvalue())
