"""/v1/responses/{id}: stored responses and the items that they were sent: get, delete. Only its owner can see one."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from ...openai.errors import ApiError
from ...openai.stored_responses import items_before
from ..store.responses import drop_responses, get_response
from ..store.rows import ResponseRow
from .state import Services, audit, owner_of, reach_of

_ROUTE = "/v1/responses/{response_id}"


def responses_router(services: Services) -> APIRouter:
    router = APIRouter(tags=["responses"])

    async def stored(request: Request, response_id: str, unchecked: bool = False) -> ResponseRow:
        if services.retained is None:
            message = "no retention of responses is configured (daemon.responses_retention): none is stored"
            raise ApiError(message, "not_found", status=404)
        owner = reach_of(request)
        if (row := await services.read(lambda db: get_response(db, response_id, owner, unchecked))) is None:
            message = f"Response with id {response_id[:80]!r} not found: it was not stored, was deleted, or has expired"
            raise ApiError(message, "not_found", "response_id", status=404)
        return row

    @router.get(_ROUTE, response_model=dict[str, Any])
    async def look(request: Request, response_id: str, stream: bool = False) -> Response:
        """A stored response; `stream` is not supported."""
        if stream:
            message = "stream is not supported: a response is stored when it has ended"
            raise ApiError(message, "unsupported_parameter", "stream")
        return Response((await stored(request, response_id)).to_json(), media_type="application/json")

    @router.delete(_ROUTE)
    async def delete(request: Request, response_id: str) -> dict[str, Any]:
        """Delete a stored response. A later one that continues it cannot be continued then."""
        await stored(request, response_id, unchecked=True)
        await services.write(services.store.write(partial(drop_responses, names=[response_id])))
        audit(request, "response.deleted", response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.get(_ROUTE + "/input_items", response_model=dict[str, Any])
    async def items(
        request: Request,
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: Annotated[str | None, Query(max_length=80)] = None,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """The items of the conversation before a response, those of responses that it continues included."""
        row = await stored(request, response_id)
        retained = services.retained
        assert retained is not None
        data = await services.write(retained.load(row.owner, response_id, ()))

        def page() -> bytes | None:
            listed = list(items_before(response_id, json.loads(data)))[:: 1 if order == "asc" else -1]
            names = [item["id"] for item in listed]
            if after is not None and after not in names:
                return None
            rest = listed[0 if after is None else names.index(after) + 1 :]
            part = rest[:limit]
            first, last = (part[0]["id"], part[-1]["id"]) if part else (None, None)
            more = len(rest) > limit
            answer = {"object": "list", "data": part, "first_id": first, "last_id": last, "has_more": more}
            return json.dumps(answer, ensure_ascii=False).encode()

        if (body := await services.store.in_turn(owner_of(request), page)) is None:
            raise ApiError(f"after={after!r}: the response has no such item", "not_found", "after", status=404)
        return Response(body, media_type="application/json")

    return router
