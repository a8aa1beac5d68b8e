"""A run that is killed at any moment and started again ends with the same bits as one that was left alone."""

import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import training_runs
from forked import forked
from safetensors.torch import load_file

from foretoken.training.run_state import saved_states

STEPS = 80


def start(run: Path, weights: Path, *, pause_s: float = 0.0, **changes: Any) -> BaseProcess:
    """Begins or goes on with a run in a process of its own."""
    arguments = {"directory": str(run), "weights": str(weights), "method": "hydra", "pause_s": pause_s}
    arguments |= {"schedule": {"num_steps": STEPS}, "save_every_s": 0.05, **changes}
    return forked(training_runs.child, **arguments)


def exit_code(process: BaseProcess) -> int | None:
    """Waits for a process; negative for a signal that ended it."""
    process.join()
    return process.exitcode


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Weights of a run with dropout that nothing happened to."""
    directory = tmp_path_factory.mktemp("undisturbed")
    assert exit_code(start(directory / "run", directory / "head.safetensors")) == 0
    return load_file(directory / "head.safetensors")


@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_killed_at_random_moments(undisturbed: dict[str, torch.Tensor], tmp_path: Path, kills: int) -> None:
    dice = random.Random(7)
    run, weights = tmp_path / "run", tmp_path / "head.safetensors"
    resumed_at = []
    for step in sorted(dice.sample(range(3, STEPS - 8), kills)):
        process = start(run, weights, pause_s=0.01)
        training_runs.wait_for(run, step)
        time.sleep(dice.uniform(0, 0.04))  # anywhere in a step or a save
        process.kill()
        assert exit_code(process) == -signal.SIGKILL
        states = saved_states(run)
        resumed_at.append(int(states[-1].name.rpartition("-")[2]) if states else 0)
    assert not weights.exists()
    assert len(set(resumed_at) - {0}) >= min(kills, 3), "else nothing was gone on from"
    assert exit_code(start(run, weights)) == 0
    training_runs.same_weights(load_file(weights), undisturbed)
    lines = training_runs.metrics(run)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert {path.name.split("-")[0] for path in run.iterdir()} <= {
        "checkpoint", "settings.json", "metrics.jsonl", "tensorboard", "run.lock"
    }  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_told_to_stop(undisturbed: dict[str, torch.Tensor], tmp_path: Path, number: signal.Signals) -> None:
    """The step is finished and saved, whatever the time since the last save; the same call goes on."""
    run, weights = tmp_path / "run", tmp_path / "head.safetensors"
    process = start(run, weights, pause_s=0.02, save_every_s=1e9)
    training_runs.wait_for(run, 5)
    assert process.pid is not None
    os.kill(process.pid, number)
    assert exit_code(process) == 128 + number
    (state,) = saved_states(run)
    last = training_runs.metrics(run)[-1]["step"]
    assert state.name == f"checkpoint-{last:08d}"
    assert 5 <= last < STEPS
    assert not weights.exists()
    assert exit_code(start(run, weights, save_every_s=1e9)) == 0
    training_runs.same_weights(load_file(weights), undisturbed)


@pytest.mark.slow
def test_dropout_differs_without_its_random_numbers(undisturbed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """The control: with another seed of dropout alone the bits differ, so the tests above can fail."""
    run, weights = tmp_path / "run", tmp_path / "head.safetensors"
    process = start(run, weights, pause_s=0.02)
    training_runs.wait_for(run, 10)
    process.terminate()
    assert exit_code(process) == 143
    for state in saved_states(run):
        tensors = load_file(state / "state.safetensors")
        tensors["random.cpu"] = torch.Generator().manual_seed(99).get_state()
        training_runs.save_file(tensors, state / "state.safetensors")
    assert exit_code(start(run, weights)) == 0
    assert any(not torch.equal(value, undisturbed[key]) for key, value in load_file(weights).items())
