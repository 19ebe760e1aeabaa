"""What a rank says of itself: the figures of its heartbeat and of a dump, read from plain attributes by another thread.

Names are flat, `series/label/…`, and become the series of engine/metrics.py on the other side.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..engine.engine import Progress
from ..engine.histogram import REQUEST_SECONDS, Buckets
from ..engine.scheduler import RequestTimes
from ..topology.groups import Communicator
from ..topology.ledger import Entry
from ..topology.sysfs import Sysfs
from .messages import Beat
from .rank_health import HealthWatch, run_delay_s


class Latencies:
    """Seconds that ended requests of this replica queued, were prefilled and decoded."""

    def __init__(self) -> None:
        self._queue, self._prefill, self._decode = (Buckets(REQUEST_SECONDS) for _ in range(3))

    def add(self, ended: Iterable[RequestTimes]) -> None:
        for times in ended:
            if times.admitted is not None:
                self._queue.observe(times.admitted - times.arrival)
                if times.first_token is not None:
                    self._prefill.observe(times.first_token - times.admitted)
                    self._decode.observe(times.finished - times.first_token)

    def to_counters(self) -> dict[str, float]:
        return (
            self._queue.to_counters("request_queue_time_seconds")
            | self._prefill.to_counters("request_prefill_time_seconds")
            | self._decode.to_counters("request_decode_time_seconds")
        )


def collective_counters(entries: Iterable[Entry]) -> dict[str, float]:
    """`collective_{hidden,exposed}_seconds/OP/LINK`, `collective_bytes/…` and `collectives/…`, the all-reduces' two
    sums, and `layer_{hidden,exposed}_seconds/LAYER/LINK` of those whose layer is known. Under an emulated link the
    collective that does its arithmetic is left out: its time is part of the link's."""
    listed = list(entries)
    emulated = {entry.op for entry in listed if entry.link.startswith("emulated")}
    found: defaultdict[str, float] = defaultdict(float, collective_hidden_seconds=0.0, collective_exposed_seconds=0.0)
    for entry in listed:
        if entry.op in emulated and not entry.link.startswith("emulated"):
            continue
        where = f"{entry.op}/{entry.link}"
        found[f"collective_hidden_seconds/{where}"] += entry.hidden_s
        found[f"collective_exposed_seconds/{where}"] += entry.waited_s
        found[f"collective_bytes/{where}"] += entry.bytes
        found[f"collectives/{where}"] += entry.count
        if entry.op == "all_reduce":
            found["collective_hidden_seconds"] += entry.hidden_s
            found["collective_exposed_seconds"] += entry.waited_s
        if entry.layer:
            found[f"layer_hidden_seconds/{entry.layer}/{entry.link}"] += entry.hidden_s
            found[f"layer_exposed_seconds/{entry.layer}/{entry.link}"] += entry.waited_s
    return dict(found)


@dataclass(slots=True)
class Status:
    """What the heartbeat reports, in plain attributes that another thread reads at any moment."""

    progress: Progress = field(default_factory=Progress)
    communicator: Communicator | None = None
    scheduler: dict[str, float] = field(default_factory=dict)
    latencies: Latencies = field(default_factory=Latencies)
    health: HealthWatch | None = None

    def beat(self) -> Beat:
        p, communicator = self.progress, self.communicator
        since, tokens = p.busy_since, p.step_tokens
        if since is None:
            since, tokens = p.turn_since, 0
        counters: dict[str, float] = {}
        gauges = {"last_step_timestamp_seconds": p.finished_at} if p.step else {}
        collectives, waiting = 0, ""
        if communicator is not None:
            collectives, waiting = communicator.ledger.place()
            counters |= collective_counters(communicator.ledger.entries())
        for name, value in (*self.scheduler.items(), *(self.health.figures.items() if self.health else ())):
            (counters if "_total" in name else gauges)[name] = value
        counters |= {"steps_total": float(p.step), "step_seconds_total": p.total_seconds}
        if (delay := run_delay_s(Sysfs())) is not None:
            counters["run_delay_seconds_total"] = delay
        counters |= p.durations.to_counters("step_duration_seconds")
        if self.scheduler:
            counters |= p.sizes.to_counters("iteration_tokens") | self.latencies.to_counters()
        return Beat(
            step=p.step,
            busy_s=0.0 if since is None else max(0.0, time.monotonic() - since),
            step_tokens=tokens,
            last_tokens=p.last_tokens,
            last_s=p.last_seconds,
            collective=collectives,
            waiting=waiting,
            counters=counters,
            gauges=gauges,
        )

    def dump(self) -> dict[str, Any]:
        """For the bundle: the last collectives, oldest first."""
        communicator, p = self.communicator, self.progress
        out: dict[str, Any] = {"step": p.step, "step_tokens": p.step_tokens, "collectives": []}
        if communicator is None:
            return out
        names = ("seq", "op", "strategy", "layer", "bytes", "start_s", "in_flight_s", "waited_s")
        out["started"], out["waiting"] = communicator.ledger.place()
        out["collectives"] = [{name: getattr(r, name) for name in names} for r in communicator.ledger.history()]
        return out
