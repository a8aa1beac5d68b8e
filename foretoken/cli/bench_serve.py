"""`foretoken bench serve`: measures a server with OpenAI's API under load."""

from __future__ import annotations

import asyncio
import json
import os
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import typer

from foretoken.cli import options, terminal
from foretoken.cli.progress import progress
from foretoken.core.errors import ConfigError


def serve(
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
        int | None, typer.Option(min=1, help="Closed loop: requests in flight at once. Default: all.")
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
    """
    from foretoken.bench.workload import load_prompts

    try:
        from foretoken.bench.serving.load import Load, run_load
    except ImportError as err:
        raise ConfigError("httpx is not installed. Run in foretoken's repository: pip install '.[bench]'.") from err
    from foretoken.bench.serving.load_results import load_results

    if save_result is not None:
        options.check_new_file(save_result, "--save-result", force=force)
    texts = load_prompts(prompts)
    load = Load(
        base_url=base_url, prompts=list(islice(cycle(texts), num_prompts)), endpoint=endpoint, model=model,
        max_tokens=max_tokens, temperature=temperature, max_concurrency=max_concurrency,
        request_rate=float("inf") if request_rate is None else request_rate, burstiness=burstiness, seed=seed,
        api_key=_api_key(api_key_variable),
    )  # fmt: skip
    if num_prompts > len(texts):
        terminal.note(f"'{prompts}' has {len(texts)} prompts, which are repeated: a server may know them already")
    with progress("requests") as on_progress:
        run = asyncio.run(run_load(load, on_progress))
    results = load_results(load, run)
    if save_result is not None:
        _save(save_result, results)
    if as_json:
        options.print_json(results)
    else:
        _print(results)
    if not results["completed"]:
        terminal.note(f"no request was answered: {run.answers[0].error}")
        raise typer.Exit(1)


def _api_key(variable: str) -> str | None:
    key = os.environ.get(variable)
    if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
        raise ConfigError(f"the API key in {variable} is empty or has other than ASCII characters.")
    return key


def _save(path: Path, results: dict[str, Any]) -> None:
    from foretoken.files.atomic_files import told_as, write_file

    with told_as(ConfigError, f"'{path}'", "Choose another --save-result."):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(results) + "\n")


def _print(results: dict[str, Any]) -> None:
    from foretoken.bench.serving.load_results import LATENCIES

    head = ("model_id", "backend", "num_prompts", "max_concurrency", "request_rate", "burstiness", "max_tokens")
    terminal.conditions({name: results[name] for name in (*head, "temperature", "seed")})
    figures = ("mean", "median", "std", "p90", "p99")
    rows = [
        [name.upper(), *(_number(results[f"{figure}_{name}_ms"]) for figure in figures)]
        for name in LATENCIES
    ]  # fmt: skip
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
        terminal.note(f"{count} x {next(each for each in results['errors'] if each.startswith(f'{status}: '))}")


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"
