"""Saves and restores a training run between two steps, so that a crash loses at most the steps since the last save.

Tensors go to safetensors and numbers to JSON: loading never unpickles.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from foretoken.core.errors import ModelError, one_line
from foretoken.files.atomic_files import new_directory, told_as, write_file
from foretoken.formats.files import write_weights

_KEPT = 2  # states: the last one, and the one before if the last one is damaged
_ADVICE = "Expected room for the run's curves. Make some, and go on."
_log = logging.getLogger(__name__)
_STATE, _PROGRESS, _METRICS = "state.safetensors", "progress.json", "metrics.jsonl"


@dataclass(slots=True)
class Progress:
    """The progress of a run; `skipped` counts steps without a change.

    They had a loss or gradient that was not finite, or a batch without labels.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0


def save_state(run: Path, module: nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Writes a checkpoint, keeps the last two; raises `ModelError` when it cannot be written, as on a full disk."""
    final = run / f"checkpoint-{progress.step:08d}"
    if final.is_dir():
        return
    for left in run.glob(".checkpoint-*"):  # left by a crash while saving
        shutil.rmtree(left, ignore_errors=True)
    tensors = {f"module.{key}": value for key, value in module.state_dict().items()}
    names = _parameter_names(module, optimizer)
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{names[index]}.{key}": torch.as_tensor(value) for key, value in state.items()}
    tensors["random.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    tensors = {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}
    advice = "Expected room for it. Make some; the same command goes on from the checkpoint before."
    with told_as(ModelError, f"the training checkpoint '{final}'", advice), new_directory(final) as new:
        write_weights(new / _STATE, tensors)
        (new / _PROGRESS).write_text(json.dumps(asdict(progress)), encoding="utf-8")
    for old in saved_states(run)[:-_KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def saved_states(run: Path) -> list[Path]:
    """Returns the complete checkpoints of a run, oldest first."""
    return sorted(path.parent for path in run.glob(f"checkpoint-*/{_PROGRESS}"))


def load_state(checkpoint: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> Progress:
    """Restores a run in place, with random states; raises `ModelError` for a damaged checkpoint or another run."""
    try:
        tensors = load_file(checkpoint / _STATE)
        progress = TypeAdapter(Progress).validate_json((checkpoint / _PROGRESS).read_bytes(), strict=True)
        if progress.step != int(checkpoint.name.rpartition("-")[2]):
            raise ValueError(f"{_PROGRESS} names step {progress.step}")
        _restore(tensors, module, optimizer)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as err:
        raise ModelError(
            f"the training checkpoint '{checkpoint}' cannot be read: {one_line(err)}. "
            "Remove it to go on from the one before."
        ) from err
    return progress


def _restore(tensors: dict[str, Tensor], module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    groups: dict[str, dict[str, Tensor]] = {"module": {}, "optimizer": {}, "random": {}}
    for key, value in tensors.items():
        group, name = key.split(".", 1)
        groups[group][name] = value
    module.load_state_dict(groups["module"])
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in groups["optimizer"].items():
        name, _, kind = key.rpartition(".")
        by_name.setdefault(name, {})[kind] = value
    names = _parameter_names(module, optimizer)
    state = {index: by_name[name] for index, name in names.items() if name in by_name}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    torch.set_rng_state(groups["random"]["cpu"])
    if torch.cuda.is_available() and "cuda" in groups["random"]:
        torch.cuda.set_rng_state(groups["random"]["cuda"])


def _parameter_names(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {index: names[id(parameter)] for index, parameter in enumerate(ordered)}


def weights_sha(weights: Mapping[str, Tensor]) -> str:
    """Returns the first 16 hexadecimal digits of a hash of names and values."""
    digest = hashlib.sha256()
    for key, value in sorted(weights.items()):
        digest.update(key.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


class MetricsLog:
    """Writes one JSON object a step to `metrics.jsonl`, and tensorboard curves if tensorboard is installed."""

    def __init__(self, run: Path, first_step: int) -> None:
        """Opens the log and drops lines of steps that will be repeated; raises as `read_curve`."""
        self._path = path = run / _METRICS
        kept = [point for point in read_curve(run) if point["step"] <= first_step]
        with told_as(ModelError, f"'{path}'", _ADVICE):
            write_file(path, "".join(f"{json.dumps(point)}\n" for point in kept))
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._board = _board(run / "tensorboard", first_step)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Adds the values of a step, a list as several curves; raises `ModelError` if it cannot, as on a full disk."""
        with told_as(ModelError, f"'{self._path}'", _ADVICE):
            self._file.write(json.dumps({"step": step, **values}) + "\n")
        try:
            for key, value in values.items() if self._board is not None else ():
                if isinstance(value, list):
                    for index, part in enumerate(value):
                        self._board.add_scalar(f"{key}/{index}", part, step)
                elif isinstance(value, int | float):
                    self._board.add_scalar(key, value, step)
        except OSError as err:
            _log.warning("tensorboard gets no more curves: %s", one_line(err))
            self._board = None

    def close(self) -> None:
        """Closes the log; lines that could not be written are lost."""
        for file in (self._file, self._board):
            if file is not None:
                with suppress(OSError):
                    file.close()


def _board(directory: Path, first_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(directory), purge_step=first_step + 1)


def read_curve(run: Path) -> list[dict[str, Any]]:
    """Returns the lines of a run's metrics but an unfinished last one; raises `ModelError` if others are damaged."""
    path = run / _METRICS
    try:
        whole = path.read_bytes().rpartition(b"\n")[0] if path.is_file() else b""
        points = [json.loads(line) for line in whole.splitlines()]
        if not all(type(point["step"]) is int and {"loss", "head_matches"} <= point.keys() for point in points):
            raise ValueError("a line has no step, loss and head_matches")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as err:
        raise ModelError(
            f"'{path}' is damaged: {one_line(err)}. Expected a step in each line. Remove the file: the run goes on "
            "without the curves so far."
        ) from err
    return points
