"""`foretoken bench`: drafters side by side against plain decoding by the same runner."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli import options
from foretoken.cli.progress import progress

if TYPE_CHECKING:
    from foretoken.bench.compare import Measurement


def bench(
    model: options.Model,
    speculative_config: options.Drafters = None,
    prompts: options.Prompts = "heldout",
    num_prompts: options.NumPrompts = 8,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperatures = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences decoded at once.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 1,
    seed: options.Seed = 0,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    runner: options.RunnerName = "auto",
    threads: options.Threads = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure tokens/s, speed-up, acceptance length tau, efficiency and where the time goes.

    Every batch of prompts is decoded by all setups in turn; speed-up is the median ratio to plain decoding of the same
    batch by the same runner. tau counts the target's own token of each pass; efficiency is speed-up / tau.
    """
    from foretoken.bench.compare import compare_setups
    from foretoken.bench.prompt_sets import load_prompts
    from foretoken.bench.setups import parse_setup
    from foretoken.bench.workload import Workload

    setups = [parse_setup(text) for text in speculative_config or ["ngram"]]
    texts = load_prompts(prompts, limit=num_prompts)
    workload = Workload(prompts=texts, temperatures=temperature or (0.0, 0.8), max_tokens=max_tokens, seed=seed)
    loaded, tokenizer = options.load_target(model, dtype, device, threads)
    with progress("batches") as on_progress:
        measurements = compare_setups(
            loaded,
            tokenizer,
            setups,
            workload,
            batch_size=batch_size,
            repeats=repeats,
            runner=runner,
            on_progress=on_progress,
        )
    header = options.run_header(
        loaded, runner=measurements[0].runner, prompts=len(texts), max_tokens=max_tokens, batch_size=batch_size,
        repeats=repeats, seed=seed, command=shlex.join(["foretoken", *sys.argv[1:]]),
    )  # fmt: skip
    if as_json:
        options.print_json({**header, "measurements": [row.as_dict() for row in measurements]})
        return
    print(" ".join(f"{key}={value}" for key, value in header.items() if key != "command"))
    _print_table(measurements)


def _print_table(measurements: list[Measurement]) -> None:
    """One line a setup and temperature."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for column in ("drafter", "T", "tokens/s", "speed-up", "(min-max)", "tau", "efficiency", "draft", "verify",
                   "accept", "commit", "identical"):  # fmt: skip
        table.add_column(column, justify="left" if column == "drafter" else "right", no_wrap=True)
    for row in measurements:
        low, high = row.speed_up_spread
        is_plain = row.num_identical is None
        identical = "" if is_plain else f"{row.num_identical}/{len(row.texts)}"
        table.add_row(
            row.setup,
            f"{row.temperature:g}",
            f"{row.tokens_per_s:.1f}",
            f"{row.speed_up:.2f}",
            "" if is_plain else f"{low:.2f}-{high:.2f}",
            f"{row.tau:.2f}",
            f"{row.efficiency:.2f}",
            *(f"{share:.0%}" for share in row.shares.values()),
            identical,
        )
    Console(width=132).print(table)
