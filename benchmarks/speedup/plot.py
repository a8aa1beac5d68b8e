"""Draws speed-up against the cost of a target pass, and every method at the smallest and the largest size.

Each picture is drawn for pages with a light and with a dark background.
"""

from __future__ import annotations

from math import log
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from foretoken.bench.plots import DARK, LIGHT, look_of, page_style
from foretoken.entrypoints.config import PLAIN

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from benchmarks.speedup.rows import Row
    from foretoken.bench.plots import Theme


_TICKS = (0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 3, 4, 6, 8, 12, 16)
_LEAST_GAP = 0.062  # between labels at the ends of lines, in heights of a panel
_LEAST_TICK_GAP = 0.14  # between labels of sizes, in widths of a panel
_LETTERS = 75  # of a line below the title, over one panel
_ROOM = 0.62  # of the axis of target passes, for the methods' names


def write_pictures(rows: Sequence[Row], out: Path, what: str) -> dict[str, str]:
    """Draws both pictures as `OUT-curve` and `OUT-methods`, `.svg` for both backgrounds and `.png` for a light one.

    Args:
        rows: Of all sizes, the smallest first.
        out: File without suffix.
        what: The models and the machine, shown below the title.

    Returns:
        Names of the light `.svg` files by what they show; empty where matplotlib is not installed.
    """
    try:
        import matplotlib as mpl  # optional
    except ImportError:
        return {}
    names = {}
    drawings = {
        "curve": ("speed-up of every method against the time of a target pass", draw_curve),
        "methods": ("speed-up of every method at the smallest and the largest size", draw_methods),
    }
    for key, (title, draw) in drawings.items():
        for theme in (LIGHT, DARK):
            with mpl.rc_context(page_style(theme, "speedup")):
                figure = draw(rows, theme, what)
                place = out.with_name(f"{out.name}-{key}{theme.name}")
                figure.savefig(place.with_suffix(".svg"), metadata={"Date": None})
                if theme is LIGHT:
                    figure.savefig(place.with_suffix(".png"), dpi=160)
        names[title] = f"{out.name}-{key}.svg"
    return names


def draw_curve(rows: Sequence[Row], theme: Theme, what: str) -> Any:
    """One panel a temperature, one line a method; returns the figure."""
    methods = [m for m in dict.fromkeys(row.method for row in rows) if m != PLAIN]
    title, height = "From which target pass on drafting pays", 3.0 + 0.19 * len(methods)
    figure, panels = _figure(rows, theme, title, what, height=height, has_common_y=False)
    for temperature, axes in panels.items():
        own = [row for row in rows if row.temperature == temperature]
        ends = []
        for method in methods:
            line = sorted((row for row in own if row.method == method), key=lambda row: row.plain_pass_ms)
            colour = _colour(method, methods, theme)
            look = look_of(method, methods)
            x, y = [row.plain_pass_ms for row in line], [row.speed_up.median for row in line]
            axes.plot(x, y, color=colour, marker=look.marker, ms=5, lw=1.8, zorder=3)
            axes.vlines(
                x,
                [row.speed_up.low for row in line],
                [row.speed_up.high for row in line],
                color=colour,
                lw=1,
                alpha=0.4,
            )
            ends.append((y[-1], f"{look.title}  {y[-1]:.2f}", colour))
        _mark_sizes(axes, own)
        _scale(axes, own, "y", theme)
        axes.tick_params(axis="y", length=0)
        _label_ends(axes, ends, theme)
    first = next(iter(panels.values()))
    first.set_ylabel("times the speed of plain decoding")
    return figure


def draw_methods(rows: Sequence[Row], theme: Theme, what: str) -> Any:
    """One panel a temperature, one line a method with a hollow dot for the smallest size; returns the figure."""
    sizes = list(dict.fromkeys(row.size for row in rows))
    methods = [m for m in dict.fromkeys(row.method for row in rows) if m != PLAIN]
    names = [size.replace(" ", "") for size in (sizes[0], sizes[-1])]
    title = f"Every method on the model of {names[0]} (hollow) and of {names[1]} (filled)"
    figure, panels = _figure(rows, theme, title, what, height=1.9 + 0.5 * len(methods))
    for temperature, axes in panels.items():
        for place, method in enumerate(reversed(methods)):
            colour = _colour(method, methods, theme)
            own = {r.size: r for r in rows if r.temperature == temperature and r.method == method}
            dots = [(own[size].speed_up, size == sizes[-1]) for size in (sizes[0], sizes[-1]) if size in own]
            axes.plot([dot.median for dot, _ in dots], [place] * len(dots), color=colour, lw=1, ls=":", zorder=2)
            for dot, is_filled in dots:
                axes.hlines(place, dot.low, dot.high, color=colour, lw=5, alpha=0.3, zorder=2)
                face = colour if is_filled else theme.page
                axes.plot(dot.median, place, "o", ms=7.5, mec=colour, mfc=face, mew=1.6, zorder=4)
                spot = {"xytext": (0, 8 if is_filled else -8), "textcoords": "offset points", "ha": "center"}
                axes.annotate(
                    f"{dot.median:.2f}", (dot.median, place), **spot, va="bottom" if is_filled else "top",
                    fontsize=8.5, alpha=1.0 if is_filled else 0.7,
                )  # fmt: skip
        axes.set_yticks(range(len(methods)), [look_of(m, methods).title for m in reversed(methods)])
        axes.set_ylim(-0.6, len(methods) - 0.3)
        axes.tick_params(axis="y", length=0)
        _scale(axes, rows, "x", theme)
        axes.set_xlabel("times the speed of plain decoding; bars join the quartiles")
    return figure


