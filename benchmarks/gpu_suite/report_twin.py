"""The report's table of trained drafters on the cost twin."""

from __future__ import annotations

from benchmarks.gpu_suite.goals import Ceilings, Record, Row, table
from benchmarks.gpu_suite.markdown import NONE, markdown_table
from foretoken.bench.plots import look_of

_HEADINGS = (
    "method", "T", "tokens/s", "tau", "speed-up", "efficiency", "pass, ms", "drafting, ms", "host, ms", "not drafted",
    "identical", "near-ties", "bugs",
)  # fmt: skip


def show_twin(record: Record) -> str:
    """What the twin is, and how every method did on it."""
    models, rows = table(record, "twin", "model"), table(record, "twin", "methods")
    if not models:
        return ""
    model = models[0]
    memory = [f" Peak memory: {row['peak_gib']:.1f} GiB." for row in table(record, "twin", "memory")]
    parts = [
        f"{model['twin'].capitalize()}: {model['heads']} / {model['kv_heads']} heads, MLP {model['intermediate']}, "
        f"vocabulary {model['vocabulary']}, {model['dtype']}; {model['weight_bytes'] / 1e9:.2f} GB of weights read by "
        f"a pass{_floor(record, model)}. It has the text, drafts and acceptance of the small trained model at the cost "
        f"of its size. Made on the device in {model['made_in_s']:.1f} s, {model['drafter_file_bytes'] / 1e9:.2f} GB of "
        f"drafters on disk.{''.join(memory)}"
    ]
    if rows:
        methods = list(dict.fromkeys(row["setup"] for row in rows))
        lines = [_line(row, methods) for row in sorted(rows, key=lambda row: row["temperature"])]
        parts += [markdown_table(_HEADINGS, lines), _conditions(rows)]
    return "\n\n".join(parts)


def _floor(record: Record, model: Row) -> str:
    """How long reading the weights takes at the best measured bandwidth."""
    read = Ceilings.of(record).read
    return "" if read is None else f", {model['weight_bytes'] / read / 1e6:.3f} ms at the best measured read bandwidth"


def _line(row: Row, methods: list[str]) -> list[str]:
    """One method at one temperature."""
    is_plain = row["setup"] == "plain"
    speed_up = f"{row['speed_up']:.2f} ({row['speed_up_min']:.2f}-{row['speed_up_max']:.2f})"
    return [
        look_of(row["setup"], methods).title, f"{row['temperature']:g}", f"{row['tokens_per_s']:.1f}",
        f"{row['mean_acceptance_length']:.2f}", NONE if is_plain else speed_up,
        NONE if is_plain else f"{row['efficiency']:.3f}", f"{row['verify_ms']:.3f}",
        NONE if is_plain else f"{row['draft_ms']:.3f}", f"{row['host_ms'] - row['draft_ms']:.3f}",
        NONE if is_plain else f"{row['declined']:.0%}",
        *([NONE] * 3 if is_plain else [str(row[key]) for key in ("identical", "near_ties", "bugs")]),
    ]  # fmt: skip


def _conditions(rows: list[Row]) -> str:
    """Under the table."""
    first = rows[0]
    prompts = ", ".join(
        f"{max(row['prompts'] for row in rows if row['temperature'] == temperature)} at T={temperature:g}"
        for temperature in dict.fromkeys(row["temperature"] for row in rows)
    )
    return (
        f"Held-out prompts ({prompts}), {first['max_tokens']} output tokens each, batch 1, {first['runner']} runner, "
        "all methods in turn prompt by prompt after a warm-up, prefill left out. Speed-up: median over prompts of "
        "tokens/s over plain decoding's of the same prompt, in brackets the smallest and largest; efficiency = "
        "speed-up / tau. Milliseconds per step, means: in the target's pass and in the drafter, by the device's events "
        "on a GPU, and in everything else. Not drafted: steps in which the controller chose not to draft. Texts "
        "against plain decoding's, what differs judged by `foretoken.bench.verify`."
    )
