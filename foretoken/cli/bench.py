"""Commands that measure speed: `foretoken bench` and `foretoken bench serve`."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options, terminal
from foretoken.cli.terminal import ProgressBar
from foretoken.core.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.bench.compare import Measurement
    from foretoken.text.prompt_rows import PromptRow


@dataclass(frozen=True, kw_only=True)
class SuiteOptions(options.PromptOptions):
    """The prompts of a measurement, or the questions of a suite."""

    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="spec-bench: print the form of its leaderboard, for its file in --prompts, greedily by default.",
        ),
    ] = None

    def rows(self) -> list[PromptRow]:
        """Reads the prompts; raises `ConfigError` for an unknown suite, and for a suite without its file."""
        if self.suite is None:
            return super().rows()
        from foretoken.bench.speed_report import GROUPS, SUITE, check_rows
        from foretoken.bench.workload import read_prompts

        if self.suite != SUITE:
            raise ConfigError(f"--suite is '{self.suite}'. Expected {SUITE}. Leave it out for other prompts.")
        if self.prompts == "heldout":
            raise ConfigError(
                f"--suite {SUITE} has no questions. Expected its file. Pass --prompts question.jsonl, which lies in "
                "data/spec_bench of hemingkx/Spec-Bench."
            )
        rows = read_prompts(self.prompts, limit=self.num_prompts, groups=GROUPS)
        check_rows(rows)
        return rows


def bench(
    model: options.Model,
    *,
    drafters: options.DrafterChoices,
    synthetic_acceptance: options.SyntheticAcceptance = None,
    asked: Annotated[SuiteOptions, ("prompts", "suite", "num_prompts", "max_tokens", "temperature")],
    batch_size: options.BatchSizes = None,
    repeats: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 1,
    seed: options.Seed = 0,
    loading: options.LoadOptions,
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
    Efficiency is speed-up / tau. "declined" stands for a speed-up below 1 where the engine mostly chose not to draft.

    A second table shows the drafts: how many nodes were used, how often each depth was accepted, and in which share of
    the passes the engine chose not to draft because drafting would have been slower (with num_speculative_tokens it
    always drafts). For a lossy acceptance rule it shows the target's surprise at the text, in nats a token: the price
    of the speed. The drafter `oracle` knows the text and is right as often as its `pattern` says: it shows the cost of
    the engine itself.

    A third table has SPEED-Bench's figures, one line a batch size and category of prompts. AL is the mean over texts of
    tokens per target pass. A user is one text, timed from its first token; the tokens/s of all include prefill.

    The last lines say for each temperature what to take, and what to try next.
    """
    from foretoken.bench.compare import compare_setups, measure_anew, verify_costs
    from foretoken.entrypoints.config import checked_setups
    from foretoken.planning.verdict import next_step, verdicts

    setups = [
        options.with_synthetic_acceptance(setup, synthetic_acceptance, model)
        for setup in checked_setups(drafters.texts or ["ngram"], target=model)
    ]
    rows, batch_sizes = asked.rows(), batch_size or [1]
    (loaded, tokenizer), runner = loading.load(model), loading.runner
    if refresh_costs:
        measure_anew(loaded, runner, max(batch_sizes))
    temperatures = [0.0] if asked.suite else [0.0, 0.8]
    workload = asked.workload(rows, loaded, tokenizer, temperatures=temperatures, runner=runner, seed=seed)
    header = options.run_header(
        loaded, prompts=len(workload.prompts), max_tokens=workload.max_tokens,
        batch_size=batch_sizes[0] if len(batch_sizes) == 1 else batch_sizes, repeats=repeats, seed=seed,
        command=options.command_line(),
    )  # fmt: skip
    twin = "" if loaded.cost_twin is None else str(loaded.cost_twin)
    measurements: list[Measurement] = []
    columns = _columns([setup.name for setup in setups], wide=wide, has_sizes=len(batch_sizes) > 1)
    table = terminal.growing_table(
        [name for name, _, _ in columns], [widest for _, widest, _ in columns], title=twin or None,
        num_keys=2 + (len(batch_sizes) > 1),
    )  # fmt: skip
    with ProgressBar("batches") as bar, table as add:
        for size in batch_sizes:
            for measured in compare_setups(
                loaded, tokenizer, setups, workload, batch_size=size, repeats=repeats, runner=runner, on_progress=bar
            ):
                bar.pause()
                if not as_json:
                    if not measurements:
                        terminal.conditions({**header, "runner": _runners(measured), "command": None})
                    for row in measured:
                        add([cell(row) for _, _, cell in columns])
                measurements += measured
    header["runner"] = _runners(measurements)
    boards = _leaderboards(measurements) if asked.suite else []
    found = verdicts(measurements, {each.name for each in setups if each.config and not each.needs_references})
    costs = verify_costs(loaded, measurements[0].runner) if cost_curve else []
    if as_json:
        options.print_json({
            **header,
            "measurements": [row.as_dict() for row in measurements],
            **({"spec_bench": boards} if asked.suite else {}),
            "verdicts": [each._asdict() for each in found],
            **({"verify_cost": [{"width": w, "seconds": s} for w, s in costs]} if cost_curve else {}),
        })  # fmt: skip
        return
    _print_acceptance(measurements, twin)
    if asked.suite:
        _print_leaderboards(boards, twin)
    else:
        _print_speed_bench(measurements, twin)
    if costs:
        _print_costs(costs, twin)
    for verdict in found:
        terminal.prose(verdict.sentence)
    if found:
        terminal.prose(next_step(model, found))