def _figure(
    rows: Sequence[Row], theme: Theme, title: str, what: str, *, height: float, has_common_y: bool = True
) -> tuple[Any, dict[float, Any]]:
    """A figure with a title and one panel a temperature."""
    from matplotlib.figure import Figure

    temperatures = list(dict.fromkeys(row.temperature for row in rows))
    figure: Any = Figure(figsize=(5.2 * len(temperatures), height), layout="constrained", facecolor=theme.page)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    lines = wrap(what, _LETTERS * len(temperatures))
    figure.suptitle(title + "\n" * len(lines), fontsize=12.5, fontweight="bold", x=0.012, ha="left")
    figure.text(0.012, 1 - 0.38 / height, "\n".join(lines), fontsize=9, alpha=0.8, va="top")
    panels: Any = figure.subplots(1, len(temperatures), sharey=has_common_y, squeeze=False)[0]
    for temperature, axes in zip(temperatures, panels, strict=True):
        name = "greedy, T 0" if temperature == 0 else f"sampled, T {temperature:g}"
        axes.set_title(name, loc="left", fontsize=10)
        axes.spines[["top", "right", "left"]].set_visible(False)
    return figure, dict(zip(temperatures, panels, strict=True))


def _scale(axes: Any, rows: Sequence[Row], axis: str, theme: Theme) -> None:
    """A logarithmic axis of speed-ups with the line of plain decoding, and the area below it shaded."""
    seen = [value for row in rows for value in (row.speed_up.low, row.speed_up.high)]
    low, high = min([0.9, *seen]) * 0.92, max([1.2, *seen]) * 1.1
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    is_y = axis == "y"
    (axes.set_yscale if is_y else axes.set_xscale)("log")
    (axes.set_ylim if is_y else axes.set_xlim)(low, high)
    (axes.set_yticks if is_y else axes.set_xticks)(ticks, [f"{tick:g}x" for tick in ticks])
    (axes.set_yticks if is_y else axes.set_xticks)([], minor=True)
    (axes.axhspan if is_y else axes.axvspan)(low, 1.0, color=theme.slower, zorder=0)
    (axes.axhline if is_y else axes.axvline)(1.0, color=theme.text, lw=1.1, zorder=1)
    axes.grid(visible=True, axis=axis, color=theme.grid, lw=0.6, zorder=0)
    axes.set_axisbelow(True)


def _mark_sizes(axes: Any, rows: Sequence[Row]) -> None:
    """The axis of target passes: a tick at each size that was measured, with room for labels behind the last."""
    found = sorted({(row.plain_pass_ms, row.size) for row in rows})
    least, most = found[0][0], found[-1][0]
    span = max(most / least, 2.0)
    axes.set_xscale("log")
    axes.set_xlim(least / span**0.06, most * span**_ROOM)
    labels: list[str] = []
    for number, (ms, size) in enumerate(found):
        label = f"{ms:.2g} ms\n{size.replace(' ', '')}"
        is_near = number > 0 and log(ms / found[number - 1][0]) < _LEAST_TICK_GAP * log(span ** (1.06 + _ROOM))
        labels.append(f"\n\n{label}" if is_near and not labels[-1].startswith("\n") else label)
    axes.set_xticks([ms for ms, _ in found], labels, fontsize=8)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("plain target pass, by size of the target (layers x hidden size)")


def _label_ends(axes: Any, ends: Sequence[tuple[float, str, str]], theme: Theme) -> None:
    """Writes the methods' names behind their lines, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    right = max(axes.get_xticks())
    ordered = sorted(ends)
    places = [log(value / low) / log(high / low) for value, _, _ in ordered]
    gap = min(_LEAST_GAP, 0.96 / max(len(places) - 1, 1))
    for _ in range(100):
        for i in range(len(places) - 1):
            lack = gap - (places[i + 1] - places[i])
            if lack > 0:
                places[i], places[i + 1] = places[i] - lack / 2, places[i + 1] + lack / 2
        for i, place in enumerate(places):  # within the panel, with room for those below and above
            places[i] = min(max(place, 0.02 + gap * i), 0.98 - gap * (len(places) - 1 - i))
    line = {"arrowstyle": "-", "lw": 0.7, "alpha": 0.6, "relpos": (0.0, 0.5), "shrinkA": 1, "shrinkB": 5}
    for place, (value, text, colour) in zip(places, ordered, strict=True):
        axes.annotate(
            text,
            (right, value),
            xytext=(0.66, place),
            textcoords="axes fraction",
            color=colour,
            fontsize=9,
            va="center",
            bbox={"facecolor": theme.page, "edgecolor": "none", "alpha": 0.8, "pad": 0.6},
            arrowprops=line | {"color": colour},
        )


def _colour(method: str, methods: list[str], theme: Theme) -> str:
    """Of a method, on a page."""
    look = look_of(method, methods)
    return look.light if theme is LIGHT else look.dark
