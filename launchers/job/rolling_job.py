"""A rolling restart of one replica's ranks: an EngineJob that forwards to the old job or the new one. `reload.py`
decides before whether the restart is allowed.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import Any, Protocol

from ...engine.job import EngineJob, JobListener, JobPhase, JobState, RankHeartbeat
from ...engine.request import Request, TokensEvent

log = logging.getLogger(__name__)


class HeldJob(EngineJob, Protocol):
    """An EngineJob that can be made to wait on standby until `load`; MpiJob implements it."""

    room: bool
    before: Any

    def load(self) -> None: ...

    async def freed(self) -> None:
        """Waits, after `close`, until its devices' memory is free. Raises RuntimeError."""


class _Member:
    def __init__(self, owner: RollingJob, job: HeldJob) -> None:
        self._owner, self.job = owner, job
        self._moved = asyncio.Event()

    async def until(self, *phases: JobPhase) -> bool:
        """Waits for one of the phases; False if the job ended before."""
        while self.job.state.phase not in (*phases, "failed", "stopped"):
            self._moved.clear()
            await self._moved.wait()
        return self.job.state.phase in phases

    def on_tokens(self, events: list[TokensEvent]) -> None:
        self._owner.listener.on_tokens(events)

    def on_lost(self, lost: dict[str, int], reason: str, suspects: int) -> None:
        self._owner.listener.on_lost(lost, reason, suspects)

    def on_state(self, state: JobState) -> None:
        self._moved.set()
        self._owner.moved(self.job)

    def on_report(self, report: RankHeartbeat) -> None:
        if self.job is self._owner.job:
            self._owner.listener.on_report(report)


class RollingJob:
    """See EngineJob for the methods. `job` accepts requests; others may be starting, or finishing their requests."""

    def __init__(self, job: HeldJob) -> None:
        self.job, self._others, self._closed = job, list[HeldJob](), False
        self._awaited: HeldJob | None = None  # while no job accepts requests: the next job
        self.listener: JobListener

    @property
    def identity(self) -> Any:
        return self.job.identity

    @identity.setter
    def identity(self, identity: Any) -> None:
        self.job.identity = identity

    @property
    def state(self) -> JobState:
        if self._awaited is None:
            return self.job.state
        reason = self._awaited.state.reason or "running requests finish before the new launch loads"
        return JobState("reloading", reason, limits=self.job.state.limits)

    async def start(self, listener: JobListener) -> None:
        self.listener = listener
        await self.job.start(_Member(self, self.job))

    def submit(self, request: Request) -> None:
        if self._awaited is not None:
            raise RuntimeError("the job is reloading, it takes requests only when ready")
        self.job.submit(request)

    def cancel(self, request_id: str) -> None:
        for job in (self.job, *self._others):
            job.cancel(request_id)

    def stop_choice(self, request_id: str, choice: int, n_tokens: int) -> None:
        for job in (self.job, *self._others):
            job.stop_choice(request_id, choice, n_tokens)

    async def drain(self, timeout_s: float) -> bool:
        return all(await asyncio.gather(*(job.drain(timeout_s) for job in (self.job, *self._others))))

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(job.close() for job in (self.job, *self._others)))

    async def bundle(self) -> dict[str, Any]:
        return await self.job.bundle()

    async def replace(self, new: HeldJob, restore: Callable[[], HeldJob]) -> str | None:
        """Replaces the job by `new`, which is held and not started. Loads it next to the old job if memory suffices,
        else after it, while requests wait. Returns None once the old job's requests have ended and it is closed, or
        the reason why the replacement failed. `restore` makes a job of the old configuration, for a failure after the
        old one was closed. Raises `restore`'s ValueError or OSError, with the job unchanged."""
        old, member = self.job, _Member(self, new)
        self._others.append(new)
        new.before = old
        await new.start(member)
        if not await member.until("standby"):
            return await self._discard(new)
        if new.room:
            new.load()
            if not await member.until("ready"):
                return await self._discard(new)
            self._serve(new)
            self._others.append(old)
            await self._retire(old)
            self._others.remove(old)
            return None
        try:
            before = await asyncio.to_thread(restore)
        except (ValueError, OSError):
            await self._discard(new)
            raise
        log.info("reload: no room for both launches: running requests finish, new ones wait")
        self._awaited = new
        self.moved(new)
        await self._retire(old)
        try:
            await old.freed()
        except RuntimeError as error:
            log.warning("reload: %s; loading all the same", error)
        if await member.until("standby"):  # it may have failed while the old job finished
            new.load()
            if await member.until("ready"):
                self._serve(new)
                return None
        reason = await self._discard(new)
        self.job, self._awaited = before, None
        if not self._closed:
            await before.start(_Member(self, before))
        return reason

    def _serve(self, job: HeldJob) -> None:
        self._others.remove(job)
        self.job, self._awaited = job, None
        self.moved(job)

    async def _retire(self, job: HeldJob) -> None:
        await job.drain(math.inf)
        await job.close()

    async def _discard(self, job: HeldJob) -> str:
        reason = job.state.reason
        await job.close()
        self._others.remove(job)
        return reason

    def moved(self, job: HeldJob) -> None:
        if job is (self._awaited or self.job):
            self.listener.on_state(self.state)
