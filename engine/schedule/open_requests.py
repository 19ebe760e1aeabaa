"""The requests that are open: what comes in, what is reported of each choice, how each ends.

The scheduler's own; no torch, data in and data out.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

from ..request import FinishReason, Request, TokenLogprob, TokensEvent
from .kv_manager import Residency
from .limits import SchedulerLimits, check_request
from .prefix_hash import DigestChain
from .sequence import RequestGroup, RequestTimes, Sequence
from .waiting_queue import WaitingQueues

_RECORDS = 4096


class OpenRequests:
    """`spawn` brings a request's later choices to be. `now`: of the scheduler's last call."""

    def __init__(
        self,
        limits: SchedulerLimits,
        waiting: WaitingQueues,
        residency: Residency,
        spawn: Callable[[RequestGroup], None],
    ) -> None:
        self.now = 0.0
        self.groups: dict[str, RequestGroup] = {}
        self.events: list[TokensEvent] = []
        self._limits, self._waiting, self._residency, self._spawn = limits, waiting, residency, spawn
        self._deadlines: list[tuple[float, int, str]] = []
        self._ended: deque[RequestTimes] = deque(maxlen=_RECORDS)
        self._arrivals = 0

    def add(self, request: Request, now: float) -> None:
        """As `Scheduler.add`."""
        check_request(request, self._limits)
        if request.request_id in self.groups:
            raise ValueError(f"request {request.request_id} is running: ids are unique, choose another")
        group = RequestGroup(request, self._arrivals, now)
        self._arrivals += 1
        self.groups[request.request_id] = group
        self._waiting.join(group)
        for choice in range(len(request.emitted) or 1):
            chain = DigestChain(request.salt, self._limits.block_size) if self._limits.enable_prefix_caching else None
            sequence = Sequence(group, choice, chain, self._limits.max_model_len)
            group.sequences.append(sequence)
            if not request.emitted:
                self._waiting.push(sequence)
            elif sequence.state == "waiting":
                self._waiting.push_back(sequence)  # it goes on as after a preemption
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, group.number, request.request_id))

    def take_events(self) -> list[TokensEvent]:
        events, self.events = self.events, []
        return events

    def take_ended(self) -> list[RequestTimes]:
        ended = list(self._ended)
        self._ended.clear()
        return ended

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] | None = None,
        stop_token: int | None = None,
        start: int | None = None,
        message: str | None = None,
    ) -> None:
        """The choice's last event; slot and blocks are given back. `start` defaults to the tokens already sent."""
        group = sequence.group
        if sequence.state == "running":
            self._residency.running.remove(sequence)
            self._residency.vacate(sequence)
        elif sequence.state == "waiting":
            self._waiting.remove(sequence)
        sequence.state = "ended"
        if sequence.fresh:
            sequence.fresh = False
            group.unforked -= 1
        first = sequence.outputs - len(tokens) if start is None else start
        self.tell(sequence, reason, tokens, first, logprobs, stop_token, message)
        group.open -= 1
        if group.open == 0:
            self._close(group)

    def tell(
        self,
        sequence: Sequence,
        finish: FinishReason | None,
        tokens: tuple[int, ...],
        start: int,
        logprobs: tuple[TokenLogprob, ...] | None = None,
        stop_token: int | None = None,
        message: str | None = None,
    ) -> None:
        request = sequence.group.request
        prompt: Seq[TokenLogprob | None] | None = sequence.prompt_logprobs if sequence.prompt_scored else None
        if prompt is not None:
            sequence.prompt_logprobs = None
        self.events.append(
            TokensEvent(
                request.request_id,
                sequence.choice,
                start,
                tokens,
                finish,
                logprobs,
                None if prompt is None else tuple(prompt),
                stop_token,
                message,
                sequence.group.cached_tokens,
                request.epoch,
            )
        )

    def end_group(self, group: RequestGroup, reason: FinishReason, message: str | None = None) -> None:
        """Every choice that has not ended does, those that never came to be included."""
        self._spawn(group)
        for sequence in group.sequences:
            if sequence.state != "ended":
                self.finish(sequence, reason, message=message)

    def _close(self, group: RequestGroup) -> None:
        self._residency.unhold(group)
        self._waiting.leave(group)
        del self.groups[group.request.request_id]
        self._ended.append(group.times(self.now))

    def expire(self, now: float) -> None:
        """Those whose deadline is over end with "timeout"."""
        self.now = now
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            _, number, request_id = heapq.heappop(deadlines)
            group = self.groups.get(request_id)
            if group is not None and group.number == number:
                self.end_group(group, "timeout")
        if len(deadlines) > 2 * len(self.groups) + 64:
            numbers = {group.number for group in self.groups.values()}
            self._deadlines = [entry for entry in deadlines if entry[1] in numbers]
            heapq.heapify(self._deadlines)
