"""The report's tables of passes, iterations and texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.gpu_suite.goals import Ceilings, Record, Row, passes_by_context, plain_floor_us, table
from benchmarks.gpu_suite.markdown import NONE, markdown_table, number, times_of

if TYPE_CHECKING:
    from collections.abc import Sequence


def show_step(record: Record) -> str:
    """Passes, decoding and the host."""
    models = table(record, "step", "model")
    if not models:
        return ""
    model = models[0]
    memory = ", ".join(f"{row['peak_gib']:.1f} GiB after {row['after']}" for row in table(record, "step", "memory"))
    parts = [
        f"Random-weight Llama, {model['layers']} layers of {model['hidden']}, {model['heads']} / {model['kv_heads']} "
        f"heads, MLP {model['intermediate']}, vocabulary {model['vocabulary']}, {model['dtype']}: "
        f"{model['weight_bytes'] / 1e9:.2f} GB of weights read by a pass. Batch 1."
        + (f" Peak memory: {memory}." if memory else ""),
        _passes(record),
        _efficiency(record),
        _iterations(record),
    ]
    return "\n\n".join(part for part in parts if part)


def _passes(record: Record) -> str:
    """Passes of growing width."""
    passes, ceilings = passes_by_context(record), Ceilings.of(record)
    widths = sorted({width for rows in passes.values() for width in rows})
    lines = []
    for context, rows in sorted(passes.items()):
        plain, floor = rows.get(1), plain_floor_us(record, context, ceilings)
        of_floor = f"{floor / plain['waited']['median']:.2f}" if plain and floor else NONE
        for kind in ("waited", "queued"):
            cells = []
            for width in widths:
                row = rows.get(width)
                base = plain[kind]["median"] if plain else None
                cells.append(f"{row[kind]['median'] / 1e3:.3f}{times_of(row[kind]['median'], base)}" if row else NONE)
            shown = (
                of_floor if kind == "waited" else f"{floor / plain[kind]['median']:.2f}" if plain and floor else NONE
            )
            lines.append([str(context), kind, shown, *cells])
    if not lines:
        return ""
    names = sorted({row["runner"] for rows in passes.values() for row in rows.values()})
    headings = ["context", "", "of read roofline", *(f"{width} tokens, ms" for width in widths)]
    return markdown_table(headings, lines) + (
        f"\n\n`verify` of the {', '.join(names)} runner, logits of all nodes of a three-way tree, medians by device "
        "events, in brackets over the plain pass. waited: from an idle GPU, launches included; queued: launches hidden "
        "as far as the pass itself does not wait for the GPU. Roofline: weights and the context's K and V at the best "
        "measured read bandwidth."
    )


def _efficiency(record: Record) -> str:
    """Decoding at scripted acceptance."""
    rows = table(record, "step", "efficiency")
    if not rows:
        return ""
    lines = [
        [
            row["title"], f"{row['tokens_per_s']:.1f}", f"{row['tau']:.2f} ({row['tau_scripted']:.2f})",
            f"{row['speed_up']:.2f} ({row['speed_up_min']:.2f}-{row['speed_up_max']:.2f})", f"{row['efficiency']:.3f}",
            "yes" if row["is_expected_text"] else "**NO**",
        ]
        for row in rows
    ]  # fmt: skip
    for row in table(record, "step", "generate"):
        text = "yes" if row["is_expected_text"] else "**NO**"
        title = f"transformers generate, {row['attention']}"
        lines.append(
            [
                title,
                f"{row['tokens_per_s']:.1f}",
                "1",
                times_of(row["tokens_per_s"], rows[0]["tokens_per_s"]).strip(" ()x"),
                NONE,
                text,
            ]
        )
    first = rows[0]
    return markdown_table(["", "tokens/s", "tau (script)", "speed-up", "efficiency", "known text"], lines) + (
        f"\n\nGreedy, batch 1, {first['prompt']} prompt tokens, {first['tokens']} output tokens, {first['rounds']} "
        "rounds in turns after a warm-up, prefill left out; speed-up over plain decoding in the same round, efficiency "
        "= speed-up / tau. Drafts are scripted and cost nothing but the host's trees: a head's own weights come on top."
    )


def _iterations(record: Record) -> str:
    """Where an iteration's time goes."""
    lines = [
        [
            row["pattern"], f"{row['wall_us']:.0f}", number(row["busy_us"]), number(row["gap_us"]),
            number(row.get("launches")),
            *(f"{row[f'{stage}_us']:.0f}" for stage in ("draft", "verify", "accept", "commit")),
        ]
        for row in table(record, "step", "iterations")
    ]  # fmt: skip
    if not lines:
        return ""
    headings = [
        "iteration",
        "wall, us",
        "GPU busy, us",
        "GPU idle, us",
        "kernels",
        "draft",
        "verify",
        "accept",
        "commit",
    ]
    return markdown_table(headings, lines) + (
        "\n\nMedian wall-clock time from one iteration's end to the next; GPU busy: union of its kernels' intervals in "
        "a profiled run of the same text; idle: the difference. Stages: the host's medians, us; the one that waits for "
        "the GPU holds its time."
    )


def show_lossless(record: Record) -> str:
    """Drafters against plain decoding."""
    rows = table(record, "lossless", "setups")
    if not rows:
        return ""
    lines = []
    for name in dict.fromkeys(row["setup"] for row in rows):
        own = [row for row in rows if row["setup"] == name]
        lines.append(
            [
                name, ", ".join(str(b) for b in sorted({row["batch"] for row in own})),
                *(f"{_tau(own, t)}" for t in (0.0, 0.8)), str(sum(row["prompts"] for row in own)),
                *(str(sum(row[key] for row in own)) for key in ("identical", "near_ties", "bugs")),
            ]
        )  # fmt: skip
    first = rows[0]
    headings = ["setup", "batches", "tau, T=0", "tau, T=0.8", "texts", "identical", "near-ties", "bugs"]
    return markdown_table(headings, lines) + (
        f"\n\nmodels/tinycode in {first['dtype']} on the {first['runner']} runner, held-out prompts, greedy and "
        "sampled with seeds, every text against plain decoding one at a time; `foretoken.bench.verify` judges what "
        "differs."
    )


def _tau(rows: Sequence[Row], temperature: float) -> str:
    """Mean acceptance length at a temperature."""
    own = [row["tau"] for row in rows if row["temperature"] == temperature]
    return f"{sum(own) / len(own):.2f}" if own else NONE
