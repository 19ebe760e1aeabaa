"""Several replicas as one EngineJob, for `laddertron run`: each request to the least loaded, one failure ends all.

The daemon keeps its replicas apart (a lost one does not stop the others) and does not use this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..job import EngineJob, JobListener, JobState, RankHeartbeat
from ..request import Request, TokensEvent


class _Member:
    """Listens to one replica."""

    def __init__(self, group: JobGroup, index: int) -> None:
        self._group, self._index = group, index

    def on_tokens(self, events: list[TokensEvent]) -> None:
        self._group.took(events)

    def on_lost(self, request_ids: list[str], reason: str, suspects: int) -> None:
        self._group.listener.on_lost(request_ids, f"replica {self._index}: {reason}", suspects)

    def on_state(self, state: JobState) -> None:
        self._group.moved()

    def on_report(self, report: RankHeartbeat) -> None:
        rank = self._index * self._group.ranks_each + report.rank
        self._group.listener.on_report(replace(report, rank=rank))


class JobGroup:
    """See EngineJob for the methods. `ranks_each`: ranks of a replica, to number the ranks of all in one row."""

    def __init__(self, jobs: Sequence[EngineJob], ranks_each: int) -> None:
        self._jobs, self.ranks_each = tuple(jobs), ranks_each
        self._where: dict[str, tuple[int, int]] = {}  # request id -> (replica, choices still open)
        self._load = [0] * len(jobs)
        self._asked = 0  # replicas that were told to start
        self._told: JobState | None = None
        self.listener: JobListener

    @property
    def state(self) -> JobState:
        """The least of the replicas' states: ready once all are, failed as soon as one is."""
        # the first replica speaks up before the others are told to start: they are not "stopped" for that
        states = [job.state if i < self._asked else JobState("starting") for i, job in enumerate(self._jobs)]
        order = ("failed", "stopped", "starting", "loading", "restarting", "suspect", "draining", "ready")
        index, state = min(enumerate(states), key=lambda pair: order.index(pair[1].phase))
        return replace(state, reason=f"replica {index}: {state.reason}") if state.reason else state

    async def start(self, listener: JobListener) -> None:
        self.listener = listener
        for index, job in enumerate(self._jobs):
            self._asked = index + 1
            await job.start(_Member(self, index))

    def submit(self, request: Request) -> None:
        index = self._load.index(min(self._load))
        self._jobs[index].submit(request)
        self._where[request.request_id] = (index, request.params.n)
        self._load[index] += request.params.n

    def cancel(self, request_id: str) -> None:
        if request_id in self._where:
            self._jobs[self._where[request_id][0]].cancel(request_id)

    def stop_choice(self, request_id: str, choice: int, n_tokens: int) -> None:
        if request_id in self._where:
            self._jobs[self._where[request_id][0]].stop_choice(request_id, choice, n_tokens)

    async def drain(self, timeout_s: float) -> bool:
        return all(await asyncio.gather(*(job.drain(timeout_s) for job in self._jobs)))

    async def close(self) -> None:
        await asyncio.gather(*(job.close() for job in self._jobs))

    async def bundle(self) -> dict[str, Any]:
        return {"replicas": [await job.bundle() for job in self._jobs]}

    def took(self, events: list[TokensEvent]) -> None:
        """Tokens of a replica: its load shrinks with every choice that ends."""
        for event in events:
            if event.finish is not None and event.request_id in self._where:
                index, still = self._where.pop(event.request_id)
                self._load[index] -= 1
                if still > 1:
                    self._where[event.request_id] = (index, still - 1)
        self.listener.on_tokens(events)

    def moved(self) -> None:
        """A replica's state changed; the group's may have."""
        if self._told != (state := self.state):
            self._told = state
            self.listener.on_state(state)
