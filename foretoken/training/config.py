"""Settings of a training run; they are stored beside its checkpoints and must not change when it is resumed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from foretoken.core.checks import validated
from foretoken.core.errors import ConfigError, nearest_name_hint
from foretoken.training.objectives import METHODS, TrainedMethod

if TYPE_CHECKING:
    from collections.abc import Mapping

    from foretoken.heads.base import HeadConfig
    from foretoken.models.loaded import LoadedModel
    from foretoken.training.objective_base import Objective


DRAFT_MODEL = "draft_model"  # the method that trains no head, but a whole model


class Schedule(BaseModel):
    """Learning rate of every optimiser step.

    Attributes:
        peak: Highest learning rate.
        warmup_steps: Steps of linear rise from near 0.
        floor: Last learning rate as a part of `peak`; above 0, or a resumed or extended run would silently stop
            learning.
        seconds: The run ends after these seconds of steps, if it has not done all steps by then, and the rate falls by
            this clock; None for steps alone.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    peak: float = Field(default=1e-3, gt=0)
    num_steps: int = Field(default=1000, ge=1)
    warmup_steps: int = Field(default=50, ge=0)
    floor: float = Field(default=0.05, gt=0, le=1)
    seconds: float | None = Field(default=None, gt=0)

    def done(self, step: int, seconds: float) -> float:
        """Returns the share of the run that is done after some steps, which took some seconds."""
        return max(step / self.num_steps, 0.0 if self.seconds is None else seconds / self.seconds)

    def rate(self, step: int, seconds: float = 0.0) -> float:
        """Returns the learning rate of a step, counted from 0, that begins after `seconds` of steps."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        length = max(self.num_steps - self.warmup_steps - 1, 1)
        by_time = 0.0 if self.seconds is None else seconds / self.seconds
        progress = min(max((step - self.warmup_steps) / length, by_time), 1.0)
        return self.peak * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress)))


class TrainConfig(BaseModel):
    """Batches and optimiser.

    Attributes:
        batch_size: Windows of a global batch, over all processes.
        micro_batch_size: Windows computed at once by one process; None for all of its share.
        length: Tokens of a window.
        max_offset: Largest random offset of the positions of a window, see `WindowPositions`; 0 for none.
        repeats_windows: Whether all epochs cut the data at the same places, see `PackedTokens`.
        clip_norm: Greatest norm of the gradient.
        precision: Precision of the arithmetic: "float32", or "bfloat16" by autocast with float32 weights.
        seed: Seed of weights, order of the data and dropout.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    schedule: Schedule = Schedule()
    batch_size: int = Field(default=8, ge=1, le=1 << 16)
    micro_batch_size: int | None = Field(default=None, ge=1)
    length: int = Field(default=512, ge=4)
    max_offset: int = Field(default=0, ge=0)
    repeats_windows: bool = False
    weight_decay: float = Field(default=0.01, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = Field(default=1.0, gt=0)
    precision: Literal["float32", "bfloat16"] = "float32"
    seed: int = Field(default=0, ge=0)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of GEMMs and of frozen weights; trained weights are in float32."""
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32


class JointConfig(BaseModel):
    """Settings of the backbone's training.

    Attributes:
        backbone: "lora" for low-rank adapters on every projection and an untied LM head, "full" for all weights.
        head_weight: Largest lambda.
        head_warmup: Rise of lambda: "constant" at once, "linear" or "sine" over `warmup_part` of the steps.
        warmup_part: Part of the steps until lambda is largest.
        rate_factor: Learning rate of the backbone as a part of the heads'.
        self_distillation: Train the backbone towards the original's distributions instead of the text.
        lora_alpha: Scale of the adapters times the rank.
        lora_dropout: Dropout before the adapters in training.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    backbone: Literal["lora", "full"] = "lora"
    head_weight: float = Field(default=0.2, gt=0)
    head_warmup: Literal["constant", "linear", "sine"] = "constant"
    warmup_part: float = Field(default=1.0, gt=0, le=1)
    rate_factor: float = Field(default=0.25, gt=0)
    self_distillation: bool = True
    lora_rank: int = Field(default=32, ge=1)
    lora_alpha: int = Field(default=16, ge=1)
    lora_dropout: float = Field(default=0.05, ge=0, lt=1)

    def weight(self, step: int, num_steps: int) -> float:
        """Returns the heads' weight in a step, counted from 0."""
        progress = min((step + 1) / (self.warmup_part * num_steps), 1.0)
        shape = {"constant": 1.0, "linear": progress, "sine": math.sin(math.pi / 2 * progress)}
        return self.head_weight * shape[self.head_warmup]


def head_config(method: str, target: LoadedModel, sizes: Mapping[str, Any]) -> HeadConfig:
    """Returns a new head's configuration with `sizes`; raises `ConfigError` for unknown names and wrong values."""
    found = trained_method(method)
    fixed = sorted({"hidden_size", "vocab_size"} & sizes.keys())
    if fixed:
        raise ConfigError(f"'{fixed[0]}' of a {method} head is the target's. Expected no value here. Leave it out.")
    given = {
        "hidden_size": int(target.config.hidden_size),
        "vocab_size": target.vocab_size,
        **found.default_sizes(target),
        **sizes,
    }
    return validated(found.config, given, f"a {method} head")


def objective_config(method: str, weights: Mapping[str, Any]) -> Objective:
    """Returns the objective of a head; weights: values that replace its defaults. Raises as `head_config`."""
    return validated(trained_method(method).objective, weights, f"the objective of {method}")


def train_config(values: Mapping[str, Any]) -> TrainConfig:
    """Returns the checked settings of a run. Raises as `head_config`."""
    return validated(TrainConfig, values, "training")


def trained_method(method: str) -> TrainedMethod:
    """Returns the row of `METHODS`; raises `ConfigError` for an unknown method, with the nearest name."""
    if method not in METHODS:
        known = sorted({*METHODS, DRAFT_MODEL})
        raise ConfigError(f"there is no head '{method}' to train. {nearest_name_hint(method, known)}")
    return METHODS[method]
