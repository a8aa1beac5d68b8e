"""Turns the suite's results into a Markdown report: what failed, goals, then every table as it was measured."""

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu_suite.goals import Record, Row, proofs, speeds, table
from benchmarks.markdown import markdown_table

_WARNING = (
    "**REHEARSAL: toy sizes, wall-clock times of a CPU and of Triton's interpreter. It shows that the suite runs. No "
    "number below is a result.**"
)
_LEFT_OUT = ("rehearsal", "differences", "difference", "is_replayed", "min", "max", "rounds", "copies")
# Section, its table, and what the table holds. Times are medians by device events.
_TABLES = (
    ("ceilings", "ceilings", "What the device can do at most, microseconds of one call."),
    ("attention", "attention",
     "Microseconds of one layer's attention, a tree of `nodes` behind `prefix` rows; kernels take turns over caches "
     "beyond L2, launches hidden by CUDA graphs. SDPA has a dense mask and enable_gqa; packed: the query heads of a KV "
     "head as rows of one matrix."),
    ("states", "states", "Microseconds of the delta rule of one layer, a tree or chain of `nodes` in each sequence."),
    ("step", "model", "The target of the next tables: random weights, a known text, batch 1."),
    ("step", "passes",
     "Microseconds of a pass with the logits of all nodes. Waited: from an idle GPU, launches included; queued: "
     "launches hidden as far as the pass itself does not wait for the GPU."),
    ("step", "efficiency",
     "Greedy decoding, prefill left out, in turns; drafts are scripted and cost nothing but the host's trees. "
     "Efficiency: speed-up / tau."),
    ("step", "generate", "transformers' `generate` on the same target."),
    ("step", "iterations",
     "Microseconds from one iteration's end to the next; busy: union of the kernels' intervals in a profiled run of "
     "the same text; gap: the rest. Stages: the host's; the one that waits for the GPU holds its time."),
    ("lossless", "setups", "models/tinycode, held-out prompts, every text beside plain decoding one at a time."),
    ("twin", "model", "The cost twin of the next table."),
    ("twin", "methods",
     "Trained drafters on the cost twin, held-out prompts, batch 1, methods in turn prompt by prompt, prefill left "
     "out. Speed-up: median over prompts."),
)  # fmt: skip


def as_markdown(record: Record) -> str:
    """The report of a record, finished or not."""
    mark = " (rehearsal)" if record["rehearsal"] else ""
    device = ", ".join(f"{key} {value}" for key, value in _flat(record["device"]))
    goals = [[*goal[:3], goal.verdict + mark] for goal in (*proofs(record), *speeds(record))]
    parts = [
        f"# The GPU suite on {record['device'].get('name', 'CPU')}{mark}",
        *([_WARNING] if record["rehearsal"] else []),
        f"Commit {record['commit']}, seed {record['seed']}, begun {record['begun']}, {record['seconds']:.0f} s. "
        f"Command: `{record['command']}`. {device}.",
        "\n".join(list(_failures(record))[:60]),
        f"## Goals{mark}",
        markdown_table(["goal", "wanted", "measured", ""], goals),
    ]
    for section, name, legend in _TABLES:
        rows = [dict(_flat(row)) for row in table(record, section, name)]
        if rows:
            headings = list(dict.fromkeys(key for row in rows for key in row))
            lines = [[_cell(row.get(key)) for key in headings] for row in rows]
            parts += [f"## {section}: {name}{mark}", legend, markdown_table(headings, lines)]
    parts += [f"## Sections{mark}", _sections(record)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _flat(row: Row, before: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of a row, those of nested ones by both names."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{key} ")
        elif key not in _LEFT_OUT:
            yield f"{before}{key}".removesuffix(" median"), value


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "**NO**"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return "-" if value is None else str(value)


def _failures(record: Record) -> Iterator[str]:
    yield from (f"- **FAILED: {goal.what}: {goal.measured}**" for goal in proofs(record) if goal.verdict == "MISSED")
    for name, section in record["sections"].items():
        for error in section["errors"]:
            last = error["lines"][-1] if error["lines"] else "no word"
            yield f"- **BROKE DOWN: {name}, {error['process']}**: `{last}`"
    for row in table(record, "lossless", "broken"):
        yield f"- {row['setup']}, batch {row['batch']}, stopped the engine: {row['failure']}"
    for section, name in (("lossless", "setups"), ("twin", "methods")):
        for row in table(record, section, name):
            if row["bugs"]:
                yield f"- bug: {row['setup']}, {section}, T={row['temperature']}: {row['differences']}"


def _sections(record: Record) -> str:
    lines = []
    for name, section in record["sections"].items():
        left = [f"{row['what']} ({row['why']})" for row in section["tables"].get("left_out", [])]
        shown = "; ".join(left[:12]) + (f"; and {len(left) - 12} more" if len(left) > 12 else "")
        seconds = f"{section.get('seconds', 0):.0f} of {section['limit_s']:.0f}"
        lines.append([name, section["status"], seconds, shown or "-"])
    return markdown_table(["section", "", "seconds", "left out"], lines)
