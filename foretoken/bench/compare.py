"""Measures drafters against plain decoding of the same target, in one process, in interleaved rounds."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import cache, partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from foretoken.bench.setups import PLAIN, Setup
from foretoken.bench.workload import Workload, no_progress
from foretoken.core.results import GenerationMetrics
from foretoken.engine.llm import LLM
from foretoken.hf.plain import run_plain
from foretoken.runner.choice import likely_decoder
from foretoken.runner.costs import measure_costs, pass_costs
from foretoken.runner.pass_widths import PassWidths

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.core.records import StepRecord
    from foretoken.core.results import RequestOutput
    from foretoken.core.sampling_params import SamplingParams
    from foretoken.hf.loading import LoadedModel


@dataclass(slots=True)
class Measurement:
    """One setup at one temperature.

    Attributes:
        setup: Its name.
        temperature: Of all requests.
        runner: The target's runner.
        runner_choice: Why that one, in a sentence.
        seconds: Wall-clock seconds of each round of prompts, prefill left out; rounds of all setups are interleaved.
        tokens: Output tokens of each round.
        metrics: Added up over all rounds.
        iterations: Of the engine, over all rounds.
        verify_seconds: Seconds of these iterations spent in target passes.
        texts: Output token ids, one entry a prompt and repeat.
        num_identical: Entries of `texts` that equal plain decoding's; None for plain itself.
        speed_up: Median over rounds of this setup's tokens per second over plain's in the same round.
        speed_up_spread: Smallest and largest of these ratios.
        nats_per_token: Mean surprise of the target at temperature 1 over the output, in nats; what a lossy rule costs
            shows against plain decoding's. None where all setups are lossless.
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
    texts: list[list[int]] = field(default_factory=list)
    num_identical: int | None = None
    speed_up: float = 1.0
    speed_up_spread: tuple[float, float] = (1.0, 1.0)
    nats_per_token: float | None = None

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

    def add_step(self, record: StepRecord) -> None:
        """Counts an iteration."""
        self.iterations += 1
        self.verify_seconds += record.seconds.verify

    @property
    def shares(self) -> dict[str, float]:
        """Parts of the stages' time spent in draft, verify, accept and commit."""
        seconds = self.metrics.seconds
        total = seconds.total or 1.0
        return {name: getattr(seconds, name) / total for name in ("draft", "verify", "accept", "commit")}

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
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
            "host_ms": self.host_ms,
            "shares": self.shares,
            "num_identical": self.num_identical,
            "num_texts": len(self.texts),
            "nats_per_token": self.nats_per_token,
            "metrics": self.metrics.as_dict(),
        }


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
) -> list[Measurement]:
    """Measures every setup on every prompt at every temperature; plain decoding is always among them and first.

    Prompts go round in batches: each batch is decoded by every setup in turn before the next one, so that a drift of
    the machine's speed hits all alike. Before anything is timed, every setup decodes one short warm-up.

    Args:
        model: The target, loaded once.
        tokenizer: Its tokenizer.
        setups: What to compare.
        workload: What to decode; sampled requests have the same seeds in every setup.
        batch_size: Sequences decoded at once.
        repeats: How often everything is measured.
        runner: Of the target and of draft models, see `LLM`.
        on_progress: Called with batches done and batches in all.
    """
    ordered = [Setup(PLAIN, None), *(s for s in setups if s.config is not None)]
    on_step: dict[str, Callable[[StepRecord], None]] = {setup.name: _ignore for setup in ordered}
    engines: dict[str, LLM] = {}
    for setup in ordered:
        engines[setup.name] = LLM(
            model,
            speculative_config=setup.with_references(
                _plain_texts(engines[PLAIN], workload) if setup.needs_references else ()
            ),
            tokenizer=tokenizer,
            max_num_seqs=batch_size,
            runner=runner,
            on_step=lambda record, name=setup.name: on_step[name](record),  # type: ignore[misc]
        )
    prompts, temperatures = workload.prompts, workload.temperatures
    batches = [list(range(i, min(i + batch_size, len(prompts)))) for i in range(0, len(prompts), batch_size)]
    total = len(temperatures) * repeats * len(batches) * len(ordered)
    done = 0
    measurements = []
    for temperature in temperatures:
        targets = {setup.name: engines[setup.name].target for setup in ordered}
        rows = [Measurement(name, temperature, target.name, target.choice) for name, target in targets.items()]
        params = workload.params(temperature)
        for row in rows:
            engines[row.setup].generate(prompts[0], replace(params[0], max_tokens=min(8, workload.max_tokens)))
        for repeat in range(repeats):
            for number, batch in enumerate(batches):
                shift = (number + repeat) % len(rows)
                for row in rows[shift:] + rows[:shift]:
                    on_step[row.setup] = row.add_step
                    _run_batch(engines[row.setup], row, [prompts[i] for i in batch], [params[i] for i in batch])
                    done += 1
                    on_progress(done, total)
        for row in rows:
            on_step[row.setup] = _ignore
        _relate(rows)
        if any(engine.is_lossy for engine in engines.values()):
            for row in rows:
                row.nats_per_token = _surprise(model, tokenizer, prompts, row.texts)
        measurements.extend(rows)
    return measurements


