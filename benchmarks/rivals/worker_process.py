"""Controls one worker process: starts it, asks it, stops it while others are asked, and always ends it.

A worker that is not being asked gets SIGSTOP, its whole process group with it, so that no spinning thread pool of one
rival can slow another; every rival keeps its own waiting policy.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.rivals.messages import Generation, Loaded, LoadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).resolve().parents[2]
# numba's, because vLLM's n-gram drafter sets the OpenMP count of the whole process to it.
_THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
_CHUNK_BYTES = 65536
_LAST_WORDS = 300  # characters of a dead worker's log that its error repeats


class WorkerError(Exception):
    """A worker that could not answer, in one sentence.

    Attributes:
        log: What the worker printed.
    """

    def __init__(self, sentence: str, log: Path) -> None:
        super().__init__(sentence)
        self.log = log


class WorkerProcess:
    """A contestant's process.

    Attributes:
        name: Of the contestant.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        threads: int,
        log: Path,
        timeout_s: float,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the process; it loads nothing yet.

        Args:
            name: Of the contestant.
            command: Python and the worker's module.
            threads: Compute threads.
            log: File that gets everything the worker prints.
            timeout_s: Longest that any answer may take.
            settings: Environment variables of this worker alone.
        """
        self.name = name
        self._log, self._timeout_s = log, timeout_s
        self._unread = b""
        counts = dict.fromkeys(_THREAD_COUNTS, str(threads))
        quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env={**os.environ, **counts, **quiet, **(settings or {})},
                process_group=0,
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def load(self, request: LoadRequest) -> Loaded:
        """Loads the model."""
        return Loaded(**self._ask("load", asdict(request)))

    def generate(
        self, prompt_ids: Sequence[int], max_tokens: int, *, temperature: float = 0.0, seed: int = 0
    ) -> Generation:
        """Decodes one prompt."""
        fields = {"prompt_ids": list(prompt_ids), "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        return Generation(**self._ask("generate", fields))

    def forward(self, *, width: int, context: int, repeats: int) -> float:
        """Median seconds of a pass."""
        answer = self._ask("forward", {"width": width, "context": context, "repeats": repeats})
        return float(answer["seconds"])

    def close(self) -> None:
        """Ends the process and everything it started; may be called twice."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None, "both were asked for as pipes"
            try:
                stream.close()
            except BrokenPipeError:  # a question that a dead worker never read
                continue

    def _ask(self, ask: str, fields: dict[str, Any]) -> dict[str, Any]:
        """Wakes the worker, asks, waits for the answer and stops the worker again.

        Raises:
            WorkerError: When it answers with an error, dies, or takes too long.
        """
        assert self._process.stdin is not None, "it was asked for as a pipe"
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"ask": ask, **fields}).encode() + b"\n")
            self._process.stdin.flush()
            line = self._read_line(ask)
        except BrokenPipeError as err:
            raise self._death(ask) from err
        self._signal(signal.SIGSTOP)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.name} failed at {ask}: {answer['error']}", self._log)
        return answer

    def _read_line(self, ask: str) -> bytes:
        """The next line of the worker's output."""
        assert self._process.stdout is not None, "it was asked for as a pipe"
        deadline = time.monotonic() + self._timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise WorkerError(
                        f"{self.name} did not answer {ask} within {self._timeout_s:g} s. Raise --timeout.", self._log
                    )
                chunk = os.read(self._process.stdout.fileno(), _CHUNK_BYTES)
                if not chunk:
                    raise self._death(ask)
                self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _death(self, ask: str) -> WorkerError:
        """What to say about a process that has ended."""
        status = self._process.wait()
        said = [line for line in self._log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        last = f", its last words: {said[-1].strip()[-_LAST_WORDS:]}" if said else ""
        return WorkerError(f"{self.name} ended with status {status} during {ask}{last}", self._log)

    def _signal(self, number: signal.Signals) -> None:
        """Signals the whole process group, where it is still there."""
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):  # ended; macOS says permission for a zombie's group
            return
