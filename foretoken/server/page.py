"""The page at `/`, and the description of each route in `/openapi.json`."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from foretoken.report.page import render_inlined

_ANSWERS = {"/": HTMLResponse, "/metrics": PlainTextResponse}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {},
            },
        }
    },
}
_ERRORS = {
    status: {"description": description, "content": {"application/json": {"schema": _ERROR}}}
    for status, description in (
        ("4XX", "Refused: `error` says why."),
        ("5XX", "Failed, or not ready: `error` says why."),
    )
}


def documentation_of(path: str) -> dict[str, Any]:
    """Returns the keyword arguments of `FastAPI.add_api_route` for a path such as "/v1/models/{name}"."""
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)(?::path)?}", path)
    ]
    return {
        "response_class": _ANSWERS.get(path, JSONResponse),
        "responses": _ERRORS,
        "openapi_extra": {"parameters": parameters} if parameters else None,
    }


# The page sends requests to this server alone, cannot be framed, and never parses text as markup.
_POLICY = "connect-src 'self'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"


def page_response() -> Response:
    """Returns the page, which reads the name of the model from /v1/models."""
    content, policy = _page()
    headers = {
        "Content-Security-Policy": f"{policy}; {_POLICY}", "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache",
    }  # fmt: skip
    return Response(content, media_type="text/html", headers=headers)


@cache
def _page() -> tuple[str, str]:
    """Returns the page and its content security policy."""
    return render_inlined("foretoken.server", "page")