def _runners(measured: Sequence[Measurement]) -> str:
    return ", ".join(dict.fromkeys(row.runner for row in measured))


def _leaderboards(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Returns the lines of the leaderboard, plain decoding's included."""
    from foretoken.bench.speed_report import leaderboard
    from foretoken.entrypoints.config import PLAIN

    plain: dict[tuple[float, int], Measurement] = {}
    for row in measurements:
        if row.setup == PLAIN:
            plain[row.temperature, row.batch_size] = row
    return [
        {
            "setup": row.setup, "temperature": row.temperature, "batch_size": row.batch_size,
            "categories": leaderboard(row.runs, plain[row.temperature, row.batch_size].runs),
        }
        for row in measurements
    ]  # fmt: skip


def _print_leaderboards(boards: Sequence[Mapping[str, Any]], twin: str) -> None:
    from foretoken.bench.speed_report import ALL, CATEGORIES

    titles = {
        "speed_up": "Spec-Bench: speed-up by category, prefill included; tau counts the target's own token",
        "tau": "Spec-Bench: accepted tokens a pass by category (tau), the target's own included",
    }
    for figure, title in titles.items():
        last = {"tau": "tau", "all": "speed_up"} if figure == "speed_up" else {"all": "tau"}
        rows = []
        for board in boards:
            figures = board["categories"]
            cells = [_number(figures[name][figure] if name in figures else None, "") for name in CATEGORIES]
            totals = [_number(figures[ALL][each], "" if each == "tau" else "unknown") for each in last.values()]
            rows.append([board["setup"], f"{board['temperature']:g}", str(board["batch_size"]), *cells, *totals])
        columns = ["drafter", "T", "batch", *CATEGORIES.values(), *last]
        terminal.print_table(columns, rows, title=_titled(title, twin), num_keys=3)


def _columns(
    names: Sequence[str], *, wide: bool, has_sizes: bool
) -> list[tuple[str, str, Callable[[Measurement], str]]]:  # fmt: skip
    """Returns the columns of the table: heading, widest cell, and the cell of a measurement."""
    from foretoken.planning.verdict import is_declined

    columns: list[tuple[str, str, Callable[[Measurement], str]]] = [
        ("drafter", max(["plain", *names], key=len), lambda row: row.setup),
        ("T", "0.8", lambda row: f"{row.temperature:g}"),
    ]
    if has_sizes:
        columns.append(("batch", "", lambda row: str(row.batch_size)))
    columns += [
        ("tokens/s", "12345.6", lambda row: f"{row.tokens_per_s:.1f}"),
        ("speed-up", "declined", lambda row: "declined" if is_declined(row) else f"{row.speed_up:.2f}"),
        ("(min-max)", "10.00-10.00", lambda row: _compared(row, "{:.2f}-{:.2f}".format(*row.speed_up_spread))),
        ("tau", "10.00", lambda row: f"{row.tau:.2f}"),
    ]
    if wide:
        columns += [
            ("effic.", "", lambda row: f"{row.efficiency:.2f}"),
            ("draft", "", lambda row: f"{row.shares['draft']:.0%}"),
            ("verify", "", lambda row: f"{row.shares['verify']:.0%}"),
            ("accept", "", lambda row: f"{row.shares['accept']:.0%}"),
            ("commit", "", lambda row: f"{row.shares['commit']:.0%}"),
            ("pass ms", "", lambda row: f"{row.verify_ms:.2f}"),
            ("host ms", "", lambda row: f"{row.host_ms:.2f}"),
        ]
    return [*columns, ("same text", "480/480", lambda row: _compared(row, f"{row.num_identical}/{len(row.texts)}"))]


def _compared(row: Measurement, text: str) -> str:
    return "" if row.num_identical is None else text  # plain decoding is compared with nothing


def _print_acceptance(measurements: list[Measurement], twin: str) -> None:
    is_lossy = any(row.nats_per_token is not None for row in measurements)
    drafting = [row for row in measurements if row.metrics.num_drafted or row.metrics.num_declined]
    if not drafting:
        return
    rows, has_sizes = [], len({row.batch_size for row in measurements}) > 1
    for row in measurements if is_lossy else drafting:
        metrics = row.metrics
        cells = {
            "drafter": row.setup,
            "T": f"{row.temperature:g}",
            **({"batch": str(row.batch_size)} if has_sizes else {}),
            "nodes": f"{metrics.tree_nodes:.1f}",
            "used": f"{metrics.tree_utilisation:.0%}",
            "not drafted": f"{metrics.num_declined / max(metrics.steps, 1):.0%}",
            "% at depth 1, 2, ...": terminal.percent_by_depth(metrics.acceptance_by_depth),
            **({"nats/token": f"{row.nats_per_token:.3f}"} if is_lossy else {}),
        }
        rows.append(cells)
    title = "accepted at each depth, % of the passes whose tree reached it"
    columns, cells_of = list(rows[0]), [list(cells.values()) for cells in rows]
    terminal.print_table(columns, cells_of, title=_titled(title, twin), num_keys=2 + has_sizes)


_SPEED_BENCH = ("texts", "AL", "tokens/s a user", "tokens/s of all", "% at depth 1, 2, ...")
_SPEED_BENCH_TITLE = (
    "by category, as SPEED-Bench reports it; accepted at each depth, % of the passes that accepted the depth before"
)


def _print_speed_bench(measurements: list[Measurement], twin: str) -> None:
    rows = [
        [row.setup, f"{row.temperature:g}", str(row.batch_size), *cells]
        for row in measurements for cells in _speed_bench_cells(row.speed_bench)
    ]  # fmt: skip
    columns = ["drafter", "T", "batch", "category", *_SPEED_BENCH]
    terminal.print_table(columns, rows, title=_titled(_SPEED_BENCH_TITLE, twin), num_keys=4)


def _speed_bench_cells(report: dict[str, Any]) -> list[list[str]]:
    """Returns the cells of all texts, then of each of several categories; these have no tokens per second of all."""
    categories = report["categories"]
    parts = {"all" if len(categories) > 1 else next(iter(categories), "all"): report}
    if len(categories) > 1:
        parts |= categories
    return [
        [
            name,
            str(part["num_requests"]),
            _number(part["Average_AL"], ""),
            _number((part["Request Generation Tokens Per Second"] or {}).get("mean"), ""),
            _number(part["Output TPS"], "") if part is report else "",
            terminal.percent_by_depth([*part["Conditional_Acceptance_Rate"].values()][1:]),
        ]
        for name, part in parts.items()
    ]


def _print_costs(costs: list[tuple[int, float]], twin: str) -> None:
    rows = [[str(width), f"{seconds * 1e3:.2f}", f"{seconds / costs[0][1]:.2f}"] for width, seconds in costs]
    terminal.print_table(
        ["tokens in a pass", "ms", "x one token"], rows, title=_titled("what a target pass costs", twin)
    )


def _titled(title: str, twin: str) -> str:
    return f"{title}; {twin}" if twin else title


def bench_serve(
    base_url: Annotated[
        str, typer.Option(metavar="URL", help="URL of the server, with or without /v1.")
    ] = "http://127.0.0.1:8000",
    endpoint: Annotated[str, typer.Option(metavar="NAME", help="completions or chat.")] = "completions",
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Its name there. Default: the first.")] = None,
    prompts: options.Prompts = "heldout",
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Requests to send; a smaller set of prompts is repeated.")
    ] = 64,
    max_tokens: options.MaxTokens = 128,
    temperature: Annotated[float, typer.Option(help="0 for greedy.")] = 0.0,
    max_concurrency: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Closed loop: requests in flight at once; may be repeated. Default: all."),
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="Open loop: requests a second, at random times. Default: all at once.")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(help="Open loop: 1 for a Poisson process, less for bursts, more for even times.")
    ] = 1.0,
    seed: options.Seed = 0,
    api_key_variable: Annotated[
        str, typer.Option(metavar="NAME", help="Environment variable with the API key, if the server wants one.")
    ] = "FORETOKEN_API_KEY",
    save_result: Annotated[
        Path | None, typer.Option(help="File to make, JSON with the keys of vLLM's `bench serve`.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file of --save-result.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Send requests to a server with OpenAI's API and measure latencies, throughput, errors and acceptance.

    TTFT is the time to the first text, TPOT the time a token after that, E2EL the time of a whole request. ITL is the
    time between parts of a stream; a part holds several tokens if drafts were accepted. Figures are over complete
    answers; others are counted by status, with 429 (the server is full) apart.

    Tokens are counted by the server's usage, else by parts with text: the output says which. Acceptance comes from the
    server's counters at /metrics between begin and end, requests of other clients included.

    A table has SPEED-Bench's figures, one line a --max-concurrency and category of prompts. AL is the mean over answers
    of tokens per target pass; servers tell it with --spec-decode-metrics summary. A user is one request, timed from its
    first token.
    """
    from foretoken.bench.workload import read_prompts

    try:
        from foretoken.bench.serving import Load, load_results, run_load
    except ImportError as err:
        raise ConfigError("httpx is not installed. Run in foretoken's repository: pip install '.[bench]'.") from err

    if save_result is not None:
        options.check_new_file(save_result, "--save-result", force=force)
    concurrencies: list[int | None] = [*max_concurrency] if max_concurrency else [None]
    if save_result is not None and len(concurrencies) > 1:
        raise ConfigError("a file of --save-result holds one load. Expected one --max-concurrency, or --json.")
    cases, key = read_prompts(prompts, limit=num_prompts), _api_key(api_key_variable)
    asked = list(islice(cycle(cases), num_prompts))
    loads = [
        Load(
            base_url=base_url, prompts=[case.text for case in asked], endpoint=endpoint, model=model,
            max_tokens=max_tokens, temperature=temperature, max_concurrency=concurrency,
            request_rate=float("inf") if request_rate is None else request_rate, burstiness=burstiness, seed=seed,
            api_key=key, categories=[case.category for case in asked],
        )
        for concurrency in concurrencies
    ]  # fmt: skip
    if num_prompts > len(cases) or len(loads) > 1:
        terminal.print_note(f"'{prompts}' has {len(cases)} prompts, which are repeated: a server may know them already")
    each: list[dict[str, Any]] = []
    for load in loads:
        with ProgressBar("requests") as on_progress:
            each.append(load_results(load, asyncio.run(run_load(load, on_progress))))
    if any(results["acceptance"] == "synthetic" for results in each):
        terminal.print_note("the server's acceptance is synthetic: its texts are not the target's")
    if save_result is not None:
        _save(save_result, each[0])
    if as_json:
        options.print_json(each[0] if len(each) == 1 else {"loads": each})
    else:
        for results in each:
            _print_load(results)
        _print_loads(each)
    if not all(results["completed"] for results in each):
        error = next(results for results in each if not results["completed"])["errors"][0]
        terminal.print_note(f"no request was answered: {error}")
        raise typer.Exit(1)


def _api_key(variable: str) -> str | None:
    key = os.environ.get(variable)
    if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
        raise ConfigError(f"the API key in {variable} is empty or has other than ASCII characters.")
    return key


def _save(path: Path, results: dict[str, Any]) -> None:
    from foretoken.files.atomic_files import told_as, write_file

    with told_as(ConfigError, f"'{path}'", "Choose another --save-result."):
        write_file(path, json.dumps(results) + "\n")


def _print_load(results: dict[str, Any]) -> None:
    from foretoken.bench.serving import LATENCIES

    head = ("model_id", "acceptance", "backend", "num_prompts", "max_concurrency", "request_rate", "burstiness")
    terminal.conditions({name: results[name] for name in (*head, "max_tokens", "temperature", "seed")})
    figures = ("mean", "median", "std", "p90", "p99")
    rows = [[name.upper(), *(_number(results[f"{figure}_{name}_ms"]) for figure in figures)] for name in LATENCIES]
    terminal.print_table(["ms", *figures], rows)
    source = f", by {results['output_len_source']}" if results["output_len_source"] else ""
    facts = {
        "seconds": _number(results["duration"]),
        "requests answered": results["completed"],
        "requests rejected (429)": results["rejected"],
        "requests failed otherwise": results["failed"] - results["rejected"],
        "requests/s": _number(results["request_throughput"]),
        f"output tokens{source}": results["total_output_tokens"],
        "output tokens/s": _number(results["output_throughput"]),
        "all tokens/s": _number(results["total_token_throughput"]),
        "most output tokens in a second": _number(results["max_output_tokens_per_s"]),
        "most requests at once": results["max_concurrent_requests"],
    }
    if "spec_decode_acceptance_length" in results:
        facts["acceptance length tau"] = _number(results["spec_decode_acceptance_length"])
        facts["drafted tokens accepted, %"] = _number(results["spec_decode_acceptance_rate"])
    for name, value in facts.items():
        terminal.fact(name, value, max(map(len, facts)))
    for status, count in results["errors_by_status"].items():
        terminal.print_note(f"{count} x {next(each for each in results['errors'] if each.startswith(f'{status}: '))}")


def _print_loads(each: list[dict[str, Any]]) -> None:
    """Prints SPEED-Bench's figures, one line a load and category."""
    reports = [results["speed_bench"] for results in each if results["completed"]]
    rows = [
        ["no limit" if report["concurrency"] is None else str(report["concurrency"]), *cells]
        for report in reports for cells in _speed_bench_cells(report)
    ]  # fmt: skip
    if rows:
        terminal.print_table(["at once", "category", *_SPEED_BENCH], rows, title=_SPEED_BENCH_TITLE, num_keys=2)


def _number(value: float | None, missing: str = "unknown") -> str:
    return missing if value is None else f"{value:.2f}"
