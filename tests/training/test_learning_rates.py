"""The learning rate of every step."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import training_runs

from foretoken.training import trainer
from foretoken.training.trainer import Schedule


def test_warmup_rises_in_equal_steps_to_the_peak() -> None:
    schedule = Schedule(peak=2.0, num_steps=100, warmup_steps=4)
    assert [schedule.rate(step) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_cosine_from_the_peak_to_the_floor() -> None:
    schedule = Schedule(peak=2.0, num_steps=15, warmup_steps=4, floor=0.1)
    assert schedule.rate(4) == 2.0
    assert schedule.rate(9) == pytest.approx(2.0 * (0.1 + 0.9 / 2))  # halfway between steps 4 and 14
    assert schedule.rate(14) == pytest.approx(0.2)
    rates = [schedule.rate(step) for step in range(4, 15)]
    assert rates == sorted(rates, reverse=True)
    steps = [rates[0] - rates[1], rates[4] - rates[5]]
    assert steps[0] == pytest.approx(0.9 * (1 - math.cos(math.pi / 10)))
    assert steps[0] < steps[1]  # a cosine leaves its ends slowly, a line does not


@pytest.mark.parametrize("num_steps", [1, 2, 5])
@pytest.mark.parametrize("warmup", [0, 1, 5, 9])
def test_never_zero(num_steps: int, warmup: int) -> None:
    schedule = Schedule(peak=1e-3, num_steps=num_steps, warmup_steps=warmup, floor=0.05)
    for step in range(num_steps + 3):
        assert 0 < schedule.rate(step) <= 1e-3


def test_a_floor_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="floor"):
        Schedule(floor=0.0)


def test_the_rates_of_a_run_in_pieces(tmp_path: Path) -> None:
    """What the optimiser steps with, in a run that goes on from a checkpoint: not begun anew, not one step off."""
    schedule = {"peak": 1e-2, "num_steps": 6, "warmup_steps": 2}
    used: list[float] = []
    step = torch.optim.AdamW.step

    def watched(self: torch.optim.AdamW, *args: object) -> None:
        used.extend({group["lr"] for group in self.param_groups})
        step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", watched)
        with pytest.raises(training_runs.StopError):
            training_runs.trained(
                tmp_path / "run", schedule=schedule, save_every_s=-1.0, on_step=training_runs.stop_after(3)
            )
        training_runs.trained(tmp_path / "run", schedule=schedule, save_every_s=-1.0)
    rates = [Schedule(**schedule).rate(step) for step in range(6)]
    # The third step's checkpoint was not written when its report was interrupted: it is done again.
    assert used == [*rates[:3], *rates[2:]]
    assert [line["rate"] for line in training_runs.metrics(tmp_path / "run")] == rates


def test_rates_fall_by_the_clock_where_it_is_ahead() -> None:
    by_steps, by_clock = Schedule(num_steps=101, warmup_steps=0), Schedule(num_steps=101, warmup_steps=0, seconds=8.0)
    assert by_clock.rate(50, 2.0) == by_steps.rate(50)
    assert by_clock.rate(5, 4.0) == pytest.approx(by_steps.rate(50))
    assert by_clock.rate(5, 9.0) == by_steps.rate(100)
    assert by_steps.rate(5, 9.0) == by_steps.rate(5)


@pytest.mark.parametrize("method", ["medusa", "falcon"])
def test_a_run_ends_with_its_seconds(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes two seconds here. The last one begins before the end, and the share of glances falls as well."""
    readings = iter(range(0, 10_000, 2))
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: float(next(readings)))
    schedule = {"peak": 1e-2, "num_steps": 500, "warmup_steps": 2, "seconds": 9.0}
    training_runs.trained(tmp_path / "run", method, schedule=schedule)
    lines = training_runs.metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    expected = [Schedule(**schedule).rate(step, 2.0 * step) for step in range(5)]
    assert [line["rate"] for line in lines] == expected
    assert expected[-1] < 0.1 * expected[1]


def test_a_stopped_run_goes_on_with_its_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter(range(0, 10_000, 2))
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: float(next(readings)))
    schedule = {"peak": 1e-2, "num_steps": 500, "warmup_steps": 2, "seconds": 9.0}
    stop = training_runs.stop_after(3)
    with pytest.raises(training_runs.StopError):
        training_runs.trained(tmp_path / "run", schedule=schedule, save_every_s=-1.0, on_step=stop)
    stopped = training_runs.trained(tmp_path / "run", schedule=schedule)
    whole = training_runs.trained(tmp_path / "whole", schedule=schedule)
    assert stopped.notes["steps"] == whole.notes["steps"] == 5
    training_runs.same_weights(stopped.weights, whole.weights)
