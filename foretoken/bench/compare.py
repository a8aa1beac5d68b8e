"""Measures drafters against plain decoding of the same target, in one process, in interleaved rounds."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from foretoken.bench.speed_report import NO_CATEGORY, RequestRun, RunLog, speed_report
from foretoken.bench.workload import Asked, Workload, counted, no_progress, prompt_token_ids
from foretoken.core.records import GenerationMetrics, StepRecord
from foretoken.entrypoints.config import PLAIN, Setup
from foretoken.entrypoints.llm import LLM
from foretoken.models.generic import run_plain
from foretoken.runner.costs import measure_costs, pass_costs
from foretoken.runner.runner import PassWidths, likely_decoder

if TYPE_CHECKING:
    from foretoken.core.results import RequestOutput
    from foretoken.models.loaded import LoadedModel

_T = TypeVar("_T")
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


# Fields of `Measurement` that further rounds add to.
_SUMMED = (
    "seconds", "tokens", "iterations", "verify_seconds", "draft_seconds", "host_seconds", "taus", "texts", "runs",
    "wall_seconds",
)  # fmt: skip


@dataclass(slots=True)
class Measurement:
    """One setup at one temperature, over rounds of prompts; rounds of all setups are interleaved."""

    setup: str
    temperature: float
    runner: str
    runner_choice: str
    seconds: list[float] = field(default_factory=list)  # wall-clock seconds of each round, without prefill
    tokens: list[int] = field(default_factory=list)  # output tokens of each round, without those that prefill gives
    metrics: GenerationMetrics = field(default_factory=GenerationMetrics)
    # Sums over iterations, prompt tokens left out. The host accepts, commits and makes text between passes and drafts.
    iterations: int = 0
    verify_seconds: float = 0.0
    draft_seconds: float = 0.0
    host_seconds: float = 0.0
    last_step: float | None = None  # when the last iteration ended, in seconds; None before the first
    taus: list[float] = field(default_factory=list)  # acceptance length of each round
    texts: list[list[int]] = field(default_factory=list)  # output token ids, one entry a prompt and repeat
    num_identical: int | None = None  # entries of `texts` that equal plain decoding's; None for plain decoding
    speed_ups: list[float] = field(default_factory=list)  # over plain decoding in the same round; empty for that
    speed_up: float = 1.0  # median of `speed_ups`
    speed_up_spread: tuple[float, float] = (1.0, 1.0)  # smallest and largest of `speed_ups`
    # Mean surprise of the target at temperature 1 over the output, in nats; None if all setups are lossless. Compared
    # with plain decoding's, it shows the cost of a lossy rule.
    nats_per_token: float | None = None
    batch_size: int = 1  # sequences decoded at once
    runs: list[RequestRun] = field(default_factory=list)  # one for each entry of `texts`
    wall_seconds: float = 0.0  # of all rounds, prefill included

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
        self.metrics = GenerationMetrics.total([self.metrics, other.metrics])
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))

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


# A choice: several iterations, so that buffers exist and kernels are compiled before the clock starts.
_WARM_UP_TOKENS = 8


class SetupEngines:
    """One engine a setup, over weights that are loaded once; plain decoding is always included, as the first."""

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: Any,
        setups: Sequence[Setup],
        workload: Workload,
        *,
        batch_size: int = 1,
        runner: str = "auto",
    ) -> None:
        self.workload, self._batch_size = workload, batch_size
        self._engines: dict[str, LLM] = {}
        self._on_step: Callable[[StepRecord], None] | None = None  # one engine runs at a time
        self._create = partial(
            LLM, model, tokenizer=tokenizer, max_num_seqs=batch_size, runner=runner, on_step=self._note_step,
            enable_prefix_caching=False,  # a repeated prompt must cost as much as a new one
        )  # fmt: skip
        for setup in [Setup(PLAIN, None), *(setup for setup in setups if setup.config is not None)]:
            self.add(setup)

    @property
    def names(self) -> list[str]:
        """The names of the setups, in order."""
        return list(self._engines)

    def add(self, setup: Setup) -> None:
        """Makes or replaces the engine of a setup; raises `ForetokenError` if the drafter does not fit the target."""
        config = setup.with_references(self._plain_texts() if setup.needs_references else ())
        self._engines[setup.name] = self._create(speculative_config=config)

    def remove(self, name: str) -> None:
        """Frees the engine of a setup, with its memory."""
        del self._engines[name]

    @property
    def is_lossy(self) -> bool:
        """Whether the text of any setup may differ from plain decoding's."""
        return any(engine.is_lossy for engine in self._engines.values())

    def empty(self, name: str, temperature: float) -> Measurement:
        """Returns an empty measurement of a setup."""
        target = self._engines[name].target
        return Measurement(name, temperature, target.name, target.choice, batch_size=self._batch_size)

    def warm_up(self, temperature: float) -> None:
        """Decodes a few tokens with every setup, untimed."""
        params = replace(
            self.workload.params(temperature)[0], max_tokens=min(_WARM_UP_TOKENS, self.workload.max_tokens)
        )
        for engine in self._engines.values():
            engine.generate(self.workload.prompts[0], params)

    def measure(self, name: str, temperature: float, batch: Sequence[int]) -> Measurement:
        """Decodes one batch, indices into the workload's prompts, with one setup and returns the round."""
        row, params = self.empty(name, temperature), self.workload.params(temperature)
        work, log = self.workload, RunLog()

        def note(record: StepRecord) -> None:
            now = time.perf_counter()
            row.add_step(record, now)
            log.add(record, now)

        self._on_step = note
        begin = time.perf_counter()
        results = self._engines[name].generate([work.prompts[i] for i in batch], [params[i] for i in batch])
        seconds = time.perf_counter() - begin
        self._on_step = None
        row.metrics = GenerationMetrics.total(result.metrics for result in results)
        row.runs = [
            log.run_of(
                result.request_id, work.categories[index] if work.categories else NO_CATEGORY,
                question=work.questions[index] if work.questions else index, begin=begin,
            )
            for result, index in zip(results, batch, strict=True)
        ]  # fmt: skip
        row.wall_seconds = seconds
        row.seconds.append(seconds - row.metrics.prefill_seconds)
        decoded = row.metrics.num_emitted - row.metrics.num_prefill_emitted
        row.tokens.append(decoded or row.metrics.num_emitted)  # with one token a prompt, prefill's tokens count
        row.taus.append(row.tau)
        row.texts.extend(list(result.outputs[0].token_ids) for result in results)
        return row

    def _note_step(self, record: StepRecord) -> None:
        if self._on_step is not None:
            self._on_step(record)

    def _plain_texts(self) -> list[RequestOutput]:
        plain, workload = self._engines[PLAIN], self.workload
        return [
            output
            for temperature in workload.temperatures
            for output in plain.generate(list(workload.prompts), workload.params(temperature))
        ]


