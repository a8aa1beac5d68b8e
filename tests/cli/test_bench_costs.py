"""`foretoken bench --refresh-costs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import MODEL, run

import foretoken.bench.compare  # noqa: F401 - binds `measure_costs` when it is imported: not while that is replaced
import foretoken.runner.costs as costs_module
from foretoken.decoder.library import native_library
from foretoken.runner.costs import CostCurve, PassCosts


def test_costs_are_measured_anew_when_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured: list[str] = []

    def instantly(model: Any, decoder: str) -> PassCosts:
        measured.append(decoder)
        return PassCosts(*[CostCurve((1,), (0.5,))] * 3)

    native_library()  # not to be compiled anew for an empty cache
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    monkeypatch.setattr(costs_module, "measure_costs", instantly)
    arguments = ("bench", MODEL, "-s", "draft_model", "--num-prompts", "1", "--max-tokens", "2", "--temperature", "0")
    for expected, more in ((1, ()), (1, ()), (2, ("--refresh-costs",))):
        done = run(*arguments, *more)
        assert done.returncode == 0, done.stderr
        assert len(measured) == expected
