"""Reads a batch file line by line in bounded memory, for `laddertron run` and the Batch API."""

from __future__ import annotations

import hashlib
import json
import time
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

from ...topology.json_codec import ReadError, one_line, parse
from ..text.pool import LARGE_BYTES
from .body import Body, check_body
from .errors import ApiError
from .schema import GENERATING, Route
from .stored_responses import Stored
from .to_engine import wrong_model
from .validators import did_you_mean, show

MAX_LINE_BYTES = 10_000_000 - 1
MAX_CUSTOM_ID = 512
MAX_ERRORS = 100
_ENVELOPE = ("custom_id", "method", "url", "body")
_ENDPOINTS: dict[str, Route] = {path: path for path in GENERATING}
_CHUNK = 1 << 20
_PART_SECONDS, _PART_LINES, _PART_BYTES = 0.05, 256, 1 << 20


class BatchLine(NamedTuple):
    """One line of a batch file. `number` counts from 1; `length` is in bytes, with the line break. Exactly one of
    `body`, `error` and `raw` is set; `raw`: a large line, not checked yet. `custom_id` and `url` are set if they could
    be read, `digest` if LineRules asks for it (not for a duplicate custom_id)."""

    number: int
    length: int
    custom_id: str | None = None
    url: str | None = None
    body: Body | None = None
    error: ApiError | None = None
    raw: bytes | None = None
    digest: bytes = b""


@dataclass(frozen=True, slots=True)
class LineRules:
    """`endpoint`: the only url allowed (a batch). `max_lines=None`: any number. `digests`: lines carry their digest.
    `retains`: see as_chat (responses_body.py)."""

    endpoint: Route | None = None
    max_line_bytes: int = MAX_LINE_BYTES
    max_lines: int | None = None
    digests: bool = False
    retains: bool = False


def read_lines(
    file: BinaryIO,
    rules: LineRules = LineRules(),
    skip: Container[int] = (),
    large: bool = False,
    seen: set[bytes] | None = None,
) -> Iterator[BatchLine]:
    """Yields every line that is not blank, in order. A duplicate custom_id is the later line's error. Memory: one line,
    and 16 bytes a custom_id. The first line beyond `max_lines` is an error and the last one yielded. Lines whose
    numbers are in `skip` are not parsed. `large`: lines longer than LARGE_BYTES, and those that refer to stored
    responses, are yielded unparsed (`raw`), and `seen` has the keys of the other lines' custom_ids, for `once`."""
    seen = set() if seen is None else seen
    for number, length, raw in _raw_lines(file, rules.max_line_bytes):
        if rules.max_lines is not None and number > rules.max_lines:
            message = f"line {number}: at most {rules.max_lines} lines a file"
            yield BatchLine(number, length, error=ApiError(message, code="too_many_lines"))
            return
        if number in skip:
            continue
        if raw is None:
            message = f"line {number} has {length} bytes: at most {rules.max_line_bytes} are allowed"
            yield BatchLine(number, length, error=ApiError(message, code="line_too_long"))
        elif raw and not raw.isspace():
            if large and length > LARGE_BYTES:
                yield BatchLine(number, length, raw=raw)
                continue
            line = check_line(raw, number, rules)
            if large and line.body is not None and line.body.missing is not None:
                yield BatchLine(number, length, raw=raw)
                continue
            yield once(line._replace(digest=digest_of(raw)) if rules.digests else line, seen)


def once(line: BatchLine, seen: set[bytes]) -> BatchLine:
    """Returns the line, or an error line if its custom_id is in `seen`; adds it to `seen`."""
    if line.custom_id is not None:
        key = key_of(line.custom_id)
        if key in seen:
            message = f"line {line.number}: custom_id {show(line.custom_id)} is a duplicate of an earlier line's"
            error = ApiError(message, "duplicate_custom_id", "custom_id")
            return BatchLine(line.number, line.length, line.custom_id, line.url, error=error)
        seen.add(key)
    return line


InThread = Callable[[Callable[[], list[BatchLine]]], Awaitable[list[BatchLine]]]


