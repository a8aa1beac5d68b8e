"""What processes and threads share: locks, stop signals, memory that stays, and helper processes for untrusted work.

A helper process reads a line of JSON and answers with one, within limits of time and memory. A thread could not end
another thread that is busy in C or Rust, or that holds the interpreter's lock. `HelperProcess` is this process's end,
`serve` the other one's. Helper programs import this module, so it imports `filelock` and `ctypes` only where needed.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from foretoken.core.errors import ConfigError, ForetokenError, one_line, undone_on_error

_ENDING_SECONDS = 0.5  # waits for a run that is just ending; a choice


@contextmanager
def file_lock(path: Path, *, refusal: str) -> Iterator[None]:
    """Holds a lock file for this run alone during the block; raises `ConfigError(refusal)` if another run holds it.

    The system releases the lock at the end of the process. The holder removes the file, so finished runs leave none.
    Another process may have opened the removed file: `filelock` then sees no links, and opens the name anew.
    """
    from filelock import FileLock, SoftFileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=_ENDING_SECONDS)
    except Timeout as err:
        raise ConfigError(refusal) from err
    try:
        yield
    finally:
        if not isinstance(lock, SoftFileLock):  # a soft lock is the file itself
            with suppress(OSError):  # Windows keeps open files; the library removes it there
                path.unlink()
        lock.release()


_LOCK = "run.lock"


def is_lock(path: Path) -> bool:
    """Whether a file is the lock of `run_lock`, left by a killed process."""
    return path.name == _LOCK


@contextmanager
def run_lock(directory: Path, *, option: str) -> Iterator[None]:
    """Holds a directory, made if needed, for this run alone; raises `ConfigError` if another run holds it."""
    directory.mkdir(parents=True, exist_ok=True)
    refusal = (
        f"another run is at work in '{directory}'. Expected one at a time. Wait for it, or choose another {option}."
    )
    with file_lock(directory / _LOCK, refusal=refusal):
        yield


class ForkLock:
    """A lock for short work that a forked child finds released, as a context manager."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _alive.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()


_alive: weakref.WeakSet[ForkLock] = weakref.WeakSet()


def _after_fork() -> None:
    """Renews the locks in a forked child; only the forking thread lives on there."""
    for lock in _alive:
        lock._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collects the numbers of stop signals in a list instead of ending the process; works in the main thread alone."""
    received: list[int] = []
    try:
        before = {number: signal.signal(number, lambda got, _: received.append(got)) for number in STOP_SIGNALS}
    except ValueError:  # not the main thread: the calling program handles signals
        before = {}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_NEVER, _LARGE = 2**31 - 1, 1 << 30  # bytes
_LARGEST_OF_OLD = 32 << 20  # bytes; glibc before 2.35 accepts no more


def keep_freed_memory() -> bool:
    """Makes the whole process keep freed memory, up to about its peak; returns False if the C library is not glibc."""
    import ctypes

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # Both are needed: the trim threshold alone would only switch off glibc's own tuning.
    if not (mallopt(_MMAP_THRESHOLD, _LARGE) or mallopt(_MMAP_THRESHOLD, _LARGEST_OF_OLD)):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _NEVER))


def start_python(*arguments: str, name: str, advice: str, error: type[ForetokenError]) -> subprocess.Popen[bytes]:
    """Starts a Python process with pipes, which Ctrl-C does not reach; raises `error` if the system refuses.

    Messages call the process `name`; `advice` says how to do without it.
    """
    try:
        return subprocess.Popen(
            [sys.executable, "-P", *arguments],  # -P: not in the folder of its file
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as err:
        raise error(
            f"{name} cannot be started: {one_line(err)}. Expected {sys.executable} to run. {advice}, or let this "
            "process start others."
        ) from err


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
        self._program, self._name, self._advice, self._setup = program, f"the process that {work}", advice, setup
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
            raise ValueError(f"{self._name} crashed, exit status {status}")
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
        process = start_python(self._program, name=self._name, advice=self._advice, error=ForetokenError)
        self._process, self._owner = process, os.getpid()
        self.end = weakref.finalize(self, _end, process, self._owner)
        if _exchange(process, json.dumps(setup)) != _READY:
            self.end()
            raise ForetokenError(
                f"{self._name} ended with exit status {process.returncode} before the first answer. Expected its "
                f"packages to load. {self._advice}, or run in foretoken's repository: "
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


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    """Ends the process, unless it belongs to the process that this one was forked from."""
    if owner == os.getpid():
        process.kill()
        process.communicate()


_Object = dict[str, Any]  # of JSON


def serve(prepared: Callable[[_Object], Callable[[_Object], _Object]]) -> None:
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


def _answered(answer: Callable[[_Object], _Object], line: bytes, most_bytes: int) -> bytes:
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


def _as_line(answer: _Object) -> bytes:
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _bound_memory(most_bytes: int) -> None:
    """Bounds the memory of this process to `most_bytes` more than now, if the system can."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + most_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _write(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
