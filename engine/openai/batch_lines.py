"""Lines of a batch's output and error files. Pure: data in, JSON lines out."""

from __future__ import annotations

import json
from typing import Any

from .errors import ApiError


def answer_line(custom_id: str, answer_id: str, body: dict[str, Any]) -> bytes:
    return _line(custom_id, answer_id, 200, body)


def error_line(custom_id: str | None, answer_id: str, error: ApiError, number: int | None = None) -> bytes:
    """A line of the error file. `number`: of the input's line, for a request that was not taken."""
    if error.status is None:
        return _line(custom_id, answer_id, None, {"code": error.code, "message": error.message})
    return _line(custom_id, answer_id, error.status, error.to_json(number))


def _line(custom_id: str | None, answer_id: str, status: int | None, body: dict[str, Any]) -> bytes:
    """As it stands in a file, line break included; `status=None`: the body is the line's `error`."""
    response = {"status_code": status, "request_id": f"req_{answer_id}", "body": body}
    ends = {"response": None, "error": body} if status is None else {"response": response, "error": None}
    line = {"id": f"batch_req_{answer_id}", "custom_id": custom_id, **ends}
    return json.dumps(line, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n"
