"""The learning rate of every step."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import training_runs

from foretoken.training.config import Schedule


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
    settings = training_runs.settings(tmp_path / "run", schedule=schedule, save_every_s=-1.0)
    used: list[float] = []
    step = torch.optim.AdamW.step

    def watched(self: torch.optim.AdamW, *args: object) -> None:
        used.extend({group["lr"] for group in self.param_groups})
        step(self)

    def stop(report: object) -> None:
        if len(used) == 3:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", watched)
        with pytest.raises(KeyboardInterrupt):
            training_runs.train_head(training_runs.target(), training_runs.batches(), settings, on_step=stop)
        training_runs.train_head(training_runs.target(), training_runs.batches(), settings)
    rates = [Schedule(**schedule).rate(step) for step in range(6)]
    # The third step's checkpoint was not written when its report was interrupted: it is done again.
    assert used == [*rates[:3], *rates[2:]]
    assert [line["rate"] for line in training_runs.metrics(tmp_path / "run")] == rates
