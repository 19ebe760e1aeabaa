"""Shared by all routes: the services, the caller's key, the audit line."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request

from ..batches import Batches
from ..core import Core
from ..keys import Key
from ..overview import Samples
from ..store.store import StoreUnavailable
from ..store.sums import Damaged
from .bodies import HeldBodies
from .errors import damaged, not_found, unstored
from .reservations import Reservations

audit_log = logging.getLogger("laddertron.audit")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Services(Core):
    """Made once by the daemon (or a test) and passed to every router."""

    batches: Batches
    started_at: int
    bodies: HeldBodies
    uploads: Reservations
    samples: Samples = field(default_factory=Samples)

    async def read(self, query: Callable[[sqlite3.Connection], T], owner: str | None = None) -> T:
        try:
            return await self.store.read(query, owner)
        except StoreUnavailable as error:
            raise unstored(str(error)) from error
        except Damaged as error:
            raise damaged(error) from error

    async def read_intact(
        self, query: Callable[[sqlite3.Connection, list[Damaged]], dict[str, Any] | None], owner: str
    ) -> bytes | None:
        """The JSON of an object without the rows that are damaged, which `query` adds to its list; names them."""
        errors: list[Damaged] = []

        def read(db: sqlite3.Connection) -> bytes | None:
            if (value := query(db, errors)) is None:
                return None
            value |= {"damaged": [str(error) for error in errors]} if errors else {}
            return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()

        body = await self.read(read, owner)
        for error in errors:
            self.store.report(error)
        return body

    async def find(
        self, get: Callable[[sqlite3.Connection, str, str | None], T | None], what: str, name: str, request: Request
    ) -> T:
        """A file or batch that the caller may see. Raises ApiError (404)."""
        owner = reach_of(request)
        if (record := await self.read(lambda db: get(db, name, owner))) is None:
            raise not_found(what, name)
        return record

    async def write(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except StoreUnavailable as error:
            raise unstored(str(error)) from error
        except Damaged as error:
            self.store.report(error)
            raise damaged(error) from error


def owner_of(request: Request) -> str:
    """The key's id; "" where no keys are configured."""
    key: Key | None = getattr(request.state, "key", None)
    return key.id if key is not None else ""


def is_admin(request: Request) -> bool:
    key: Key | None = getattr(request.state, "key", None)
    return key is not None and key.kind == "admin"


def reach_of(request: Request) -> str | None:
    """The owner whose files and batches the caller sees; None, for an admin key: all owners."""
    return None if is_admin(request) else owner_of(request)


def audit(request: Request, what: str, which: str) -> None:
    log_fields = {"event": what, "id": which, "key": owner_of(request) or None, "request": request.state.request_name}
    audit_log.info("%s %s", what, which, extra=log_fields)
