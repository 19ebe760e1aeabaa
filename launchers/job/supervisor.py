"""MpiJob: launches, monitors and relaunches one replica as an MPI job (the protocol `EngineJob`). Any failure ends the
whole launch (job_launch.py) and starts another, until failures repeat without progress. Reports the requests in flight
that a failed launch loses. Everything runs on one event loop; decisions are in detect.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from ...engine.identity import ModelIdentity
from ...engine.job import JobListener, JobPhase, JobState, RankHeartbeat
from ...engine.request import ModelLimits, Request, TokensEvent
from ..compose.mpi import LaunchCommand
from ..control.messages import Cancel, Drain, Loading, Ready, Running, Standing, StopChoice, Submit, Tokens
from .detect import SAME_FILES, Evidence, JobFailure, RestartPolicy, bad_node, by_a_request, no_launch
from .in_flight import InFlight
from .job_launch import Launch, LaunchOwner, Said
from .options import JobOptions, JobTimeouts
from .rank_board import Recovered, Suspect
from .standby import Standby

__all__ = ["JobFailure", "JobHooks", "JobOptions", "JobTimeouts", "MpiJob"]

log = logging.getLogger(__name__)

_SHORTAGE_S = 2.0

CHANGED = "restore the files, or run `laddertron reload` to serve the changed model"
CHANGED_IN_RUN = "restore the files and resume the run, or start over with the changed model"
CommandFactory = Callable[[frozenset[str]], LaunchCommand]
"""Composes the launch command without the given excluded hosts. Raises ValueError if too few are left."""


@dataclass(frozen=True, slots=True)
class JobHooks:
    """Optional callbacks of the owner. `failed` is called with every failure (metrics, log, bundle). `devices_free` is
    awaited before every relaunch: it returns once the devices' memory is free, or raises RuntimeError, which names the
    memory still in use.
    """

    failed: Callable[[JobFailure], object] = field(default=lambda failure: None)
    devices_free: Callable[[], Awaitable[None]] | None = None


class MpiJob:
    """See EngineJob for the methods. `command` is called for every launch."""

    def __init__(
        self, command: CommandFactory, config_json: str, options: JobOptions, hooks: JobHooks | None = None
    ) -> None:
        self._command, self._config_json, self._options = command, config_json, options
        self._hooks = hooks or JobHooks()
        self.state = JobState("stopped")
        self._policy = RestartPolicy(options.max_failures if options.restart else 0, options.longest_backoff_s)
        self._listener: JobListener | None = None
        self._launch: Launch | None = None
        self._standby = Standby(self._make_launch, self._standby_changed)
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._draining = self._progress = False
        self._held = options.hold
        self.identity: ModelIdentity | None = None
        """The identity of the model that the job serves; set before `start`. Ranks that read another are refused."""
        self.before: MpiJob | None = None
        """The job that a held job replaces, and whose weights it may share."""
        self.room = False
        """Whether a held job's ranks have room for their weights next to the running launch's."""
        self._ready_since: float | None = None
        self._taken_over = False
        self._lost_at = self._gone_at = 0.0
        self.in_flight = InFlight()
        self._excluded: frozenset[str] = frozenset()
        self._seats: tuple[str, ...] = ()
        self.failures: deque[JobFailure] = deque(maxlen=16)

    async def start(self, listener: JobListener) -> None:
        if self._task is not None:
            raise RuntimeError("the job was started already")
        self._listener = listener
        self._set_state("starting")
        self._task = asyncio.create_task(self._supervise())

    def submit(self, request: Request) -> None:
        if self.state.phase != "ready" or self._launch is None:
            raise RuntimeError(f"the job is {self.state.phase}, it takes requests only when ready")
        self.in_flight.add(request)
        self._launch.send(Submit(request), 0)

    def cancel(self, request_id: str) -> None:
        if self._launch is not None and request_id in self.in_flight:
            self._launch.send(Cancel(request_id), 0)

    def stop_choice(self, request_id: str, choice: int, n_tokens: int) -> None:
        if self._launch is not None and request_id in self.in_flight:
            self._launch.send(StopChoice(request_id, choice, n_tokens), 0)

    def load(self) -> None:
        """Lets a held job in phase `standby` load. Raises RuntimeError in another phase."""
        if self.state.phase != "standby" or self._launch is None:
            raise RuntimeError(f"the job is {self.state.phase}, it loads when its ranks are on standby")
        self._held, self.before = False, None
        self._set_state("loading")
        self._launch.load()

    async def drain(self, timeout_s: float) -> bool:
        self._draining = True
        self._standby.stop()
        lost_before = len(self.failures)
        if self.state.phase in ("ready", "suspect"):
            self._set_state("draining")
            if self._launch is not None:
                self._launch.send(Drain(), 0)
        return await self.in_flight.drained(timeout_s) and len(self.failures) == lost_before

    async def close(self) -> None:
        self._closing.set()
        if self.state.phase in ("ready", "suspect"):
            self._set_state("draining")  # lost requests must not be submitted here again
        await self._standby.close()
        if self._task is not None:
            await self._task

    async def freed(self) -> None:
        """Waits, after `close`, until the devices' memory is free, like a relaunch (JobHooks). Raises RuntimeError."""
        if self._hooks.devices_free is not None:
            await self._hooks.devices_free()

    async def bundle(self) -> dict[str, Any]:
        launch = self._launch
        failures = [dataclasses.asdict(failure) for failure in self.failures]
        data: dict[str, Any] = {"state": dataclasses.asdict(self.state), "failures": failures}
        if launch is not None:
            dumps = await launch.dump(2.0)
            data |= launch.describe() | {"dumps": {str(rank): dump for rank, dump in dumps.items()}}
        return data

    # supervision

    async def _supervise(self) -> None:
        try:
            while not self._closing.is_set():
                failure = await self._run_once()
                if failure is None:
                    break
                if not await self._await_relaunch(failure):
                    return
            self._set_state("stopped")
        except Exception as error:
            log.exception("internal error of the supervisor")
            if self._launch is not None:
                await self._launch.end(orderly=False)
            self._report_lost(JobFailure("launch", repr(error)))
            self._set_state("failed", reason=f"internal error of the supervisor: {error!r}")
        finally:
            await self._standby.close()

    async def _run_once(self) -> JobFailure | None:
        """Runs one launch until its last process has exited; None if it ended because the job was closed."""
        self._progress, self._ready_since, self._taken_over = False, None, False
        try:
            if self.failures and self._hooks.devices_free is not None:
                await self._hooks.devices_free()
            launch = self._standby.take(self, self._excluded)
            self._taken_over = launch is not None
            if launch is None:
                launch = self._make_launch(self, self._excluded, standby=self._held)
        except OSError as error:
            return no_launch(error)
        except (ValueError, RuntimeError) as error:
            return JobFailure("launch", str(error))
        self._launch, self._seats = launch, launch.seats
        if not self._taken_over and (failure := await launch.begin()) is not None:
            self._launch = None
            return failure
        failure = await launch.failure_before(self._closing)
        if failure is not None:
            self._set_state("restarting" if self._options.restart else "suspect", failure=failure)
        stuck = await launch.end(orderly=failure is None and self._ready_since is not None)
        self._launch = None
        if failure is not None and launch.explained:  # the cause may become known after its consequences
            failure = launch.verdict()
        self._note_end(launch.sign_at, time.monotonic())
        if stuck is not None:
            self._excluded |= {socket.gethostname()}
            failure = failure and dataclasses.replace(failure, reason=f"{failure.reason}; {stuck}")
        self._report_lost(failure)
        return failure

    def _make_launch(self, owner: LaunchOwner, excluded: frozenset[str], standby: bool = True) -> Launch:
        """Makes a launch. Raises ValueError."""
        serving = self._launch if self.before is None else self.before._launch
        fix = SAME_FILES if self.state.limits is None else CHANGED if self._options.restart else CHANGED_IN_RUN
        command = self._command(excluded)
        return Launch(owner, command, self._config_json, self._options, standby, serving, self.identity, fix)

    async def _await_relaunch(self, failure: JobFailure) -> bool:
        """Counts the failure and waits for the policy's delay. False if the job is not launched again."""
        passes = failure.kind == "shortage" or (failure.kind == "model_changed" and self.state.limits is not None)
        if passes and self._options.restart and not self._held:
            return await self._await_outside(failure)
        if self._taken_over and self._ready_since is None:
            log.warning("standby: failed as it took over: %s: a cold start", failure.reason, extra={"event": "standby"})
            self._set_state("starting")
            return True
        self.failures.append(failure)
        self._hooks.failed(failure)
        self._exclude(bad_node(tuple(self.failures), socket.gethostname()))
        ready_s = 0.0 if self._ready_since is None else time.monotonic() - self._ready_since
        delay = self._policy.after_failure(self._progress or ready_s >= self._options.healthy_s)
        # not retried: differing files, and a refusal of the first launch; a later refusal may be temporary
        first = self.state.limits is None
        hopeless = failure.kind == "mismatch" or (failure.kind in ("refused", "model_changed") and first)
        hopeless |= self._held
        if delay is None or self._draining or hopeless:
            reason = failure.reason
            if self._options.restart and delay is None and not hopeless:
                reason = f"{self._policy.in_a_row} failures in a row without progress, the last: {reason}"
            self._set_state("failed", failure=failure, reason=reason)
            return False
        await self._pause(delay)
        return True

    async def _await_outside(self, failure: JobFailure) -> bool:
        """Waits before the next launch of a job whose model was changed in place, or for which this host had no free
        descriptor, process, thread or memory. Such failures are not counted: the files may be restored, or the daemon
        reloads; a shortage passes. False if the job is not launched again."""
        repeated = bool(self.failures) and self.failures[-1].kind == failure.kind
        if not repeated:
            self.failures.append(failure)
            self._hooks.failed(failure)
        if self._draining:
            self._set_state("failed", failure=failure)
            return False
        self._set_state("restarting", failure=failure)
        longest = _SHORTAGE_S if failure.kind == "shortage" else self._options.longest_backoff_s
        await self._pause(longest if repeated else 0.0)
        return True

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        if not self._closing.is_set():
            self._set_state("starting", restarts=self.state.restarts + 1)

    def _note_end(self, lost_at: float, gone_at: float) -> None:
        if self._ready_since is not None:
            self._lost_at, self._gone_at = lost_at, gone_at

    def _log_recovery(self, now: float) -> None:
        gone_s, again_s = self._gone_at - self._lost_at, now - self._lost_at
        log.info(
            "serving again %.2f s after the first sign of failure: processes gone after %.2f s, %s ready %.2f s later",
            again_s,
            gone_s,
            "the standby" if self._taken_over else "a cold start",
            again_s - gone_s,
            extra={"event": "recovered", "standby": self._taken_over, "seconds": round(again_s, 3)},
        )

    def _exclude(self, host: str | None) -> None:
        """Excludes a host if a spare host can replace it."""
        if host is None or host in self._excluded:
            return
        with contextlib.suppress(ValueError, OSError):
            seats = self._command(self._excluded | {host}).seats
            if seats and seats == self._seats:
                log.warning("%s is no listed host, so no spare replaces it", host, extra={"node": host})
                return
            self._excluded |= {host}
            spares = ", ".join(name for name in dict.fromkeys(seats) if name not in self._seats) or "a spare host"
            log.warning("%s is excluded: %s replaces it", host, spares, extra={"node": host})

    def _report_lost(self, failure: JobFailure | None) -> None:
        lost, entered = self.in_flight.lose()
        if lost and self._listener is not None:
            guilty = failure is not None and by_a_request(failure, socket.gethostname())
            reason = failure.reason if failure else "the job was closed"
            self._tell(self._listener.on_lost, lost, reason, entered if guilty else 0)

    def _set_state(
        self,
        phase: JobPhase,
        reason: str = "",
        failure: JobFailure | None = None,
        rank: int | None = None,
        node: str | None = None,
        limits: ModelLimits | None = None,
        restarts: int | None = None,
    ) -> None:
        culprit: dict[str, Any] = {"rank": rank, "node": node}
        if failure is not None:
            reason, culprit = reason or failure.reason, failure.culprit
        elif phase in ("starting", "loading") and self.failures:
            last = self.failures[-1]
            reason, culprit = f"{reason or 'starting'} after a failure: {last.reason}", last.culprit
        state = JobState(
            phase,
            reason,
            self.state.restarts if restarts is None else restarts,
            limits or self.state.limits,
            exit_code=None if failure is None else failure.exit_code or 1,
            **culprit,
            standby=self._standby.phase,
            model="" if self.identity is None else self.identity.digest,
        )
        self._take_state(state)

    def _take_state(self, state: JobState) -> None:
        if state != self.state:
            self.state = state
            if self._listener is not None:
                self._tell(self._listener.on_state, state)

    def _standby_changed(self) -> None:
        self._take_state(dataclasses.replace(self.state, standby=self._standby.phase))

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            callback(*arguments)
        except Exception:  # an error of the owner must end neither the ranks nor this supervisor
            log.exception("%s failed", getattr(callback, "__qualname__", callback))

    # news of the launch

    def launch_said(self, said: Said, node: str | None) -> None:
        phase = self.state.phase
        match said:
            case Loading(fraction, detail):
                if phase in ("starting", "loading"):
                    self._set_state("loading", reason=(f"{fraction:.0%} {detail}" if fraction else detail).strip())
            case Standing(_, room):
                self.room = room
                if self._held:  # else it is a standby that took over while starting, and loads already
                    self._set_state("standby")
            case Ready(limits):
                self._ready_since = time.monotonic()
                if self._lost_at:
                    self._log_recovery(self._ready_since)
                self._set_state("draining" if self._draining else "ready", limits=limits)
                if self._options.standby and not self._draining:
                    self._standby.keep(self._excluded)
            case Recovered():
                if phase == "suspect":
                    self._set_state("ready")
            case Suspect(rank, text) | Evidence(_, rank, text):
                if phase in ("ready", "suspect"):
                    self._set_state("suspect", reason=text, rank=rank, node=node)

            case Tokens(events):
                self._take_tokens(events)
            case Running():
                self.in_flight.note(said)
            case RankHeartbeat():
                if self._listener is not None:
                    self._tell(self._listener.on_report, said)

    def _take_tokens(self, events: tuple[TokensEvent, ...]) -> None:
        known = self.in_flight.take(events)
        # tokens are kept even if this launch fails, so they are progress
        self._progress |= any(event.tokens or event.finish in ("stop", "length") for event in known)
        if known and self._listener is not None:
            self._tell(self._listener.on_tokens, known)
