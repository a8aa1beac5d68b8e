"""Running cases in a child process, so that a crash or a hang is one finding and the other cases go on.

The parent sends the number of a case; the child answers with what it is about to do, as often as it likes, and then
with the case's result. Before a child that is stuck is killed, it writes where each of its threads stands.
"""

import contextlib
import faulthandler
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from made_once import shared_folder

from foretoken.core.errors import ForetokenError

LONGEST_MESSAGE = 1000  # characters: every missing and unexpected key of a head is named
_SHOWN = 6000  # characters of a crashed child's last words


class FindingError(AssertionError):
    """A case that did not do what it should."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all cases of a run share.

    Attributes:
        seed: Of the run; with a case's number it decides everything in the case.
        runner: Of the target, see `LLM`.
        dtype: Of the target, by name.
        limit_s: Seconds after which a case counts as stuck.
    """

    seed: int = 0
    runner: str = "lean-native"
    dtype: str = "bfloat16"
    limit_s: float = 120.0


@dataclass
class Case:
    """One case on its way.

    Attributes:
        number: Which.
        settings: Of the run.
        rng: Its random numbers.
        note: Tells the parent what comes next, as a line of Python where that is possible.
        size: Requests that it made, for counts.
        counts: How often something happened, by its name.
    """

    number: int
    settings: Settings
    rng: random.Random
    note: Callable[[str], None] = lambda text: None
    size: int = 1
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, what: str) -> None:
        """Counts one of something."""
        self.counts[what] = self.counts.get(what, 0) + 1


class Report(NamedTuple):
    """What became of a case.

    Attributes:
        number: Which.
        finding: What was wrong, or None.
        doing: What it did when it went wrong.
        size: See `Case`.
        counts: See `Case`.
    """

    number: int
    finding: str | None
    doing: str
    size: int
    counts: dict[str, int]


def check_refusal(error: ForetokenError) -> None:
    """Raises `FindingError` unless an error's message is one line of valid text and not too long."""
    message = str(error)
    try:
        message.encode()
    except UnicodeEncodeError as err:
        raise FindingError(f"the message cannot be printed: {message!a}") from err
    if not message or "\n" in message or len(message) >= LONGEST_MESSAGE:
        raise FindingError(
            f"the message has {len(message)} characters, {message.count(chr(10)) + 1} lines: {message!a}"
        )


def run_cases(
    run: Callable[[Case], None], name: str, numbers: Iterable[int], settings: Settings = Settings()
) -> Iterator[Report]:
    """Runs cases of a target one after another, with a new child after each crash and each case that hangs.

    Args:
        run: The target; whatever it raises is a finding.
        name: Of the target.
        numbers: Of the cases.
        settings: Of the run.
    """
    shared_folder()  # which goes with this process: children are killed
    child = None
    try:
        for number in numbers:
            child = child or _Child(run, name, settings)
            report = child.report(number)
            if report is None:
                report, child = child.autopsy(number), None
            yield report
    finally:
        if child is not None:
            child.stop()


class _Child:
    """A forked process that runs cases."""

    def __init__(self, run: Callable[[Case], None], name: str, settings: Settings) -> None:
        self._settings, self._doing = settings, ""
        handle, path = tempfile.mkstemp(prefix="foretoken-fuzz-")
        os.close(handle)
        self._output = Path(path)
        context = multiprocessing.get_context("fork")  # inherits what is imported: a new child takes no time
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._connection, run, name, settings, self._output)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads of a test run hold nothing of ours
            self._process.start()
        theirs.close()
        self._is_stuck = False

    def report(self, number: int) -> Report | None:
        """Runs a case; None when the child died of it or is stuck."""
        self._doing = ""
        try:
            self._connection.send(number)
            while self._connection.poll(self._settings.limit_s):
                answer = self._connection.recv()
                if isinstance(answer, Report):
                    return answer._replace(doing=self._doing if answer.finding else "")
                self._doing = answer
        except (EOFError, OSError):
            return None
        self._is_stuck = True
        return None

    def autopsy(self, number: int) -> Report:
        """What became of a case without a report; the child is gone afterwards."""
        if self._is_stuck and self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGABRT)  # makes it write where it is
        self._process.join(5)
        what = f"no answer within {self._settings.limit_s:g} s" if self._is_stuck else self._cause()
        words = self._output.read_text(errors="replace").partition("\nExtension modules:")[0][-_SHOWN:]
        self.stop()
        return Report(number, f"{what}\n{words}".rstrip(), self._doing, 1, {})

    def stop(self) -> None:
        """Ends the child."""
        self._connection.close()
        self._process.join(2)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._output.unlink(missing_ok=True)

    def _cause(self) -> str:
        """How the child ended."""
        code = self._process.exitcode
        return f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"


def _serve(
    connection: Connection,
    parents: Connection,
    run: Callable[[Case], None],
    name: str,
    settings: Settings,
    output: Path,
) -> None:
    """The child: answers each number with a report until the parent hangs up."""
    parents.close()  # its end of the pipe, which nobody else may hold open
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        faulthandler.enable(file, all_threads=True)
        with contextlib.suppress(EOFError, BrokenPipeError):
            while True:
                connection.send(_result(run, name, connection.recv(), settings, connection.send))
                file.truncate(0)


def _result(
    run: Callable[[Case], None], name: str, number: int, settings: Settings, note: Callable[[Any], None]
) -> Report:
    """One case's report."""
    rng = random.Random(f"{name} {settings.seed} {number}")
    case = Case(number=number, settings=settings, rng=rng, note=note)
    finding = None
    try:
        run(case)
    except FindingError as err:
        finding = str(err)
    except Exception:  # noqa: BLE001 - whatever escapes is the finding
        finding = "".join(traceback.format_exc()[-_SHOWN:])
    return Report(number, finding, "", case.size, case.counts)
