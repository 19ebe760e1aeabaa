"""Replica: launches, monitors, relaunches and replaces the ranks of one replica (the protocol `EngineJob`). A hot
standby and the new launch of a reload are the same thing: a launch whose ranks wait for Load. Any failure ends a whole
launch (job_launch.py); failures that repeat without progress are final. Everything runs on one event loop; decisions
are in detect.py.
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
from typing import Any, Literal

from ...engine.identity import ModelIdentity
from ...engine.job import NOBODY, Culprit, JobListener, JobPhase, JobState, RankHeartbeat, StandbyPhase
from ...engine.request import ModelLimits, Request
from ..compose.mpi import LaunchCommand
from ..control.messages import Cancel, Drain, Loading, Ready, Running, Standing, StopChoice, Submit, Tokens
from .detect import SAME_FILES, Evidence, JobFailure, RestartPolicy, bad_node, by_a_request, no_launch
from .job_launch import Launch, LauncherOutput, OuterRanks
from .options import JobOptions
from .rank_board import Recovered, Suspect

log = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 300.0
"""Seconds between two attempts to start a standby: doubled after each."""

_SHORTAGE_S = 2.0
CLOSED = "the job was closed"
CHANGED = "restore the files, or run `laddertron reload` to serve the changed model"
CHANGED_IN_RUN = "restore the files and resume the run, or start over with the changed model"

Reason = Literal["first", "relaunch", "standby", "reload"]
"""Why a launch was started."""
LaunchState = Literal["waiting", "serving", "draining", "ended"]
"""`waiting`: until it is chosen to serve (a standby, or the next launch of a reload); `serving`: takes requests, or
starts in order to; `draining`: finishes the requests that it has, while another launch serves."""


@dataclass(frozen=True, slots=True)
class JobHooks:
    """Optional callbacks. `failed` is called with every failure (metrics, log, bundle). `devices_free` is awaited
    before every relaunch: it returns once the devices' memory is free, or raises RuntimeError, which names its use.
    """

    failed: Callable[[JobFailure], object] = field(default=lambda failure: None)
    devices_free: Callable[[], Awaitable[None]] | None = None


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """The arguments of a replica's launches. `command` composes the launch command without the given excluded hosts, or
    gives the ranks that an outer launcher has started; it raises ValueError if too few are left. `identity`: of the
    model that is served; ranks that read another one are refused."""

    command: Callable[[frozenset[str]], LaunchCommand | OuterRanks]
    config_json: str
    options: JobOptions
    hooks: JobHooks = field(default_factory=JobHooks)
    identity: ModelIdentity | None = None


class Member:
    """One launch in a replica's life; receives its news."""

    def __init__(
        self, replica: Replica, number: int, spec: ReplicaSpec, reason: Reason, excluded: frozenset[str], fix: str
    ) -> None:
        self._replica, self.number, self.spec, self.reason, self.excluded = replica, number, spec, reason, excluded
        self.state: LaunchState = "waiting" if reason in ("standby", "reload") else "serving"
        serving = replica.serving
        self.launch: Launch = Launch(
            self,
            spec.command(excluded),
            spec.config_json,
            spec.options,
            standby=self.state == "waiting",
            serving=serving.launch if serving is not None and self.state == "waiting" else None,
            identity=spec.identity,
            fix=fix,
        )
        self.took_over = False
        """Whether it was the standby when its predecessor failed."""
        self.standing: Standing | None = None
        """Set once its ranks wait for Load."""
        self.ready_since: float | None = None
        self.limits: ModelLimits | None = None
        self.progress = False
        """Whether it reported tokens: they are retained even if it fails."""
        self.over = asyncio.Event()
        """Set to end it in an orderly way."""
        self.why_ended = ""
        self._changed = asyncio.Event()
        self.running: asyncio.Task[None]

    def on_launch_output(self, output: LauncherOutput, node: str | None) -> None:
        match output:
            case Standing():
                self.standing = output
            case Ready(limits) if not self.launch.failing:
                self.ready_since, self.limits = time.monotonic(), limits
            case Ready():  # of a launch that is being ended
                return
            case Tokens(events):
                self.progress |= any(event.tokens or event.finish in ("stop", "length") for event in events)
        self._replica.on_launch_output(self, output, node)
        self._changed.set()

    def end(self, failure: JobFailure | None) -> None:
        """Marks it as ended: its processes have exited."""
        self.state = "ended"
        self.why_ended = CLOSED if failure is None else failure.reason
        self._changed.set()

    async def until(self, condition: Callable[[], object]) -> bool:
        """Waits for a condition on its news; False if it ended before."""
        while not condition() and self.state != "ended":
            self._changed.clear()
            await self._changed.wait()
        return self.state != "ended"


