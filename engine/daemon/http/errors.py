"""What goes wrong at the HTTP door, and its JSON: {"error": {message, type, param, code}} for every status."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse

from ...openai.validators import BadRequest

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "invalid_request_error", 429: "rate_limit_error"}


class HttpFault(Exception):
    """Ends a request with a status. `retry_after` in seconds; `close`: the connection cannot go on."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after, self.close = retry_after, close

    def to_json(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.close:
            headers["connection"] = "close"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return JSONResponse(self.to_json(), self.status, headers)


def of_bad_request(bad: BadRequest) -> HttpFault:
    return HttpFault(bad.status, bad.message, bad.code, bad.param)


def not_found(what: str, name: str) -> HttpFault:
    """The same words whether it never was or is another's."""
    return HttpFault(404, f"no {what} {name[:80]!r} here", "not_found")


def not_ready(message: str) -> HttpFault:
    return HttpFault(503, message, "not_ready", retry_after=5)


def unstored(message: str) -> HttpFault:
    return HttpFault(507, f"{message}; nothing was stored", "insufficient_storage", retry_after=10)
