"""Times calls by device events, candidates in turns, queued so that the host's launches do not count.

In a rehearsal there is no device and everything is wall-clock time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from foretoken.core.backend import has_cuda_runtime

_CYCLES_PER_S = 2.0e9  # of the counter that `_sleep` waits by, at most
_QUEUE_S = 100e-6  # what a replay takes to be launched, and more


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds of one call: over rounds, of the fastest and of the slowest round; how many rounds."""

    median: float
    min: float
    max: float
    rounds: int

    @classmethod
    def of(cls, microseconds: Sequence[float]) -> Times:
        """The times of some rounds."""
        return cls(median(microseconds), min(microseconds), max(microseconds), len(microseconds))

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Program:
    """Some calls that are timed together, so that each meets inputs that have left the caches."""

    run: Callable[[], object]  # makes them all
    calls: Sequence[Callable[[], object]]  # a replay reads their tensors, which must live as long as it
    is_replayed: bool  # whether they were captured into a CUDA graph, so that launching costs the host nothing
    launch_s: float  # that the host takes to launch them


def prepare(calls: Sequence[Callable[[], object]], device: torch.device) -> Program:
    """Warms calls up, the same work on different inputs, and captures them where that is possible.

    Raises:
        torch.OutOfMemoryError: When a call does not fit.
    """

    def run_all() -> None:
        for call in calls:
            call()

    if not has_cuda_runtime(device):
        calls[0]()
        return Program(run_all, calls, is_replayed=False, launch_s=0.0)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run_all()
    except RuntimeError:  # something in it waits for the host
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        run_all()
        launch_s = time.perf_counter() - begin
        torch.cuda.synchronize(device)
        return Program(run_all, calls, is_replayed=False, launch_s=launch_s)
    graph.replay()
    torch.cuda.synchronize(device)
    return Program(graph.replay, calls, is_replayed=True, launch_s=_QUEUE_S)


def interleave(
    programs: Mapping[str, Program], device: torch.device, *, seconds: float, min_rounds: int = 5, max_rounds: int = 60
) -> dict[str, Times]:
    """Runs programs in turns, each round starting with another one; gives the times of one call of each.

    No round begins after `seconds`, once there are enough. A rehearsal has one round.
    """
    if not has_cuda_runtime(device):
        min_rounds = max_rounds = 1
    names = list(programs)
    taken: dict[str, list[float]] = {name: [] for name in names}
    begin = time.monotonic()
    for number in range(max_rounds):
        if number >= min_rounds and time.monotonic() - begin > seconds:
            break
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            program = programs[name]
            spent = queued_seconds(program.run, device, launch_s=program.launch_s)
            taken[name].append(spent / len(program.calls) * 1e6)
    return {name: Times.of(values) for name, values in taken.items()}


def queued_seconds(run: Callable[[], object], device: torch.device, *, launch_s: float) -> float:
    """Seconds that the device takes for something whose launches are all queued before it begins.

    `run` launches and must not wait for the device; `launch_s` is about how long the host takes for that.
    """
    if not has_cuda_runtime(device):
        return waited_seconds(run, device)
    torch.cuda._sleep(int((1.5 * launch_s + _QUEUE_S) * _CYCLES_PER_S))
    return _event_seconds(run, device)


def waited_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Seconds from an idle device to the end of something, the host's launches included."""
    if not has_cuda_runtime(device):
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    torch.cuda.synchronize(device)
    return _event_seconds(run, device)


def _event_seconds(run: Callable[[], object], device: torch.device) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) / 1e3
