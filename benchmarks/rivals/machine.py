"""Describes the machine of a comparison, and measures whether it was quiet meanwhile."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.bench.measurement import processor_facts, processor_name

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path(__file__).resolve().parents[2]
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd")
_QUIET_CORES = 0.1
_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal of /proc/stat


def describe_machine() -> dict[str, Any]:
    """CPU, memory, system and Python, JSON-ready."""
    flags = set(processor_facts().get("flags", "").split())
    return {
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "instruction_sets": [flag for flag in _FLAGS if flag in flags],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }


def available_bytes() -> int | None:
    """Memory that a new process can have without swapping; None where the system does not tell."""
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def commit(*paths: str) -> str:
    """The repository's commit, with "+changes" where files differ from it; what benchmarks have written does not count.

    Args:
        paths: Gives the last commit that touched any of these, and changes in these, instead.
    """

    def git(*arguments: str) -> str:
        result = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=False)
        return result.stdout.strip()

    found = git("log", "-1", "--format=%h", "--", *paths) or "unknown"
    changes = git("status", "--porcelain", "--", *(paths or (".",)), ":(exclude)benchmarks/results")
    return found + ("+changes" if changes else "")


@dataclass(slots=True)
class Disturbance:
    """Processor time that others took while contestants were being timed.

    Attributes:
        load_before: 1-minute load average at the start; at rest it is 0.
        load_after: The same at the end; near the thread count when nothing else ran.
        foreign_seconds: Processor seconds used by neither the workers nor idling; None where the system does not tell.
        wall_seconds: Seconds that were watched.
    """

    load_before: float
    load_after: float = 0.0
    foreign_seconds: float | None = None
    wall_seconds: float = 0.0

    @property
    def foreign_cores(self) -> float | None:
        """Mean number of cores that others kept busy."""
        if self.foreign_seconds is None or not self.wall_seconds:
            return None
        return max(0.0, self.foreign_seconds) / self.wall_seconds  # ticks of 10 ms can leave less than nothing

    def sentence(self) -> str:
        """What a reader must know."""
        loads = f"load average {self.load_before:.2f} before, {self.load_after:.2f} after"
        if self.foreign_cores is None:
            return f"Other work on the machine was not watched ({loads})."
        return f"{verdict(self.foreign_cores)} while contestants were timed ({loads})."


def verdict(foreign_cores: float) -> str:
    """Whether a machine was quiet; foreign_cores: mean number of cores that others kept busy."""
    quiet = "quiet" if foreign_cores < _QUIET_CORES else "DISTURBED"
    return f"The machine was {quiet}: others kept {foreign_cores:.2f} cores busy"


class DisturbanceWatch:
    """Watches the whole machine's processor time against that of the one process that is at work."""

    def __init__(self) -> None:
        self._seen = Disturbance(load_before=os.getloadavg()[0])

    @contextmanager
    def during(self, pid: int) -> Iterator[None]:
        """Watches while a process answers."""
        begin = time.perf_counter()
        machine, own = _machine_seconds(), _process_seconds(pid)
        yield
        self._seen.wall_seconds += time.perf_counter() - begin
        machine_after, own_after = _machine_seconds(), _process_seconds(pid)
        if machine is None or own is None or machine_after is None or own_after is None:
            return
        foreign = (machine_after - machine) - (own_after - own)
        self._seen.foreign_seconds = (self._seen.foreign_seconds or 0.0) + foreign

    def finish(self) -> Disturbance:
        """What was seen."""
        self._seen.load_after = os.getloadavg()[0]
        return self._seen


def _machine_seconds() -> float | None:
    """Processor seconds spent by the whole machine since it started; None where the system does not tell."""
    lines = _lines("/proc/stat")
    if not lines:
        return None
    ticks = [int(field) for field in lines[0].split()[1:]]
    return sum(ticks[i] for i in _BUSY_FIELDS) / os.sysconf("SC_CLK_TCK")


def _process_seconds(pid: int) -> float | None:
    """Processor seconds spent by a process and its ended children; None where the system does not tell."""
    lines = _lines(f"/proc/{pid}/stat")
    if not lines:
        return None
    fields = lines[0].rpartition(")")[2].split()
    return sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def _lines(path: str) -> list[str]:
    """A system file's lines, or none."""
    file = Path(path)
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []
