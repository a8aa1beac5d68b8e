"""What a measurement or comparison decodes: prompts and sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretoken.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.core.records import StepRecord


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

    def batches(self, batch_size: int) -> list[list[int]]:
        """Indices of the prompts that are decoded at once; the last batch may be smaller."""
        indices = list(range(len(self.prompts)))
        return [indices[begin : begin + batch_size] for begin in range(0, len(indices), batch_size)]


@dataclass(slots=True)
class TokenProgress:
    """Counts output tokens over several runs of a workload; `add` goes to `LLM` as `on_step`.

    Attributes:
        workload: What one run decodes, at one temperature.
        num_runs: Runs in all.
        report: Called with tokens done and tokens in all.
    """

    workload: Workload
    num_runs: int
    report: Callable[[int, int], None]
    _tokens: int = 0
    _runs: int = 0

    def add(self, record: StepRecord) -> None:
        """Counts an iteration."""
        self._tokens += sum(step.num_emitted for step in record.sequences)
        self._show()

    def end_run(self) -> None:
        """Counts a run as done, whatever its texts were cut short by."""
        self._runs += 1
        self._tokens = 0
        self._show()

    def _show(self) -> None:
        """Reports."""
        size = len(self.workload.prompts) * self.workload.max_tokens
        self.report(self._runs * size + min(self._tokens, size), self.num_runs * size)


def no_progress(done: int, total: int) -> None:
    """Shows nothing."""
    del done, total
