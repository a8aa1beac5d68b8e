"""Checks that a grammar compiles in limited time, in a process that can be ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from foretoken.core.errors import ForetokenError, one_line, undone_on_error
from foretoken.grammars import checking_process

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_LONGEST_S = 5.0  # to compile one grammar


class Form(NamedTuple):
    """The output form of a request.

    Attributes:
        kind: "json", "regex", "choice" or "grammar", as llguidance names them.
        text: The schema, expression, list of choices as JSON, or grammar.
        options: Of a schema, as JSON.
        before: What may come before the form, as the beginning of a rule in Lark's syntax.
    """

    kind: str
    text: str
    options: str = "{}"
    before: str = ""


class TooSlow(Exception):
    """Raised when a grammar takes too long to compile; the text is the limit."""


class GrammarChecks:
    """A process that compiles grammars: started for the first grammar, restarted after it ended. For one thread."""

    def __init__(self, setup: Callable[[], Mapping[str, Any]]) -> None:
        """Starts nothing yet.

        Args:
            setup: Returns the input of the process: `tokenizer`, as JSON of tokenizers, `vocab_size`, `eos_ids` and
                `limits`, of llguidance's `LLParserLimits`.
        """
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None
        self._owner = os.getpid()

    def grammar(self, form: Form) -> str:
        """Returns a form in llguidance's own syntax, after it was compiled once.

        Raises:
            ValueError: When the form does not compile.
            TooSlow: When compiling takes too long.
            ForetokenError: When the process cannot be started.
        """
        process = self._running()
        asked = {**form._asdict(), "options": json.loads(form.options), "longest_s": _LONGEST_S}
        with undone_on_error(self._end):  # after an interrupt its answer would be taken for that of the next grammar
            answer = _exchange(process, asked)
        if not answer:
            status = process.wait()
            self._end()
            if status == checking_process.TOOK_TOO_LONG:
                raise TooSlow(f"{_LONGEST_S:g} s")
            raise ValueError(f"the compiler crashes, exit status {status}")
        told = json.loads(answer)
        if "error" in told:
            raise ValueError(told["error"])
        return str(told["grammar"])

    def _running(self) -> subprocess.Popen[bytes]:
        """Returns the process; a forked child gets a process of its own."""
        if self._process is not None and self._owner == os.getpid() and self._process.poll() is None:
            return self._process
        self._end()
        setup = self._setup()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", checking_process.__file__],  # -P: not in the folder of its file
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process
            )
        except OSError as err:
            raise ForetokenError(
                f"the process that compiles grammars cannot be started: {one_line(err)}. Expected {sys.executable} to "
                "run. Leave structured_outputs out, or let this process start others."
            ) from err
        self._process, self._owner = process, os.getpid()
        self._end = weakref.finalize(self, _ended, process, self._owner)
        if _exchange(process, setup) != checking_process.READY:
            self._end()
            raise ForetokenError(
                f"the process that compiles grammars ended with exit status {process.returncode} before the first. "
                "Expected llguidance to load there. Leave structured_outputs out, or run in foretoken's "
                "repository: pip install --force-reinstall '.[serve]'."
            )
        return process


def _exchange(process: subprocess.Popen[bytes], line: Mapping[str, Any]) -> bytes:
    """Sends a line and returns the answer; empty if the process has ended."""
    assert process.stdin is not None, "it has pipes"
    assert process.stdout is not None, "it has pipes"
    try:
        process.stdin.write(json.dumps(line).encode() + b"\n")
        process.stdin.flush()
    except OSError:
        return b""
    return process.stdout.readline()


def _ended(process: subprocess.Popen[bytes], owner: int) -> None:
    """Ends the process, unless it belongs to the process that this one was forked from."""
    if owner == os.getpid():
        process.kill()
        process.communicate()
