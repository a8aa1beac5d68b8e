"""Warm-up, stable, decay: a run that can be stopped at any time and shipped by a short decay branch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Learning rate by step.

    Attributes:
        peak: learning rate of the stable phase.
        warmup_steps: linear warm-up from 0.
        decay_start, decay_steps: the branch falls as 1 - sqrt(progress) to 0; `decay_steps == 0` stays stable.
    """

    peak: float
    warmup_steps: int
    decay_start: int = 0
    decay_steps: int = 0

    def lr(self, step: int) -> float:
        """Return the learning rate of 0-based step `step`."""
        rate = self.peak * min(1.0, (step + 1) / self.warmup_steps)
        if self.decay_steps and step >= self.decay_start:
            progress = min(1.0, (step - self.decay_start) / self.decay_steps)
            rate *= 1.0 - progress**0.5
        return rate
