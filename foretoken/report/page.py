"""One HTML page that holds everything: no network, no other file, and no text that could become markup or script."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from foretoken.report.inlined import render_inlined

if TYPE_CHECKING:
    from foretoken.report.sources import RunView


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
