"""Turns the suite's results into a Markdown report; every table names the conditions of its measurement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.gpu_suite.goals import Record, proofs, speeds, table
from benchmarks.gpu_suite.markdown import NONE, markdown_table
from benchmarks.gpu_suite.report_decoding import show_lossless, show_step
from benchmarks.gpu_suite.report_kernels import show_attention, show_ceilings, show_flex, show_parity
from benchmarks.gpu_suite.report_twin import show_twin

if TYPE_CHECKING:
    from collections.abc import Callable

_WARNING = (
    "**REHEARSAL: toy sizes, wall-clock times of a CPU and of Triton's interpreter. It shows that the suite runs. No "
    "number below is a result.**"
)


def as_markdown(record: Record) -> str:
    """The report of a record, finished or not."""
    name = record["device"].get("name", "CPU")
    parts = [f"# {'REHEARSAL of the' if record['rehearsal'] else 'The'} GPU suite on {name}"]
    parts += [_WARNING] if record["rehearsal"] else []
    parts += [_conditions(record), _failures(record)]
    parts += [_heading("Goals", record), _goals(record)]
    for title, show in _SECTIONS.items():
        shown = show(record)
        if shown:
            parts += [_heading(title, record), shown]
    parts += [_heading("Sections", record), _sections(record)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _heading(title: str, record: Record) -> str:
    """A heading; one of a rehearsal says so."""
    return f"## {title}{' (rehearsal)' if record['rehearsal'] else ''}"


def _conditions(record: Record) -> str:
    """Where, when and how."""
    device = record["device"]
    queried, after = device.get("queried", {}), device.get("after", {})
    facts = [
        *(f"{key} {value}" for key, value in device.get("versions", {}).items()),
        *(f"{key} {queried[key]}" for key in queried if key != "name"),
        *([f"clocks after a large GEMM {after.get('clocks.sm')}, {after.get('clocks.mem')}"] if after else []),
    ]
    return (
        f"Commit {record['commit']}, seed {record['seed']}, begun {record['begun']}, {record['seconds']:.0f} s. "
        f"Command: `{record['command']}`. {', '.join(facts)}."
    )


def _failures(record: Record) -> str:
    """Whatever makes the rest doubtful, first."""
    lines = [f"- **FAILED: {goal.what}: {goal.measured}**" for goal in proofs(record) if goal.verdict == "MISSED"]
    lines += [
        f"- **BROKE DOWN: {name}, {error['process']}**: `{error['lines'][-1] if error['lines'] else 'no word'}`"
        for name, section in record["sections"].items()
        for error in section["errors"]
    ]
    for row in table(record, "parity", "cases"):
        for kernel, verdict in row["kernels"].items():
            if kernel != "one lost key" and not verdict["passes"]:
                what = verdict.get("failure") or f"error {verdict['error']:.3g} bounds" + (
                    "" if verdict["is_repeatable"] else ", NOT REPEATABLE"
                )
                lines.append(f"- parity, {kernel}: {what}; input seed {row['input_seed']}, {_case(row['case'])}")
    lines += [
        f"- {row['setup']}, batch {row['batch']}, stopped the engine: {row['failure']}"
        for row in table(record, "lossless", "broken")
    ]
    for row in table(record, "lossless", "setups"):
        if row["bugs"]:
            lines.append(f"- bug: {row['setup']}, batch {row['batch']}, T={row['temperature']}: {row['differences']}")
    lines += [
        f"- {row['setup']}, cost twin, stopped the engine: {row['failure']}" for row in table(record, "twin", "broken")
    ]
    lines += [
        f"- bug: {row['setup']}, cost twin, T={row['temperature']}: {row['differences']}"
        for row in table(record, "twin", "methods") if row["bugs"]
    ]  # fmt: skip
    return "\n".join(lines[:60])


def _goals(record: Record) -> str:
    """Goals and verdicts."""
    rows = [[g.what, g.wanted, g.measured, g.verdict] for g in (*proofs(record), *speeds(record))]
    if record["rehearsal"]:
        rows = [[*row[:3], f"{row[3]} (rehearsal)"] for row in rows]
    return markdown_table(["goal", "wanted", "measured", ""], rows)


def _sections(record: Record) -> str:
    """What each section did and did not do."""
    lines = []
    for name, section in record["sections"].items():
        left = [f"{row['what']} ({row['why']})" for row in section["tables"].get("left_out", [])]
        shown = "; ".join(left[:12]) + (f"; and {len(left) - 12} more" if len(left) > 12 else "")
        lines.append(
            [name, section["status"], f"{section.get('seconds', 0):.0f} of {section['limit_s']:.0f}", shown or NONE]
        )
    return markdown_table(["section", "", "seconds", "left out"], lines)


_SECTIONS: dict[str, Callable[[Record], str]] = {
    "Parity of kernels": show_parity,
    "Ceilings": show_ceilings,
    "Attention": show_attention,
    "FlexAttention": show_flex,
    "Steps of an 8B-shaped target": show_step,
    "Losslessness": show_lossless,
    "Trained drafters on a cost twin": show_twin,
}


def _case(case: dict[str, Any]) -> str:
    """A case in one line."""
    return ", ".join(f"{key} {value}" for key, value in case.items())
