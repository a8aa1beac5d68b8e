"""Reads a report's traces, results of sweeps and pictures, and makes self-contained HTML pages.

A page uses no network and no other file, and no text in it can become markup or script.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from foretoken.core.errors import ConfigError
from foretoken.files.bounded_reads import MIB, read_named
from foretoken.report.trace_file import MOST_TRACE_BYTES, is_trace, read_trace
from foretoken.report.views import TraceView, view_of, visible

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

RESULTS = "results.jsonl"
_DARK = "-dark"
_MOST_PICTURE_BYTES = 16 * MIB  # a choice: the page holds its pictures, and browsers load it whole
# Columns of a table of a sweep's points: heading, keys in a line's `result`, and format.
_COLUMNS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("point", ("name",), ""),
    ("batch", ("serving", "batch_size"), ""),
    ("temperature", ("serving", "temperature"), "g"),
    ("dtype", ("serving", "dtype"), ""),
    ("tau", ("tau",), ".2f"),
    ("nodes", ("nodes",), ".1f"),
    ("tokens/s", ("tokens_per_s", "median"), ".1f"),
    ("speed-up", ("speed_up", "median"), ".2f"),
    ("same text", ("num_identical",), ""),
    ("texts", ("num_texts",), ""),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture of the page, as data URLs for a light and perhaps a dark page."""

    name: str
    light: str
    dark: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepView:
    """Results of a sweep as a table: columns with at least one value, the fastest point first."""

    name: str
    headings: list[str]
    rows: list[list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The contents of one page."""

    title: str
    traces: list[TraceView]
    sweeps: list[SweepView]
    pictures: list[Picture]


def read_run(run: Path) -> RunView:
    """Reads a trace, or all traces, `results.jsonl` and SVG pictures of a directory.

    Raises `ConfigError` when there is none of these, or a file is damaged; `OSError` when a file cannot be read.
    """
    if not run.exists():
        raise ConfigError(f"there is no '{run}'. Expected a file of `foretoken generate --trace`, or a directory.")
    files = sorted(path for path in run.rglob("*") if path.is_file()) if run.is_dir() else [run]
    lines = [path for path in files if path.suffix == ".jsonl"] if run.is_dir() else files
    base = run if run.is_dir() else run.parent
    traces = [
        view_of(str(path.relative_to(base)), read_trace(path)) for path in lines if not run.is_dir() or is_trace(path)
    ]
    sweeps = [
        _sweep(path, str(path.parent.relative_to(base))) for path in lines if path.name == RESULTS and run.is_dir()
    ]
    pictures = _pictures([path for path in files if path.suffix == ".svg"], base)
    if not (traces or sweeps or pictures):
        raise ConfigError(
            f"'{run}' holds no trace of `foretoken generate --trace`, no results of `foretoken sweep` and no SVG "
            "picture. Name a directory that does."
        )
    title = run.resolve().name
    return RunView(title=visible(title), traces=traces, sweeps=sweeps, pictures=pictures)


def _pictures(files: Iterable[Path], base: Path) -> list[Picture]:
    by_name = {str(path.relative_to(base).with_suffix("")): path for path in files}
    return [
        Picture(
            name=visible(name),
            light=_data_url(path),
            dark=_data_url(by_name[name + _DARK]) if name + _DARK in by_name else None,
        )
        for name, path in by_name.items()
        if not (name.endswith(_DARK) and name.removesuffix(_DARK) in by_name)
    ]


def _data_url(path: Path) -> str:
    data = read_named(path, limit=_MOST_PICTURE_BYTES, error=ConfigError)
    return f"data:image/svg+xml;base64,{base64.b64encode(data).decode()}"


def _sweep(path: Path, name: str) -> SweepView:
    points = []
    for number, line in enumerate(read_named(path, limit=MOST_TRACE_BYTES, error=ConfigError).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as err:
            raise ConfigError(f"line {number} of '{path}' is no JSON. Expected results of `foretoken sweep`.") from err
        if isinstance(value, dict) and isinstance(value.get("result"), dict):
            points.append(value["result"])
    points.sort(key=lambda point: -_number(_value_at(point, ("tokens_per_s", "median"))))
    used = [column for column in _COLUMNS if any(_value_at(point, column[1]) is not None for point in points)]
    rows = [[_cell(_value_at(point, keys), form) for _, keys, form in used] for point in points]
    return SweepView(name=visible(name), headings=[heading for heading, _, _ in used], rows=rows)


def _value_at(value: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _cell(value: Any, form: str) -> str:
    if isinstance(value, int | float) and form:
        return format(value, form)
    return "" if value is None else visible(str(value))


_COMMON = "foretoken.report"  # the package with the common style


def render_inlined(package: str, name: str, **values: Any) -> tuple[str, str]:
    """Renders NAME.html, NAME.css and NAME.js of a package's templates; returns HTML and its security policy."""
    environment = Environment(
        loader=PackageLoader(package),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script, style = _asset(package, f"{name}.js"), _asset(_COMMON, "common.css") + _asset(package, f"{name}.css")
    policy = (
        f"default-src 'none'; img-src data:; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    page = environment.get_template(f"{name}.html").render(
        script=Markup(script), style=Markup(style), policy=policy, **values
    )
    return page, policy


def _asset(package: str, name: str) -> str:
    return (resources.files(package) / "templates" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def render(run: RunView) -> str:
    """Returns the page as HTML."""
    page, _ = render_inlined("foretoken.report", "report", run=run, embedded=embedded)
    return page


def embedded(value: Any) -> Markup:
    """Returns JSON for a script element: ASCII, without characters special to HTML."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)
