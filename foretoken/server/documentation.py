"""What `/openapi.json` says of a route beyond what its handler tells: types of answers, errors, names in its path."""

from __future__ import annotations

import re
from typing import Any

from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse

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
    for status, description in (("4XX", "Refused: `error` says why."), ("5XX", "Failed, or not ready: likewise."))
}


def documentation_of(path: str) -> dict[str, Any]:
    """Keyword arguments of `FastAPI.add_api_route` for a path such as "/v1/models/{name}"."""
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)(?::path)?}", path)
    ]
    return {
        "response_class": _ANSWERS.get(path, JSONResponse),
        "responses": _ERRORS,
        "openapi_extra": {"parameters": parameters} if parameters else None,
    }
