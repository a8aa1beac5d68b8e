"""Colours of pages, and names and colours of the methods: the same in every table and picture."""

from __future__ import annotations

from typing import Any, NamedTuple

from foretoken.core.errors import ConfigError


class Theme(NamedTuple):
    """Colours of a page: background, text, lines of the grid, and the area of slow-downs."""

    name: str
    page: str
    text: str
    grid: str
    slower: str


LIGHT = Theme("", "#ffffff", "#1f2328", "#d8dee4", "#f3f4f6")
DARK = Theme("-dark", "#0d1117", "#d1d7e0", "#30363d", "#161b22")


class Look(NamedTuple):
    """How a method is shown.

    Attributes:
        title: In tables and pictures.
        light: Colour on white.
        dark: Colour on black.
        marker: Of matplotlib.
    """

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
_DYNAMIC, _SHAPES = "d", ("<", ">", "1", "2")  # markers of a method's dynamic trees, and of its other ones
_OTHERS = (("#be185d", "#f472b6", "P"), ("#57534e", "#d6d3d1", "X"), ("#0e7490", "#22d3ee", "p"))


def in_order(methods: list[str]) -> list[str]:
    """Methods as tables list them."""
    known = list(_LOOKS)
    return sorted(methods, key=lambda method: known.index(method) if method in known else len(known))


def look_of(method: str, methods: list[str]) -> Look:
    """How a method is shown among others: one of a shape of trees of its own in the method's colours.

    Args:
        method: One of these.
        methods: All that are shown: a name, `NAME:TREE`, or several of either with `+` between them, drafting for one
            tree.
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
    """The look of a method itself, whatever its trees are; None for several in one tree, and for others."""
    return None if "+" in method else _LOOKS.get(method.partition(":")[0])


def _title_of(method: str) -> str:
    """A title that says which drafters there are and that their trees are dynamic; else the name as it is."""
    titles = []
    for part in method.split("+"):
        name, _, tree = part.partition(":")
        if name not in _LOOKS or tree not in ("", "dynamic"):
            return method
        titles.append(_LOOKS[name].title + (", dynamic trees" if tree else ""))
    return " + ".join(titles)


def distinct_look(number: int) -> Look:
    """One of several looks where lines differ by something else than their method."""
    looks = [look for method, look in _LOOKS.items() if method != "plain"]
    return looks[number % len(looks)]


def load_matplotlib() -> Any:
    """Returns the module `matplotlib`.

    Raises:
        ConfigError: When it is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as err:
        raise ConfigError(
            "pictures need the package 'matplotlib', which is not installed. Run in foretoken's "
            "repository: pip install '.[report]'."
        ) from err
    return mpl


def page_style(theme: Theme, salt: str) -> Any:
    """Settings of matplotlib for a page, as its `rc_context` takes them: names and values of many types.

    Args:
        theme: Of the page.
        salt: Of the ids in an SVG file, which are the same each time it is drawn.
    """
    colours = dict.fromkeys(
        ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.titlecolor"), theme.text
    )
    pages = dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), theme.page)
    return {"svg.hashsalt": salt, "font.size": 9.5, "axes.edgecolor": theme.grid, **colours, **pages}
