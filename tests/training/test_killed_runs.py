"""A run that is killed at any moment and started again ends with the same bits as one that was left alone."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import training_runs
from safetensors.torch import load_file

from foretoken.training.run_state import saved_states

STEPS = 80
KILLS = 5


class Children:
    """Runs in processes of their own, forked from one that has imported everything."""

    def __init__(self) -> None:
        environment = {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"}
        self._server = subprocess.Popen(
            [sys.executable, training_runs.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**environment, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def start(self, run: Path, weights: Path, *, pause_s: float = 0.0, **changes: Any) -> int:
        """Begins or goes on with a run; gives its process id."""
        assert self._server.stdin is not None
        arguments = {"directory": str(run), "weights": str(weights), "method": "hydra", "pause_s": pause_s}
        arguments |= {"schedule": {"num_steps": STEPS}, "save_every_s": 0.05, **changes}
        print(json.dumps(arguments), file=self._server.stdin, flush=True)
        return int(self._line())

    def exit_code(self) -> int:
        """Waits for the last one; negative for a signal that ended it."""
        return int(self._line())

    def close(self) -> None:
        """Ends the server."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.stdout.close()
        assert self._server.wait(60) == 0

    def _line(self) -> str:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, "the server died"
        return line


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    server = Children()
    yield server
    server.close()


@pytest.fixture(scope="module")
def undisturbed(children: Children, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Weights of a run with dropout that nothing happened to."""
    directory = tmp_path_factory.mktemp("undisturbed")
    children.start(directory / "run", directory / "head.safetensors")
    assert children.exit_code() == 0
    return load_file(directory / "head.safetensors")


def wait_for(run: Path, step: int) -> None:
    """Until the curves of a run have come to a step."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").is_file() else []
        done = [json.loads(line)["step"] for line in lines if line.endswith("}")]
        if done and done[-1] >= step:
            return
        time.sleep(0.002)
    pytest.fail(f"the run did not come to step {step}")


def test_killed_at_random_moments(children: Children, undisturbed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    dice = random.Random(7)
    run, weights = tmp_path / "run", tmp_path / "head.safetensors"
    resumed_at = []
    for step in sorted(dice.sample(range(3, STEPS - 8), KILLS)):
        process = children.start(run, weights, pause_s=0.01)
        wait_for(run, step)
        time.sleep(dice.uniform(0, 0.04))  # anywhere in a step or a save
        os.kill(process, signal.SIGKILL)
        assert children.exit_code() == -signal.SIGKILL
        states = saved_states(run)
        resumed_at.append(int(states[-1].name.rpartition("-")[2]) if states else 0)
    assert not weights.exists()
    assert len(set(resumed_at) - {0}) >= 3, "else nothing was gone on from"
    children.start(run, weights)
    assert children.exit_code() == 0
    training_runs.same_weights(load_file(weights), undisturbed)
    lines = training_runs.metrics(run)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert {path.name.split("-")[0] for path in run.iterdir()} <= {
        "checkpoint", "settings.json", "metrics.jsonl", "tensorboard", "run.lock"
    }  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop(
    children: Children, undisturbed: dict[str, torch.Tensor], tmp_path: Path, number: signal.Signals
) -> None:
    """The step is finished and saved, whatever the time since the last save; the same call goes on."""
    run, weights = tmp_path / "run", tmp_path / "head.safetensors"
    process = children.start(run, weights, pause_s=0.02, save_every_s=1e9)
    wait_for(run, 5)
    os.kill(process, number)
    assert children.exit_code() == 128 + number
    (state,) = saved_states(run)
    last = training_runs.metrics(run)[-1]["step"]
    assert state.name == f"checkpoint-{last:08d}"
    assert 5 <= last < STEPS
    assert not weights.exists()
    children.start(run, weights, save_every_s=1e9)
    assert children.exit_code() == 0
    training_runs.same_weights(load_file(weights), undisturbed)


def test_dropout_differs_without_its_random_numbers(
    children: Children, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """The control: with another seed of dropout alone the bits differ, so the tests above can fail."""
    run, weights = tmp_path / "run", tmp_path / "head.safetensors"
    process = children.start(run, weights, pause_s=0.02)
    wait_for(run, 10)
    os.kill(process, signal.SIGTERM)
    assert children.exit_code() == 143
    for state in saved_states(run):
        tensors = load_file(state / "state.safetensors")
        tensors["random.cpu"] = torch.Generator().manual_seed(99).get_state()
        training_runs.save_file(tensors, state / "state.safetensors")
    children.start(run, weights)
    assert children.exit_code() == 0
    assert any(not torch.equal(value, undisturbed[key]) for key, value in load_file(weights).items())
