"""Cells and tables of the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.gpu_suite.goals import Row

NONE = "-"


def cell_of(row: Row, kernel: str) -> str:
    """A kernel's time, or why it has none."""
    cell = row["kernels"].get(kernel, {})
    if "median" not in cell:
        return str(cell.get("failure", cell.get("left_out", NONE)))
    return f"{cell['median']:.1f}" + ("" if cell.get("is_replayed", True) else "*")


def times_of(value: float | None, base: float | None) -> str:
    """How many times a base, in brackets; nothing where either is unknown."""
    return f" ({value / base:.2f}x)" if value is not None and base else ""


def number(value: float | None) -> str:
    """Three digits, or a dash."""
    return NONE if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def markdown_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [headings, ["---"] * len(headings), *lines])
