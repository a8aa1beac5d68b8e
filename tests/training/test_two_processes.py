"""Two processes with one global batch train the same head as one process does."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import together
import torch
import training_runs
from forked import forked
from safetensors.torch import load_file

pytest.importorskip("accelerate", reason="training in several processes needs accelerate")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def assert_same_run(pair: Path, one: Path) -> None:
    """Two runs have the same losses, matches and gradients at every step."""
    ours, theirs = training_runs.metrics(pair), training_runs.metrics(one)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] == list(range(1, 7))
    for line, other in zip(ours, theirs, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert line["head_losses"] == pytest.approx(other["head_losses"], abs=1e-5)
        assert line["head_matches"] == other["head_matches"]
        assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_a_pair_of_unequal_shares_trains_as_one(tmp_path: Path) -> None:
    """Three windows of a batch in one fork and two in the other, with the variables that `accelerate launch` sets."""
    port = free_port()
    pair = [forked(together.member, tmp_path / "pair", rank, port) for rank in range(2)]
    for process in pair:
        process.join()
    assert [process.exitcode for process in pair] == [0, 0]
    alone = training_runs.trained(tmp_path / "one", **together.SCENARIOS["medusa"])
    assert_same_run(tmp_path / "pair" / "run", tmp_path / "one")
    for rank in range(2):
        training_runs.same_weights(load_file(tmp_path / "pair" / f"{rank}.safetensors"), alone.weights, atol=1e-5)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes, started by `accelerate launch`, left their runs."""
    out = tmp_path_factory.mktemp("together")
    settings = {
        **os.environ, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(out / "home"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])),
    }  # fmt: skip
    # On a CPU accelerate starts several processes only under the name of its launcher for many devices.
    launch = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines",
        "1",
        "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", str(free_port()),
    ]  # fmt: skip
    result = subprocess.run(
        [*launch, together.__file__, str(out)], capture_output=True, text=True, timeout=200, env=settings, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", together.SCENARIOS)
def test_the_same_losses_and_weights_as_one(finished: Path, tmp_path: Path, name: str) -> None:
    alone = training_runs.trained(tmp_path, **together.SCENARIOS[name])
    assert_same_run(finished / "runs" / name, tmp_path)
    for rank in range(2):
        # Sums of float32 in another order, through six steps of at most 1e-2.
        training_runs.same_weights(load_file(finished / f"{name}-{rank}.safetensors"), alone.weights, atol=1e-5)


@pytest.mark.slow
def test_both_have_the_same_bits(finished: Path) -> None:
    for name in (*together.SCENARIOS, "straight", "resumed"):
        first, second = (load_file(finished / f"{name}-{rank}.safetensors") for rank in range(2))
        training_runs.same_weights(first, second)


@pytest.mark.slow
def test_only_the_first_writes(finished: Path) -> None:
    facts = [json.loads((finished / f"facts-{rank}.json").read_text()) for rank in range(2)]
    assert any("metrics.jsonl" in path for path in facts[0]["written"])
    assert any("state.safetensors" in path or "progress.json" in path for path in facts[0]["written"])
    assert facts[1]["written"] == []


@pytest.mark.slow
def test_a_signal_to_one_stops_both_and_dropout_goes_on_as_it_was(finished: Path) -> None:
    """The second alone was told to stop after step 3; both did, and both resumed to the bits of an undisturbed run."""
    facts = [json.loads((finished / f"facts-{rank}.json").read_text()) for rank in range(2)]
    assert [fact["stopped"] for fact in facts] == [15, 15]
    straight, resumed = (load_file(finished / f"{name}-0.safetensors") for name in ("straight", "resumed"))
    training_runs.same_weights(resumed, straight)
    assert [line["step"] for line in training_runs.metrics(finished / "runs" / "r")] == list(range(1, 9))


@pytest.mark.slow
def test_processes_drop_different_units(finished: Path, tmp_path: Path) -> None:
    """With one stream of dropout in both, the pair would be one process that drops the same units twice."""
    pair = load_file(finished / "straight-0.safetensors")
    alone = training_runs.trained(tmp_path, **together.DROPOUT).weights
    assert any(not torch.allclose(value, alone[key], atol=1e-4) for key, value in pair.items())
