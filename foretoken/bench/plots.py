"""Draws a sweep: drafted nodes a pass against tau and tokens/s, one line a method, with the Pareto fronts.

Each picture is drawn for pages with a light and with a dark background.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from foretoken.bench.grid import Serving, short_name, spelled
from foretoken.bench.sweep import PointResult, pareto_front
from foretoken.core.errors import ConfigError


class Theme(NamedTuple):
    """Colours of a page: background, text and grid."""

    name: str
    page: str
    text: str
    grid: str


LIGHT = Theme("", "#ffffff", "#1f2328", "#d8dee4")
DARK = Theme("-dark", "#0d1117", "#d1d7e0", "#30363d")


class Look(NamedTuple):
    """The look of a method: its title, its colours on white and on black, and its marker in matplotlib."""

    title: str
    light: str
    dark: str
    marker: str


_LOOKS = {
    "plain": Look("plain", "#475569", "#94a3b8", "o"),
    "ngram": Look("prompt lookup", "#c2410c", "#fb923c", "o"),
    "draft_model": Look("draft model", "#1d4ed8", "#60a5fa", "s"),
    "eagle3": Look("EAGLE-3", "#be123c", "#fb7185", "h"),
    "eagle": Look("EAGLE", "#15803d", "#4ade80", "p"),
    "hass": Look("HASS", "#0369a1", "#38bdf8", "*"),
    "falcon": Look("Falcon", "#3f6212", "#a3e635", "X"),
    "hydra": Look("Hydra++", "#7e22ce", "#c084fc", "D"),
    "mlp_speculator": Look("MLP speculator", "#0f766e", "#2dd4bf", "^"),
    "medusa": Look("Medusa", "#a16207", "#facc15", "v"),
}
_DYNAMIC, _SHAPES = "d", ("<", ">", "1", "2")  # markers of dynamic trees and of other tree variants
_OTHERS = (("#be185d", "#f472b6", "P"), ("#57534e", "#d6d3d1", "X"), ("#0e7490", "#22d3ee", "p"))


def in_order(methods: list[str]) -> list[str]:
    """Returns methods in the order of tables."""
    known = list(_LOOKS)
    return sorted(methods, key=lambda method: known.index(method) if method in known else len(known))


def look_of(method: str, methods: list[str]) -> Look:
    """Returns the look of a method; variants of one method share a colour and have different markers.

    `methods` are all shown methods: `NAME`, `NAME:TREE`, or several of these joined by `+` for one merged tree.
    """
    if method in _LOOKS:
        return _LOOKS[method]
    known = _known(method)
    if known is not None:
        shapes = sorted(name for name in methods if name not in _LOOKS and _known(name) is known)
        marker = _DYNAMIC if method.endswith(":dynamic") else _SHAPES[shapes.index(method) % len(_SHAPES)]
        return Look(_title_of(method), known.light, known.dark, marker)
    others = [name for name in methods if _known(name) is None]
    return Look(_title_of(method), *_OTHERS[others.index(method) % len(_OTHERS)])


def _known(method: str) -> Look | None:
    return None if "+" in method else _LOOKS.get(method.partition(":")[0])


def _title_of(method: str) -> str:
    titles = []
    for part in method.split("+"):
        name, _, tree = part.partition(":")
        if name not in _LOOKS or tree not in ("", "dynamic"):
            return method
        titles.append(_LOOKS[name].title + (", dynamic trees" if tree else ""))
    return " + ".join(titles)


def distinct_look(number: int) -> Look:
    """Returns one of several looks for lines that do not differ by their method."""
    looks = [look for method, look in _LOOKS.items() if method != "plain"]
    return looks[number % len(looks)]


def load_matplotlib() -> Any:
    """Returns the module `matplotlib`; raises `ConfigError` when matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError as err:
        raise ConfigError(
            "pictures need the package 'matplotlib', which is not installed. Run in foretoken's "
            "repository: pip install '.[report]'."
        ) from err
    return mpl


def page_style(theme: Theme, salt: str) -> Any:
    """Returns a page's settings for matplotlib's `rc_context`; salt: makes the ids in SVG files reproducible."""
    colours = dict.fromkeys(
        ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.titlecolor"), theme.text
    )
    pages = dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), theme.page)
    return {"svg.hashsalt": salt, "font.size": 9.5, "axes.edgecolor": theme.grid, **colours, **pages}


