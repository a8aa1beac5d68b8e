"""Draws a sweep: drafted nodes a pass against tau and against tokens/s, one line a method, with the Pareto fronts.

Each picture is drawn for pages with a light and with a dark background. matplotlib is imported here only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from foretoken.bench.grid import short_name, spelled
from foretoken.bench.looks import DARK, LIGHT, distinct_look, look_of, page_style
from foretoken.bench.pareto import pareto_front
from foretoken.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from foretoken.bench.grid import Serving
    from foretoken.bench.looks import Theme
    from foretoken.bench.sweep_results import PointResult

# Keys by which a method's trees grow: values of these are points of one line, values of others begin lines of their own.
_SIZE_KEYS = frozenset({"num_speculative_tokens", "max_nodes", "tree_top_k"})
_LINE_STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)), (0, (7, 3)))
_PANEL = (4.6, 3.7)  # inches
_MOST_COLUMNS = 3


class Chart(NamedTuple):
    """One picture.

    Attributes:
        name: Of its files, without suffix.
        title: Shown above.
        axis: What stands on the vertical axis, with its unit.
        value: Of a point.
    """

    name: str
    title: str
    axis: str
    value: Callable[[PointResult], float]


CHARTS = (
    Chart("nodes-tau", "What drafted nodes bring: tokens a target pass", "tau, tokens a target pass", lambda r: r.tau),
    Chart(
        "nodes-tokens",
        "What drafted nodes bring: tokens a second",
        "output tokens/s, median over rounds",
        lambda r: r.tokens_per_s.median,
    ),
)


class Series(NamedTuple):
    """Points that are joined by one line.

    Attributes:
        method: Of drafting.
        variant: What else tells it from other lines of that method, in words; empty where there is one line only.
    """

    method: str
    variant: str

    @property
    def title(self) -> str:
        """In the legend."""
        return " ".join(filter(None, (look_of(self.method, [self.method]).title, self.variant)))


def write_plots(panels: dict[Serving, list[PointResult]], directory: Path, what: str) -> list[Path]:
    """Draws every chart as `.svg` for both backgrounds and as `.png` for a light one.

    Args:
        panels: Points of each serving.
        directory: Where the files go; older ones are replaced.
        what: The model and the machine, shown below the title.

    Returns:
        The files.

    Raises:
        ConfigError: When matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as err:
        raise ConfigError(
            "pictures need the package 'matplotlib', which is not installed. Install it: pip install \"foretoken"
            '[report]".'
        ) from err
    files = []
    for chart in CHARTS:
        for theme in (LIGHT, DARK):
            with mpl.rc_context(page_style(theme, "sweep")):
                figure = draw(chart, panels, theme, what)
                place = directory / f"{chart.name}{theme.name}.svg"
                figure.savefig(place, metadata={"Date": None})
                files.append(place)
                if theme is LIGHT:
                    files.append(place.with_suffix(".png"))
                    figure.savefig(files[-1], dpi=160)
    return files


