"""Requests as their clients see them: from submission and token events to the latency histograms. One event loop calls
it; it keeps one small record for each request in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .metrics import Metrics
from .request import Request, TokensEvent
from .sequence import RequestTimes


@dataclass(slots=True)
class _Flight:
    request: Request
    arrival: float
    open: set[int]
    last: dict[int, float] = field(default_factory=dict)
    first_token: float | None = None
    tokens: int = 0
    cached: int = 0


class RequestWatch:
    """Between the job's callbacks and the Metrics: call `submitted` for every submission, `on_tokens` and `on_lost` as
    the JobListener is called. `on_end` is told every ended request too (for traces). `clock`: unix seconds."""

    def __init__(
        self,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
        on_end: Callable[[RequestTimes, str], None] | None = None,
    ) -> None:
        self._metrics, self._clock, self._on_end = metrics, clock, on_end
        self._flights: dict[str, _Flight] = {}
        self._lost: dict[str, float] = {}

    def submitted(self, request: Request, arrival: float | None = None) -> None:
        """`arrival`: when it came to the daemon, unix seconds (default: now). A request that was lost and is submitted
        again keeps its arrival."""
        came = self._lost.pop(request.request_id, arrival)
        came = self._clock() if came is None else came
        self._flights[request.request_id] = _Flight(request, came, set(range(request.params.n)))

    def on_tokens(self, events: Iterable[TokensEvent]) -> None:
        now = self._clock()
        for event in events:
            flight = self._flights.get(event.request_id)
            if flight is None or event.choice not in flight.open:
                continue
            if event.tokens:
                flight.tokens += len(event.tokens)
                if flight.first_token is None:
                    flight.first_token = now
                if event.choice in flight.last:
                    self._metrics.observe_gap(now - flight.last[event.choice], len(event.tokens))
                flight.last[event.choice] = now
            flight.cached = event.cached_tokens
            if event.finish is not None:
                self._metrics.observe_finish(event.finish)
                flight.open.discard(event.choice)
                if not flight.open:
                    self._end(flight, now, event.finish)

    def on_lost(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if (flight := self._flights.pop(request_id, None)) is not None:
                self._lost[request_id] = flight.arrival

    def forget(self, request_id: str) -> None:
        """It will neither end nor be submitted again."""
        self._flights.pop(request_id, None)
        self._lost.pop(request_id, None)

    def _end(self, flight: _Flight, now: float, finish: str) -> None:
        request = flight.request
        del self._flights[request.request_id]
        times = RequestTimes(
            request.request_id,
            request.priority,
            flight.arrival,
            None,
            flight.first_token,
            now,
            len(request.prompt),
            flight.tokens,
            flight.cached,
        )
        self._metrics.observe_request(times)
        if self._on_end is not None:
            self._on_end(times, finish)
