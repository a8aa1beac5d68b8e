"""What each of two processes does in the test of training together: several runs, one after another."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import training_runs
from safetensors.torch import save_file

from foretoken.training.run import Interrupted, train_head

SCENARIOS: dict[str, dict[str, Any]] = {
    "medusa": {"batch_size": 5},  # three windows and two
    "hydra": {"method": "hydra", "sizes": {"dropout": 0.0}, "micro_batch_size": 1},
    "mlp": {"method": "mlp_speculator", "weights": {"ce_weight": 0.5, "head_decay": 0.7}},
    "fewer windows": {"batch_size": 1},
}
DROPOUT: dict[str, Any] = {"method": "hydra", "schedule": {"num_steps": 8}}


def write(at: Path, weights: Any) -> None:
    """Keeps a head's weights beside its run."""
    save_file({key: value.clone() for key, value in weights.items()}, at)


def member(out: Path, rank: int, port: int) -> None:
    """One run in one of two forks."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), ACCELERATE_USE_CPU="true", CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    write(out / f"{rank}.safetensors", training_runs.trained(out / "run", **SCENARIOS["medusa"]).weights)


def main(out: Path) -> None:
    """All runs of one process."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    written: list[str] = []

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(str(out / "runs")):
            if arguments[2] & (os.O_WRONLY | os.O_RDWR):
                written.append(arguments[0])
        elif event in ("os.mkdir", "os.rename") and str(arguments[0]).startswith(str(out / "runs")):
            written.append(str(arguments[0]))

    sys.addaudithook(watch)
    for name, changes in SCENARIOS.items():
        head = training_runs.trained(out / "runs" / name, **changes)
        write(out / f"{name}-{rank}.safetensors", head.weights)
    write(out / f"straight-{rank}.safetensors", training_runs.trained(out / "runs" / "straight", **DROPOUT).weights)
    arguments = (training_runs.target(), training_runs.batches(), training_runs.settings(out / "runs" / "r", **DROPOUT))

    def signal_to_the_second(report: Any) -> None:
        if report.step == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        train_head(*arguments, on_step=signal_to_the_second)
        stopped = 0
    except Interrupted as err:
        stopped = err.number
    torch.distributed.barrier()  # as when both are started anew: the first has saved
    write(out / f"resumed-{rank}.safetensors", train_head(*arguments)[0].weights)
    (out / f"facts-{rank}.json").write_text(json.dumps({"written": written, "stopped": stopped}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
