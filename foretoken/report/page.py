"""One HTML page that holds everything: no network, no other file, and no text that could become markup or script."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

if TYPE_CHECKING:
    from foretoken.report.sources import RunView

_COMMON = "foretoken.report"  # has the style that all pages begin with


def render_inlined(package: str, name: str, **values: Any) -> tuple[str, str]:
    """A page from templates/NAME.html, NAME.css and NAME.js.

    Args:
        package: Has these files.
        name: Theirs.
        values: Further variables of the template, which also has `script`, `style` and `policy`.

    Returns:
        The page as HTML, and its content security policy.
    """
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
    """How a content security policy names an inline script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def render(run: RunView) -> str:
    """The page as HTML."""
    page, _ = render_inlined("foretoken.report", "report", run=run, embedded=embedded)
    return page


def embedded(value: Any) -> Markup:
    """JSON that may stand inside a script element: in ASCII, without characters that HTML knows."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)
