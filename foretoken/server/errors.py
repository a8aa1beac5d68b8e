"""Errors in the form of OpenAI's API: a status, and a body with message, type, parameter and code."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import EngineStopped, QueueFull, RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "method_not_allowed",
    408: "timeout_error", 413: "request_too_large", 415: "invalid_request_error", 429: "rate_limit_error",
    503: "service_unavailable",
}  # fmt: skip


class ApiError(Exception):
    """An error answer.

    Attributes:
        status: HTTP status.
        message: One or two sentences.
        param: The field of the request with the error, if any.
        code: A name for programs, if any.
        headers: Further headers of the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """Returns the body of the answer."""
        kind = _TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def api_error(error: BaseException) -> ApiError:
    """Returns the answer for an exception; an unforeseen exception reveals no details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        wait = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        return ApiError(str(error), status=429, code="queue_full", headers=wait)
    if isinstance(error, RequestError):
        return ApiError(str(error))
    if isinstance(error, EngineStopped):
        return ApiError("The engine serves no requests any more. Send the request to another server.", status=503)
    return ApiError("The server failed. The request was not completed; other requests go on.", status=500)