class Replica:
    """See EngineJob for the methods."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self.state = JobState("stopped")
        self.failures: deque[JobFailure] = deque(maxlen=16)
        self._listener: JobListener | None = None
        self._members: list[Member] = []
        self._launches = 0
        self._next: asyncio.Task[None] | None = None
        """Starts the serving launch after a delay."""
        self._standby_timer: asyncio.TimerHandle | None = None
        self._standby_wait_s = FIRST_WAIT_S
        self._turn: asyncio.Future[str | None] | None = None
        """Pending while a reload's launch loads after the former one has exited; its result is that of `replace`."""
        self._closing = self._draining = False
        self._adopt(spec)

    def _adopt(self, spec: ReplicaSpec) -> None:
        """Starts later serving launches by `spec`."""
        self.spec, options = spec, spec.options
        self._policy = RestartPolicy(options.max_failures if options.restart else 0, options.longest_backoff_s)
        self._excluded: frozenset[str] = frozenset()
        self._seats: tuple[str, ...] = ()
        """Hosts of the last serving launch's ranks."""
        self._was_ready = False
        self._lost_at = self._gone_at = 0.0

    @property
    def identity(self) -> ModelIdentity | None:
        return self.spec.identity

    @identity.setter
    def identity(self, identity: ModelIdentity | None) -> None:
        self.spec = dataclasses.replace(self.spec, identity=identity)

    async def start(self, listener: JobListener) -> None:
        if self._listener is not None:
            raise RuntimeError("the replica was started already")
        self._listener = listener
        self._start_first()

    @property
    def serving(self) -> Member | None:
        """The launch that takes requests, or starts in order to."""
        return next((member for member in self._members if member.state == "serving"), None)

    @property
    def _standby(self) -> Member | None:
        waiting = (member for member in self._members if member.state == "waiting" and not member.over.is_set())
        return next((member for member in waiting if member.reason == "standby"), None)

    @property
    def launch(self) -> int:
        return 0 if self.serving is None else self.serving.number

    def submit(self, request: Request) -> None:
        if self.state.phase != "ready" or self.serving is None:
            raise RuntimeError(f"the job is {self.state.phase}, it takes requests only when ready")
        self.serving.launch.send(Submit(request), 0)

    def cancel(self, request_id: str) -> None:
        for member in self._computing:
            member.launch.send(Cancel(request_id), 0)

    def stop_choice(self, request_id: str, choice: int, n_tokens: int) -> None:
        for member in self._computing:
            member.launch.send(StopChoice(request_id, choice, n_tokens), 0)

    @property
    def _computing(self) -> list[Member]:
        """Launches that may have requests."""
        return [member for member in self._members if member.state in ("serving", "draining")]

    async def drain(self, timeout_s: float) -> bool:
        self._draining = True
        self._end_standby()
        if self.state.phase in ("ready", "suspect"):
            self._set_state("draining")
            if self.serving is not None:
                self.serving.launch.send(Drain(), 0)
        try:
            async with asyncio.timeout(timeout_s):
                return all([await self._idle(member) for member in self._computing])
        except TimeoutError:
            return False

    async def close(self) -> None:
        self._closing = True
        if self.state.phase in ("ready", "suspect"):
            self._set_state("draining")  # lost requests must not be submitted here again
        self._end_turn(CLOSED)
        await self._end_others(None)
        if self.state.phase != "failed":
            self._set_state("stopped")

    async def _end_others(self, survivor: Member | None) -> None:
        """Ends every launch but `survivor`, and what would start one; returns when their processes have exited."""
        if self._next is not None:
            self._next.cancel()
        self._end_standby()
        others = [member for member in self._members if member is not survivor]
        for member in others:
            member.over.set()
        await asyncio.gather(*(member.running for member in others))

    async def _idle(self, member: Member) -> bool:
        return self._listener is None or await self._listener.idle(member.number)

    async def bundle(self) -> dict[str, Any]:
        failures = [dataclasses.asdict(failure) for failure in self.failures]
        data: dict[str, Any] = {"state": dataclasses.asdict(self.state), "failures": failures}
        if (member := self.serving) is not None:
            dumps = await member.launch.dump(2.0)
            data |= member.launch.describe() | {"dumps": {str(rank): dump for rank, dump in dumps.items()}}
        return data

    # a launch, from start to end

    def _begin(self, spec: ReplicaSpec, reason: Reason, excluded: frozenset[str] = frozenset()) -> Member:
        """Starts a launch. Raises ValueError or OSError."""
        self._launches += 1
        same_model = self._was_ready and reason != "reload"  # the folder was read before: it has changed since
        changed = CHANGED if spec.options.restart else CHANGED_IN_RUN
        member = Member(self, self._launches, spec, reason, excluded, changed if same_model else SAME_FILES)
        self._members.append(member)
        member.running = asyncio.create_task(self._run(member))
        return member

    async def _run(self, member: Member) -> None:
        """Runs a launch until its last process has exited."""
        try:
            failure = await self._run_launch(member)
        except Exception as error:
            log.exception("internal error of the supervisor")
            failure = JobFailure("launch", f"internal error of the supervisor: {error!r}")
            if member is self.serving:
                self._set_state("restarting", failure=failure)  # lost requests must not be submitted here again
            await member.launch.end(orderly=False)
        self._ended(member, failure)

    async def _run_launch(self, member: Member) -> JobFailure | None:
        launch = member.launch
        if (failure := await launch.begin()) is not None:
            return failure
        self._show_standby()
        failure = await launch.failure_before(member.over)
        if failure is not None and member is self.serving:
            self._set_state("restarting" if member.spec.options.restart else "suspect", failure=failure)
        up = member.ready_since is not None or (member.state == "waiting" and member.standing is not None)
        stuck = await launch.end(orderly=failure is None and up)
        if failure is not None and launch.explained:  # the cause may become known after its consequences
            failure = launch.verdict()
        if member is self.serving and member.ready_since is not None:
            self._lost_at, self._gone_at = launch.sign_at, time.monotonic()
        if stuck is not None and member.state != "waiting":
            self._excluded |= {socket.gethostname()}
            failure = failure and dataclasses.replace(failure, reason=f"{failure.reason}; {stuck}")
        return failure

    def _ended(self, member: Member, failure: JobFailure | None) -> None:
        """Reports what a launch has lost, and replaces it if it must be replaced."""
        former, standby = member.state, self._standby
        member.end(failure)
        self._members.remove(member)
        by_request = failure is not None and by_a_request(failure, socket.gethostname())
        reason = failure.reason if failure is not None else CLOSED
        if self._listener is not None:
            self._tell(self._listener.on_lost, member.number, reason, by_request)
        if failure is None:
            return
        if former == "serving":
            self._launch_again(failure, member)
        elif member is standby:
            self._standby_failed(failure, member)
        elif former == "draining" or member.reason == "reload":
            self._count(failure, member.spec)

    # the serving launch

    def _start_first(self) -> None:
        self._set_state("starting")
        self._next = asyncio.create_task(self._start_serving("first"))

    async def _start_serving(self, reason: Reason, delay_s: float = 0.0, restarts: int = 0) -> None:
        """Starts the serving launch after a delay: the standby if it is usable, else a cold start."""
        await asyncio.sleep(delay_s)
        if reason == "relaunch":
            self._set_state("starting", restarts=self.state.restarts + restarts)
        try:
            if self.failures and self.spec.hooks.devices_free is not None:
                await self.spec.hooks.devices_free()
            member = self._take_standby() or self._begin(self.spec, reason, self._excluded)
            self._seats = member.launch.seats
        except OSError as error:
            self._launch_again(no_launch(error))
        except (ValueError, RuntimeError) as error:
            self._launch_again(JobFailure("launch", str(error)))
        except Exception as error:
            log.exception("internal error of the supervisor")
            self._launch_again(JobFailure("launch", f"internal error of the supervisor: {error!r}"))

    def _launch_again(self, failure: JobFailure, member: Member | None = None) -> None:
        """Counts a failure of the serving launch (None: it could not be started), and launches it again or gives up."""
        ready_since = None if member is None else member.ready_since
        passes = failure.kind == "shortage" or (failure.kind == "model_changed" and self._was_ready)
        if passes and self.spec.options.restart:
            self._await_outside(failure)
            return
        if member is not None and member.took_over and ready_since is None and not self._closing:
            log.warning("standby: failed as it took over: %s: a cold start", failure.reason, extra={"event": "standby"})
            self._next = asyncio.create_task(self._start_serving("relaunch"))
            return
        self._count(failure, self.spec)
        self._exclude(bad_node(tuple(self.failures), socket.gethostname()))
        options = self.spec.options
        ready_s = 0.0 if ready_since is None else time.monotonic() - ready_since
        delay = self._policy.after_failure(member is not None and (member.progress or ready_s >= options.healthy_s))
        # not retried: differing files, and a refusal of the first launch; a later refusal may be temporary
        first = not self._was_ready
        hopeless = failure.kind == "mismatch" or (failure.kind in ("refused", "model_changed") and first)
        if delay is None or self._draining or hopeless:
            reason = failure.reason
            if options.restart and delay is None and not hopeless:
                reason = f"{self._policy.in_a_row} failures in a row without progress, the last: {reason}"
            if not self._end_turn(reason):
                self._end_standby()
                self._set_state("failed", failure=failure, reason=reason)
        elif not self._closing:
            self._next = asyncio.create_task(self._start_serving("relaunch", delay, restarts=1))

    def _await_outside(self, failure: JobFailure) -> None:
        """Launches again after the model was changed in place, or this host had no free descriptor, process, thread or
        memory. Such failures are not counted: the files may be restored, or a reload serves the changed model; a
        shortage passes."""
        repeated = bool(self.failures) and self.failures[-1].kind == failure.kind
        if not repeated:
            self._count(failure, self.spec)
        if self._draining:
            if not self._end_turn(failure.reason):
                self._set_state("failed", failure=failure)
        elif not self._closing:
            self._set_state("restarting", failure=failure)
            longest = _SHORTAGE_S if failure.kind == "shortage" else self.spec.options.longest_backoff_s
            delay = longest if repeated else 0.0
            self._next = asyncio.create_task(self._start_serving("relaunch", delay, restarts=1))

    def _count(self, failure: JobFailure, spec: ReplicaSpec) -> None:
        self.failures.append(failure)
        self._tell(spec.hooks.failed, failure)

    def _exclude(self, host: str | None) -> None:
        """Excludes a host if a spare host can replace it."""
        if host is None or host in self._excluded:
            return
        with contextlib.suppress(ValueError, OSError):
            seats = self.spec.command(self._excluded | {host}).seats
            if seats and seats == self._seats:
                log.warning("%s is no listed host, so no spare replaces it", host, extra={"node": host})
                return
            self._excluded |= {host}
            spares = ", ".join(name for name in dict.fromkeys(seats) if name not in self._seats) or "a spare host"
            log.warning("%s is excluded: %s replaces it", host, spares, extra={"node": host})

    def _now_ready(self, member: Member) -> None:
        self._was_ready = True
        if self._lost_at:
            gone_s, again_s = self._gone_at - self._lost_at, time.monotonic() - self._lost_at
            log.info(
                "serving again %.2f s after the first sign of failure: processes gone after %.2f s, %s ready %.2f s "
                "later",
                again_s,
                gone_s,
                "the standby" if member.took_over else "a cold start",
                again_s - gone_s,
                extra={"event": "recovered", "standby": member.took_over, "seconds": round(again_s, 3)},
            )
            self._lost_at = 0.0
        self._end_turn(None)
        self._set_state("draining" if self._draining else "ready", limits=member.limits)
        self._start_standby()

    # the standby

    def _start_standby(self) -> None:
        """Starts a standby if the replica has none, should have one, and serves."""
        serves = self.serving is not None and self.serving.ready_since is not None
        if self._standby or not self.spec.options.standby or not serves or self._draining or self._closing:
            return
        try:
            self._begin(self.spec, "standby", self._excluded)
        except OSError as error:
            self._standby_failed(no_launch(error))
        except ValueError as error:
            self._standby_failed(JobFailure("launch", str(error)))

    def _standby_failed(self, failure: JobFailure, member: Member | None = None) -> None:
        """Starts another standby after a while."""
        stood = member is not None and member.standing is not None
        self._standby_wait_s = FIRST_WAIT_S if stood else min(2 * self._standby_wait_s, LONGEST_WAIT_S)
        log.warning(
            "standby: lost (%s): %s; another one is tried in %g s, until it is ready a failure costs a cold start",
            failure.kind,
            failure.reason,
            self._standby_wait_s,
            extra={"event": "standby", "rank": failure.culprit.rank, "node": failure.culprit.node},
        )
        self._show_standby()
        self._standby_timer = asyncio.get_running_loop().call_later(self._standby_wait_s, self._start_standby)

    def _take_standby(self) -> Member | None:
        """Makes the standby the serving launch and sends it `Load`. Returns None, and logs why, if none is usable."""
        member, phase = self._standby, self._standby_phase
        usable = member is not None and member.excluded == self._excluded and member.launch.healthy
        if member is None or not usable:
            if member is not None:
                silent = member.excluded == self._excluded
                why = "one of its ranks is silent or exited" if silent else "it uses an excluded node"
                log.warning("standby: not used, %s: a cold start", why, extra={"event": "standby"})
            self._end_standby()
            return None
        log.info(
            "standby: takes over%s", "" if phase == "ready" else ", which is still starting", extra={"event": "standby"}
        )
        member.state, member.took_over = "serving", True
        self._show_standby()
        member.launch.load()
        return member

    def _end_standby(self) -> None:
        """Ends the standby, or the wait for another; `_start_standby` may start one again."""
        if self._standby_timer is not None:
            self._standby_timer.cancel()
        self._standby_wait_s = FIRST_WAIT_S
        if (standby := self._standby) is not None:
            standby.over.set()
            self._show_standby()

    @property
    def _standby_phase(self) -> StandbyPhase:
        if (standby := self._standby) is None:
            return ""
        return "ready" if standby.standing is not None and standby.launch.healthy else "starting"

    def _show_standby(self) -> None:
        self._take_state(dataclasses.replace(self.state, standby=self._standby_phase))

    # a reload

    async def replace(self, spec: ReplicaSpec) -> str | None:
        """Replaces the ranks by a launch of another spec: it loads while the serving launch computes if memory
        suffices, else after that one has exited, while requests wait. Returns None once the former launch's requests
        have ended and its processes have exited, or the reason why the former spec stays."""
        if self._closing:
            return CLOSED
        try:
            member = self._begin(spec, "reload")
        except (ValueError, OSError) as error:
            return str(error)
        if not await member.until(lambda: member.standing):
            return member.why_ended
        assert member.standing is not None
        if not member.standing.room:
            return await self._replace_in_turn(member)
        member.launch.load()
        if not await member.until(lambda: member.ready_since and not member.launch.failing):
            return member.why_ended
        former = self._retire()
        self._serve(member)
        self._now_ready(member)
        if former is not None:
            await self._idle(former)
            former.over.set()
            await former.running
        return None

    async def _replace_in_turn(self, member: Member) -> str | None:
        """Replaces the serving launch by a waiting one for which there is no room next to it."""
        log.info("reload: no room for both launches: running requests finish, new ones wait")
        former_spec, self._turn = self.spec, asyncio.get_running_loop().create_future()
        former = self._retire()
        self._set_state("reloading", "running requests finish before the new launch loads")
        if former is not None:
            await self._idle(former)
        await self._end_others(member)
        try:
            if former_spec.hooks.devices_free is not None:
                await former_spec.hooks.devices_free()
        except (RuntimeError, OSError) as error:
            log.warning("reload: %s; loading all the same", error)
        if member.state == "waiting":  # it may have failed while the former launch finished
            self._serve(member)
            member.launch.load()
            reason = await self._turn if self._turn is not None else CLOSED
        else:
            reason, self._turn = member.why_ended, None
        if reason is not None and not self._closing:
            self._adopt(former_spec)
            self._start_first()
        return reason

    def _retire(self) -> Member | None:
        """Lets the serving launch finish its requests, and starts none in its place. Returns it, None if there is none
        at the moment."""
        if self._next is not None:
            self._next.cancel()
        self._end_standby()
        former = self.serving
        if former is not None:
            former.state = "draining"
            former.launch.send(Drain(), 0)
        return former

    def _serve(self, member: Member) -> None:
        self._adopt(member.spec)
        self.failures.clear()  # of another spec's launches
        member.state, self._seats = "serving", member.launch.seats

    def _end_turn(self, result: str | None) -> bool:
        """Ends a reload's turn, if there is one, with the result of `replace`."""
        turn, self._turn = self._turn, None
        if turn is not None and not turn.done():
            turn.set_result(result)
        return turn is not None

    # news

    def on_launch_output(self, member: Member, output: LauncherOutput, node: str | None) -> None:
        listener, phase = self._listener, self.state.phase
        assert listener is not None
        match output:
            case Tokens(events):
                self._tell(listener.on_tokens, list(events))
            case Running(started, parked):
                self._tell(listener.on_running, started, parked)
            case Standing(resident) if member is self._standby:
                log.info("standby: ready, %d MB a rank", resident // 10**6, extra={"event": "standby"})
        if member is self._standby:
            self._show_standby()
        if member is not self.serving:
            return
        match output:
            case Loading(fraction, detail):
                if phase in ("starting", "loading", "reloading"):
                    self._set_state("loading", reason=(f"{fraction:.0%} {detail}" if fraction else detail).strip())
            case Ready():
                self._now_ready(member)
            case Recovered():
                if phase == "suspect":
                    self._set_state("ready")
            case Suspect(rank, text) | Evidence(_, rank, text):
                if phase in ("ready", "suspect"):
                    self._set_state("suspect", reason=text, culprit=Culprit(rank, node))
            case RankHeartbeat():
                self._tell(listener.on_report, output)

    def _set_state(
        self,
        phase: JobPhase,
        reason: str = "",
        failure: JobFailure | None = None,
        culprit: Culprit = NOBODY,
        limits: ModelLimits | None = None,
        restarts: int | None = None,
    ) -> None:
        if failure is not None:
            reason, culprit = reason or failure.reason, failure.culprit
        elif phase in ("starting", "loading") and self.failures:
            last = self.failures[-1]
            reason, culprit = f"{reason or 'starting'} after a failure: {last.reason}", last.culprit
        state = JobState(
            "reloading" if self._turn is not None else phase,
            reason,
            self.state.restarts if restarts is None else restarts,
            limits or self.state.limits,
            culprit,
            exit_code=None if failure is None else failure.exit_code or 1,
            standby=self._standby_phase,
            model="" if self.identity is None else self.identity.digest,
        )
        self._take_state(state)

    def _take_state(self, state: JobState) -> None:
        if state != self.state:
            self.state = state
            if self._listener is not None:
                self._tell(self._listener.on_state, state)

    def _tell(self, callback: Callable[..., object], *arguments: object) -> None:
        try:
            callback(*arguments)
        except Exception:  # an error of the owner must end neither the ranks nor this supervisor
            log.exception("%s failed", getattr(callback, "__qualname__", callback))
