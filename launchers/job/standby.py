"""Maintains a hot standby: a second launch, connected and without weights, that replaces a failed launch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from ...engine.job import StandbyPhase
from ..control.messages import Standing
from .detect import JobFailure, no_launch
from .job_launch import Launch, LaunchOwner, Said
from .rank_board import Recovered, Suspect

log = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 300.0
"""Seconds between two attempts to start a standby: doubled after each."""

MakeLaunch = Callable[[LaunchOwner, frozenset[str]], Launch]
"""Makes a launch of the job's layout, without the given nodes, whose ranks wait for Load. Raises ValueError if too few
nodes are left."""


class Standby:
    """`changed` is called when `phase` has changed."""

    def __init__(self, make: MakeLaunch, changed: Callable[[], None]) -> None:
        self._make, self._changed = make, changed
        self.phase: StandbyPhase = ""
        self._launch: Launch | None = None
        self._excluded: frozenset[str] = frozenset()
        self._was_ready = False
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def keep(self, excluded: frozenset[str]) -> None:
        """Starts and restarts a standby until it is taken."""
        self._over.set()
        self._excluded, self._over = excluded, asyncio.Event()
        self._task = asyncio.create_task(self._keep(self._over, self._task))

    def take(self, owner: LaunchOwner, excluded: frozenset[str]) -> Launch | None:
        """Takes the standby for `owner` and sends it `Load`. Returns None, and logs why, if none is usable."""
        launch, phase = self._launch, self.phase
        self._over.set()
        if launch is None:
            return None
        if excluded != self._excluded or not launch.healthy:
            why = "one of its ranks is silent or exited" if excluded == self._excluded else "it uses an excluded node"
            log.warning("standby: not used, %s: a cold start", why, extra={"event": "standby"})
            return None
        log.info(
            "standby: takes over%s", "" if phase == "ready" else ", which is still starting", extra={"event": "standby"}
        )
        self._launch, launch.owner = None, owner
        self._set("")
        launch.load()
        return launch

    def stop(self) -> None:
        self._over.set()

    async def close(self) -> None:
        self._over.set()
        if self._task is not None:
            await self._task

    async def _keep(self, over: asyncio.Event, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        wait_s = FIRST_WAIT_S
        while not over.is_set():
            self._was_ready = False
            failure = await self._run_once(over)
            if failure is None:
                return
            wait_s = FIRST_WAIT_S if self._was_ready else min(2 * wait_s, LONGEST_WAIT_S)
            log.warning(
                "standby: lost (%s): %s; another one is tried in %g s, until it is ready a failure costs a cold start",
                failure.kind,
                failure.reason,
                wait_s,
                extra={"event": "standby", "rank": failure.rank, "node": failure.node},
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await over.wait()

    async def _run_once(self, over: asyncio.Event) -> JobFailure | None:
        """Runs one launch until it fails; None if it was taken, or is no longer needed."""
        try:
            launch = self._make(self, self._excluded)
        except OSError as error:
            return no_launch(error)
        except ValueError as error:
            return JobFailure("launch", str(error))
        if (failure := await launch.begin()) is not None:
            return failure
        self._launch = launch  # only now: `take` must not get a launch that has not started
        self._set("starting")
        failure = await launch.failure_before(over)
        if self._launch is launch:
            self._launch = None
            self._set("")
            await launch.end(orderly=failure is None and self._was_ready)
        return failure

    def _set(self, phase: StandbyPhase) -> None:
        if phase != self.phase:
            self.phase = phase
            self._changed()

    def launch_said(self, said: Said, node: str | None) -> None:
        """Handles news until the launch is taken. A standby has no requests, and its series are not in the metrics."""
        match said:
            case Standing(resident):
                self._was_ready = True
                log.info("standby: ready, %d MB a rank", resident // 10**6, extra={"event": "standby"})
                self._set("ready")
            case Suspect():
                self._set("starting")
            case Recovered() if self._was_ready:
                self._set("ready")
            case _:
                pass
