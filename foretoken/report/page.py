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

_TEMPLATES = "foretoken.report"


def render(run: RunView) -> str:
    """The page as HTML."""
    environment = Environment(
        loader=PackageLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script, style = _asset("report.js"), _asset("report.css")
    policy = (
        f"default-src 'none'; img-src data:; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return environment.get_template("report.html").render(
        run=run, policy=policy, script=Markup(script), style=Markup(style), embedded=embedded
    )  # fmt: skip


def embedded(value: Any) -> Markup:
    """JSON that may stand inside a script element: in ASCII, without characters that HTML knows."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


def _asset(name: str) -> str:
    return (resources.files(_TEMPLATES) / "templates" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """How a content security policy names an inline script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
