"""Runs sections in processes: started early, released in turn, ended in time, rows saved as they come."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from benchmarks.gpu_suite.work import Section

ROOT = Path(__file__).resolve().parents[2]
_LAST_WORDS = 12  # lines of a dead process's log
_GRACE_S = 15.0  # past its deadline


class _Message(NamedTuple):
    """A line from a process, or None at its end."""

    sender: _Child
    content: dict[str, Any] | None


class SectionRun:
    """One section's processes and what they have said so far."""

    def __init__(self, section: Section, *, is_rehearsal: bool, seed: int, logs: Path) -> None:
        """Starts the processes: they import what they need and wait; what they print goes to `logs`."""
        self._is_rehearsal = is_rehearsal
        self._messages: queue.Queue[_Message] = queue.Queue()
        count = 1 if is_rehearsal else section.shards
        options = ["--num-shards", str(count), "--seed", str(seed), *(["--rehearse"] if is_rehearsal else [])]
        self._children = [
            _Child(
                [sys.executable, "-m", "benchmarks.gpu_suite.child", section.module, "--shard", str(shard), *options],
                logs / f"{section.name}-{shard}.log",
                self._messages,
                {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} if is_rehearsal else {"TRITON_INTERPRET": "0"},
            )
            for shard in range(count)
        ]

    def finish(
        self, seconds: float, on_change: Callable[[dict[str, Any]], None], *, grace_s: float = _GRACE_S
    ) -> dict[str, Any]:
        """Lets the section work for so long and gives its record; `on_change` gets the record so far, now and then.

        What is at work `grace_s` later is killed.
        """
        begin = time.monotonic()
        record: dict[str, Any] = {
            "rehearsal": self._is_rehearsal, "status": "running", "limit_s": round(seconds, 1), "errors": [],
            "tables": {},
        }  # fmt: skip
        for child in self._children:
            child.release(seconds)
        while any(child.is_at_work for child in self._children):
            left = begin + seconds + grace_s - time.monotonic()
            if left <= 0:
                record["errors"] += [child.kill() for child in self._children if child.is_at_work]
                break
            with suppress(queue.Empty):
                self._take(self._messages.get(timeout=min(left, 1.0)), record)
            on_change(record)
        while not self._messages.empty():
            self._take(self._messages.get(), record)
        record["seconds"] = round(time.monotonic() - begin, 1)
        record["status"] = (
            "failed" if record["errors"] else "parts left out" if "left_out" in record["tables"] else "complete"
        )
        on_change(record)
        return record

    def close(self) -> None:
        """Ends what is still there."""
        for child in self._children:
            child.close()

    def _take(self, message: _Message, record: dict[str, Any]) -> None:
        child, content = message
        if content is None:
            child.is_at_work = False
            if not child.has_reported:
                record["errors"].append(child.last_words())
        elif "row" in content:
            record["tables"].setdefault(content["table"], []).append(content["row"])
        else:
            child.has_reported = True
            if "error" in content:
                record["errors"].append({"process": child.name, "lines": content["error"]})


class _Child:
    """One process of a section; `is_at_work` until its output ends, `has_reported` when it said how it ended."""

    def __init__(
        self, command: list[str], log: Path, messages: queue.Queue[_Message], settings: dict[str, str]
    ) -> None:
        self.name, self._log = log.stem, log
        self.is_at_work, self.has_reported = True, False
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", **settings},
                process_group=0,
            )
        threading.Thread(target=self._read, args=(messages,), daemon=True).start()

    def release(self, seconds: float) -> None:
        assert self._process.stdin is not None, "it was asked for as a pipe"
        with suppress(BrokenPipeError):  # one that has died says so by ending
            self._process.stdin.write(json.dumps({"seconds": seconds}).encode() + b"\n")
            self._process.stdin.flush()

    def kill(self) -> dict[str, Any]:
        """Ends the process; gives why."""
        self.close()
        self.is_at_work = False
        return self._error("killed: still at work past its deadline")

    def last_words(self) -> dict[str, Any]:
        """What to say about a process that ended without a word."""
        return self._error(f"ended with status {self._process.wait()}")

    def close(self) -> None:
        """Ends the process and everything it started; may be called twice."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None, "it was asked for as a pipe"
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def _read(self, messages: queue.Queue[_Message]) -> None:
        assert self._process.stdout is not None, "it was asked for as a pipe"
        with self._process.stdout as lines:
            for line in lines:
                with suppress(json.JSONDecodeError):  # the last line of a killed process may be half of one
                    messages.put(_Message(self, json.loads(line)))
        messages.put(_Message(self, None))

    def _error(self, why: str) -> dict[str, Any]:
        """The end of its log, and why it ended."""
        said = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_WORDS:]
        return {"process": self.name, "lines": [*said, why]}
