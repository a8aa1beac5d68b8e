"""Draws speed-up against the rows of a text, measured and modelled, and tau against the position in the output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.long_context.positions import BIN
from benchmarks.long_context.report import break_even, title
from foretoken.bench.plots import DARK, LIGHT, distinct_look, page_style

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from benchmarks.long_context.positions import Line
    from benchmarks.long_context.sizes import Cell
    from foretoken.bench.plots import Theme

_TICKS = (0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 3, 4, 6, 8)
_FIXED = "num_speculative_tokens="


def write_pictures(draw: Callable[[Theme], Any], out: Path) -> bool:
    """Writes `OUT.svg`, `OUT-dark.svg` and `OUT.png`; returns False, with nothing written, without matplotlib."""
    try:
        import matplotlib as mpl  # optional
    except ImportError:
        return False
    for theme in (LIGHT, DARK):
        with mpl.rc_context(page_style(theme, "long_context")):
            figure = draw(theme)
            figure.savefig(out.with_name(f"{out.name}{theme.name}.svg"), metadata={"Date": None})
            if theme is LIGHT:
                figure.savefig(out.with_name(f"{out.name}.png"), dpi=160)
    return True


def draw_sizes(cells: Sequence[Cell], weights: float, row: int, what: str, theme: Theme) -> Any:
    """One panel a batch size, one colour a drafter; hollow markers where the controller chooses the depth.

    Args:
        weights: Bytes of the target's weights.
        row: Bytes of a KV row.
        what: The model and the machine, shown below the title.
    """
    batches = sorted({cell.batch for cell in cells})
    rows = sorted({cell.rows for cell in cells})
    drafters = list(dict.fromkeys(_drafter(cell.setup) for cell in cells))
    figure, panels = _figure(len(batches), theme, "Behind how long a text, in how large a batch, drafting pays", what)
    values = [value for cell in cells for value in (cell.speed_up, cell.modelled) if value is not None]
    low, high = min([0.8, *values]) * 0.9, max([1.4, *values]) * 1.1
    for batch, axes in zip(batches, panels, strict=True):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlim(rows[0] / 1.25, rows[-1] * 1.25)
        axes.set_ylim(low, high)
        axes.set_xticks(rows, [f"{each:,}" for each in rows])
        ticks = [tick for tick in _TICKS if low <= tick <= high]
        axes.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
        axes.minorticks_off()
        axes.axhspan(low, 1.0, color=theme.slower, zorder=0)
        axes.axhline(1.0, color=theme.text, lw=1.1, zorder=1)
        even = break_even(weights, row, batch)
        axes.axvline(even, color=theme.text, lw=1.1, ls=":", zorder=1)
        axes.set_title(f"batch {batch}: break-even of bytes at {even:,.0f} rows", loc="left", fontsize=9)
        axes.set_xlabel("rows of each text")
        for setup in dict.fromkeys(cell.setup for cell in cells):
            line = sorted((c for c in cells if c.setup == setup and c.batch == batch), key=lambda cell: cell.rows)
            look = distinct_look(drafters.index(_drafter(setup)))
            colour = look.light if theme is LIGHT else look.dark
            is_fixed = _FIXED in setup
            axes.plot(
                [cell.rows for cell in line], [cell.speed_up for cell in line], color=colour, marker=look.marker,
                mfc=colour if is_fixed else theme.page, ms=5.5, lw=1.7 if is_fixed else 1.0, zorder=3,
                label=title(setup),
            )  # fmt: skip
            if is_fixed:
                modelled = [(cell.rows, cell.modelled) for cell in line if cell.modelled is not None]
                axes.plot(
                    *zip(*modelled, strict=True) if modelled else ([], []), color=colour, ls="--", lw=1.1, zorder=2
                )
    panels[0].set_ylabel("times the speed of plain decoding, median")
    panels[-1].plot([], [], color=theme.text, ls="--", lw=1.1, label="modelled by bytes, with the measured tau")
    panels[-1].plot([], [], color=theme.text, ls=":", lw=1.1, label="KV rows are as large as the weights")
    _legend(figure, panels)
    return figure


def draw_positions(lines: Sequence[Line], what: str, theme: Theme) -> Any:
    """One panel a temperature, one line a drafter."""
    temperatures = sorted({line.temperature for line in lines})
    setups = list(dict.fromkeys(line.setup for line in lines))
    figure, panels = _figure(len(temperatures), theme, "Tokens a pass by the position in the output", what)
    for temperature, axes in zip(temperatures, panels, strict=True):
        own = [line for line in lines if line.temperature == temperature]
        loops = ", looping texts" if any(line.is_looping for line in own) else ""
        axes.set_title(
            ("greedy" if temperature == 0 else f"sampled, T {temperature:g}") + loops, loc="left", fontsize=10
        )
        for line in own:
            look = distinct_look(setups.index(line.setup))
            colour = look.light if theme is LIGHT else look.dark
            middles = [BIN * (place + 0.5) for place in range(len(line.taus))]
            axes.plot(middles, line.taus, color=colour, marker=look.marker, ms=4, lw=1.4, label=title(line.setup))
        axes.set_ylim(bottom=1.0)
        axes.set_xlabel(f"position in the output, bins of {BIN} tokens")
    panels[0].set_ylabel("tau, tokens a target pass")
    _legend(figure, panels)
    return figure


def _figure(num_panels: int, theme: Theme, name: str, what: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    columns = min(num_panels, 2)
    height = 3.6 * -(-num_panels // columns) + 0.6
    figure: Any = Figure(figsize=(4.8 * columns + 2.4, height), layout="constrained", facecolor=theme.page)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    figure.suptitle(f"{name}\n", fontsize=12.5, fontweight="bold", x=0.012, ha="left")
    figure.text(0.012, 1 - 0.46 / height, what, fontsize=8.5, alpha=0.8, va="center")
    panels = figure.subplots(-(-num_panels // columns), columns, squeeze=False, sharey=True).flatten()
    for axes in panels[num_panels:]:
        axes.set_visible(False)
    for axes in panels[:num_panels]:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, axis="y", color=theme.grid, lw=0.6, zorder=0)
        axes.set_axisbelow(True)
    return figure, panels[:num_panels]


def _legend(figure: Any, panels: Any) -> None:
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(found.values(), found.keys(), loc="outside right upper", frameon=False, fontsize=8)


def _drafter(setup: str) -> str:
    """The setup without its depth, so that a fixed depth and the controller share a colour."""
    return " ".join(word for word in setup.split(" ") if not word.startswith(_FIXED))
