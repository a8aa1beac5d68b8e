"""The page that the server shows in a browser: a text box, the text with its drafts in colour, and how fast it came.

One document without anything from elsewhere: its policy lets it run its own script and ask its own server, no more.
"""

from __future__ import annotations

import secrets
from functools import cache
from importlib import resources
from typing import NamedTuple


class Page(NamedTuple):
    """A document, and the headers without which it is not to be sent."""

    text: str
    headers: dict[str, str]


def made_page() -> Page:
    """The page; every one has a nonce of its own, by which the browser knows its script and its style."""
    nonce = secrets.token_urlsafe(16)
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }  # fmt: skip
    return Page(_document().replace("{nonce}", nonce), headers)


@cache
def _document() -> str:
    """The page without a nonce."""
    folder = resources.files("foretoken.server.page")
    html, style, script = (folder.joinpath(name).read_text("utf-8") for name in ("page.html", "page.css", "page.js"))
    return html.replace("{style}", style).replace("{script}", script)
