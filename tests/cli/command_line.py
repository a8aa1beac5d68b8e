"""Runs `foretoken …` through its entry point in this process: what a user calls, without importing torch anew."""

import contextlib
import functools
import io
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO
from unittest import mock

import typer.main

from foretoken.cli.main import main

# Typer builds all commands at every call, 60 ms each time. They hold no state, so one build serves all calls.
typer.main.get_command = functools.cache(typer.main.get_command)

ROOT = Path(__file__).parents[2]
MODEL = "models/tinycode"


class Finished(NamedTuple):
    """What a call left behind."""

    returncode: int
    stdout: str
    stderr: str


class Terminal(io.StringIO):
    """An output stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def run_process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs Python with arguments in a process of its own, from the repository's root; options: of `subprocess.run`."""
    options = {"capture_output": "stdout" not in options, "timeout": 120, "text": True, "check": False} | options
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, **options)  # noqa: PLW1510 - see above


def run_main(setup: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python code, then the entry point with arguments, in a process of its own."""
    code = f"import sys; sys.argv = {['foretoken', *arguments]}\n{setup}\nfrom foretoken.cli.main import main\nmain()"
    return run_process("-c", code)


def run(
    *arguments: str, stdin: str | bytes | BinaryIO = "", stderr: TextIO | None = None, is_terminal: bool = False
) -> Finished:
    """Calls the entry point from the repository's root.

    Args:
        arguments: After `foretoken`.
        stdin: Standard input.
        stderr: Standard error; by default kept for the result.
        is_terminal: Whether standard output is a terminal.
    """
    out, err, code = Terminal() if is_terminal else io.StringIO(), io.StringIO(), 0
    on_interrupt = signal.getsignal(signal.SIGINT)
    stdin = stdin.encode() if isinstance(stdin, str) else stdin
    given = io.TextIOWrapper(io.BytesIO(stdin) if isinstance(stdin, bytes) else stdin, encoding="utf-8")
    with (
        contextlib.chdir(ROOT),
        mock.patch.object(sys, "argv", ["foretoken", *arguments]),
        mock.patch.object(sys, "stdin", given),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(stderr or err),
    ):
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            given.detach()  # what was passed is closed by who opened it
            signal.signal(signal.SIGINT, on_interrupt)  # a process of its own would end now
    return Finished(code, out.getvalue(), err.getvalue())


def done(*arguments: str, code: int = 0, **options: Any) -> Finished:
    """A call that must end with an exit code."""
    result = run(*arguments, **options)
    assert result.returncode == code, result.stdout + result.stderr
    return result


def output_of(*arguments: str, **options: Any) -> str:
    """Standard output of a call, see `done`."""
    return done(*arguments, **options).stdout


def report_of(*arguments: str, **options: Any) -> dict[str, Any]:
    """The JSON object that a call prints, see `done`."""
    report: dict[str, Any] = json.loads(output_of(*arguments, "--json", **options))
    return report


def refused(*arguments: str, **options: Any) -> str:
    """What a call says that must be refused, on standard error alone and without a traceback."""
    result = done(*arguments, code=2, **options)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def assert_refused(parts: str | Sequence[str], *arguments: str, **options: Any) -> None:
    """A call that must fail says all of some parts, in one line."""
    told = refused(*arguments, **options)
    errors = [line for line in told.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, told
    for part in [parts] if isinstance(parts, str) else parts:
        assert part in told
