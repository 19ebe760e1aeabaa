"""Launches that the test moves, in place of job_launch.Launch."""

from __future__ import annotations

import asyncio
from typing import Any

from laddertron.engine.job import Culprit
from laddertron.engine.request import ModelLimits, TokensEvent
from laddertron.launchers.control.messages import Cancel, Drain, Ready, Standing, Submit, Tokens
from laddertron.launchers.job.detect import JobFailure
from laddertron.launchers.job.options import JobOptions

LIMITS = ModelLimits(4096, 1000, 8, 65536, (2,))


class FakeLaunch:
    """Keeps what it is given; the test moves it. `made`: all, in order; `room`: what those that wait report."""

    made: list[FakeLaunch] = []  # noqa: RUF012
    room = True
    explained, sign_at, failing = False, 1.0, False
    seats: tuple[str, ...] = ()

    def __init__(self, owner: Any, name: str, config: str, options: JobOptions, **made_for: Any) -> None:
        self.owner, self.name = owner, name
        self.standby, self.serving = made_for["standby"], made_for["serving"]
        self.done: list[str] = []
        self.healthy = False
        self._failing: asyncio.Future[JobFailure] = asyncio.get_running_loop().create_future()
        self.made.append(self)

    async def begin(self) -> None:
        self.healthy = True

    def send(self, message: Any, rank: int | None = None) -> None:
        match message:
            case Submit(asked):
                self.done.append(f"submit {asked.request_id}")
            case Cancel(name):
                self.done.append(f"cancel {name}")
            case Drain():
                self.done.append("drain")

    def load(self) -> None:
        self.done.append("load")

    def stand(self) -> None:
        self.owner.on_launch_output(Standing(1, self.room), None)

    def ready(self) -> None:
        self.owner.on_launch_output(Ready(LIMITS), None)

    def answer(self, name: str) -> None:
        self.owner.on_launch_output(Tokens((TokensEvent(name, 0, 0, (1,), "length"),)), None)

    def fail(self, reason: str, kind: Any = "rank_error") -> None:
        self.failing = True
        self._failing.set_result(JobFailure(kind, reason, Culprit(0)))

    async def failure_before(self, over: asyncio.Event) -> JobFailure | None:
        waiting: asyncio.Future[Any] = asyncio.ensure_future(over.wait())
        ends: list[asyncio.Future[Any]] = [waiting, self._failing]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return self._failing.result() if self._failing.done() else None

    async def end(self, *, orderly: bool) -> None:
        self.healthy = False
        self.done.append("end")

    async def dump(self, timeout_s: float) -> dict[int, Any]:
        return {}

    def describe(self) -> dict[str, Any]:
        return {"name": self.name}
