"""What every route is given, and the few words they share: the services, who asks, the audit line."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request

from ..config import Limits
from ..text import TextModel
from ..text_pool import Encoder
from .app_errors import unstored
from .batches import Batches
from .dispatch import Dispatcher
from .keys import Key
from .observe import Observer
from .store import Store, StoreUnavailable

audit_log = logging.getLogger("laddertron.audit")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Services:
    """Made once by the daemon (or a test), handed to every router."""

    store: Store
    dispatcher: Dispatcher
    batches: Batches
    text: TextModel
    encoder: Encoder
    observer: Observer
    limits: Limits
    served_model_name: str
    started_at: int

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return await self.store.read(query)
        except StoreUnavailable as error:
            raise unstored(str(error)) from error

    async def write(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except StoreUnavailable as error:
            raise unstored(str(error)) from error


def owner_of(request: Request) -> str:
    """The key's id; "" where no keys are configured."""
    key: Key | None = getattr(request.state, "key", None)
    return key.id if key is not None else ""


def audit(request: Request, what: str, which: str) -> None:
    """Who did what to which."""
    said = {"event": what, "id": which, "key": owner_of(request) or None, "request": request.state.request_name}
    audit_log.info("%s %s", what, which, extra=said)
