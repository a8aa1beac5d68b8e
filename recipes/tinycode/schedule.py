"""Warm-up by step, then stable, then decay by the share of the run that is done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Learning rate of a run whose length is known in steps or in seconds.

    Attributes:
        peak: learning rate of the stable phase.
        warmup_steps: linear warm-up from 0.
        decay_share: last share of the run, in which the rate falls as 1 - sqrt(progress) to 0
            (Haegele et al. 2024, arXiv 2405.18392).
    """

    peak: float
    warmup_steps: int
    decay_share: float = 1 / 3

    def decaying(self, done: float) -> bool:
        """Say whether the rate falls after this share of the run."""
        return done >= 1 - self.decay_share

    def lr(self, step: int, done: float) -> float:
        """Return the learning rate of 0-based step `step`, before which the share `done` of the run has passed."""
        rate = self.peak * min(1.0, (step + 1) / self.warmup_steps)
        progress = min(1.0, (done - 1) / self.decay_share + 1)
        return rate * (1.0 - progress**0.5) if progress > 0 else rate
