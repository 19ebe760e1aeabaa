"""Stored responses (`daemon.responses_retention`): what is stored of an answer, for how long and how much, and the
conversations that later requests continue."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..metrics.observer import Observer
from ..openai.answers import Answer
from ..openai.errors import ApiError
from ..openai.stored_responses import unknown_previous
from .store import records
from .store.responses import add_response, get_response, make_room, needed
from .store.rows import ResponseRow
from .store.schema import Rows
from .store.store import Store
from .usage import Usage

log = logging.getLogger(__name__)

_PART = 64
"""The bytes of all responses are counted after each 64th part of those that are allowed."""


class RetainedResponses:
    """`retention` in seconds; `most`: bytes of all responses; `longest`: of a conversation. For the event loop."""

    def __init__(
        self, store: Store, usage: Usage, observer: Observer, retention: float, most: int, longest: int
    ) -> None:
        self._store, self._usage, self._observer = store, usage, observer
        self._retention, self._most, self._longest = retention, most, longest
        self._uncounted = most  # bytes added since they were counted; at a start, what is stored

    async def admit(self, owner: str, size: int) -> None:
        """Raises ApiError if the owner's files leave no room for a response with an input of `size` bytes."""
        if self._usage.limits_of(owner).stored_bytes is not None:
            files = await self._store.read(partial(records.stored_bytes, owner=owner))
            self._usage.check_stored(owner, files, size)

    async def load(self, owner: str, previous: str | None, of_items: Sequence[str]) -> bytes:
        """Reads responses of the owner: see body_worker.Load. Raises ApiError, StoreUnavailable or Damaged."""
        return await self._store.read(lambda db: self._read(db, owner, previous, of_items), owner)

    def _read(self, db: sqlite3.Connection, owner: str, previous: str | None, of_items: Sequence[str]) -> bytes:
        parts, size = list[str](), 0
        try:
            names = needed(db, owner, previous, of_items)
        except KeyError as error:
            raise unknown_previous(str(error.args[0])) from None
        for name in names:
            if (row := get_response(db, name, owner)) is None:
                raise unknown_previous(name)  # deleted meanwhile
            parts.append(row.items_json())
            if (size := size + row.bytes) > self._longest:
                message = f"the stored conversation has more than {self._longest} bytes (limits.max_line_bytes)"
                raise ApiError(message, "context_length_exceeded", "previous_response_id")
        return f"{{{','.join(parts)}}}".encode()

    def row(self, owner: str, answer: Answer, response: dict[str, Any]) -> ResponseRow:
        """The row of an answer, whose body has `stored_input`, and of its response."""
        stored_input = answer.body.stored_input
        assert stored_input is not None
        head = _json({name: value for name, value in response.items() if name != "output"})
        output = _json(response["output"])
        size = sum(len(part.encode()) for part in (head, stored_input.input, output))
        previous, of_items = stored_input.references
        expires_at = self._store.clock.stamp() + int(self._retention)
        more = (size, previous, " ".join(of_items), response["status"], head, stored_input.input, output)
        return ResponseRow(response["id"], owner, expires_at, *more)

    async def add(self, row: ResponseRow) -> None:
        """Stores a response. Raises StoreUnavailable."""
        await self._store.write(self.change(row.owner, [row]))

    def change(self, owner: str, responses: Sequence[ResponseRow]) -> Callable[[Rows], None]:
        """What stores responses of an owner within a transaction, and deletes old ones that have no room."""
        owner_most = self._usage.limits_of(owner).stored_bytes

        def work(rows: Rows) -> None:
            for row in responses:
                add_response(rows, row)
                self._uncounted += row.bytes
            if owner_most is None and self._uncounted <= self._most // _PART:
                return
            self._uncounted = 0
            if count := make_room(rows, self._most, owner, owner_most):
                self._observer.evicted(count)
                log.info("deleted %d stored responses before their time: no room", count, extra={"event": "retention"})

        return work


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