async def off_loop(lines: Iterator[BatchLine], in_thread: InThread) -> AsyncIterator[BatchLine]:
    """Yields the lines, read by `in_thread` in parts of bounded time, lines and bytes. A large line (`raw`) ends a
    part, so that it can be checked before the next line is read."""

    def part() -> list[BatchLine]:
        batch_lines, size, until = list[BatchLine](), 0, time.monotonic() + _PART_SECONDS
        for line in lines:
            batch_lines.append(line)
            size += line.length
            if line.raw or len(batch_lines) == _PART_LINES or size > _PART_BYTES or time.monotonic() > until:
                break
        return batch_lines

    while batch_lines := await in_thread(part):
        for line in batch_lines:
            yield line


def key_of(custom_id: str) -> bytes:
    """A 16-byte key of a custom_id, for sets of many."""
    return hashlib.blake2b(custom_id.encode(), digest_size=16).digest()


def digest_of(raw: bytes) -> bytes:
    """A 16-byte digest of a line's bytes, without surrounding white space."""
    return hashlib.blake2b(raw.strip(), digest_size=16).digest()


def line_digests(file: BinaryIO, max_line_bytes: int) -> Iterator[tuple[bytes, int, bytes]]:
    """Yields digest, number and bytes of every line that is neither blank nor longer than `max_line_bytes`."""
    for number, _, raw in _raw_lines(file, max_line_bytes):
        if raw and not raw.isspace():
            yield digest_of(raw), number, raw


def check_line(
    raw: bytes,
    number: int = 1,
    rules: LineRules = LineRules(),
    bound: Callable[[Any], None] = lambda body: None,
    stored: Stored | None = None,
) -> BatchLine:
    """Checks one line; its error begins with its number. `bound` may refuse (ApiError) or shorten a body before it is
    checked; `stored`: see as_chat (responses_body.py)."""
    custom_id = url = None
    try:
        try:
            value = parse(raw)
        except ReadError as error:
            raise ApiError(str(error), code="invalid_json_line") from None
        if type(value) is not dict:
            raise ApiError("a line must be a JSON object", code="invalid_json_line")
        custom_id = _custom_id(value)
        url = value.get("url") if type(value.get("url")) is str else None
        endpoint = _envelope(value, rules)
        bound(value["body"])
        body = check_body(value["body"], endpoint, rules.retains, stored)
        if body.stream:
            raise ApiError("stream: true is not supported in a batch file", param="stream", code="unsupported_value")
        return BatchLine(number, len(raw), custom_id, url, body)
    except ApiError as bad:
        return BatchLine(number, len(raw), custom_id, url, error=bad.within(f"line {number}: "))


def _custom_id(value: dict[str, Any]) -> str | None:
    """The custom_id, or None if it is invalid; then `_envelope` raises the error."""
    given = value.get("custom_id")
    return given if type(given) is str and 1 <= len(given) <= MAX_CUSTOM_ID else None


def _envelope(value: dict[str, Any], rules: LineRules) -> Route:
    for name in _ENVELOPE:
        if name not in value:
            raise ApiError(f"{name} is missing", param=name, code="missing_required_parameter")
    if len(value) > len(_ENVELOPE):
        other = next(k for k in value if k not in _ENVELOPE)[:64]
        hint = did_you_mean(other, _ENVELOPE)
        raise ApiError(f"unknown field {other!r}{hint}", param=other, code="unknown_parameter")
    if _custom_id(value) is None:
        message = f"custom_id={show(value['custom_id'])}: must be a string of 1 to {MAX_CUSTOM_ID} characters"
        raise ApiError(message, param="custom_id", code="invalid_custom_id")
    if value["method"] != "POST":
        raise ApiError(f"method={show(value['method'])}: must be 'POST'", param="method", code="invalid_method")
    url = value["url"]
    endpoint = _ENDPOINTS.get(url) if type(url) is str else None
    if endpoint is None:
        raise ApiError(f"url={show(url)}: expected is one of {', '.join(GENERATING)}", param="url", code="invalid_url")
    if rules.endpoint is not None and endpoint != rules.endpoint:
        raise ApiError(f"url={url}: this batch's endpoint is {rules.endpoint}", param="url", code="mismatched_url")
    return endpoint


