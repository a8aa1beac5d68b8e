"""The measurement of one setup at one temperature: rounds of prompts, added up and compared with plain decoding."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.bench.speed_report import RequestRun, speed_report
from foretoken.core.records import GenerationMetrics

if TYPE_CHECKING:
    from foretoken.core.records import StepRecord

_CPU_INFO = Path("/proc/cpuinfo")


def processor_facts() -> dict[str, str]:
    """Returns what the system says of its first processor, by name; may be empty."""
    if not _CPU_INFO.exists():
        return {}
    facts: dict[str, str] = {}
    for line in _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    return facts


def processor_name() -> str:
    """Returns the processor's model, as "Intel(R) Xeon(R) Platinum 8488C", or else its architecture."""
    return processor_facts().get("model name") or platform.processor() or platform.machine()


@dataclass(slots=True)
class Measurement:
    """One setup at one temperature.

    Attributes:
        seconds: Wall-clock seconds of each round of prompts, without prefill; rounds of all setups are interleaved.
        tokens: Output tokens of each round without the first of each prompt, which prefill gives.
        taus: Acceptance length of each round.
        texts: Output token ids, one entry a prompt and repeat.
        num_identical: Entries of `texts` that equal plain decoding's; None for plain decoding.
        speed_ups: Tokens per second over plain decoding's in the same round; empty for plain decoding.
        speed_up: Median of `speed_ups`.
        speed_up_spread: Smallest and largest of `speed_ups`.
        nats_per_token: Mean surprise of the target at temperature 1 over the output, in nats; compared with plain
            decoding's, it shows the cost of a lossy rule. None if all setups are lossless.
        batch_size: Sequences decoded at once.
        verify_seconds: Of target passes; this and the next two sum over iterations, prompt tokens left out.
        draft_seconds: Of drafting.
        host_seconds: Between the ends of iterations, outside of passes and drafting: accepting, committing, text.
        last_step: When the last iteration ended, in seconds; None before the first.
        runs: One for each entry of `texts`.
        wall_seconds: Wall-clock seconds of all rounds, prefill included.
    """

    setup: str
    temperature: float
    runner: str
    runner_choice: str
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    metrics: GenerationMetrics = field(default_factory=GenerationMetrics)
    iterations: int = 0
    verify_seconds: float = 0.0
    draft_seconds: float = 0.0
    host_seconds: float = 0.0
    last_step: float | None = None
    taus: list[float] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)
    num_identical: int | None = None
    speed_ups: list[float] = field(default_factory=list)
    speed_up: float = 1.0
    speed_up_spread: tuple[float, float] = (1.0, 1.0)
    nats_per_token: float | None = None
    batch_size: int = 1
    runs: list[RequestRun] = field(default_factory=list)
    wall_seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of decoding, over all rounds."""
        return sum(self.tokens) / sum(self.seconds)

    @property
    def tau(self) -> float:
        """Mean acceptance length, the target's own token included."""
        return self.metrics.mean_acceptance_length

    @property
    def efficiency(self) -> float:
        """Speed-up over tau: 1 when drafting, wider verification and the host cost nothing."""
        return self.speed_up / self.tau if self.tau else 0.0

    @property
    def host_ms(self) -> float:
        """Milliseconds of an iteration outside of the target's pass: drafting, accepting, committing, text."""
        return (sum(self.seconds) - self.verify_seconds) / max(self.iterations, 1) * 1e3

    @property
    def verify_ms(self) -> float:
        """Milliseconds of an iteration in the target's pass."""
        return self.verify_seconds / max(self.iterations, 1) * 1e3

    @property
    def draft_ms(self) -> float:
        """Milliseconds of an iteration in the drafter."""
        return self.metrics.seconds.draft / max(self.metrics.steps, 1) * 1e3

    def add_step(self, record: StepRecord, now: float) -> None:
        """Counts an iteration that ended at `now`, in seconds, unless it was prefill alone."""
        begin, self.last_step = self.last_step, now
        if all(step.ends_prompt for step in record.sequences):
            return
        self.iterations += 1
        self.verify_seconds += record.decode_seconds.verify
        self.draft_seconds += record.seconds.draft
        if begin is not None:
            self.host_seconds += now - begin - record.seconds.verify - record.seconds.draft

    def add(self, other: Measurement) -> None:
        """Adds further rounds of the same setup at the same temperature; the comparison with plain decoding stays."""
        self.seconds += other.seconds
        self.tokens += other.tokens
        self.metrics = GenerationMetrics.total([self.metrics, other.metrics])
        self.iterations += other.iterations
        self.verify_seconds += other.verify_seconds
        self.draft_seconds += other.draft_seconds
        self.host_seconds += other.host_seconds
        self.taus += other.taus
        self.texts += other.texts
        self.runs += other.runs
        self.wall_seconds += other.wall_seconds

    @property
    def speed_bench(self) -> dict[str, Any]:
        """The figures of SPEED-Bench, see `speed_report`."""
        return speed_report(self.runs, self.wall_seconds, self.batch_size)

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the stages' time in draft, verify, accept and commit."""
        seconds = self.metrics.seconds
        total = seconds.total or 1.0
        return {name: getattr(seconds, name) / total for name in ("draft", "verify", "accept", "commit")}

    @property
    def wall_shares(self) -> dict[str, float]:
        """Shares of the wall-clock time of decoding: in the drafter, in target passes, and in everything else."""
        total = sum(self.seconds) or 1.0
        draft, verify = self.draft_seconds / total, self.verify_seconds / total
        return {"draft": draft, "verify": verify, "host": 1.0 - draft - verify}

    @property
    def rates(self) -> list[float]:
        """Output tokens per second of decoding, round by round."""
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """Returns the measurement JSON-ready."""
        return {
            "setup": self.setup,
            "temperature": self.temperature,
            "runner": self.runner,
            "runner_choice": self.runner_choice,
            "tokens_per_s": self.tokens_per_s,
            "speed_up": self.speed_up,
            "speed_up_min": self.speed_up_spread[0],
            "speed_up_max": self.speed_up_spread[1],
            "mean_acceptance_length": self.tau,
            "efficiency": self.efficiency,
            "verify_ms": self.verify_ms,
            "draft_ms": self.draft_ms,
            "host_ms": self.host_ms,
            "iterations": self.iterations,
            "shares": self.shares,
            "num_identical": self.num_identical,
            "num_texts": len(self.texts),
            "nats_per_token": self.nats_per_token,
            "batch_size": self.batch_size,
            "speed_bench": self.speed_bench,
            "metrics": self.metrics.as_dict(),
        }
