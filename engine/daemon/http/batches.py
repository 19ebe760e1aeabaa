"""/v1/batches: create (once for each Idempotency-Key), list, get, cancel. Only its owner can see a batch."""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from pydantic import AfterValidator, Field

from ...openai.errors import ApiError
from ...openai.schema import Route
from ...openai.validators import StrictModel, checked, invalid, json_schema, parsed, show, takes, text
from ..store import records
from ..store.rows import BatchRow, new_id
from ..store.sums import Damaged
from .errors import not_found
from .files import ExpiresAfter, listed, with_owner
from .state import Services, audit, owner_of, reach_of

_WINDOW = re.compile(r"([1-9]\d{0,3})([mhd])")
_SECONDS = {"m": 60, "h": 3600, "d": 86400}
_LONGEST = 30 * 86400


def _window(value: str) -> str:
    match = _WINDOW.fullmatch(value)
    if match is None or int(match[1]) * _SECONDS[match[2]] > _LONGEST:
        raise invalid(f"={show(value)}: such as 24h; 1m to 30d are allowed")
    return value


_WINDOW_SCHEMA = Field(
    min_length=2, max_length=8, json_schema_extra={"pattern": f"^{_WINDOW.pattern}$", "examples": ["24h"]}
)


class NewBatch(StrictModel):
    input_file_id: Annotated[str, text(80, 1)]
    endpoint: Route
    completion_window: Annotated[str, AfterValidator(_window), _WINDOW_SCHEMA]
    metadata: Annotated[dict[Annotated[str, text(64)], Annotated[str, text(512)]], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None
    reuse_batch_id: Annotated[str, text(80, 1)] | None = Field(
        None,
        description="Reuse this batch's answers to unchanged lines (same key and model); only the others are computed.",
    )


def _row(fields: dict[str, Any], owner: str, now: int, model_digest: str | None) -> BatchRow:
    number, unit = int(fields["completion_window"][:-1]), fields["completion_window"][-1]
    return BatchRow(
        new_id("batch_"),
        owner,
        fields["endpoint"],
        fields["input_file_id"],
        fields["completion_window"],
        "validating",
        now,
        now + number * _SECONDS[unit],
        metadata=fields.get("metadata"),
        output_seconds=fields.get("output_expires_after", {}).get("seconds"),
        reuse_batch_id=fields.get("reuse_batch_id"),
        model_digest=model_digest,
    )


def batches_router(services: Services) -> APIRouter:
    router = APIRouter(tags=["batches"])

    @router.post("/v1/batches", openapi_extra=takes(json_schema(NewBatch)))
    async def create(
        request: Request, idempotency_key: Annotated[str | None, Header(max_length=256)] = None
    ) -> dict[str, Any]:
        """Start a batch over an uploaded file."""
        fields = checked(NewBatch, parsed(await request.body())).model_dump(exclude_none=True)
        owner, now = owner_of(request), services.store.clock.stamp()
        model, reuse = services.model_digest(), fields.get("reuse_batch_id")

        def check(db: sqlite3.Connection) -> None:
            file = records.get_file(db, fields["input_file_id"], owner)
            if file is None or file.purpose != "batch":
                message = f"input_file_id={fields['input_file_id'][:80]!r}: no such file of purpose batch"
                raise ApiError(message, "invalid_input_file", "input_file_id")
            if reuse is not None and (reason := records.why_not_reuse(db, reuse, owner, model)):
                raise ApiError(f"reuse_batch_id={reuse[:80]!r}: {reason}", "invalid_reuse_batch", "reuse_batch_id")

        batch = _row(fields, owner, now, model or None)
        digest = hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()
        made = await services.write(services.batches.create(batch, idempotency_key, digest, check))
        if made is None:
            raise ApiError("this Idempotency-Key was used with another body", "idempotency_conflict", status=409)
        if made.id == batch.id:
            audit(request, "batch.created", batch.id)
        return shown(made)

    @router.get("/v1/batches", response_model=dict[str, Any])
    async def list_all(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: Annotated[str | None, Query(max_length=80)] = None,
    ) -> Response:
        """Your batches, newest first."""
        owner = reach_of(request)

        def rows(db: sqlite3.Connection, damaged: list[Damaged]) -> list[BatchRow] | None:
            return records.list_batches(db, owner, limit, after, damaged)

        show = with_owner(shown) if owner is None else shown
        return await listed(services, owner_of(request), rows, limit, show, "batch", after)

    @router.get("/v1/batches/{batch_id}")
    async def look(request: Request, batch_id: str) -> dict[str, Any]:
        """One batch."""
        return shown(await services.find(records.get_batch, "batch", batch_id, request))

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel(request: Request, batch_id: str) -> dict[str, Any]:
        """Cancel a batch; what is finished stays. One that has ended already is 409."""
        batch = await services.find(records.get_batch, "batch", batch_id, request)
        if batch.ended:
            raise ApiError(f"the batch is {batch.status} already", "batch_ended", status=409)
        try:
            made = await services.write(services.batches.cancel(batch_id))
        except KeyError:  # it ended and was deleted since
            raise not_found("batch", batch_id) from None
        audit(request, "batch.cancelled", batch_id)
        return shown(made)

    @router.delete("/v1/batches/{batch_id}")
    async def delete(request: Request, batch_id: str) -> dict[str, Any]:
        """Delete an ended batch with its results, output and error file; its input file is kept. An open one is 409."""
        try:
            batch = await services.find(records.get_batch, "batch", batch_id, request)
            if not batch.ended:
                raise ApiError(f"the batch is {batch.status}: cancel it first", "batch_in_use", status=409)
        except ApiError as error:
            if error.code != "row_damaged":
                raise
            batch = await services.find(partial(records.get_batch, unchecked=True), "batch", batch_id, request)
        await services.write(services.batches.remove(batch))
        audit(request, "batch.deleted", batch_id)
        return {"id": batch_id, "object": "batch", "deleted": True}

    def shown(batch: BatchRow) -> dict[str, Any]:
        return batch.to_json() | {"model": services.served_model_name}

    return router
