"""/v1/usage: what a key has used, by day, and what it may; a key of the kind metrics sees all."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from ..store import records
from ..store.store import StoreUnavailable
from ..usage import DAY
from .keys import Key
from .state import Services, owner_of


def usage_router(services: Services) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.get("/v1/usage", response_model=dict[str, Any])
    async def usage(request: Request, days: Annotated[int, Query(ge=1, le=400)] = 30) -> Response:
        """Requests and tokens of your key by day (UTC), newest first, and its limits; a metrics key: of all."""
        key: Key | None = request.state.key
        everyone = key is not None and key.kind == "metrics"
        owner = None if everyone else owner_of(request)
        with contextlib.suppress(StoreUnavailable):  # what is stored can be read all the same
            await services.usage.flush()
        since = services.store.clock.stamp() // DAY - days + 1
        limits = None if owner is None else asdict(services.usage.limits_of(owner))

        def listed(db: sqlite3.Connection) -> bytes:
            rows = records.read_usage(db, owner, since)
            out: dict[str, Any] = {"object": "list", "data": [_shown(row) for row in rows]}
            if owner is not None:
                out |= {"limits": limits, "stored_bytes": sum(file.bytes for file in records.all_files(db, owner))}
            return json.dumps(out).encode()

        return Response(await services.read(listed, owner or ""), media_type="application/json")

    return router


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    used = {name: row[name] for name in ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")}
    total = row["prompt_tokens"] + row["completion_tokens"]
    day = time.strftime("%Y-%m-%d", time.gmtime(row["day"] * DAY))
    named = {"object": "usage", "key": row["owner"] or None, "day": day}
    return {**named, **used, "total_tokens": total}
