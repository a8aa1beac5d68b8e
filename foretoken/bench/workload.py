"""What is decoded in a measurement or a proof: prompts and how each is sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretoken.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts decoded at several temperatures.

    Attributes:
        prompts: What to complete.
        temperatures: 0 for greedy; above, every request is sampled with its own seed.
        max_tokens: Output tokens a prompt; the end-of-sequence token does not stop.
        seed: Seed of the first prompt; the i-th gets `seed + i`.
    """

    prompts: Sequence[str]
    temperatures: Sequence[float] = (0.0, 0.8)
    max_tokens: int = 128
    seed: int = 0

    def params(self, temperature: float) -> list[SamplingParams]:
        """Sampling parameters of every prompt."""
        return [
            SamplingParams(temperature=temperature, max_tokens=self.max_tokens, seed=self.seed + index, ignore_eos=True)
            for index in range(len(self.prompts))
        ]


def no_progress(done: int, total: int) -> None:
    """Shows nothing."""
    del done, total
