"""Measures the stages of an iteration: on CPUs by the host's clock, on GPUs by events on the device.

A GPU computes later than the host launches. The host's clock would measure the launches alone. So events mark the
stages, and the clock reads them after the host has waited for the device anyway.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from foretoken.core.backend import has_cuda_runtime
from foretoken.core.records import StageSeconds

if TYPE_CHECKING:
    from collections.abc import Iterator


class Laps:
    """Seconds of consecutive laps; the first lap begins at construction."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = has_cuda_runtime(device)
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        """Ends a lap."""
        self._marks.append(time.perf_counter())
        if self._is_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)

    def seconds(self) -> list[float]:
        """Returns the seconds of each lap; on GPUs call it after the host has waited for the last lap."""
        if self._is_gpu:
            return [before.elapsed_time(after) / 1000 for before, after in pairwise(self._events)]
        return [after - before for before, after in pairwise(self._marks)]


class StageClock:
    """The clock of one iteration; starts at construction."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = has_cuda_runtime(device)
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._paused_for = 0.0
        self.mark()

    def mark(self) -> None:
        """Ends a stage: draft, verify, accept (which waits for the device), then commit."""
        self._marks.append(time.perf_counter() - self._paused_for)
        if self._is_gpu and len(self._marks) <= 3:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time of this block, between acceptance and commit, from all stages."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._paused_for += time.perf_counter() - begin

    def seconds(self) -> StageSeconds:
        """Returns the seconds of the four stages; their sum is the host's time.

        Uses the host's clock if the host has not waited for the device, as after a pass that chooses no token.
        """
        marks = self._marks
        draft, verify = marks[1] - marks[0], marks[2] - marks[1]
        if self._is_gpu and self._events[-1].query():
            begin, drafted, verified = self._events
            draft, verify = begin.elapsed_time(drafted) / 1000, drafted.elapsed_time(verified) / 1000
        return StageSeconds(
            draft=draft,
            verify=verify,
            accept=max(marks[3] - marks[0] - draft - verify, 0.0),
            commit=marks[4] - marks[3],
        )