# Keys that size a method's trees: their values are points along one line. Values of other keys begin new lines.
_SIZE_KEYS = frozenset({"num_speculative_tokens", "max_nodes", "tree_top_k"})
_LINE_STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)), (0, (7, 3)))
_PANEL = (4.6, 3.7)  # inches; a choice
_MOST_COLUMNS = 3  # panels side by side; a choice: fits a page
_LEGEND_LINE, _LEGEND_CHARACTER = 0.19, 0.075  # inches
_WIDE_RANGE = 8  # ratio of the largest to the smallest tree from which the axis is logarithmic; a choice
_FRONT, _PLAIN = "Pareto front of both axes", "plain decoding"


class Chart(NamedTuple):
    """One picture."""

    name: str
    title: str
    axis: str  # the label of the vertical axis, with its unit
    value: Callable[[PointResult], float]  # returns the value of a point
    is_beside_plain: bool = False  # whether plain decoding has such a value too


CHARTS = (
    Chart("nodes-tau", "What drafted nodes bring: tokens a target pass", "tau, tokens a target pass", lambda r: r.tau),
    Chart(
        "nodes-tokens",
        "What drafted nodes bring: tokens a second",
        "output tokens/s, median over rounds",
        lambda r: r.tokens_per_s.median,
        is_beside_plain=True,
    ),
)


class Series(NamedTuple):
    """The method and the further options, in words (`variant`), of points with the same look."""

    method: str
    variant: str

    @property
    def title(self) -> str:
        """The title in the legend."""
        return " ".join(filter(None, (look_of(self.method, [self.method]).title, self.variant)))


def write_plots(panels: dict[Serving, list[PointResult]], directory: Path, what: str) -> list[Path]:
    """Draws every chart as `.svg` for both backgrounds and as `.png` for a light one; returns the files.

    Older files are replaced. `what`, the model and the machine, is shown below the title. Raises `ConfigError` without
    matplotlib.
    """
    mpl = load_matplotlib()
    files = []
    for chart in CHARTS:
        for theme in (LIGHT, DARK):
            with mpl.rc_context(page_style(theme, "sweep")):
                figure = draw(chart, panels, theme, what)
                path = directory / f"{chart.name}{theme.name}.svg"
                figure.savefig(path, metadata={"Date": None})
                files.append(path)
                if theme is LIGHT:
                    files.append(path.with_suffix(".png"))
                    figure.savefig(files[-1], dpi=160)
    return files


