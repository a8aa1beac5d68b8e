"""Compares drafters, alone and several in one tree, on three workloads and their union: completion, edits, prose.

    python -m benchmarks.workloads [MODEL] -s ngram -s hydra -s ngram+hydra --out benchmarks/results/workloads

All setups decode prompt after prompt in turn with plain decoding, in one process; nothing else may run meanwhile. A
workload's rate is its tokens over its seconds, the speed-up the median over prompts of the ratio to plain decoding.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.rivals.machine import commit, describe_machine
from foretoken.bench.compare import compare_setups
from foretoken.bench.workload import Workload, load_prompts
from foretoken.core.results import GenerationMetrics
from foretoken.decoder.library import set_num_threads
from foretoken.entrypoints.config import parse_setup
from foretoken.models.loading import load_model, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.bench.measurement import Measurement

WORKLOADS = {"completion": "heldout", "edits": "edit", "prose": "prose"}
UNION = "all three"


@dataclass(frozen=True, slots=True)
class Row:
    """One setup on one workload, or on all of them together.

    Attributes:
        workload: Its name.
        setup: Likewise.
        tokens_per_s: Tokens over seconds.
        speed_up: Median over prompts.
        tau: Tokens a target pass.
        same: Texts that are plain decoding's, and texts in all.
    """

    workload: str
    setup: str
    tokens_per_s: float
    speed_up: float
    tau: float
    same: tuple[int, int]


def row_of(workload: str, parts: Sequence[Measurement]) -> Row:
    """Measurements of one setup on one or several workloads together; the first setup of a run is plain decoding."""
    speed_ups = [ratio for part in parts for ratio in part.speed_ups]
    identical = [part.num_identical for part in parts if part.num_identical is not None]
    return Row(
        workload=workload,
        setup=parts[0].setup,
        tokens_per_s=sum(sum(part.tokens) for part in parts) / sum(sum(part.seconds) for part in parts),
        speed_up=median(speed_ups) if speed_ups else 1.0,
        tau=GenerationMetrics.total(part.metrics for part in parts).mean_acceptance_length,
        same=(sum(identical), sum(len(part.texts) for part in parts)) if identical else (0, 0),
    )


def rows_of(measured: dict[str, list[Measurement]]) -> list[Row]:
    """A row for every workload and setup, then the union's; measured: the setups in one order for every workload."""
    rows = [row_of(workload, [part]) for workload, parts in measured.items() for part in parts]
    return rows + [row_of(UNION, parts) for parts in zip(*measured.values(), strict=True)]


def as_markdown(rows: Sequence[Row], sentences: Sequence[str]) -> str:
    """One table: a line a setup, a column a workload, the fastest in bold."""
    workloads = list(dict.fromkeys(row.workload for row in rows))
    best = {name: max(row.tokens_per_s for row in rows if row.workload == name) for name in workloads}
    lines = [*sentences, "", f"| tokens/s (speed-up, tau) | {' | '.join(workloads)} | same text |"]
    lines.append("|---" * (len(workloads) + 2) + "|")
    for setup in dict.fromkeys(row.setup for row in rows):
        of_setup = {row.workload: row for row in rows if row.setup == setup}
        cells = []
        for name in workloads:
            row = of_setup[name]
            rate = f"{row.tokens_per_s:.1f}"
            cells.append(
                f"{f'**{rate}**' if row.tokens_per_s == best[name] else rate} ({row.speed_up:.2f}, {row.tau:.2f})"
            )
        same, total = of_setup[UNION].same
        lines.append(f"| {setup} | {' | '.join(cells)} | {f'{same}/{total}' if total else ''} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Measures and writes Markdown and JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.workloads", description=__doc__)
    parser.add_argument("model", nargs="?", default="models/tinycode")
    parser.add_argument("-s", dest="setups", action="append", required=True, help="as `foretoken bench -s`; repeated")
    parser.add_argument("--out", type=Path, required=True, help="files to write, without suffix")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-prompts", type=int, default=8, help="of each workload (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    set_num_threads(options.threads)
    model, tokenizer = load_model(options.model, dtype=options.dtype), load_tokenizer(options.model)
    setups = [parse_setup(text, target=options.model) for text in options.setups]
    measured: dict[str, list[Measurement]] = {}
    for name, source in WORKLOADS.items():
        workload = Workload(
            prompts=load_prompts(source, limit=options.num_prompts), temperatures=[options.temperature],
            max_tokens=options.max_tokens,
        )  # fmt: skip
        (measured[name],) = compare_setups(model, tokenizer, setups, workload, batch_size=options.batch_size)
        print(f"{name} is done", file=sys.stderr, flush=True)
    rows, machine = rows_of(measured), describe_machine()
    twin = model.cost_twin
    conditions: dict[str, Any] = {
        "model": model.name if twin is None else f"a cost twin, {twin.label}",
        "dtype": options.dtype,
        "runner": measured["completion"][0].runner,
        "temperature": options.temperature,
        "batch_size": options.batch_size,
        "num_prompts": options.num_prompts,
        "max_tokens": options.max_tokens,
        "threads": options.threads,
        "processor": f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['instruction_sets'])})",
        "commit": commit("foretoken", "models"),
        "command": shlex.join(["python", "-m", "benchmarks.workloads", *arguments]),
    }
    report = as_markdown(rows, [f"{key.replace('_', ' ')}: {value}  " for key, value in conditions.items()])
    options.out.with_suffix(".md").write_text(report, encoding="utf-8")
    record = {**conditions, "rows": [{key: getattr(row, key) for key in Row.__slots__} for row in rows]}
    options.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(report)


if __name__ == "__main__":
    main(sys.argv[1:])
