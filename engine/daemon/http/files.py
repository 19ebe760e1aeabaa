"""/v1/files: upload (streamed to the disk), list, get, read, delete. Only its owner can see a file."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import Field

from ...openai.errors import ApiError
from ...openai.validators import StrictModel, checked, json_schema, takes
from ..store import records
from ..store.disk import NewFile
from ..store.rows import FileRow, new_id
from ..store.store import StoreUnavailable
from ..store.sums import BLOCK_BYTES, BlockSums, CheckedFile, Damaged
from .errors import damaged, not_found, unstored
from .forms import FormReader, boundary_of
from .reservations import Reservation
from .state import Services, audit, owner_of, reach_of

_CHUNK = 1 << 18
T = TypeVar("T")


class ExpiresAfter(StrictModel):
    """How long a file is kept, as the Batch API says it."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=30 * 86400)]


_UPLOAD = {
    "type": "object",
    "required": ["file", "purpose"],
    "additionalProperties": False,
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after": json_schema(ExpiresAfter),
    },
}


class _LineCounter:
    """Counts lines while they arrive: a file with too many is refused before the rest is read."""

    def __init__(self, max_lines: int, max_bytes: int) -> None:
        self._max_lines, self._max_bytes = max_lines, max_bytes
        self._count = self._length = 0
        self._open = False

    def feed(self, data: bytes) -> None:
        if not data:
            return
        breaks = data.count(b"\n")
        if not breaks:
            self._length += len(data)
            longest = self._length
        else:
            first, last = data.find(b"\n"), data.rfind(b"\n")
            longest = max(self._length + first + 1, len(data) - last - 1)
            if breaks > 1 and last - first > self._max_bytes:
                longest = max(longest, *(len(part) + 1 for part in data[first + 1 : last].split(b"\n")))
            self._length = len(data) - last - 1
        self._count += breaks
        self._open = not data.endswith(b"\n")
        if longest > self._max_bytes:
            message = f"line {self._count + 1} or one before it is longer than {self._max_bytes} bytes"
            raise ApiError(message, "line_too_long", "file", close=True)
        if self._count + self._open > self._max_lines:
            raise ApiError(f"more than {self._max_lines} lines", "too_many_lines", "file", close=True)


class _Upload:
    """Buffers received bytes and writes them in large pieces, outside the event loop."""

    def __init__(self, services: Services, file: NewFile, reservation: Reservation) -> None:
        self._services, self._file, self._reservation = services, file, reservation
        self._parts: list[bytes] = []
        self._size = 0
        self._lines = _LineCounter(services.limits.max_lines, services.limits.max_line_bytes)
        self.sums = BlockSums()

    def take(self, data: bytes) -> None:
        self._lines.feed(data)
        self._parts.append(data)
        self._size += len(data)
        if self._file.size + self._size > self._services.limits.max_body_bytes:
            most = self._services.limits.max_body_bytes
            raise ApiError(f"the file is larger than {most} bytes", "file_too_large", "file", status=413, close=True)

    async def write(self, least: int) -> None:
        if self._size >= least:
            data, self._parts, self._size = b"".join(self._parts), [], 0
            await finished(self._services.store.in_thread(lambda: self._write(data)))
            self._reservation.wrote(len(data))

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self.sums.update(data)


