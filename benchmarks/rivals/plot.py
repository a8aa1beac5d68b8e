"""Plots the tables: decoding against the reference, and the cost of a wider pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.rivals.contestants import HF_GENERATE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.rivals.report import PassRow, Row

_OURS, _THEIRS = "#c2410c", "#64748b"
_MARKERS = "osD^vP"
_MILLISECONDS = [base * 10**power for power in range(-1, 5) for base in (1, 2, 3, 5, 7)]


def write_plot(rows: Sequence[Row], passes: Sequence[PassRow], out: Path, title: str) -> bool:
    """Draws both tables side by side.

    Args:
        rows: Requests.
        passes: Single passes; may be empty.
        out: File without suffix; `.svg` and `.png` are written.
        title: Shown above.

    Returns:
        False, with nothing written, where matplotlib is not installed or nothing can be drawn.
    """
    try:
        import matplotlib as mpl  # optional
        from matplotlib.figure import Figure
    except ImportError:
        return False
    compared = [row for row in rows if row.name in row.decode_ratio]
    reference = next((row for row in compared if row.name == HF_GENERATE.name), compared[0] if compared else None)
    if reference is None:
        return False
    with mpl.rc_context({"svg.hashsalt": "rivals", "font.size": 9}):
        figure = Figure(figsize=(11 if passes else 6.5, 1.4 + 0.34 * max(8, len(rows))), layout="constrained")
        axes: Any = figure.subplots(1, 2 if passes else 1, squeeze=False)[0]
        _draw_requests(axes[0], rows, reference.name, reference.title)
        if passes:
            _draw_passes(axes[1], passes)
        figure.suptitle(title, fontsize=10)
        figure.savefig(out.with_name(out.name + ".svg"), metadata={"Date": None})
        figure.savefig(out.with_name(out.name + ".png"), dpi=160)
    return True


def _draw_requests(axes: Any, rows: Sequence[Row], reference: str, reference_title: str) -> None:
    """Bars from the slowest to the fastest, with the extremes."""
    known = [(row, spread) for row in rows if (spread := row.decode_ratio[reference]) is not None]
    known.sort(key=lambda pair: pair[1].median)
    medians = [spread.median for _, spread in known]
    extremes = [[s.median - s.min for _, s in known], [s.max - s.median for _, s in known]]
    colours = [_OURS if row.name.startswith("foretoken.") else _THEIRS for row, _ in known]
    axes.barh(
        [row.title for row, _ in known], medians, xerr=extremes, color=colours, error_kw={"lw": 0.8, "alpha": 0.6}
    )
    for place, (_, spread) in enumerate(known):
        right = max(spread.max, 1.0) + 0.015 * max(s.max for _, s in known)  # past the line of the reference too
        axes.text(right, place, f"{spread.median:.2f}", va="center", fontsize=8)
    axes.axvline(1.0, color="black", lw=0.8, ls=":")
    axes.set_xlabel(f"decoding speed against {reference_title}; median, bars to the extremes")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_passes(axes: Any, passes: Sequence[PassRow]) -> None:
    """Milliseconds by width, both logarithmic."""
    for number, row in enumerate(passes):
        widths = sorted(row.seconds)
        is_ours = row.name.startswith("foretoken.")
        axes.plot(
            widths,
            [row.seconds[width].median * 1000 for width in widths],
            marker=_MARKERS[number % len(_MARKERS)],
            color=_OURS if is_ours else None,
            lw=2 if is_ours else 1.2,
            label=row.title,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({width for row in passes for width in row.seconds})
    axes.set_xticks(ticks, [str(width) for width in ticks])
    least, most = (find(s.median for row in passes for s in row.seconds.values()) * 1000 for find in (min, max))
    marks = [mark for mark in _MILLISECONDS if 0.8 * least <= mark <= 1.2 * most]
    axes.set_yticks(marks, [f"{mark:g}" for mark in marks])
    axes.set_yticks([], minor=True)
    axes.set_xlabel("tokens per pass")
    axes.set_ylabel("milliseconds per pass")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
