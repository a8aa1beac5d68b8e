"""The learning rate by step: linear warm-up, then a cosine to a floor above zero."""

from __future__ import annotations

import math

from pydantic import BaseModel, ConfigDict, Field


class Schedule(BaseModel):
    """Learning rate of every optimiser step.

    Attributes:
        peak: Highest learning rate.
        num_steps: Optimiser steps in all.
        warmup_steps: Steps of linear rise from near 0.
        floor: Last learning rate as a part of `peak`; never 0, or a resumed or extended run stops learning unnoticed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    peak: float = Field(default=1e-3, gt=0)
    num_steps: int = Field(default=1000, ge=1)
    warmup_steps: int = Field(default=50, ge=0)
    floor: float = Field(default=0.05, gt=0, le=1)

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        length = max(self.num_steps - self.warmup_steps - 1, 1)
        progress = min((step - self.warmup_steps) / length, 1.0)
        return self.peak * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress)))
