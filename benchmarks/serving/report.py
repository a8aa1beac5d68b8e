"""Writes a comparison of servers as Markdown."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

_HEAD = (
    "server", "load", "tokens/s", "of the first", "TTFT p50, ms", "p99", "ITL p50, ms", "p99", "tau", "answered",
    "429", "other errors", "texts of the first",
)  # fmt: skip


def markdown(made: Mapping[str, Any]) -> str:
    """The report; made: what `python -m benchmarks.serving` stores."""
    runs: Sequence[Mapping[str, Any]] = made["runs"]
    machine, settings, model = made["machine"], made["settings"], made["model"]
    size = f"cost twin {model['layers']} x {model['hidden_size']} of " if "layers" in model else ""
    first = runs[0]["server"] if runs else ""
    first_of = {(run["clients"], run["round"]): run for run in runs if run["server"] == first}
    loads = list(dict.fromkeys(run["clients"] for run in runs))
    rows = [
        _row(server, load, [run for run in runs if (run["server"], run["clients"]) == (server, load)], first_of)
        for load in loads
        for server in dict.fromkeys(run["server"] for run in runs if run["clients"] == load)
    ]
    return "\n".join([
        f"# Servers under load: {size}{model['of']}",
        "",
        f"{machine['cpu']}, {machine['cores']} cores ({', '.join(machine['instruction_sets'])}); {made['date']}, "
        f"commit {made['commit']}; {settings['dtype']}, {settings['threads']} threads, {settings['max_num_seqs']} "
        f"sequences at once, {settings['max_tokens']} tokens an answer, temperature {settings['temperature']:g}, "
        f"held-out prompts, {settings['rounds']} rounds. One server runs at a time. `python -m benchmarks.serving`.",
        "",
        f"| {' | '.join(_HEAD)} |",
        f"|{'---|' * len(_HEAD)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        f"*of the first*: the median over rounds of tokens/s beside `{first}` under the same load. ITL is the time "
        "between parts of a stream, which hold several tokens where drafts were accepted. *texts of the first*: "
        f"answers that equal those of `{first}`; other engines round differently.",
        "",
    ])  # fmt: skip


def _row(
    server: str, load: int | None, runs: Sequence[Mapping[str, Any]], first_of: Mapping[Any, Mapping[str, Any]]
) -> list[str]:
    """Cells of one server under one load."""
    pairs = [(run, first) for run in runs if (first := first_of.get((run["clients"], run["round"]))) is not None]
    ratios = [run["output_throughput"] / first["output_throughput"] for run, first in pairs]
    taus = [run["spec_decode_acceptance_length"] for run in runs if "spec_decode_acceptance_length" in run]
    texts = [
        mine == theirs
        for run, first in pairs
        for mine, theirs in zip(run["generated_texts"], first["generated_texts"], strict=True)
        if mine and theirs
    ]
    total = {key: sum(run[key] for run in runs) for key in ("completed", "rejected", "failed", "num_prompts")}
    rate = f"open, {runs[0]['request_rate']:.2f} requests/s" if load is None else f"{load} clients"
    ratio = f"{statistics.median(ratios):.2f}" if ratios else "-"
    return [
        f"`{server}`", rate, _median(runs, "output_throughput", 1), ratio,
        _median(runs, "median_ttft_ms", 0), _median(runs, "p99_ttft_ms", 0), _median(runs, "median_itl_ms", 0),
        _median(runs, "p99_itl_ms", 0), f"{statistics.median(taus):.2f}" if taus else "-",
        f"{total['completed']} of {total['num_prompts']}", str(total["rejected"]),
        str(total["failed"] - total["rejected"]), f"{sum(texts)} of {len(texts)}",
    ]  # fmt: skip


def _median(runs: Sequence[Mapping[str, Any]], key: str, digits: int) -> str:
    """Over rounds; "-" where none has the figure."""
    values = [run[key] for run in runs if run[key] is not None]
    return f"{statistics.median(values):.{digits}f}" if values else "-"
