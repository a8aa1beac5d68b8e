"""Compares what `foretoken plan` predicts with what the engines of `foretoken bench` measure.

    python -m benchmarks.planning --out benchmarks/results/planning

The plan measures acceptance on every second prompt, with one sequence and drafts of eight levels. The benchmark decodes
the other prompts, with shallower drafts, one and four at once. The plan has seen neither those prompts, nor that depth,
nor a drafter with a batch.

Both are measured in turn, prompt by prompt: other programs may use the machine, and its speed may change by half within
a minute. Neither interrupted iterations of the plan nor interrupted rounds of the benchmark count. Batches of the
benchmark drain, as their texts end at different times. A prediction therefore counts for the mean number of sequences
that an iteration decoded, linear between predictions for whole numbers.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.rivals.machine import commit, describe_machine
from foretoken.bench.compare import in_turn
from foretoken.bench.workload import SetupEngines, Workload, load_prompts
from foretoken.decoder.library import set_num_threads
from foretoken.entrypoints.config import PLAIN, parse_setup
from foretoken.models.loading import load_model, load_tokenizer
from foretoken.planning.acceptance import nearest
from foretoken.planning.measure import Measured, measure
from foretoken.planning.predict import Prediction, predictions

if TYPE_CHECKING:
    from foretoken.bench.measurement import Measurement

BATCHES = (1, 4)


class Row(NamedTuple):
    """One drafter at one temperature and batch: the prediction for `batch` sequences, and the measurement.

    `predicted_ms` and `measured_ms` are those of pass, drafts and host, predicted for the whole batch.
    """

    drafter: str
    temperature: float
    batch_size: int
    batch: float
    predicted: float
    measured: float
    predicted_speed_up: float
    measured_speed_up: float
    predicted_tau: float
    measured_tau: float
    half_width: float
    predicted_ms: tuple[float, ...]
    measured_ms: tuple[float, ...]

    @property
    def error(self) -> float:
        """Relative error of the predicted tokens/s."""
        return self.predicted / self.measured - 1

    @property
    def speed_up_error(self) -> float:
        """Relative error of the predicted speed-up."""
        return self.predicted_speed_up / self.measured_speed_up - 1

    @property
    def is_within(self) -> bool:
        """Whether the measured tokens/s lie in the predicted interval of 80 %."""
        return 1 / (1 + self.half_width) <= self.measured / self.predicted <= 1 + self.half_width


class Bench:
    """Measures plain decoding and drafters of a fixed depth on prompts of its own, a few at a time."""

    def __init__(self, model: Any, tokenizer: Any, names: list[str], depth: int, workload: Workload) -> None:
        """Makes the engines of every batch size."""
        setups = [parse_setup(f"{name}:num_speculative_tokens={depth}", target=model.name) for name in names]
        self._workload = workload
        self._engines = {size: SetupEngines(model, tokenizer, setups, workload, batch_size=size) for size in BATCHES}
        self._names = dict(zip(self._engines[1].names, [PLAIN, *names], strict=True))
        self.rows: dict[tuple[str, float, int], Measurement] = {}
        for size, engines in self._engines.items():
            for setup, name in self._names.items():
                for temperature in workload.temperatures:
                    self.rows[name, temperature, size] = engines.empty(setup, temperature)
            engines.warm_up(0.0)

    def advance(self, done: int, total: int) -> None:
        """Decodes the prompt of the same number as the plan's last; every fourth time four prompts at once too."""
        del total
        temperatures = list(self._workload.temperatures)
        number, temperature = (done - 1) // len(temperatures), temperatures[(done - 1) % len(temperatures)]
        for size, engines in self._engines.items():
            if number % size == size - 1:
                batch = range(number + 1 - size, number + 1)
                for setup, name in in_turn(list(self._names.items()), number):
                    self.rows[name, temperature, size].add(engines.measure(setup, temperature, batch))


_PAUSE = 1.5  # a round whose iterations take as many times as long as the median round's was interrupted; a choice


def undisturbed_rate(row: Measurement) -> float:
    """Returns the tokens/s of the rounds that were not interrupted."""
    rounds = list(zip(row.tokens, row.seconds, row.taus, strict=True))
    most = _PAUSE * median(seconds * tau / tokens for tokens, seconds, tau in rounds)
    counted = [(tokens, seconds) for tokens, seconds, tau in rounds if seconds * tau / tokens <= most]
    return sum(tokens for tokens, _ in counted) / sum(seconds for _, seconds in counted)


def at_mean_batch(found: list[Prediction], batch: float) -> float:
    """Returns the tokens/s of a mean number of sequences, from predictions for 1, 2, 3, … sequences."""
    low = max(min(int(batch), len(found) - 1), 1)
    rates = [each.tokens_per_s for each in found]
    return rates[low - 1] + (batch - low) * (rates[low] - rates[low - 1])


