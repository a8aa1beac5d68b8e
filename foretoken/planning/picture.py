"""Draws a plan: the speed-up of every drafter at its best depth against the batch, one panel a temperature."""

from pathlib import Path
from typing import Any

from foretoken.bench.plots import LIGHT, legend_entries, load_matplotlib, look_of, page_style
from foretoken.core.errors import ConfigError
from foretoken.files.atomic_files import new_file, told_as
from foretoken.planning.plan import Page, Plan, best_depths

_PANEL = (4.6, 3.6)  # inches; a choice


def check_picture(path: Path | None) -> None:
    """Raises `ConfigError` if matplotlib is not installed, or a name does not end in .svg or .png; None for none."""
    if path is None:
        return
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"--out is '{path}'. Expected a name that ends in .svg or .png.")
    load_matplotlib()


def write_picture(plan: Plan, path: Path, what: str) -> None:
    """Draws a plan into a file, which is replaced; raises `ConfigError` if it cannot be written.

    The path passes `check_picture`. `what`, the conditions, is shown below the title.
    """
    mpl = load_matplotlib()
    from matplotlib.figure import Figure

    with mpl.rc_context(page_style(LIGHT, "plan")):
        figure: Any = Figure(
            figsize=(_PANEL[0] * len(plan.pages) + 2.2, _PANEL[1] + 0.8), layout="constrained", facecolor=LIGHT.page
        )
        figure.suptitle(f"Predicted speed-up\n{what}", fontsize=9, x=0.012, ha="left", wrap=True)
        panels = figure.subplots(1, len(plan.pages), squeeze=False, sharey=True)[0]
        for axes, page in zip(panels, plan.pages, strict=True):
            _draw(axes, page)
        entries = legend_entries(panels)
        figure.legend(entries.values(), entries, loc="outside right upper", frameon=False, fontsize=8.5)
        dateless = {"Date": None} if path.suffix == ".svg" else None
        with told_as(ConfigError, f"'{path}'", "Make room, or choose another --out."), new_file(path) as new:
            figure.savefig(new, format=path.suffix[1:], dpi=160, metadata=dateless)


def _draw(axes: Any, page: Page) -> None:
    lines: dict[str, list[tuple[int, float, float, float]]] = {}
    for found in page.predictions:
        for each in best_depths(found):
            if each.draft.depth:
                scale = each.speed_up / each.tokens_per_s
                point = (each.batch, each.speed_up, each.low * scale, each.high * scale)
                lines.setdefault(each.draft.name, []).append(point)
    names = sorted(lines)
    for name in names:
        batches, speed_ups, low, high = zip(*sorted(lines[name]), strict=True)
        look = look_of(name.removesuffix(":chain"), [each.removesuffix(":chain") for each in names])
        axes.plot(batches, speed_ups, color=look.light, marker=look.marker, ms=5, lw=1.6, label=name)
        axes.fill_between(batches, low, high, color=look.light, alpha=0.1, lw=0)
    axes.axhline(1.0, color=LIGHT.text, lw=1.1, ls=(0, (2, 2)))
    axes.set_xscale("log", base=2)
    sizes = sorted({each.batch for found in page.predictions for each in found})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_title(f"temperature {page.temperature:g}", loc="left", fontsize=10)
    axes.set_xlabel("sequences decoded at once")
    axes.set_ylabel("speed-up over plain decoding")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color=LIGHT.grid, lw=0.6)
