"""Errors that several routes share, and any ApiError as a response."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fastapi.responses import JSONResponse

from ...openai.errors import ApiError
from ...text.pool import TextUnavailable
from ..store.sums import Damaged


def response_of(error: ApiError) -> JSONResponse:
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.close:
        headers["connection"] = "close"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error.to_json(), error.status or 500, headers)


def failed() -> ApiError:
    return ApiError("internal server error", "internal_error", status=500, close=True)


def not_found(what: str, name: str) -> ApiError:
    """The error (404) for an object that does not exist or belongs to another key, with the same text."""
    return ApiError(f"no {what} {name[:80]!r} here", "not_found", status=404)


def not_ready(message: str) -> ApiError:
    return ApiError(message, "not_ready", status=503, retry_after=5)


@contextlib.contextmanager
def text_workers() -> Iterator[None]:
    """Raises ApiError (503) if no text worker runs."""
    try:
        yield
    except TextUnavailable as error:
        raise not_ready(f"{error}: see /ready") from error


def stopping() -> ApiError:
    message = "the daemon stopped before this request finished: its changes may be stored"
    return ApiError(message, "not_ready", status=503, retry_after=5, close=True)


def damaged(error: Damaged) -> ApiError:
    """The error for something stored that does not match its checksum, with its name."""
    if error.kind == "file":
        return ApiError(f"{error}: upload it again", "file_damaged", status=500)
    return ApiError(f"{error}: delete it, or restore the store", "row_damaged", status=500)


def unstored(message: str) -> ApiError:
    return ApiError(f"{message}; nothing was stored", "insufficient_storage", status=507, retry_after=10)
