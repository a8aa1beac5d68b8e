"""Describes the machine and the commit of a measurement, and how busy others kept the machine meanwhile."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

from foretoken.bench.compare import processor_facts, processor_name

_ROOT = Path(__file__).resolve().parents[1]
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd")
_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")


def describe_machine() -> dict[str, Any]:
    """Returns CPU, memory, system and Python, JSON-ready."""
    flags = set(processor_facts().get("flags", "").split())
    return {
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "instruction_sets": [flag for flag in _FLAGS if flag in flags],
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }


def commit(*paths: str) -> str:
    """Returns the commit, or the last one that touched `paths`, with "+changes" where files differ from it.

    Files in benchmarks/results do not count.
    """

    def git(*arguments: str) -> str:
        try:
            result = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return ""
        return result.stdout.strip()

    found = git("log", "-1", "--format=%h", "--", *paths) or "unknown"
    changes = git("status", "--porcelain", "--", *(paths or (".",)), ":(exclude)benchmarks/results")
    return found + ("+changes" if changes else "")


def foreign_seconds() -> float:
    """Returns the processor seconds that other processes have taken since the machine started."""
    whole, own = psutil.cpu_times(), psutil.Process().cpu_times()
    return float(sum(getattr(whole, name, 0.0) for name in _BUSY) - own.user - own.system)
