"""Tiny targets, texts and runs for tests of training; also what their child processes run."""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tiny_models import VOCAB_SIZE, tiny_model
from torch import Tensor

from foretoken.formats.checkpoint import HeadCheckpoint
from foretoken.models.loaded import LoadedModel
from foretoken.models.loading import wrap_model
from foretoken.models.smaller import pruned_model
from foretoken.training.data.packed import PackedTokens
from foretoken.training.draft_model import Distillation
from foretoken.training.objectives import head_config, objective_config
from foretoken.training.run import HeadSettings, Interrupted, ModelSettings, train_head
from foretoken.training.trainer import StepReport, train_config

TINY = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24}
SIZES: dict[str, dict[str, Any]] = {
    "medusa": {"num_heads": 3},
    "hydra": {"num_heads": 3, "num_layers": 2, "dropout": 0.2},
    "mlp_speculator": {"num_heads": 3, "inner_dim": 12},
}


@cache
def target() -> LoadedModel:
    """A tiny Llama."""
    return wrap_model(tiny_model("llama", **TINY), name="tiny")


def batches(size: int = 1500, *, is_partial: bool = True) -> PackedTokens:
    """Random text of which, if partial, about two thirds count as labels."""
    generator = np.random.default_rng(5)
    tokens = generator.integers(3, VOCAB_SIZE, size).astype(np.uint16)
    return PackedTokens(tokens, generator.random(size) < 0.67 if is_partial else None, {})


def settings(directory: Path, method: str = "medusa", **changes: Any) -> HeadSettings:
    """A short run. Changes: keys of the training, of the schedule as `schedule`, of the head as `sizes`, of the
    objective as `weights`, and `save_every_s`, `cache`, `cache_bytes` and `data`.
    """
    more = {key: changes.pop(key) for key in ("save_every_s", "cache", "cache_bytes") if key in changes}
    schedule = {"peak": 1e-2, "num_steps": 6, "warmup_steps": 2, **changes.pop("schedule", {})}
    return HeadSettings(
        head=head_config(method, target(), {**SIZES.get(method, {}), **changes.pop("sizes", {})}),
        objective=objective_config(method, changes.pop("weights", {})),
        data=changes.pop("data", "text"),
        train=train_config({"batch_size": 4, "length": 16, **changes, "schedule": schedule}),
        directory=directory,
        **more,
    )


def trained(
    directory: Path, method: str = "medusa", *, text: Any = None, on_step: Any = None, **changes: Any
) -> HeadCheckpoint:
    """The head of a whole run."""
    run = settings(directory, method, **changes)
    return train_head(target(), batches() if text is None else text, run, on_step=on_step)[0]


class StopError(Exception):
    """Ends a run."""


def stop_after(step: int) -> Callable[[StepReport], None]:
    """An `on_step` that ends a run after a step, before its checkpoint."""

    def stop(report: StepReport) -> None:
        if report.step == step:
            raise StopError

    return stop


def student() -> LoadedModel:
    """A draft model: the first of two layers of the tiny target."""
    return pruned_model(target(), [0])


def model_settings(
    directory: Path, *, save_every_s: float = 120.0, num_steps: int = 11, **weights: Any
) -> ModelSettings:
    """A short run of the draft model; weights: of the objective."""
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


def weights_of(model: LoadedModel) -> dict[str, Tensor]:
    """Copies of all weights."""
    return {key: value.detach().clone() for key, value in model.module.state_dict().items()}


def metrics(directory: Path) -> list[dict[str, Any]]:
    """The lines of a run's curves."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def wait_for(run: Path, step: int) -> None:
    """Until the curves of a run have come to a step."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").is_file() else []
        done = [json.loads(line)["step"] for line in lines if line.endswith("}")]
        if done and done[-1] >= step:
            return
        time.sleep(0.002)
    raise AssertionError(f"the run did not come to step {step}")


def same_weights(one: Any, two: Any, *, atol: float = 0.0) -> None:
    """Asserts that two heads have the same weights, bit for bit by default."""
    assert one.keys() == two.keys()
    for key, value in one.items():
        torch.testing.assert_close(value, two[key], rtol=0, atol=atol, msg=lambda text, key=key: f"{key}: {text}")


def child(directory: str, weights: str, method: str, pause_s: float, **changes: Any) -> None:
    """Runs or goes on with a run and writes the head's weights into a file; exits as the command line does."""
    torch.set_num_threads(1)
    os.environ.pop("WORLD_SIZE", None)
    try:
        head = trained(Path(directory), method, on_step=lambda _: time.sleep(pause_s), **changes)
    except Interrupted as err:
        sys.exit(128 + err.number)
    save_file({key: value.clone() for key, value in head.weights.items()}, weights)


def no_grad_features(tokens: Tensor, width: int = 16, seed: int = 0) -> Tensor:
    """Features that depend on the tokens alone, for tests that need no target."""
    table = torch.randn(VOCAB_SIZE, width, generator=torch.Generator().manual_seed(seed))
    return table[tokens].cumsum(1) / torch.arange(1, tokens.shape[1] + 1).sqrt().unsqueeze(1)
