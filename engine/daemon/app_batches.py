"""/v1/batches: create (once for each Idempotency-Key), list, look at, cancel. A batch is its owner's alone."""

from __future__ import annotations

import hashlib
import json
import re
import time
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request

from . import records
from .app_errors import HttpFault, not_found, of_bad_request
from .app_files import page
from .app_state import Services, audit, owner_of
from .records import BatchRow
from .rules import BadRequest, members, one_of, string, wrong_type
from .rules import Field as Rule
from .schema import CHAT, COMPLETIONS
from .strictjson import JsonFault, parse

_WINDOW = re.compile(r"([1-9]\d{0,3})([mhd])")
_SECONDS = {"m": 60, "h": 3600, "d": 86400}
_LONGEST = 30 * 86400


def _metadata(name: str, value: Any) -> dict[str, str]:
    if type(value) is not dict:
        raise wrong_type(name, value, "an object of strings")
    if len(value) > 16:
        raise BadRequest(f"{name} has {len(value)} pairs: at most 16 are allowed", param=name)
    for key, text in value.items():
        if len(key) > 64:
            raise BadRequest(f"{name}: a key of {len(key)} characters; at most 64 are allowed", param=name)
        string(512).rule(f"{name}.{key}", text)
    return value


def _window(name: str, value: Any) -> str:
    text: str = string(8, 2).rule(name, value)
    match = _WINDOW.fullmatch(text)
    if match is None or int(match[1]) * _SECONDS[match[2]] > _LONGEST:
        raise BadRequest(f"{name}={text!r}: such as 24h; 1m to 30d are allowed", param=name)
    return text


_FIELDS: dict[str, Rule] = {
    "input_file_id": string(80, 1),
    "endpoint": one_of(CHAT, COMPLETIONS),
    "completion_window": Rule(_window, {"type": "string", "pattern": "^[1-9][0-9]{0,3}[mhd]$", "examples": ["24h"]}),
    "metadata": Rule(
        _metadata,
        {"type": "object", "maxProperties": 16, "additionalProperties": {"type": "string", "maxLength": 512}},
    ),
}
_NEEDED = ("input_file_id", "endpoint", "completion_window")
_CREATE = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": list(_NEEDED),
                    "additionalProperties": False,
                    "properties": {
                        name: rule.schema if name in _NEEDED else {"anyOf": [rule.schema, {"type": "null"}]}
                        for name, rule in _FIELDS.items()
                    },
                }
            }
        },
    }
}


def batches_router(services: Services) -> APIRouter:
    router = APIRouter(tags=["batches"])

    @router.post("/v1/batches", openapi_extra=_CREATE)
    async def create(
        request: Request, idempotency_key: Annotated[str | None, Header(max_length=256)] = None
    ) -> dict[str, Any]:
        """Start a batch over an uploaded file."""
        try:
            wanted = _wanted(await request.body())
        except BadRequest as bad:
            raise of_bad_request(bad) from None
        owner, now = owner_of(request), int(time.time())
        file = await services.read(lambda db: records.get_file(db, wanted["input_file_id"], owner))
        if file is None or file.purpose != "batch":
            message = f"input_file_id={wanted['input_file_id'][:80]!r}: no such file of purpose batch"
            raise HttpFault(400, message, "invalid_input_file", "input_file_id")
        number, unit = int(wanted["completion_window"][:-1]), wanted["completion_window"][-1]
        batch = BatchRow(
            records.new_id("batch_"),
            owner,
            wanted["endpoint"],
            wanted["input_file_id"],
            wanted["completion_window"],
            "validating",
            now,
            now + number * _SECONDS[unit],
            metadata=wanted.get("metadata"),
        )
        digest = hashlib.blake2b(json.dumps(wanted, sort_keys=True).encode(), digest_size=16).hexdigest()
        made = await services.write(services.batches.create(batch, idempotency_key, digest))
        if made is None:
            raise HttpFault(409, "this Idempotency-Key came with another body before", "idempotency_conflict")
        if made.id == batch.id:
            audit(request, "batch.created", batch.id)
        return made.to_json()

    @router.get("/v1/batches")
    async def list_all(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: Annotated[str | None, Query(max_length=80)] = None,
    ) -> dict[str, Any]:
        """Your batches, newest first."""
        owner = owner_of(request)
        found = await services.read(lambda db: records.list_batches(db, owner, limit, after))
        if found is None:
            raise not_found("batch", after or "")
        return page([batch.to_json() for batch in found[:limit]], len(found) > limit)

    @router.get("/v1/batches/{batch_id}")
    async def look(request: Request, batch_id: str) -> dict[str, Any]:
        """One batch."""
        return (await find(request, batch_id)).to_json()

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel(request: Request, batch_id: str) -> dict[str, Any]:
        """Cancel a batch; what is finished stays. One that has ended already is 409."""
        batch = await find(request, batch_id)
        if batch.ended:
            raise HttpFault(409, f"the batch is {batch.status} already", "batch_ended")
        made = await services.write(services.batches.cancel(batch_id))
        audit(request, "batch.cancelled", batch_id)
        return made.to_json()

    async def find(request: Request, batch_id: str) -> BatchRow:
        owner = owner_of(request)
        batch = await services.read(lambda db: records.get_batch(db, batch_id, owner))
        if batch is None:
            raise not_found("batch", batch_id)
        return batch

    return router


def _wanted(data: bytes) -> dict[str, Any]:
    """The checked body. Raises BadRequest."""
    try:
        value = parse(data)
    except JsonFault as fault:
        raise BadRequest(f"the body is unusable: {fault}", code="invalid_json") from None
    if type(value) is not dict:
        raise BadRequest("the body must be a JSON object", code="invalid_type")
    found = members("the body", value, _FIELDS)
    for name in _NEEDED:
        if name not in found:
            raise BadRequest(f"{name} is missing", param=name, code="missing_required_parameter")
    return found
