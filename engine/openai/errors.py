"""ApiError: the error of a refused or failed request, for HTTP, batch files and streams."""

from __future__ import annotations

from typing import Any

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(ValueError):
    """`code` is for programs, `param` names the field. `status`: HTTP status; None if the request did not run to its
    end (a batch line's `error`). `retry_after` in seconds; `close`: the connection must be closed."""

    def __init__(
        self,
        message: str,
        code: str | None = "invalid_value",
        param: str | None = None,
        *,
        status: int | None = 400,
        retry_after: int | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.message, self.code, self.param, self.status = message, code, param, status
        self.retry_after, self.close = retry_after, close

    def within(self, place: str, param: str | None = None) -> ApiError:
        """The same with `place` before the message."""
        return ApiError(place + self.message, self.code, param or self.param, status=self.status)

    def to_json(self, line: int | None = None) -> dict[str, Any]:
        """{"error": {message, type, param, code}}, with the line's number for files."""
        server = self.status is None or self.status >= 500
        kind = "server_error" if server else _KINDS.get(self.status or 0, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error if line is None else {**error, "line": line}}


def unmade(error: Exception) -> ApiError:
    """The error of an answer that failed internally; without one the client would wait for ever."""
    return ApiError(f"the response could not be built: {error!r}"[:500], "engine_error", status=500)
