"""Rows of files, batches and answers, and their JSON for clients."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ...openai.schema import Route

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED: frozenset[str] = frozenset({"failed", "completed", "expired", "cancelled"})
_STAMPS = (
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


def new_id(kind: str) -> str:
    """Makes an id, `file-…` or `batch_…`, of 128 random bits."""
    return f"{kind}{secrets.token_hex(16)}"


class Tokens(NamedTuple):
    """Tokens of an answer, as counted in its usage; `cached` tokens of the `prompt` were cache hits."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def plus(self, other: Tokens) -> Tokens:
        return Tokens(*map(sum, zip(self, other, strict=True)))

    def less(self, other: Tokens) -> Tokens:
        return Tokens(*(mine - its for mine, its in zip(self, other, strict=True)))


NO_TOKENS = Tokens()


@dataclass(frozen=True, slots=True)
class FileRow:
    """A file. `batch_id`: the batch whose output or error file it is. `digest`: of an upload's bytes (files.py)."""

    id: str
    owner: str
    purpose: str
    filename: str
    bytes: int
    created_at: int
    batch_id: str | None = None
    expires_at: int | None = None
    digest: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True)
class BatchRow:
    """Times are unix seconds. `output_seconds`: how long its result files are kept; `reuse_batch_id`: the batch whose
    answers it copies; `model_digest`: of the model of all its answers, None if unknown or of several models."""

    id: str
    owner: str
    endpoint: Route
    input_file_id: str
    completion_window: str
    status: Status
    created_at: int
    expires_at: int
    errors: list[dict[str, Any]] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    metadata: dict[str, str] | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    output_seconds: int | None = None
    reuse_batch_id: str | None = None
    model_digest: str | None = None

    @property
    def tokens(self) -> Tokens:
        return Tokens(self.input_tokens, self.cached_tokens, self.output_tokens)

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": None if self.errors is None else {"object": "list", "data": self.errors},
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id if self.ended else None,
            "error_file_id": self.error_file_id if self.ended else None,
            "created_at": self.created_at,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
            "usage": {
                "input_tokens": self.input_tokens,
                "input_tokens_details": {"cached_tokens": self.cached_tokens},
                "output_tokens": self.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": self.input_tokens + self.output_tokens,
            },
        }
        return out | {name: getattr(self, name) for name in _STAMPS}


@dataclass(frozen=True, slots=True)
class ResponseRow:
    """A response and the input that it was sent. `previous`: the response that it continues; `of_items`: the ids,
    separated by spaces, of those to whose items its input refers; `head`: its JSON without `output`; `input`, `output`:
    JSON arrays of items; `bytes`: of these three."""

    id: str
    owner: str
    expires_at: int
    bytes: int
    previous: str | None
    of_items: str
    status: str
    head: str
    input: str
    output: str

    def to_json(self) -> str:
        """The response as it was answered."""
        return f'{self.head[:-1]},"output":{self.output}}}'

    def items_json(self) -> str:
        """This member of stored_responses.Stored."""
        previous = "null" if self.previous is None else f'"{self.previous}"'
        members = f'"status":"{self.status}","previous":{previous},"input":{self.input},"output":{self.output}'
        return f'"{self.id}":{{{members}}}'


@dataclass(frozen=True, slots=True)
class Result:
    """One line's answer (`ok`) or error, as in the output or error file, line break included. `response`: stored with
    it."""

    custom_id: str
    number: int
    ok: bool
    line: str
    tokens: Tokens = NO_TOKENS
    response: ResponseRow | None = None
