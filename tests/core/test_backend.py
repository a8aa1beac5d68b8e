"""Devices are told apart in one module; stages add up to the host's time, on a GPU by what the device says."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import foretoken
from foretoken.core import backend
from foretoken.core.backend import StageClock

FORK = re.compile(r"\.is_cuda\b|device\.type\s*(==|!=|in\b)|find_spec\(\"triton\"\)")
PACKAGE = Path(foretoken.__file__).parent
# A tensor's device is compared with another's there, or with what torch names; nothing follows for kernels.
OTHER_QUESTIONS = {"drafting/draft_guard.py", "models/loaded.py", "formats/files.py"}


def test_no_other_module_tells_devices_apart() -> None:
    forks = {
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if FORK.search(line) and str(path.relative_to(PACKAGE)) not in {"core/backend.py", *OTHER_QUESTIONS}
    }
    assert not forks


@pytest.mark.parametrize(
    ("name", "is_host", "is_cuda"),
    [("cpu", True, False), ("cuda", False, True), ("cuda:1", False, True), ("xpu", False, False)],
)
@pytest.mark.parametrize("is_installed", [True, False])
def test_what_devices_offer(
    name: str, is_host: bool, is_cuda: bool, is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "has_triton", lambda: is_installed)
    device = torch.device(name)
    assert backend.reads_are_free(device) == backend.runs_cpu_kernels(device) == is_host
    assert backend.has_cuda_runtime(device) == is_cuda
    assert backend.has_triton_kernels(device) == (is_cuda and is_installed)


@pytest.fixture
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


@pytest.mark.usefixtures("host")
def test_on_the_host() -> None:
    assert stages("cpu") == {"draft": 1, "verify": 1, "accept": 28, "commit": 1}


@pytest.mark.usefixtures("host")
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