def draw(chart: Chart, panels: dict[Serving, list[PointResult]], theme: Theme, what: str) -> Any:
    """Returns a figure with one panel for each `Serving`, and the legend on the right."""
    from matplotlib.figure import Figure

    columns = min(len(panels), _MOST_COLUMNS)
    rows = -(-len(panels) // columns)
    height = _PANEL[1] * rows + 0.9
    lines = lines_of([result for results in panels.values() for result in results])
    num_entries = len(set(lines)) + 2
    legend_columns = -(-num_entries // int(height / _LEGEND_LINE))
    longest = max(len(series.title) for series, _ in lines)
    legend_width = legend_columns * (0.8 + _LEGEND_CHARACTER * max(longest, 14))
    figure: Any = Figure(
        figsize=(_PANEL[0] * columns + legend_width, height), layout="constrained", facecolor=theme.page
    )
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    figure.suptitle(f"{chart.title}\n", fontsize=12.5, fontweight="bold", x=0.012, ha="left")
    figure.text(0.012, 1 - 0.46 / height, what, fontsize=9, alpha=0.8, va="center")
    grid = figure.subplots(rows, columns, squeeze=False)
    for number, (serving, results) in enumerate(panels.items()):
        axes = grid[number // columns][number % columns]
        axes.set_title(_spelled(serving, list(panels)), loc="left", fontsize=10)
        _draw_panel(axes, chart, results, lines, theme)
    for number in range(len(panels), rows * columns):
        grid[number // columns][number % columns].set_visible(False)
    entries = legend_entries(figure.axes)
    figure.legend(
        entries.values(), entries.keys(), loc="outside right upper", frameon=False, fontsize=8.5, handlelength=3.2,
        ncols=legend_columns,
    )  # fmt: skip
    return figure


def lines_of(results: Sequence[PointResult]) -> dict[tuple[Series, str], list[str]]:
    """Returns the lines of a chart: names of points, by their look and by the options that they share.

    A line joins points that differ in one key alone: of the keys that size trees, the key with the most values. Points
    with other values of further such keys lie on lines of the same look. For mappings, such as values of `pruning`,
    names tell lines apart, and numbers differ along a line.
    """
    values: dict[str, set[str]] = {}
    for result in results:
        for key, value in result.changes.items():
            values.setdefault(key, set()).add(spelled(value))
    telling = [key for key, each in values.items() if len(each) > 1 and key != "method"]
    sizes = sorted((key for key in telling if key in _SIZE_KEYS), key=lambda key: len(values[key]))[:-1]

    def said(result: PointResult, keys: Sequence[str]) -> str:
        parts = []
        for key in (each for each in keys if each in result.changes):
            value = result.changes[key]
            text = "+".join(value) if isinstance(value, dict) else spelled(value)
            parts.append(f"{short_name(key, values)}={text}")
        return " ".join(parts)

    lines: dict[tuple[Series, str], list[str]] = {}
    for result in results:
        # "medusa:chain" is a variant of medusa; merged drafters are a method of their own.
        method, _, rest = (result.method, "", "") if "+" in result.method else result.method.partition(":")
        variant = " ".join(filter(None, (rest, said(result, [key for key in telling if key not in _SIZE_KEYS]))))
        names = lines.setdefault((Series(method, variant), said(result, sizes)), [])
        if result.name not in names:  # it has a point in every panel
            names.append(result.name)
    return dict(sorted(lines.items()))


def _draw_panel(
    axes: Any, chart: Chart, results: Sequence[PointResult], lines: dict[tuple[Series, str], list[str]], theme: Theme
) -> None:
    every = list(dict.fromkeys(series for series, _ in lines))
    methods = list(dict.fromkeys(series.method for series in every))
    at = {result.name: (result.nodes, chart.value(result)) for result in results}
    found = list(at.values())
    axes.plot(
        *zip(*dict.fromkeys(found[index] for index in pareto_front(found)), strict=True), color=theme.text, lw=7,
        alpha=0.14, solid_capstyle="round", zorder=1, label=_FRONT, marker="o", ms=13, mec="none",
    )  # fmt: skip
    for (series, _), names in lines.items():
        own = sorted(at[name] for name in names if name in at)
        if not own:
            continue
        variants = [each for each in every if each.method == series.method]
        is_one_method = len(methods) == 1
        look = distinct_look(every.index(series)) if is_one_method else look_of(series.method, methods)
        style = "-" if is_one_method else _LINE_STYLES[variants.index(series) % len(_LINE_STYLES)]
        colour = look.light if theme is LIGHT else look.dark
        axes.plot(
            *zip(*own, strict=True), color=colour, ls=style, marker=look.marker, ms=5.5, lw=1.6, zorder=3,
            label=series.title,
        )  # fmt: skip
    if chart.is_beside_plain:
        plain = median(result.plain_tokens_per_s.median for result in results)
        axes.axhline(plain, color=theme.text, lw=1.1, ls=(0, (2, 2)), zorder=1, label=_PLAIN)
    axes.set_ylabel(chart.axis)
    axes.set_xlabel("drafted nodes a target pass, mean")
    _scale_nodes(axes, [nodes for nodes, _ in found])
    axes.margins(y=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color=theme.grid, lw=0.6, zorder=0)
    axes.set_axisbelow(True)


def _scale_nodes(axes: Any, nodes: Sequence[float]) -> None:
    least, most = min(nodes), max(nodes)
    if least < 0.5 or most < _WIDE_RANGE * least:
        axes.set_xlim(0, max(most * 1.08, 1.0))
        return
    axes.set_xscale("log", base=2)
    axes.set_xlim(least / 1.25, most * 1.25)
    ticks = [2**power for power in range(-1, 12) if least / 1.25 <= 2**power <= most * 1.25]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)


def legend_entries(panels: Sequence[Any]) -> dict[str, Any]:
    """Returns the handles of a figure's lines by their labels, each once; fronts and plain decoding come last."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return {label: found[label] for label in sorted(found, key=lambda label: (label == _PLAIN, label == _FRONT))}


def _spelled(serving: Serving, all_servings: Sequence[Serving]) -> str:
    temperature = "greedy" if serving.temperature == 0 else f"sampled, T {serving.temperature:g}"
    parts = [f"batch size {serving.batch_size}", temperature]
    parts += [getattr(serving, key) for key in ("dtype", "runner") if len({getattr(s, key) for s in all_servings}) > 1]
    return ", ".join(parts)
