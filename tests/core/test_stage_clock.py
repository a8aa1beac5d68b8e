"""Stages add up to the host's time; on a GPU drafting and verifying take what the device says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from foretoken.core import backend
from foretoken.core.backend import StageClock


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose marks stand at 0, 1, 2, 30 and 31 seconds: it waits in the third stage."""
    times = iter([0.0, 1.0, 2.0, 30.0, 31.0])
    monkeypatch.setattr(backend.time, "perf_counter", lambda: next(times))


def stages(device: str) -> dict[str, float]:
    clock = StageClock(torch.device(device))
    for _ in range(4):
        clock.mark()
    seconds = clock.seconds()
    return {name: getattr(seconds, name) for name in ("draft", "verify", "accept", "commit")}


def test_on_the_host() -> None:
    assert stages("cpu") == {"draft": 1, "verify": 1, "accept": 28, "commit": 1}


@pytest.mark.parametrize("has_waited", [True, False])
def test_on_a_gpu(has_waited: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        """Passed by a device that works a second behind the host on drafting, and twenty on verifying."""

        passes = itertools.chain([0.0, 2.0, 22.0])

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Any) -> None:
            assert stream == "stream"
            self.at = next(Event.passes)

        def query(self) -> bool:
            return has_waited

        def elapsed_time(self, other: Any) -> float:
            assert has_waited, "an event that has not passed has no time"
            return 1000 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    by_device = {"draft": 2, "verify": 20, "accept": 8, "commit": 1}
    by_host = {"draft": 1, "verify": 1, "accept": 28, "commit": 1}
    assert stages("cuda") == (by_device if has_waited else by_host)
