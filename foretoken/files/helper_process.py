"""Processes that do untrusted work for this one: a line of JSON in, a line out, within limits of time and memory.

A thread could not end another thread that is busy in C or Rust, or that holds the interpreter's lock. The process ends
itself when an answer takes too long. `HelperProcess` is the end of this process, `serve` the end of the other one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ForetokenError, one_line, undone_on_error

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_READY = b"ready\n"
_TOOK_TOO_LONG = -signal.SIGALRM  # exit status


class TooSlow(Exception):
    """Raised when an answer takes too long; the text is the limit."""


class HelperProcess:
    """A process: started for the first question, kept, and restarted after it ended. For one thread at a time."""

    def __init__(self, program: str, work: str, advice: str, setup: Callable[[], Mapping[str, Any]] = dict) -> None:
        """Starts nothing yet.

        Args:
            program: Path of a Python file that calls `serve`.
            work: What the process does, such as "compiles grammars", for messages.
            advice: How to do without the process, for messages.
            setup: Returns what `serve` passes on. `most_bytes` in it bounds the memory of answers.
        """
        self._program, self._work, self._advice, self._setup = program, work, advice, setup
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self.end: Callable[[], object] = lambda: None  # ends the process

    @property
    def pid(self) -> int | None:
        """Id of the process; None before the first question."""
        return None if self._process is None else self._process.pid

    def ask(self, question: str, longest_s: float) -> dict[str, Any]:
        """Returns the answer to a question, both as JSON objects.

        Raises `TooSlow` after `longest_s`, `ValueError` with the answer's "error" or if the process crashes, and
        `ForetokenError` if the process cannot be started.
        """
        process = self._running()
        with undone_on_error(self.end):  # after an interrupt its answer would be taken for that of the next question
            line = _exchange(process, f"{longest_s} {question}")
        if not line:
            status = process.wait()
            self.end()
            if status == _TOOK_TOO_LONG:
                raise TooSlow(f"{longest_s:g} s")
            raise ValueError(f"the process that {self._work} crashed, exit status {status}")
        answer: dict[str, Any] = json.loads(line)
        if answer.pop("is_full", False):
            self.end()  # the next process has all of its memory again
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        """Returns the process; a forked child gets a process of its own."""
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        self.end()
        setup = self._setup()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", self._program],  # -P: not in the folder of its file
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process
            )
        except OSError as err:
            raise ForetokenError(
                f"the process that {self._work} cannot be started: {one_line(err)}. Expected {sys.executable} to run. "
                f"{self._advice}, or let this process start others."
            ) from err
        self._process, self._owner = process, os.getpid()
        self.end = weakref.finalize(self, _ended, process, self._owner)
        if _exchange(process, json.dumps(setup)) != _READY:
            self.end()
            raise ForetokenError(
                f"the process that {self._work} ended with exit status {process.returncode} before the first answer. "
                f"Expected its packages to load. {self._advice}, or run in foretoken's repository: "
                "pip install --force-reinstall '.[serve]'."
            )
        return process


def _exchange(process: subprocess.Popen[bytes], line: str) -> bytes:
    assert process.stdin is not None, "it has pipes"
    assert process.stdout is not None, "it has pipes"
    try:
        process.stdin.write(f"{line}\n".encode("utf-8", "surrogatepass"))
        process.stdin.flush()
    except OSError:
        return b""
    return process.stdout.readline()


def _ended(process: subprocess.Popen[bytes], owner: int) -> None:
    """Ends the process, unless it belongs to the process that this one was forked from."""
    if owner == os.getpid():
        process.kill()
        process.communicate()


def serve(prepared: Callable[[dict[str, Any]], Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """Answers questions until the input ends: the program of a `HelperProcess`.

    `prepared` gets the setup and returns a function that answers a question. The text of an exception is the answer's
    "error".
    """
    setup = json.loads(sys.stdin.buffer.readline())
    answer, most_bytes = prepared(setup), setup.get("most_bytes")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if most_bytes is not None:
        _bound_memory(most_bytes)
    _write(_READY)
    for line in sys.stdin.buffer:
        _write(_answered(answer, line, most_bytes or 0))


def _answered(answer: Callable[[dict[str, Any]], dict[str, Any]], line: bytes, most_bytes: int) -> bytes:
    longest_s, _, question = line.partition(b" ")
    try:
        asked = json.loads(question)
        signal.setitimer(signal.ITIMER_REAL, float(longest_s))  # the system ends the process, whatever code is busy
        return _as_line(answer(asked))
    except MemoryError:
        return _as_line({"error": f"it needs more than {most_bytes >> 20} MiB of memory", "is_full": True})
    except BaseException as err:  # noqa: BLE001 - among them the panics of Rust
        return _as_line({"error": one_line(err)})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _as_line(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _bound_memory(most_bytes: int) -> None:
    """Bounds the memory of this process to what it has now and `most_bytes`; where the system knows such a bound."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + most_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _write(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