def compare_setups(
    model: LoadedModel,
    tokenizer: Any,
    setups: Sequence[Setup],
    workload: Workload,
    *,
    batch_size: int = 1,
    repeats: int = 1,
    runner: str = "auto",
    on_progress: Callable[[int, int], None] = no_progress,
) -> Iterator[list[Measurement]]:
    """Measures every setup on every prompt; yields the measurements of one temperature after another.

    Plain decoding is always included, as the first.

    Every setup decodes a batch of prompts in turn before the next batch, so that a drift of the machine's speed affects
    all alike. Every setup decodes a short warm-up before anything is timed.

    Args:
        workload: Prompts and sampling parameters; sampled requests have the same seeds in every setup.
        on_progress: Called with batches done and batches in all.
    """
    engines = SetupEngines(model, tokenizer, setups, workload, batch_size=batch_size, runner=runner)
    temperatures, batches = workload.temperatures, workload.batches(batch_size)
    on_measured = counted(on_progress, len(temperatures) * repeats * len(batches) * len(engines.names))
    for temperature in temperatures:
        rows = measure_rounds(engines, temperature, batches, repeats=repeats, on_measured=on_measured)
        if engines.is_lossy:
            note_surprise(model, tokenizer, workload, rows)
        yield rows


def measure_rounds(
    engines: SetupEngines,
    temperature: float,
    batches: Sequence[Sequence[int]],
    *,
    repeats: int = 1,
    on_measured: Callable[[], None] = lambda: None,
    goes_on: Callable[[], bool] = lambda: True,
) -> list[Measurement]:
    """Measures every setup on batch after batch at one temperature, and compares with plain decoding, the first.

    Args:
        batches: Indices into the workload's prompts; every setup decodes one batch before the next one.
        on_measured: Called after each batch of each setup.
        goes_on: Called before each batch but the first; False ends the measurement.
    """
    rows = [engines.empty(name, temperature) for name in engines.names]
    engines.warm_up(temperature)
    rounds = [(number + repeat, batch) for repeat in range(repeats) for number, batch in enumerate(batches)]
    for index, (shift, batch) in enumerate(rounds):
        if index and not goes_on():
            break
        for row in in_turn(rows, shift):
            row.add(engines.measure(row.setup, temperature, batch))
            on_measured()
    _relate(rows)
    return rows


def in_turn(items: Sequence[_T], number: int) -> list[_T]:
    """Returns the items in rotated order; each number begins with another item."""
    shift = number % len(items)
    return [*items[shift:], *items[:shift]]


def measure_anew(model: LoadedModel, runner: str, batch_size: int) -> None:
    """Measures again, and stores, the costs of passes of the serving decoder and of its alternatives."""
    likely_decoder(model, runner, PassWidths(batch_size), costs=cache(partial(pass_costs, model, is_refreshed=True)))


def verify_costs(model: LoadedModel, decoder: str) -> list[tuple[int, float]]:
    """Measures target passes of 1 to 128 tokens behind 128 others; returns (width, seconds) pairs."""
    return measure_costs(model, decoder, limit_s=60.0).tree.points


def note_surprise(model: LoadedModel, tokenizer: Any, workload: Workload, rows: Iterable[Measurement]) -> None:
    """Sets `nats_per_token`, in place."""
    for row in rows:
        row.nats_per_token = _surprise(model, tokenizer, workload.prompts, row.texts)


def _surprise(model: LoadedModel, tokenizer: Any, prompts: Sequence[Asked], texts: list[list[int]]) -> float:
    """Returns the mean nats a token under the target at temperature 1; texts: prompt by prompt, once a repeat."""
    total, count = 0.0, 0
    for index, text in enumerate(texts):
        prompt = prompt_token_ids(prompts[index % len(prompts)], tokenizer)
        ids = torch.tensor([[*prompt, *text]])
        logits = run_plain(model.module, ids).logits[0, len(prompt) - 1 : -1].float()
        own = torch.tensor(text, device=logits.device).unsqueeze(1)
        total -= float(logits.log_softmax(1).gather(1, own).sum())
        count += len(text)
    return total / max(count, 1)


def _relate(rows: list[Measurement]) -> None:
    """Sets speed-up and identity relative to the first row, plain decoding, in place."""
    plain = rows[0]
    for row in rows[1:]:
        row.speed_ups = [rate / plain_rate for rate, plain_rate in zip(row.rates, plain.rates, strict=True)]
        row.speed_up = median(row.speed_ups)
        row.speed_up_spread = (min(row.speed_ups), max(row.speed_ups))
        row.num_identical = sum(a == b for a, b in zip(row.texts, plain.texts, strict=True))