def draw(chart: Chart, panels: dict[Serving, list[PointResult]], theme: Theme, what: str) -> Any:
    """One panel a serving, the legend on the right of all; returns the figure."""
    from matplotlib.figure import Figure

    columns = min(len(panels), _MOST_COLUMNS)
    rows = -(-len(panels) // columns)
    height = _PANEL[1] * rows + 0.9
    series = series_of([result for results in panels.values() for result in results])
    figure: Any = Figure(
        figsize=(_PANEL[0] * columns + 2.6, height), layout="constrained", facecolor=theme.page
    )  # the legend takes some of it
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    figure.suptitle(f"{chart.title}\n", fontsize=12.5, fontweight="bold", x=0.012, ha="left")
    figure.text(0.012, 1 - 0.46 / height, what, fontsize=9, alpha=0.8, va="center")
    grid = figure.subplots(rows, columns, squeeze=False)
    for number, (serving, results) in enumerate(panels.items()):
        axes = grid[number // columns][number % columns]
        axes.set_title(_spelled(serving, list(panels)), loc="left", fontsize=10)
        _draw_panel(axes, chart, results, series, theme)
    for number in range(len(panels), rows * columns):
        grid[number // columns][number % columns].set_visible(False)
    figure.supxlabel("drafted nodes a target pass, mean", fontsize=9.5)
    handles = dict(zip(*reversed(_legend(figure)), strict=True))
    figure.legend(
        handles.values(), handles.keys(), loc="outside right upper", frameon=False, fontsize=8.5, handlelength=3.2
    )
    return figure


def series_of(results: Sequence[PointResult]) -> dict[str, Series]:
    """The line that each point belongs to, by the point's name."""
    values: dict[str, set[str]] = {}
    for result in results:
        for key, value in result.changes.items():
            values.setdefault(key, set()).add(spelled(value))
    telling = [key for key, each in values.items() if len(each) > 1 and key not in (*_SIZE_KEYS, "method")]
    found = {}
    for result in results:
        parts = [
            f"{short_name(key, values)}={spelled(result.changes[key])}" for key in telling if key in result.changes
        ]
        # "medusa:chain" is a variant of medusa; several drafters merged are a method of their own.
        method, _, rest = (result.method, "", "") if "+" in result.method else result.method.partition(":")
        found[result.name] = Series(method, " ".join([*([rest] if rest else []), *parts]))
    return found


def _draw_panel(
    axes: Any, chart: Chart, results: Sequence[PointResult], series: dict[str, Series], theme: Theme
) -> None:
    """The points of one serving: every line along the best of its points, and the front of all."""
    every = list(dict.fromkeys(series.values()))
    methods = list(dict.fromkeys(each.method for each in every))
    places = {result.name: (result.nodes, chart.value(result)) for result in results}
    front = [list(places.values())[index] for index in pareto_front(list(places.values()))]
    axes.plot(
        *zip(*front, strict=True), color=theme.text, lw=7, alpha=0.14, solid_capstyle="round", zorder=1,
        label="Pareto front", marker="o", ms=13, mec="none",
    )  # fmt: skip
    for number, line in enumerate(every):
        own = [places[name] for name, its in series.items() if its == line and name in places]
        if not own:
            continue
        variants = [each for each in every if each.method == line.method]
        look = look_of(line.method, methods) if len(methods) > 1 else distinct_look(number)
        style = _LINE_STYLES[variants.index(line) % len(_LINE_STYLES)] if len(methods) > 1 else "-"
        colour = look.light if theme is LIGHT else look.dark
        best = [own[index] for index in pareto_front(own)]
        axes.plot(
            *zip(*best, strict=True), color=colour, ls=style, marker=look.marker, ms=5.5, lw=1.6, zorder=3,
            label=line.title,
        )  # fmt: skip
        others = [place for place in own if place not in best]
        if others:
            axes.plot(*zip(*others, strict=True), look.marker, color=colour, ms=4, alpha=0.4, zorder=2)
    if chart.name == "nodes-tokens":
        plain = sum(result.plain_tokens_per_s.median for result in results) / len(results)
        axes.axhline(plain, color=theme.text, lw=1.1, ls=(0, (2, 2)), zorder=1, label="plain decoding")
    axes.set_ylabel(chart.axis)
    axes.set_xlim(left=0)
    axes.margins(x=0.06, y=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color=theme.grid, lw=0.6, zorder=0)
    axes.set_axisbelow(True)


def _legend(figure: Any) -> tuple[list[Any], list[str]]:
    """Handles and labels of all panels, each label once: methods first, then the front and plain decoding."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    last = [label for label in ("Pareto front", "plain decoding") if label in found]
    ordered = [*(label for label in found if label not in last), *last]
    return [found[label] for label in ordered], ordered


def _spelled(serving: Serving, all_servings: Sequence[Serving]) -> str:
    """A panel's title: batch size and temperature, and what else is not the same in all panels."""
    temperature = "greedy" if serving.temperature == 0 else f"sampled, T {serving.temperature:g}"
    parts = [f"batch size {serving.batch_size}", temperature]
    parts += [
        getattr(serving, key) for key in ("dtype", "runner") if len({getattr(s, key) for s in all_servings}) > 1
    ]  # fmt: skip
    return ", ".join(parts)
