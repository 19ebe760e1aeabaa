"""The protocol between the owner of requests (daemon, `run`) and an engine job: launchers/job/supervisor.py with
mpirun, launchers/rank/outer_job.py inside an outer mpirun. Every method and callback runs on one event loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from annotated_types import MaxLen

from .request import Count, ModelLimits, Request, TokensEvent

StandbyPhase = Literal["", "starting", "ready"]
"""Phase of the hot standby; "": there is none."""
JobPhase = Literal[
    "starting", "loading", "ready", "suspect", "restarting", "draining", "stopped", "failed", "standby", "reloading"
]


CULPRIT = ("rank", "node", "stage", "device", "collective")
"""The fields, of a JobState or a failure, that say who is to blame: in the log, in /ready, labels of a metric."""


@dataclass(frozen=True, slots=True)
class JobState:
    """A job's state. `ready` alone takes requests; `suspect` is a rank whose heartbeat or step is overdue;
    `failed` is final (crash loop, bad weights) and `reason` says why, naming rank and node where one is to blame.
    While it starts again they are the last failure's; `collective` is what that rank last waited in or had started,
    `device` what it computed on. `standby`: its ranks are up and wait for the word to load; `reloading`: they make room
    for others, requests wait. The field `standby` is of the launch that would take over."""

    phase: JobPhase
    reason: str = ""
    restarts: int = 0
    limits: ModelLimits | None = None
    rank: int | None = None
    node: str | None = None
    exit_code: int | None = None
    collective: str = ""
    stage: int | None = None
    device: str = ""
    standby: StandbyPhase = ""


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
        """Tokens that all ranks agreed on, in order within a choice. After a relaunch nothing is replayed: what
        had no `finish` is reported through `on_lost`."""

    def on_lost(self, lost: dict[str, int], reason: str, suspects: int) -> None:
        """Requests, by id with their epochs, that were in flight in a job that died. The owner submits them again (with
        the next epoch and their emitted tokens) or gives them up. The first `suspects` of them were in the step and may
        have caused the death. Called when the job's processes have exited: no further tokens follow."""

    def on_state(self, state: JobState) -> None: ...

    def on_report(self, report: RankHeartbeat) -> None: ...


class EngineJob(Protocol):
    """One replica: one tensor-parallel group with one scheduler."""

    @property
    def state(self) -> JobState: ...

    async def start(self, listener: JobListener) -> None:
        """Launches and returns at once; progress comes through `on_state`."""

    def submit(self, request: Request) -> None:
        """Queues a request; one of an id that was cancelled needs a later epoch. Raises RuntimeError unless the phase
        is `ready`."""

    def cancel(self, request_id: str) -> None:
        """Ends all choices with finish "cancelled"; unknown ids are ignored (it may just have ended)."""

    def stop_choice(self, request_id: str, choice: int, n_tokens: int) -> None:
        """A stop string matched: the choice ends with finish "stop" after n_tokens; what it overran is cut."""

    async def drain(self, timeout_s: float) -> bool:
        """Takes no new requests, waits for those in flight; True if all ended in time."""

    async def close(self) -> None:
        """Ends every process of the job on every node. Returns when they are gone."""

    async def bundle(self) -> dict[str, Any]:
        """Diagnostics for `laddertron bundle`: per rank the last collectives and stacks, as JSON values."""
