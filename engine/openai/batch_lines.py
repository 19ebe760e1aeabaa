"""Lines of a batch's output and error files, and why a request may have no answer. Pure: data in, JSON lines out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .validators import BadRequest


@dataclass(frozen=True, slots=True)
class AnswerFault:
    """Why a request has no answer. `status=None`: it did not run to an end (a batch line's `error`); else the HTTP
    status of a failed one."""

    code: str
    message: str
    status: int | None = 500

    def to_json(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status == 400 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}


def unmade(error: Exception) -> AnswerFault:
    """For an answer whose making failed: its line must not wait for ever."""
    return AnswerFault("engine_error", f"the answer could not be made: {error!r}"[:500])


def answer_line(custom_id: str, answer_id: str, body: dict[str, Any]) -> dict[str, Any]:
    """A line of the output file."""
    return _line(custom_id, answer_id, {"status_code": 200, "request_id": f"req_{answer_id}", "body": body}, None)


def refusal_line(custom_id: str | None, answer_id: str, bad: BadRequest, number: int | None = None) -> dict[str, Any]:
    """A line of the error file for a request that was not taken; `number` is its line in the input."""
    body = bad.to_json(number)
    return _line(
        custom_id, answer_id, {"status_code": bad.status, "request_id": f"req_{answer_id}", "body": body}, None
    )


def fault_line(custom_id: str, answer_id: str, fault: AnswerFault) -> dict[str, Any]:
    """A line of the error file for a request that was taken and has no answer."""
    if fault.status is None:
        return _line(custom_id, answer_id, None, {"code": fault.code, "message": fault.message})
    response = {"status_code": fault.status, "request_id": f"req_{answer_id}", "body": fault.to_json()}
    return _line(custom_id, answer_id, response, None)


def _line(
    custom_id: str | None, answer_id: str, response: dict[str, Any] | None, error: dict[str, Any] | None
) -> dict[str, Any]:
    return {"id": f"batch_req_{answer_id}", "custom_id": custom_id, "response": response, "error": error}


def to_bytes(line: dict[str, Any]) -> bytes:
    """One line as it stands in a file, line break included."""
    return json.dumps(line, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n"