def _raw_lines(file: BinaryIO, limit: int) -> Iterator[tuple[int, int, bytes | None]]:
    """Yields (number, length, bytes); the bytes are None for a line longer than `limit`, line break included."""
    number = 0
    while raw := file.readline(limit + 1):
        number, length = number + 1, len(raw)
        if length <= limit:
            yield number, length, raw.removeprefix(BOM_UTF8) if number == 1 else raw
        else:
            while not raw.endswith(b"\n") and (raw := file.readline(_CHUNK)):
                length += len(raw)
            yield number, length, None


def digests_of(file: BinaryIO, max_line_bytes: int) -> dict[bytes, int]:
    """Maps the digests of a file's lines to their numbers. Memory: 16 bytes a line. Raises OSError."""
    return {digest: number for digest, number, _ in line_digests(file, max_line_bytes)}


def same_lines(earlier: dict[bytes, int], later: BinaryIO, max_line_bytes: int) -> dict[int, int]:
    """Maps numbers of an earlier file's lines, by digest, to numbers of equal lines in the later one."""
    digests = line_digests(later, max_line_bytes)
    return {earlier[digest]: number for digest, number, _ in digests if digest in earlier}


@dataclass(slots=True)
class FileCheck:
    """Result of `check_file`: the number of lines, and the first MAX_ERRORS errors by line; the same (`unserved`) for
    lines that request another model."""

    lines: int = 0
    unserved: int = 0
    errors: list[tuple[int, ApiError]] = field(default_factory=list)
    unserved_errors: list[tuple[int, ApiError]] = field(default_factory=list)


async def check_file(
    file: BinaryIO,
    rules: LineRules,
    served: str,
    in_thread: InThread,
    large: Callable[[BatchLine], Awaitable[BatchLine]],
) -> FileCheck:
    """Checks a whole batch file outside the event loop; `large` checks a large line. An empty file has an error at line
    0."""
    check, seen = FileCheck(), set[bytes]()
    async for line_read in off_loop(read_lines(file, rules, large=True, seen=seen), in_thread):
        line = line_read if line_read.raw is None else once(await large(line_read), seen)
        check.lines += 1
        error, errors = line.error, check.errors
        if line.body is not None and (wrong := wrong_model(line.body.model, served)) is not None:
            check.unserved += 1
            error, errors = wrong.within(f"line {line.number}: "), check.unserved_errors
        if error is not None and len(errors) < MAX_ERRORS:
            errors.append((line.number, error))
    if not check.lines:
        check.errors.append((0, ApiError("the file has no lines", "empty_file")))
    return check


def large_answer_line(custom_id: str, answer_id: str, pieces: Iterable[bytes]) -> bytes:
    """An answer's `output_line`, for a body whose JSON is in pieces."""
    before, _, after = output_line(custom_id, answer_id, 200, {}).rpartition(b"{}")
    return b"".join((before, *pieces, after))


def error_line(custom_id: str | None, answer_id: str, error: ApiError, number: int | None = None) -> bytes:
    """A line of the error file. `number`: the input line's, for a request that was refused."""
    if error.status is None:
        return output_line(custom_id, answer_id, None, {"code": error.code, "message": error.message})
    return output_line(custom_id, answer_id, error.status, error.to_json(number))


def output_line(custom_id: str | None, answer_id: str, status: int | None, body: dict[str, Any]) -> bytes:
    """An output line with its line break; `status=None`: `body` is the line's `error`."""
    response = {"status_code": status, "request_id": f"req_{answer_id}", "body": body}
    ends = {"response": None, "error": body} if status is None else {"response": response, "error": None}
    line = {"id": f"batch_req_{answer_id}", "custom_id": custom_id, **ends}
    text = json.dumps(line, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return one_line(text).encode() + b"\n"
