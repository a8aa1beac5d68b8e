"""Measures drafters against plain decoding of the same target, in one process, in interleaved rounds."""

from __future__ import annotations

from functools import cache, partial
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from foretoken.bench.workload import Asked, SetupEngines, Workload, no_progress, prompt_token_ids
from foretoken.models.generic import run_plain
from foretoken.runner.costs import measure_costs, pass_costs
from foretoken.runner.runner import PassWidths, likely_decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from foretoken.bench.measurement import Measurement
    from foretoken.entrypoints.config import Setup
    from foretoken.models.loading import LoadedModel

_T = TypeVar("_T")


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
    total = len(temperatures) * repeats * len(batches) * len(engines.names)
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        on_progress(done, total)

    for temperature in temperatures:
        rows = measure_rounds(engines, temperature, batches, repeats=repeats, on_measured=count)
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