def files_router(services: Services) -> APIRouter:
    router = APIRouter(tags=["files"])

    @router.post("/v1/files", openapi_extra=takes(_UPLOAD, "multipart/form-data"))
    async def upload(request: Request) -> dict[str, Any]:
        """Upload a file of batch lines (multipart: `file`, `purpose=batch`)."""
        row = await _store(services, request)
        audit(request, "file.created", row.id)
        return row.to_json()

    @router.get("/v1/files", response_model=dict[str, Any])
    async def list_all(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=10000)] = 10000,
        after: Annotated[str | None, Query(max_length=80)] = None,
        order: Literal["asc", "desc"] = "desc",
        purpose: Annotated[str | None, Query(max_length=64)] = None,
    ) -> Response:
        """Your files, newest first."""
        owner, newest = reach_of(request), order == "desc"

        def rows(db: sqlite3.Connection, damaged: list[Damaged]) -> list[FileRow] | None:
            return records.list_files(db, owner, limit, after, purpose, newest, damaged)

        show = with_owner(FileRow.to_json) if owner is None else FileRow.to_json
        return await listed(services, owner_of(request), rows, limit, show, "file", after)

    @router.get("/v1/files/{file_id}")
    async def look(request: Request, file_id: str) -> dict[str, Any]:
        """One file."""
        return (await services.find(records.get_file, "file", file_id, request)).to_json()

    @router.delete("/v1/files/{file_id}")
    async def delete(request: Request, file_id: str) -> dict[str, Any]:
        """Delete a file. Deleting an output file deletes the results that it was made of."""
        file = await services.find(partial(records.get_file, unchecked=True), "file", file_id, request)
        await services.write(services.batches.remove_file(file))
        audit(request, "file.deleted", file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    @router.get("/v1/files/{file_id}/content", response_class=StreamingResponse)
    async def content(request: Request, file_id: str) -> StreamingResponse:
        """The file's bytes, or those of one range (206)."""
        file = await services.find(records.get_file, "file", file_id, request)
        # a file has no validator that If-Range could name, and so is sent whole (RFC 9110, 13.1.5)
        part = "" if "if-range" in request.headers else request.headers.get("range", "")
        begin, end = _range(part, file.bytes) or (0, file.bytes)
        try:
            opened = await services.batches.content(file, begin, end)
        except FileNotFoundError:
            raise not_found("content of file", file_id) from None
        except Damaged as error:
            raise damaged(error) from error
        except (OSError, StoreUnavailable) as error:
            raise unstored(f"the file could not be generated ({error})") from error
        try:
            given = _range(part, opened.size)  # it may have another size than before, if it was generated
        except ApiError:
            opened.close()
            raise
        begin, end = given or (0, opened.size)
        headers = {"content-length": str(end - begin), "accept-ranges": "bytes"}
        if given:
            headers["content-range"] = f"bytes {begin}-{end - 1}/{opened.size}"
        data, kind = _read(services, opened, begin, end), "application/octet-stream"
        return StreamingResponse(data, 206 if given else 200, headers, kind)

    return router


async def finished(work: Awaitable[T]) -> T:
    """Awaits work to its end, even if the caller is cancelled: a thread uses the caller's file."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        task.result()
        raise


async def _keep(services: Services, file: NewFile, row: FileRow, sums: str) -> None:
    """Commits an upload's bytes and its row, or neither. Raises ApiError, OSError or StoreUnavailable."""
    try:
        await services.store.in_thread(file.commit)
        check = partial(services.usage.check_stored, row.owner, more=row.bytes)
        await services.batches.add_file(row, sums, check)
    except Exception:
        await services.store.in_thread(lambda: file.path.unlink(missing_ok=True))
        raise


async def _store(services: Services, request: Request) -> FileRow:
    """Reads a form to the disk and adds the file to the store; deletes the bytes if it is refused. Raises ApiError."""
    boundary = boundary_of(request.headers.get("content-type", ""))
    store = services.store
    length = int(request.headers.get("content-length", "0")[:20] or 0)
    if store.refusal is None:
        await store.in_thread(store.look)
    if store.refusal is not None:
        raise unstored(store.refusal)
    owner, file_id = owner_of(request), new_id("file-")
    try:
        with services.uploads.begin(owner) as reservation:
            await reservation.grow(length)
            async with store.new_file(file_id) as file:
                into = _Upload(services, file, reservation)
                form = FormReader(boundary, into.take)
                received = 0
                async for chunk in request.stream():
                    received += len(chunk)
                    await reservation.grow(received)
                    form.feed(chunk)
                    await into.write(_CHUNK)
                form.close()
                row = _row(form, file_id, owner, store.clock.stamp())
                await into.write(0)
                row = replace(row, bytes=file.size)
                await finished(_keep(services, file, row, into.sums.text()))
            reservation.stored(row.bytes)
    except (OSError, StoreUnavailable) as error:
        if isinstance(error, OSError):
            services.observer.store_error()
        raise unstored(f"the file could not be stored ({error})") from error
    return row


def _row(form: FormReader, file_id: str, owner: str, now: int) -> FileRow:
    purpose = form.fields.pop("purpose", None)
    if purpose is None:
        raise ApiError("purpose is missing", "missing_required_parameter", "purpose")
    if purpose != "batch":
        raise ApiError(f"purpose={purpose[:64]!r}: must be 'batch'", "unsupported_value", "purpose")
    expires_at = _expiry(form.fields, now)
    if form.fields:
        name = next(iter(form.fields))[:64]
        raise ApiError(f"unknown field {name!r}", "unknown_parameter", name)
    if form.filename is None:
        raise ApiError("file is missing", "missing_required_parameter", "file")
    return FileRow(file_id, owner, purpose, form.filename, 0, now, expires_at=expires_at)


def _expiry(fields: dict[str, str], now: int) -> int | None:
    """Takes `expires_after[anchor]` and `expires_after[seconds]` out of a form. Raises ApiError."""
    given: dict[str, Any] = {}
    for name in ("anchor", "seconds"):
        if (value := fields.pop(f"expires_after[{name}]", None)) is not None:
            given[name] = int(value) if value.isdecimal() and len(value) < 12 else value
    try:
        return now + checked(ExpiresAfter, given).seconds if given else None
    except ApiError as bad:
        raise bad.within("expires_after: ", "expires_after") from None


_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


def _range(header: str, size: int) -> tuple[int, int] | None:
    """The begin and end of a range of a file; None for the whole file: without the header, or if it has several ranges
    or another unit. Raises ApiError (416)."""
    match = _RANGE.fullmatch(header.strip())
    if match is None or not any(match.groups()):
        return None
    first, last = match.groups()
    begin = int(first) if first else max(0, size - int(last))
    end = size if not first or not last else min(size, int(last) + 1)
    if begin >= end:
        raise ApiError(f"range {header[:60]!r}: the file has {size} bytes", "invalid_range", "range", status=416)
    return begin, end


async def _read(services: Services, opened: CheckedFile, begin: int, end: int) -> AsyncIterator[bytes]:
    """Yields the bytes. Raises Damaged, which ends the connection early, if they change after they were checked."""
    with opened as file:
        file.seek(begin)
        while begin < end:
            try:
                chunk = await services.store.in_thread(partial(file.read, min(BLOCK_BYTES, end - begin)))
            except Damaged as error:
                services.store.report(error)
                raise
            begin += len(chunk)
            yield chunk


def with_owner(show: Callable[[T], dict[str, Any]]) -> Callable[[T], dict[str, Any]]:
    """Adds the owner's key to rows that an admin key lists."""
    return lambda row: show(row) | {"owner": getattr(row, "owner", None) or None}


async def listed(
    services: Services,
    owner: str,
    query: Callable[[sqlite3.Connection, list[Damaged]], list[T] | None],
    limit: int,
    show: Callable[[T], dict[str, Any]],
    what: str,
    after: str | None,
) -> Response:
    """One page of a list, made outside the event loop because it may be long. `query` returns one row more than `limit`
    if there are more, and None if `after` is unknown; rows that are damaged are named. Raises ApiError."""

    def page(db: sqlite3.Connection, damaged: list[Damaged]) -> dict[str, Any] | None:
        rows = query(db, damaged)
        if rows is None:
            return None
        items = [show(one) for one in rows[:limit]]
        first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
        more = len(rows) > limit
        return {"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": more}

    if (body := await services.read_intact(page, owner)) is None:
        raise not_found(what, after or "")
    return Response(body, media_type="application/json")
