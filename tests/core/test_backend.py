"""Devices are told apart in one module; the rest of the package asks it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import foretoken
from foretoken.core import backend

FORK = re.compile(r"\.is_cuda\b|device\.type\s*(==|!=|in\b)|find_spec\(\"triton\"\)")
PACKAGE = Path(foretoken.__file__).parent
# A tensor's device is compared with another's there, or with what torch names; nothing follows for kernels.
OTHER_QUESTIONS = {"drafting/draft_guard.py", "models/placement.py", "formats/files.py"}


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
    assert backend.has_cuda_runtime(device) == backend.has_cuda_graphs(device) == is_cuda
    assert backend.has_triton_kernels(device) == (is_cuda and is_installed)
