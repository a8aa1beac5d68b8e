"""`foretoken bench`: measures drafters side by side with plain decoding by the same runner."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli import options, terminal
from foretoken.cli.progress import progress

if TYPE_CHECKING:
    from foretoken.bench.measurement import Measurement


def bench(
    model: options.Model,
    speculative_config: options.Drafters = None,
    spec_type: options.SpecType = None,
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
    cost_curve: Annotated[
        bool, typer.Option("--cost-curve", help="Also time target passes of 1 to 128 tokens.")
    ] = False,
    refresh_costs: Annotated[
        bool, typer.Option("--refresh-costs", help="Measure anew what passes cost, which decides how wide trees are.")
    ] = False,
    wide: options.Wide = False,
    as_json: options.AsJson = False,
) -> None:
    """Measure tokens/s, speed-up and acceptance length tau; where the time goes with --wide or --json.

    All setups decode every batch of prompts in turn. tau is the mean number of tokens generated per target pass, the
    target's own included. Speed-up is the median ratio to plain decoding of the same batch by the same runner.
    Efficiency is speed-up / tau.

    A second table shows the drafts: how many nodes were used, how often each depth was accepted, and in which share of
    the passes the engine chose not to draft because drafting would have been slower (with num_speculative_tokens it
    always drafts). For a lossy acceptance rule it shows the target's surprise at the text, in nats a token: the price
    of the speed. The drafter `oracle` knows the text and is right as often as its `pattern` says: it shows the cost of
    the engine itself.
    """
    from foretoken.bench.compare import compare_setups, measure_anew, verify_costs
    from foretoken.bench.workload import Workload, load_prompts
    from foretoken.entrypoints.config import checked_setup

    drafters = options.drafter_texts(speculative_config, spec_type) or ["ngram"]
    setups = [checked_setup(text, target=model) for text in drafters]
    texts = load_prompts(prompts, limit=num_prompts)
    workload = Workload(prompts=texts, temperatures=temperature or (0.0, 0.8), max_tokens=max_tokens, seed=seed)
    loaded, tokenizer = options.load_target(model, dtype, device, threads)
    if refresh_costs:
        measure_anew(loaded, runner, batch_size)
    options.check_max_tokens(max_tokens, loaded)
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
        loaded, runner=", ".join(dict.fromkeys(row.runner for row in measurements)), prompts=len(texts),
        max_tokens=max_tokens, batch_size=batch_size, repeats=repeats, seed=seed,
        command=shlex.join(["foretoken", *sys.argv[1:]]),
    )  # fmt: skip
    costs = verify_costs(loaded, measurements[0].runner) if cost_curve else []
    if as_json:
        options.print_json(
            {
                **header,
                "measurements": [row.as_dict() for row in measurements],
                **({"verify_cost": [{"width": w, "seconds": s} for w, s in costs]} if cost_curve else {}),
            }
        )
        return
    terminal.conditions({key: value for key, value in header.items() if key != "command"})
    twin = "" if loaded.cost_twin is None else str(loaded.cost_twin)
    _print_table(measurements, wide=wide, twin=twin)
    _print_acceptance(measurements, twin)
    if costs:
        _print_costs(costs, twin)


def _print_table(measurements: list[Measurement], *, wide: bool, twin: str) -> None:
    """Prints one line a setup and temperature; twin: a note above the table of a cost twin."""
    shares = ("draft", "verify", "accept", "commit")
    more = ("effic.", *shares, "pass ms", "host ms") if wide else ()
    rows = []
    for row in measurements:
        low, high = row.speed_up_spread
        is_plain = row.num_identical is None
        timing = [
            f"{row.efficiency:.2f}", *(f"{row.shares[name]:.0%}" for name in shares), f"{row.verify_ms:.2f}",
            f"{row.host_ms:.2f}",
        ]  # fmt: skip
        rows.append([
            row.setup,
            f"{row.temperature:g}",
            f"{row.tokens_per_s:.1f}",
            f"{row.speed_up:.2f}",
            "" if is_plain else f"{low:.2f}-{high:.2f}",
            f"{row.tau:.2f}",
            *(timing if wide else ()),
            "" if is_plain else f"{row.num_identical}/{len(row.texts)}",
        ])  # fmt: skip
    terminal.print_table(
        ["drafter", "T", "tokens/s", "speed-up", "(min-max)", "tau", *more, "same text"], rows, title=twin or None,
        num_keys=2,
    )  # fmt: skip


def _print_acceptance(measurements: list[Measurement], twin: str) -> None:
    is_lossy = any(row.nats_per_token is not None for row in measurements)
    drafting = [row for row in measurements if row.metrics.num_drafted or row.metrics.num_declined]
    if not drafting:
        return
    rows = []
    for row in measurements if is_lossy else drafting:
        metrics = row.metrics
        rows.append([
            row.setup,
            f"{row.temperature:g}",
            f"{metrics.tree_nodes:.1f}",
            f"{metrics.tree_utilisation:.0%}",
            f"{metrics.num_declined / max(metrics.steps, 1):.0%}",
            terminal.percent_by_depth(metrics.acceptance_by_depth),
            *([f"{row.nats_per_token:.3f}"] if is_lossy else []),
        ])  # fmt: skip
    columns = ["drafter", "T", "nodes", "used", "not drafted", "% at depth 1, 2, ...", *(["nats/token"] * is_lossy)]
    title = "accepted at each depth, % of the passes whose tree reached it"
    terminal.print_table(columns, rows, title=_titled(title, twin), num_keys=2)


def _print_costs(costs: list[tuple[int, float]], twin: str) -> None:
    """Prints one row a width: milliseconds of a target pass, and the ratio to the narrowest pass."""
    rows = [[str(width), f"{seconds * 1e3:.2f}", f"{seconds / costs[0][1]:.2f}"] for width, seconds in costs]
    terminal.print_table(
        ["tokens in a pass", "ms", "x one token"], rows, title=_titled("what a target pass costs", twin)
    )


def _titled(title: str, twin: str) -> str:
    return f"{title}; {twin}" if twin else title