def rows_of(plan: Measured, bench: Bench, depth: int) -> list[Row]:
    """Returns a row for each drafter, temperature and batch."""
    by_batch = {
        temperature: [
            {
                each.draft.name: each
                for each in predictions(nearest(plan.curves, temperature), costs, batch=size, context=plan.context)
                if each.draft.depth in (0, depth)
            }
            for size in range(1, max(BATCHES) + 1)
        ]
        for temperature, costs in plan.costs.items()
    }
    rows = []
    for (name, temperature, size), measured in bench.rows.items():
        sizes = {each: bench.rows[each, temperature, size] for each in (PLAIN, name)}
        if not all(row.iterations for row in sizes.values()):
            sys.exit(f"Error: every round of {name} was interrupted. Expected a quiet one. Add --num-prompts.")
        mean = {each: row.metrics.steps / row.iterations for each, row in sizes.items()}
        rates = {each: at_mean_batch([its[each] for its in by_batch[temperature]], mean[each]) for each in sizes}
        predicted = by_batch[temperature][size - 1][name]
        rows.append(
            Row(
                drafter=name,
                temperature=temperature,
                batch_size=size,
                batch=mean[name],
                predicted=rates[name],
                measured=undisturbed_rate(measured),
                predicted_speed_up=rates[name] / rates[PLAIN],
                measured_speed_up=undisturbed_rate(measured) / undisturbed_rate(sizes[PLAIN]),
                predicted_tau=predicted.draft.tokens,
                measured_tau=measured.tau,
                half_width=predicted.high / predicted.tokens_per_s - 1,
                predicted_ms=tuple(1e3 * each for each in predicted.seconds),
                measured_ms=_parts(measured),
            )
        )
    return sorted(rows, key=lambda row: (row.batch_size, row.temperature))


def _parts(row: Measurement) -> tuple[float, float, float]:
    draft = 1e3 * row.draft_seconds / row.iterations
    return row.verify_ms, draft, row.host_ms - draft


def choices(rows: list[Row]) -> list[str]:
    """Returns a sentence for each temperature and batch: the predicted choice, and its loss against the best."""
    said = []
    for temperature, size in dict.fromkeys((row.temperature, row.batch_size) for row in rows):
        own = [row for row in rows if (row.temperature, row.batch_size) == (temperature, size)]
        chosen, best = max(own, key=lambda row: row.predicted), max(own, key=lambda row: row.measured)
        loss = 1 - chosen.measured / best.measured
        said.append(f"T {temperature:g}, batch {size}: chose {chosen.drafter}, best {best.drafter}, loses {loss:.1%}")
    return said


def as_markdown(rows: list[Row], sentences: list[str]) -> str:
    """Returns a table with one line a row, then the choices and the errors."""
    heads = "drafter | T | batch | sequences | tokens/s predicted | measured | error | speed-up predicted | measured | "
    lines = [*sentences, "", f"| {heads}error | tau predicted | measured |", "|---" * 12 + "|"]
    for row in rows:
        cells = [row.drafter, f"{row.temperature:g}", row.batch_size, f"{row.batch:.2f}", f"{row.predicted:.0f}"]
        cells += [f"{row.measured:.0f}", f"{row.error:+.0%}", f"{row.predicted_speed_up:.2f}"]
        cells += [f"{row.measured_speed_up:.2f}", f"{row.speed_up_error:+.0%}"]
        cells += [f"{row.predicted_tau:.2f}", f"{row.measured_tau:.2f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    drafting = [row for row in rows if row.drafter != PLAIN]
    errors, ratios = [abs(row.error) for row in rows], [abs(row.speed_up_error) for row in drafting]
    lines += ["", *(f"- {line}" for line in choices(rows))]
    lines.append(f"- error of tokens/s: median {median(errors):.0%}, largest {max(errors):.0%}")
    lines.append(f"- error of the speed-up: median {median(ratios):.0%}, largest {max(ratios):.0%}")
    lines.append(f"- {sum(row.is_within for row in rows)} of {len(rows)} measured rates lie in the interval of 80 %")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Compares, prints and writes Markdown and JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("model", nargs="?", default="models/tinycode")
    parser.add_argument("-s", dest="setups", action="append", help="default: ngram, draft_model and hass, as chains")
    parser.add_argument("--out", type=Path, required=True, help="files to write, without suffix")
    parser.add_argument("--num-prompts", type=int, default=40, help="for each of the two (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4, help="of the benchmark's drafts (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    names = options.setups or ["ngram:chain", "draft_model:chain", "hass:chain"]
    set_num_threads(options.threads)
    model, tokenizer = load_model(options.model), load_tokenizer(options.model)
    texts = load_prompts("heldout", limit=2 * options.num_prompts)
    seen, unseen = (Workload(prompts=texts[first::2], max_tokens=options.max_tokens) for first in (0, 1))
    bench = Bench(model, tokenizer, names, options.depth, unseen)
    setups = {name: parse_setup(name, target=options.model).config or {} for name in names}
    plan = measure(
        model, tokenizer, setups, seen, batches=BATCHES, has_acceptance=True, on_progress=bench.advance
    )  # fmt: skip
    rows, machine = rows_of(plan, bench, options.depth), describe_machine()
    conditions = {
        "command": shlex.join(["python", "-m", "benchmarks.planning", *arguments]),
        "commit": commit("foretoken", "models"),
        "processor": f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['instruction_sets'])})",
        "threads": options.threads,
        "prompts": f"{options.num_prompts} for the plan, as many others measured",
        "max_tokens": options.max_tokens,
        "depth": options.depth,
    }
    report = as_markdown(rows, [f"- {key.replace('_', ' ')}: {value}" for key, value in conditions.items()])
    options.out.with_suffix(".md").write_text(report, encoding="utf-8")
    record = {**conditions, "rows": [row._asdict() for row in rows]}
    options.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(report)


if __name__ == "__main__":
    main(sys.argv[1:])
