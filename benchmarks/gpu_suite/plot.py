"""Plots attention time against context and against nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.gpu_suite.goals import Ceilings, Record, Row, kernel_us, table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_STYLES = {
    "mask-free": ("foretoken, mask-free", "#c2410c", "o"),
    "masked": ("Triton with a mask", "#64748b", "s"),
    "sdpa": ("SDPA, dense mask", "#0f766e", "D"),
    "sdpa-packed": ("SDPA, packed heads", "#5eead4", "d"),
    "flex": ("FlexAttention", "#7c3aed", "^"),
}


def write_plot(record: Record, out: Path) -> bool:
    """Draws both curves side by side.

    Args:
        record: Of the suite.
        out: File without suffix; `.svg` and `.png` are written.

    Returns:
        False, with nothing written, where matplotlib is not installed or nothing was timed.
    """
    try:
        import matplotlib as mpl  # optional
        from matplotlib.figure import Figure
    except ImportError:
        return False
    rows = [row for row in table(record, "attention", "attention") if row["batch"] == 1]
    if not rows:
        return False
    flex = [row for row in table(record, "attention", "flex") if row["batch"] == 1]
    prefix, nodes = _nearest(rows, "prefix", 8192), _nearest(rows, "nodes", 64)
    with mpl.rc_context({"svg.hashsalt": "gpu_suite", "font.size": 9}):
        figure = Figure(figsize=(11, 4.4), layout="constrained")
        left, right = figure.subplots(1, 2)
        ceilings = Ceilings.of(record)
        _draw(
            left, [r for r in rows if r["nodes"] == nodes], [r for r in flex if r["nodes"] == nodes], "prefix", ceilings
        )
        _draw(
            right,
            [r for r in rows if r["prefix"] == prefix],
            [r for r in flex if r["prefix"] == prefix],
            "nodes",
            ceilings,
        )
        left.set_xlabel(f"rows of context, {nodes} nodes")
        right.set_xlabel(f"nodes of the tree, {prefix} rows of context")
        left.set_ylabel("microseconds of one layer, batch 1")
        left.legend(frameon=False, fontsize=8)
        heads, kv_heads, width = rows[0]["heads"]
        name = record["device"].get("name", "CPU")
        title = f"{heads} query heads, {kv_heads} KV heads of {width}, {rows[0]['dtype']}, {name}"
        figure.suptitle(("REHEARSAL, not a result: " if record["rehearsal"] else "") + title, fontsize=10)
        figure.savefig(out.with_name(out.name + ".svg"), metadata={"Date": None})
        figure.savefig(out.with_name(out.name + ".png"), dpi=160)
    return True


def _nearest(rows: Sequence[Row], key: str, wanted: int) -> int:
    """The value nearest to the one that is wanted."""
    return min((int(row[key]) for row in rows), key=lambda value: abs(value - wanted))


def _draw(axes: Any, rows: Sequence[Row], flex: Sequence[Row], key: str, ceilings: Ceilings) -> None:
    """One curve a kernel, and what memory and arithmetic allow."""
    for kernel, (label, colour, marker) in _STYLES.items():
        points = sorted(
            (row[key], time)
            for row in (flex if kernel == "flex" else rows)
            if (time := kernel_us(row, kernel)) is not None
        )
        if points:
            axes.plot(
                [x for x, _ in points], [y for _, y in points], marker=marker, color=colour, label=label,
                lw=2 if kernel == "mask-free" else 1.2,
            )  # fmt: skip
    if ceilings.copy and ceilings.matmul:
        floor = sorted(
            (row[key], max(row["kv_bytes"] / ceilings.copy / 1e3, row["flop"] / ceilings.matmul / 1e6)) for row in rows
        )
        axes.plot(
            [x for x, _ in floor], [y for _, y in floor], color="black", lw=0.8, ls=":", label="measured ceilings"
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({row[key] for row in rows})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.spines[["top", "right"]].set_visible(False)
