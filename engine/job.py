"""The protocol between the owner of requests (daemon, `run`) and an engine job (launchers/job/replica.py). Every method
and callback runs on one event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from annotated_types import MaxLen

from .request import Count, ModelLimits, Request, TokensEvent

StandbyPhase = Literal["", "starting", "ready"]
"""Phase of the hot standby; "" if there is none."""
JobPhase = Literal[
    "starting", "loading", "ready", "suspect", "restarting", "draining", "stopped", "failed", "standby", "reloading"
]


@dataclass(frozen=True, slots=True)
class Culprit:
    """What identifies the cause of a failure, for the log, /ready, and the labels of a metric. `collective`: in which
    the rank last waited, or which it started last; `device`: its device."""

    rank: int | None = None
    node: str | None = None
    stage: int | None = None
    device: str = ""
    collective: str = ""


NOBODY = Culprit()
CULPRIT = tuple(field.name for field in fields(Culprit))


@dataclass(frozen=True, slots=True)
class JobState:
    """A job's state. Only in phase `ready` it accepts requests. `suspect`: the heartbeat or step of a rank is overdue;
    `failed`: final (crash loop, bad weights), with `reason` and the `culprit` if there is one. While the job starts
    again, these fields describe the last failure. Phase `standby`: the ranks wait for Load; `reloading`: they are being
    replaced, and requests wait. The field `standby` is the phase of the hot standby's launch; `model`: the digest of
    the model that the job serves, "" if unknown."""

    phase: JobPhase
    reason: str = ""
    restarts: int = 0
    limits: ModelLimits | None = None
    culprit: Culprit = NOBODY
    exit_code: int | None = None
    standby: StandbyPhase = ""
    model: str = ""


class MetricRow(NamedTuple):
    """A value of a rank's series (engine/metrics/catalogue.py), with its labels except replica, rank and node. Counters
    start with the process; a histogram has its sum as `value` and `counts` by bucket."""

    series: Annotated[str, MaxLen(128)]
    labels: Annotated[tuple[Annotated[str, MaxLen(128)], ...], MaxLen(8)] = ()
    value: float = 0.0
    counts: Annotated[tuple[Count, ...], MaxLen(64)] = ()


@dataclass(frozen=True, slots=True)
class RankHeartbeat:
    rank: int
    node: str
    pid: int
    step: int
    received_at: float
    rows: tuple[MetricRow, ...] = ()


class JobListener(Protocol):
    """Callbacks of a job's owner."""

    def on_tokens(self, events: list[TokensEvent]) -> None:
        """Called with tokens on which all ranks agreed, in order within a choice, each once."""

    def on_running(self, started: Sequence[str], parked: Sequence[str]) -> None:
        """Called before a step with the ids of requests that enter it for the first time, and of those preempted."""

    def on_lost(self, launch: int, reason: str, by_request: bool) -> None:
        """Called once when all processes of a launch have exited: no further tokens follow, and requests in flight in
        it are lost. The owner submits them again (under another id, with their emitted tokens) or gives them up.
        `by_request`: a request that was in the step may be the cause."""

    async def idle(self, launch: int) -> bool:
        """Waits until no request is in flight in a launch; False if one was lost meanwhile."""

    def on_state(self, state: JobState) -> None: ...

    def on_report(self, report: RankHeartbeat) -> None: ...


class EngineJob(Protocol):
    """One replica: one tensor-parallel group with one scheduler. `identity`: the ModelIdentity that it serves, set
    before `start`; the job refuses ranks that read another. None: ranks are compared with each other alone."""

    identity: Any

    @property
    def state(self) -> JobState: ...

    @property
    def launch(self) -> int:
        """Number of the launch to which `submit` sends requests."""

    async def start(self, listener: JobListener) -> None:
        """Launches and returns at once; progress comes through `on_state`."""

    def submit(self, request: Request) -> None:
        """Queues a request, whose id no earlier one had. Raises RuntimeError unless the phase is `ready`."""

    def cancel(self, request_id: str) -> None:
        """Ends all choices of a request with finish "cancelled"; ignores unknown ids (it may just have ended)."""

    def stop_choice(self, request_id: str, choice: int, n_tokens: int) -> None:
        """Ends a choice with finish "stop" after n_tokens, because a stop string matched; discards later tokens."""

    async def drain(self, timeout_s: float) -> bool:
        """Accepts no new requests and waits for those in flight; True if all ended in time."""

    async def close(self) -> None:
        """Ends every process of the job on every node; returns when they have exited."""

    async def bundle(self) -> dict[str, Any]:
        """Diagnostics for `laddertron bundle`: per rank the last collectives and stacks, as JSON values."""
