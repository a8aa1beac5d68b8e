"""Makes self-contained HTML pages: no network, no other file, and no text that could become markup or script."""

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

_COMMON = "foretoken.report"  # the package with the common style


def render_inlined(package: str, name: str, **values: Any) -> tuple[str, str]:
    """Renders a page from templates/NAME.html, NAME.css and NAME.js of a package.

    Args:
        package: The package with the files.
        name: NAME.
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
    """Returns the hash by which a content security policy allows an inline script or style."""
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