def measure_anew(model: LoadedModel, runner: str, batch_size: int) -> None:
    """Replaces the costs of passes that are kept: of the decoder that serves, and of those that it is chosen from.

    Args:
        model: The target.
        runner: See `LLM`.
        batch_size: Sequences decoded at once.
    """
    likely_decoder(model, runner, PassWidths(batch_size), costs=cache(partial(pass_costs, model, is_refreshed=True)))


def verify_costs(model: LoadedModel, decoder: str) -> list[tuple[int, float]]:
    """Seconds of target passes of 1 to 128 tokens behind 128 others, measured now; (width, seconds) pairs.

    Args:
        model: The target.
        decoder: Which one, see `foretoken.runner.decoders`.
    """
    return measure_costs(model, decoder, limit_s=60.0).tree.points


def _plain_texts(plain: LLM, workload: Workload) -> list[RequestOutput]:
    """What plain decoding writes to every prompt at every temperature."""
    return [
        output for t in workload.temperatures for output in plain.generate(list(workload.prompts), workload.params(t))
    ]


def _surprise(model: LoadedModel, tokenizer: Any, prompts: Sequence[str], texts: list[list[int]]) -> float:
    """Nats a token of outputs under the target at temperature 1; texts come prompt by prompt, once a repeat."""
    total, count = 0.0, 0
    for index, text in enumerate(texts):
        prompt = list(tokenizer(prompts[index % len(prompts)])["input_ids"])
        ids = torch.tensor([[*prompt, *text]])
        logits = run_plain(model.module, ids).logits[0, len(prompt) - 1 : -1].float()
        own = torch.tensor(text, device=logits.device).unsqueeze(1)
        total -= float(logits.log_softmax(1).gather(1, own).sum())
        count += len(text)
    return total / max(count, 1)


def _ignore(record: StepRecord) -> None:
    """Counts nothing: the warm-up."""
    del record


def _run_batch(llm: LLM, row: Measurement, prompts: list[str], params: list[SamplingParams]) -> None:
    """Decodes one batch and adds what it took to a measurement."""
    begin = time.perf_counter()
    results = llm.generate(prompts, params)
    seconds = time.perf_counter() - begin
    metrics = GenerationMetrics.total(result.metrics for result in results)
    row.seconds.append(seconds - metrics.prefill_seconds)
    row.tokens.append(metrics.num_emitted)
    row.metrics = GenerationMetrics.total([row.metrics, metrics])
    row.texts.extend(result.outputs[0].token_ids for result in results)


def _relate(rows: list[Measurement]) -> None:
    """Fills in speed-up and identity against the first row, plain decoding, in place."""
    plain = rows[0]
    for row in rows[1:]:
        rates = [tokens / seconds for tokens, seconds in zip(row.tokens, row.seconds, strict=True)]
        plain_rates = [tokens / seconds for tokens, seconds in zip(plain.tokens, plain.seconds, strict=True)]
        ratios = [rate / plain_rate for rate, plain_rate in zip(rates, plain_rates, strict=True)]
        row.speed_up, row.speed_up_spread = median(ratios), (min(ratios), max(ratios))
        row.num_identical = sum(a == b for a, b in zip(row.texts, plain.texts, strict=True))
