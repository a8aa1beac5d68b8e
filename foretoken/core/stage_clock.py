"""How long the stages of an iteration took: by the host's clock, and on GPUs, where it runs ahead, by the device's.

A GPU works through what it was given later than the host gives it; the host's clock would find that verifying takes as
long as starting it. Events stand between the stages instead and are read once the host has waited anyway.
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
    """Seconds of one thing after another; they begin when it is made."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = has_cuda_runtime(device)
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        """One of them is over."""
        self._marks.append(time.perf_counter())
        if self._is_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)

    def seconds(self) -> list[float]:
        """What each took; on GPUs to be asked once the host has waited for the last."""
        if self._is_gpu:
            return [before.elapsed_time(after) / 1000 for before, after in pairwise(self._events)]
        return [after - before for before, after in pairwise(self._marks)]


class StageClock:
    """One iteration's clock; starts when it is made."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = has_cuda_runtime(device)
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []
        self._paused_for = 0.0
        self.mark()

    def mark(self) -> None:
        """A stage is over: draft, verify, accept, which waits for the device, then commit."""
        self._marks.append(time.perf_counter() - self._paused_for)
        if self._is_gpu and len(self._marks) <= 3:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done in this block, between acceptance and commit, belongs to no stage."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._paused_for += time.perf_counter() - begin

    def seconds(self) -> StageSeconds:
        """What each of the four stages took, seconds; they add up to the host's time.

        By the host's clock where it has not waited for the device: nobody does for a pass after which no token is
        chosen.
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
