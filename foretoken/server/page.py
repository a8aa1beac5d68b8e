"""The page at `/`: asks this server for text and shows which tokens were drafted; the same for everybody."""

from __future__ import annotations

from functools import cache

from starlette.responses import Response

from foretoken.report.inlined import render_inlined

# Requests go to this server alone, no other page may frame it, and text can never be parsed as markup.
_POLICY = "connect-src 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"


def page_response() -> Response:
    """The page; it learns from /v1/models what is served."""
    content, policy = _page()
    headers = {
        "Content-Security-Policy": f"{policy}; {_POLICY}", "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache",
    }  # fmt: skip
    return Response(content, media_type="text/html", headers=headers)


@cache
def _page() -> tuple[str, str]:
    """The page and its content security policy."""
    return render_inlined("foretoken.server", "page")
