"""Writes the rows as Markdown and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks.markdown import markdown_table
from benchmarks.speedup.rows import Row, pays_from
from foretoken.bench.plots import look_of
from foretoken.entrypoints.config import PLAIN

if TYPE_CHECKING:
    from foretoken.bench.sweep import Quartiles

_LEGEND = (
    "Medians over prompts, quartiles in brackets. *Speed-up*: tokens per second of decoding over those of plain "
    "decoding of the same prompt by the same runner, prefill left out. *tau*: tokens per target pass, the target's own "
    "included. *Efficiency*: speed-up / tau, 1 when drafting, wider passes and the host cost nothing. *Pass*, "
    "*drafting* and *host*: milliseconds per step in the target's pass, in the drafter, and in everything else. *Not "
    "drafted*: passes in which the controller chose not to draft. *Same text*: texts equal to plain decoding's, token "
    "for token."
)
_PAYS_LEGEND = (
    "The plain target pass from which on a method is faster than plain decoding; between the sizes that were measured, "
    "speed-up is taken to go along a line over the logarithm of the pass."
)


def as_markdown(rows: Sequence[Row], conditions: Sequence[str]) -> str:
    """The report; rows: the smallest size first; conditions: sentences on how it was measured."""
    sizes, methods = list(dict.fromkeys(row.size for row in rows)), list(dict.fromkeys(row.method for row in rows))
    temperatures = list(dict.fromkeys(row.temperature for row in rows))
    parts = ["# Where speculation begins to pay", " ".join(conditions)]
    parts += [
        "## In short",
        *(_short_table(rows, size, methods, temperatures) for size in dict.fromkeys((sizes[-1], sizes[0]))),
    ]
    parts += ["Speed-up over plain decoding, in brackets tau."]
    parts += ["## From which pass on it pays", _pays_table(rows, methods, temperatures), _PAYS_LEGEND]
    for size in reversed(sizes):
        own = [row for row in rows if row.size == size]
        parts += [f"## {size}", _full_table(own, methods), _conditions(own)]
    return "\n\n".join([*parts, _LEGEND]) + "\n"


def as_json(rows: Sequence[Row], conditions: Mapping[str, Any]) -> dict[str, Any]:
    """The same, JSON-ready."""
    methods, temperatures = (
        list(dict.fromkeys(getattr(row, key) for row in rows)) for key in ("method", "temperature")
    )
    return {
        "conditions": dict(conditions),
        "rows": [asdict(row) for row in rows],
        "pays_from_ms": [
            {"method": method, "temperature": temperature, "plain_pass_ms": pays_from(rows, method, temperature)}
            for method in methods
            if method != PLAIN
            for temperature in temperatures
        ],
    }


def _short_table(rows: Sequence[Row], size: str, methods: Sequence[str], temperatures: Sequence[float]) -> str:
    """One line a temperature, one column a method, as a README shows it."""
    drafting = [method for method in methods if method != PLAIN]
    lines = []
    for temperature in temperatures:
        found = {row.method: row for row in rows if row.size == size and row.temperature == temperature}
        if not found:
            continue
        best = max(found[method].speed_up.median for method in drafting)
        cells = []
        for method in drafting:
            row = found[method]
            speed_up = f"{row.speed_up.median:.2f}"
            shown = f"**{speed_up}**" if row.speed_up.median == best > 1.0 else speed_up
            cells.append(f"{shown} ({row.tau.median:.2f})")
        lines.append([f"{temperature:g}", f"{found[PLAIN].tokens_per_s.median:.1f} tokens/s", *cells])
    titles = [look_of(method, drafting).title for method in drafting]
    return markdown_table([f"{size}, temperature", "plain", *titles], lines)


def _pays_table(rows: Sequence[Row], methods: Sequence[str], temperatures: Sequence[float]) -> str:
    lines = []
    for method in methods:
        if method == PLAIN:
            continue
        cells = [_pays_cell(rows, method, temperature) for temperature in temperatures]
        lines.append([look_of(method, list(methods)).title, *cells])
    return markdown_table(["", *(f"T {temperature:g}" for temperature in temperatures)], lines)


def _pays_cell(rows: Sequence[Row], method: str, temperature: float) -> str:
    at = [row.plain_pass_ms for row in rows if row.method == method and row.temperature == temperature]
    found = pays_from(rows, method, temperature)
    if found is None:
        return f"not up to {max(at):.2f} ms"
    return f"{found:.2f} ms" if found else f"at every size, {min(at):.2f} ms and more"


def _full_table(rows: Sequence[Row], methods: Sequence[str]) -> str:
    headings = ["", "T", "tokens/s", "speed-up", "tau", "efficiency", "pass, ms", "drafting, ms", "host, ms"]
    headings += ["not drafted", "same text"]
    lines = []
    for row in rows:
        is_plain = row.method == PLAIN
        lines.append(
            [
                look_of(row.method, list(methods)).title,
                f"{row.temperature:g}",
                f"{row.tokens_per_s.median:.1f}",
                "1" if is_plain else _spread(row.speed_up),
                "1" if is_plain else _spread(row.tau),
                "" if is_plain else _spread(row.efficiency),
                f"{row.pass_ms:.2f}",
                "" if is_plain else f"{row.draft_ms:.2f}",
                f"{row.host_ms:.2f}",
                "" if is_plain else f"{row.declined:.0%}",
                "" if is_plain else f"{row.num_same_text}/{row.num_prompts}",
            ]
        )
    return markdown_table(headings, lines)


def _spread(values: Quartiles) -> str:
    return f"{values.median:.2f} ({values.low:.2f}-{values.high:.2f})"


def _conditions(rows: Sequence[Row]) -> str:
    """How many prompts, by which runner, and how quiet the machine was."""
    runners, foreign = ", ".join(dict.fromkeys(row.runner for row in rows)), fmean(row.foreign_cores for row in rows)
    return f"{rows[0].num_prompts} prompts, runner {runners}. Other processes kept {foreign:.2f} cores busy."
