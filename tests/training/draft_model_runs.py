"""Runs of tiny draft models for tests, and what their child processes run."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import training_runs
from foretoken.models.loaded import LoadedModel
from safetensors.torch import save_file

from foretoken.models.smaller import pruned_model
from foretoken.training.draft_model import Distillation
from foretoken.training.run import Interrupted, ModelSettings, train_model
from foretoken.training.trainer import train_config


def student() -> LoadedModel:
    """The first of two layers of the tiny target."""
    return pruned_model(training_runs.target(), [0])


def settings(directory: Path, *, save_every_s: float = 120.0, num_steps: int = 11, **weights: Any) -> ModelSettings:
    """A short run; weights: of the objective."""
    return ModelSettings(
        objective=Distillation(**{"refresh_steps": 4, **weights}),
        train=train_config({
            "schedule": {"peak": 1e-2, "num_steps": num_steps, "warmup_steps": 2}, "batch_size": 4, "length": 16,
        }),
        data="text",
        directory=directory,
        save_every_s=save_every_s,
        origin={"target_layers": [0]},
    )  # fmt: skip


def weights_of(model: LoadedModel) -> dict[str, torch.Tensor]:
    """Copies of all weights."""
    return {key: value.detach().clone() for key, value in model.module.state_dict().items()}


def child(directory: str, weights: str, pause_s: float, **changes: Any) -> None:
    """Runs or goes on with a run and writes the weights into a file; exits as the command line does."""
    torch.set_num_threads(1)
    os.environ.pop("WORLD_SIZE", None)
    model = student()
    try:
        train_model(
            training_runs.target(), model, training_runs.batches(), settings(Path(directory), **changes),
            on_step=lambda _: time.sleep(pause_s),
        )  # fmt: skip
    except Interrupted as err:
        sys.exit(128 + err.number)
    save_file(weights_of(model), weights)
