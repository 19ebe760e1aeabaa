"""/v1/usage: what a key has used, by day, and what it may; a key of the kind metrics sees all."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from ...openai.errors import ApiError
from ..keys import Key, KeyRing
from ..store import records
from ..store.store import StoreUnavailable
from ..store.sums import Damaged
from ..usage import DAY
from .state import Services, audit, is_admin, owner_of


def usage_router(services: Services) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get("/v1/usage", response_model=dict[str, Any])
    async def usage(request: Request, days: Annotated[int, Query(ge=1, le=400)] = 30) -> Response:
        """Requests and tokens of your key by day (UTC), newest first, and its limits; a metrics or admin key: all."""
        key: Key | None = request.state.key
        everyone = key is not None and key.kind != "client"
        owner = None if everyone else owner_of(request)
        with contextlib.suppress(StoreUnavailable):  # what is stored can be read all the same
            await services.usage.flush()
        since = services.store.clock.stamp() // DAY - days + 1
        limits = None if owner is None else asdict(services.usage.limits_of(owner))

        def listed(db: sqlite3.Connection, damaged: list[Damaged]) -> dict[str, Any]:
            rows = records.read_usage(db, owner, since, damaged)
            out: dict[str, Any] = {"object": "list", "data": [_shown(row) for row in rows]}
            if owner is not None:
                files = records.all_files(db, owner, damaged)
                out |= {"limits": limits, "stored_bytes": sum(file.bytes for file in files)}
            return out

        return Response(await services.read_intact(listed, owner or ""), media_type="application/json")

    @router.post("/v1/adopt", response_model=dict[str, Any])
    async def adopt(request: Request, key: Annotated[str, Query(max_length=80)]) -> dict[str, Any]:
        """Give the files, batches and stored responses of no valid key to the key with this id; needs an admin key."""
        keys: KeyRing | None = request.state.keys
        if keys is None or not is_admin(request):
            message = "adopt requires a key of the kind admin: laddertron keys add --kind admin"
            raise ApiError(message, "wrong_kind_of_key", status=403)
        if key not in (valid := keys.valid_ids()):
            raise ApiError(f"key={key!r}: no valid key has this id: laddertron keys list", "unknown_key", "key")
        adopted = await services.write(services.store.write(lambda rows: records.adopt(rows, valid, key)))
        audit(request, "adopted", key)
        return {"object": "adoption", "key": key, **adopted}

    return router


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    used = {name: row[name] for name in ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")}
    total = row["prompt_tokens"] + row["completion_tokens"]
    day = time.strftime("%Y-%m-%d", time.gmtime(row["day"] * DAY))
    named = {"object": "usage", "key": row["owner"] or None, "day": day}
    return {**named, **used, "total_tokens": total}
