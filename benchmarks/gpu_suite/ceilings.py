"""Measures what the device can do at most: bandwidth of copying and reading, and matrix multiplication."""

from __future__ import annotations

import subprocess
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu_suite.timing import interleave, prepare
from foretoken.core.backend import has_cuda_runtime

if TYPE_CHECKING:
    from benchmarks.gpu_suite.work import Work

_GIB = 2**30
_QUERIED = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "temperature.gpu")


def run(work: Work) -> None:
    """Emits `device` and `ceilings`."""
    work.emit("device", describe(work.device))
    _bandwidths(work)
    _matmul(work)
    work.emit("device", {"after": _queried(work.device)})


def describe(device: torch.device) -> dict[str, Any]:
    """Names, sizes and versions, JSON-ready."""
    import transformers
    import triton

    versions = {module.__name__: module.__version__ for module in (torch, triton, transformers)}
    facts: dict[str, Any] = {"versions": versions, "cuda": torch.version.cuda, "queried": _queried(device)}
    if has_cuda_runtime(device):
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / _GIB, 1),
            "l2_mib": round(properties.L2_cache_size / 2**20),
        }
    return facts


def _queried(device: torch.device) -> dict[str, str]:
    """What nvidia-smi says, nothing where there is none."""
    if not has_cuda_runtime(device):
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERIED)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(_QUERIED, (part.strip() for part in answer.splitlines()[0].split(",")), strict=False))


def _bandwidths(work: Work) -> None:
    """Copying and reading of memory far larger than any cache."""
    count = 2**18 if work.is_rehearsal else 2**30  # of 4 bytes: 4 GiB
    source = torch.randn(count, device=work.device)
    target = torch.empty_like(source)
    programs = {
        "copy": prepare([lambda: target.copy_(source)], work.device),
        "read, sum": prepare([source.sum], work.device),
        "read, max": prepare([source.amax], work.device),
        "read, dot": prepare([partial(torch.dot, source, source)], work.device),
    }
    for name, times in interleave(programs, work.device, seconds=1.0, max_rounds=30).items():
        moved = 4 * count * (2 if name == "copy" else 1)
        work.emit("ceilings", {"what": name, "gb_per_s": moved / times.median / 1e3, "bytes": moved, **times.as_dict()})


def _matmul(work: Work) -> None:
    size = 128 if work.is_rehearsal else 8192
    a, b = (torch.randn(size, size, device=work.device).to(torch.bfloat16) for _ in range(2))
    times = interleave({"matmul": prepare([lambda: a @ b], work.device)}, work.device, seconds=1.0, max_rounds=30)
    row = times["matmul"]
    work.emit(
        "ceilings",
        {"what": "matmul", "tflop_per_s": 2 * size**3 / row.median / 1e6, "size": size, "dtype": "bfloat16"}
        | row.as_dict(),
    )
