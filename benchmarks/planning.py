"""Compares `foretoken plan` with `foretoken bench` on prompts, batches and depths that the plan has not seen.

    python -m benchmarks.planning --rounds 3 --out benchmarks/results/planning

The plan measures acceptance on every second prompt, with one sequence and drafts of eight levels. The benchmark decodes
the other prompts, at the depth that the plan chose for each drafter. Batches of `foretoken bench` drain, as texts of drafters end
at different times. A prediction therefore counts for the mean number of sequences that an iteration decoded, linear
between predictions for whole numbers.

Plan and benchmark run in turn, several rounds of them, since other programs may use the machine. Medians over the
rounds are compared: in tokens/s, and in speed-up over plain decoding of the same run, from which a drift of the
machine's speed cancels.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.rivals.machine import commit, describe_machine
from foretoken.bench.workload import load_prompts

PLAIN = "plain"
Key = tuple[str, float, int]  # drafter, temperature, batch


class Row(NamedTuple):
    """Medians over rounds of one drafter at one temperature and batch."""

    drafter: str
    temperature: float
    batch: int
    depth: int
    predicted: float
    measured: float
    predicted_speed_up: float
    measured_speed_up: float
    predicted_tau: float
    measured_tau: float
    half_width: float

    @property
    def is_within(self) -> bool:
        """Whether the measured speed-up lies in the predicted interval of 80 %."""
        return 1 / (1 + self.half_width) <= self.measured_speed_up / self.predicted_speed_up <= 1 + self.half_width

    @property
    def error(self) -> float:
        """Relative error of the predicted tokens/s."""
        return self.predicted / self.measured - 1

    @property
    def speed_up_error(self) -> float:
        """Relative error of the predicted speed-up."""
        return self.predicted_speed_up / self.measured_speed_up - 1


def called(arguments: list[str]) -> dict[str, Any]:
    """Runs a command of foretoken in a process of its own and returns its JSON."""
    done = subprocess.run([sys.executable, "-m", "foretoken", *arguments, "--json"], capture_output=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def planned(found: dict[str, Any]) -> dict[tuple[str, float, int, int], dict[str, Any]]:
    """Returns predictions by drafter, temperature, batch and depth."""
    return {
        (each["drafter"], page["temperature"], batch["batch_size"], each["depth"]): each
        for page in found["temperatures"]
        for batch in page["batches"]
        for each in batch["predictions"]
    }


def at_mean_batch(rates: list[float], batch: float) -> float:
    """Returns a rate at a mean number of sequences, from the rates of 1, 2, 3, … sequences."""
    low = min(int(batch), len(rates) - 1)
    return rates[low - 1] + (batch - low) * (rates[low] - rates[low - 1]) if len(rates) > 1 else rates[0]


def compare(options: argparse.Namespace) -> list[Row]:
    """Runs plan and benchmark in turn and returns a row for each drafter, temperature and batch."""
    texts = load_prompts("heldout", limit=2 * options.num_prompts)
    values: dict[Key, list[tuple[float, ...]]] = defaultdict(list)
    depths: dict[Key, int] = {}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        seen, unseen = Path(directory) / "seen.jsonl", Path(directory) / "unseen.jsonl"
        for place, part in ((seen, texts[0::2]), (unseen, texts[1::2])):
            place.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in part), encoding="utf-8")
        common = [options.model, "--threads", str(options.threads), "--max-tokens", str(options.max_tokens)]
        common += ["--num-prompts", str(options.num_prompts)]
        sizes = [str(size) for size in range(1, max(options.batches) + 1)]
        plan = ["plan", *common, "--measure", "--prompts", str(seen)]
        plan += [part for size in sizes for part in ("--batch-size", size)]
        plan += [part for name in options.setups for part in ("-s", name)]
        for number in range(options.rounds):
            predictions = planned(called(plan))
            if not depths:
                depths = _best_depths(predictions, options)
            for batch in options.batches:
                for temperature in (0.0, 0.8):
                    measured = _bench(common, unseen, depths, temperature, batch, options)
                    _add(values, predictions, depths, measured, temperature, batch)
            rows = _rows(values, depths)
            print(as_markdown(rows, [f"after round {number + 1} of {options.rounds}"]), file=sys.stderr, flush=True)
    return rows


def _rows(values: dict[Key, list[tuple[float, ...]]], depths: dict[Key, int]) -> list[Row]:
    return [
        Row(*key, depths[key], *(median(column) for column in zip(*each, strict=True))) for key, each in values.items()
    ]


def _best_depths(predictions: dict[Any, dict[str, Any]], options: argparse.Namespace) -> dict[Key, int]:
    best: dict[Key, tuple[float, int]] = {}
    for (name, temperature, batch, depth), each in predictions.items():
        if batch in options.batches:
            key = name, temperature, batch
            best[key] = max(best.get(key, (0.0, 0)), (each["tokens_per_s"], depth))
    return {key: depth for key, (_, depth) in best.items()}


def _bench(
    common: list[str],
    prompts: Path,
    depths: dict[Key, int],
    temperature: float,
    batch: int,
    options: argparse.Namespace,
) -> dict[str, dict[str, Any]]:
    """Returns the measurements of `foretoken bench` by drafter."""
    names = [name for name, at, size in depths if (at, size) == (temperature, batch) and name != PLAIN]
    setups = {name: f"{name}:num_speculative_tokens={depths[name, temperature, batch]}" for name in names}
    found = called(
        ["bench", *common, "--prompts", str(prompts)]
        + ["--temperature", str(temperature), "--batch-size", str(batch)]
        + [part for setup in setups.values() for part in ("-s", setup)]
    )
    return dict(zip([PLAIN, *names], found["measurements"], strict=True))


def _add(
    values: dict[Key, list[tuple[float, ...]]],
    predictions: dict[Any, dict[str, Any]],
    depths: dict[Key, int],
    measured: dict[str, dict[str, Any]],
    temperature: float,
    batch: int,
) -> None:
    def predicted(name: str, size: float) -> float:
        depth = depths[name, temperature, batch]
        rates = [predictions[name, temperature, each, depth]["tokens_per_s"] for each in range(1, batch + 1)]
        return at_mean_batch(rates, size)

    sizes = {name: each["metrics"]["steps"] / each["iterations"] for name, each in measured.items()}
    for name, each in measured.items():
        depth = depths[name, temperature, batch]
        values[name, temperature, batch].append((
            predicted(name, sizes[name]),
            each["tokens_per_s"],
            predicted(name, sizes[name]) / predicted(PLAIN, sizes[PLAIN]),
            each["tokens_per_s"] / measured[PLAIN]["tokens_per_s"],
            predictions[name, temperature, 1, depth]["mean_acceptance_length"],
            each["mean_acceptance_length"],
            predictions[name, temperature, batch, depth]["tokens_per_s_high"]
            / predictions[name, temperature, batch, depth]["tokens_per_s"]
            - 1,
        ))  # fmt: skip


def choices(rows: list[Row]) -> list[str]:
    """Returns a sentence for each temperature and batch: the predicted choice, and its loss against the best."""
    said = []
    for temperature, batch in dict.fromkeys((row.temperature, row.batch) for row in rows):
        own = [row for row in rows if (row.temperature, row.batch) == (temperature, batch)]
        chosen, best = max(own, key=lambda row: row.predicted), max(own, key=lambda row: row.measured)
        loss = 1 - chosen.measured / best.measured
        said.append(f"T {temperature:g}, batch {batch}: chose {chosen.drafter}, best {best.drafter}, loses {loss:.1%}")
    return said


def as_markdown(rows: list[Row], sentences: list[str]) -> str:
    """A table with one line a row, then the choices and the errors."""
    lines = [*sentences, "", "| drafter | T | batch | depth | tokens/s predicted | measured | error | "
             "speed-up predicted | measured | error | tau predicted | measured |", "|---" * 12 + "|"]  # fmt: skip
    for row in rows:
        cells = [row.drafter, f"{row.temperature:g}", row.batch, row.depth, f"{row.predicted:.0f}"]
        cells += [f"{row.measured:.0f}", f"{row.error:+.0%}", f"{row.predicted_speed_up:.2f}"]
        cells += [f"{row.measured_speed_up:.2f}", f"{row.speed_up_error:+.0%}"]
        cells += [f"{row.predicted_tau:.2f}", f"{row.measured_tau:.2f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    drafting = [row for row in rows if row.drafter != PLAIN]
    errors, ratios = [abs(row.error) for row in rows], [abs(row.speed_up_error) for row in drafting]
    lines += ["", *(f"- {line}" for line in choices(rows))]
    lines.append(f"- error of tokens/s: median {median(errors):.0%}, largest {max(errors):.0%}")
    lines.append(f"- error of the speed-up: median {median(ratios):.0%}, largest {max(ratios):.0%}")
    within = sum(row.is_within for row in drafting)
    lines.append(f"- {within} of {len(drafting)} measured speed-ups lie in the predicted interval of 80 %")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Compares, prints and writes Markdown and JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    parser.add_argument("model", nargs="?", default="models/tinycode")
    parser.add_argument("-s", dest="setups", action="append", help="default: ngram, draft_model and hass:chain")
    parser.add_argument("--out", type=Path, required=True, help="files to write, without suffix")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=40, help="for each of the two (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    options.setups = options.setups or ["ngram", "draft_model", "hass:chain"]
    options.batches = [1, 4]
    rows, machine = compare(options), describe_machine()
    conditions = {
        "command": shlex.join(["python", "-m", "benchmarks.planning", *arguments]),
        "commit": commit("foretoken", "models"),
        "processor": f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['instruction_sets'])})",
        "threads": options.threads,
        "rounds": options.rounds,
        "prompts": f"{options.num_prompts} for the plan, as many others measured",
        "max_tokens": options.max_tokens,
    }
    report = as_markdown(rows, [f"{key.replace('_', ' ')}: {value}  " for key, value in conditions.items()])
    options.out.with_suffix(".md").write_text(report, encoding="utf-8")
    record = {**conditions, "rows": [row._asdict() for row in rows]}
    options.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(report)


if __name__ == "__main__":
    main(sys.argv[1:])
