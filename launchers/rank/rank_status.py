"""A rank's heartbeat rows (engine/metrics/catalogue.py) and dumps, which another thread makes from plain attributes."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ...engine.job import MetricRow
from ...engine.metrics.histogram import EXPERT_ROWS, REQUEST_SECONDS, Buckets
from ...engine.schedule.sequence import RequestTimes
from ...engine.step.engine import StepProgress
from ...topology.comm.groups import Communicator
from ...topology.comm.ledger import Entry, without_carriers
from ...topology.hardware.health import Figures, gpu_figures, port_counters
from ...topology.hardware.nvml import load_nvml
from ...topology.hardware.sysfs import Sysfs, resident_bytes
from ..control.messages import Beat

if TYPE_CHECKING:
    from torch import Tensor

    from ...models.config.model_config import ModelConfig
    from ...models.llama import LlamaModel


class Latencies:
    """Histograms of the seconds that this replica's ended requests spent in queue, prefill and decode."""

    def __init__(self) -> None:
        self._queue, self._prefill, self._decode = (Buckets(REQUEST_SECONDS) for _ in range(3))

    def add(self, ended: Iterable[RequestTimes]) -> None:
        for times in ended:
            if times.admitted is not None:
                self._queue.observe(times.admitted - times.arrival)
                if times.first_token is not None:
                    self._prefill.observe(times.first_token - times.admitted)
                    self._decode.observe(times.finished - times.first_token)

    def to_rows(self) -> tuple[MetricRow, ...]:
        return (
            *self._queue.to_rows("request_queue_time_seconds"),
            *self._prefill.to_rows("request_prefill_time_seconds"),
            *self._decode.to_rows("request_decode_time_seconds"),
        )


class ExpertRows:
    """Counts rows of each expert in one layer, by step. `own`: this rank's experts; `leads`: whether this rank reports
    for all experts."""

    def __init__(self, own: range, leads: bool) -> None:
        self._own, self._leads, self._each, self._computed = own, leads, Buckets(EXPERT_ROWS), 0

    def add(self, rows: Tensor) -> None:
        """Adds one step; rows [E]: rows of each expert."""
        counts = rows.numpy()
        for bucket, count in enumerate(np.bincount(np.searchsorted(EXPERT_ROWS, counts)).tolist()):
            self._each.counts[bucket] += count
        self._each.total += float(counts.sum())
        self._computed += int(counts[self._own.start : self._own.stop : self._own.step].sum())

    def to_rows(self) -> tuple[MetricRow, ...]:
        mine = MetricRow("rank_expert_rows_total", (), float(self._computed))
        return (mine, *self._each.to_rows("expert_rows")) if self._leads else (mine,)


def collective_rows(entries: Iterable[Entry]) -> Iterator[MetricRow]:
    """Yields seconds, bytes and counts of collectives, and seconds by layer of all-reduces whose layer is known."""
    totals: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
    for entry in without_carriers(entries):
        where = (entry.op, entry.link)
        totals["collective_bytes_total", where] += entry.bytes
        totals["collectives_total", where] += entry.count
        for exposure, seconds in (("hidden", entry.hidden_s), ("exposed", entry.waited_s)):
            totals["collective_seconds_total", (*where, exposure)] += seconds
            if entry.layer:
                totals["layer_collective_seconds_total", (entry.layer, entry.link, exposure)] += seconds
    return (MetricRow(series, labels, value) for (series, labels), value in totals.items())


@dataclass(slots=True)
class Status:
    """The heartbeat's values, in plain attributes that another thread may read at any time."""

    progress: StepProgress = field(default_factory=StepProgress)
    communicator: Communicator | None = None
    scheduler: dict[str, float] = field(default_factory=dict)
    accepted: tuple[int, ...] = ()
    """Accepted drafts by position."""
    latencies: Latencies = field(default_factory=Latencies)
    experts: ExpertRows | None = None
    health: HealthWatch | None = None
    computes_with: tuple[str, ...] = ()
    """Device, CPU tier and number of threads, once known."""

    def count_experts(self, model: LlamaModel, config: ModelConfig) -> None:
        """Starts counting rows by expert, if layers of this rank's stage have experts; `config`: of all stages. The
        first rank of the first stage with experts reports for all experts."""
        mine, stage = model.config.experts, model.shard.stage
        if config.experts is not None and mine is not None and any(mine.layers):
            first = config.experts.layers.index(True) - (0 if stage is None else stage.first_layer)
            self.experts = ExpertRows(model.shard.expert_ids, model.shard.rank == 0 and 0 <= first < len(mine.layers))
            model.on_rows = self.experts.add

    def beat(self) -> Beat:
        p, communicator = self.progress, self.communicator
        since, tokens = p.busy_since, p.step_tokens
        if since is None:
            since, tokens = p.turn_since, 0
        rows = [MetricRow("last_step_timestamp_seconds", (), p.finished_at)] if p.step else []
        if self.computes_with:
            rows.append(MetricRow("rank_info", self.computes_with, 1.0))
        collectives, waiting = 0, ""
        if communicator is not None:
            collectives, waiting = communicator.ledger.place()
            rows += collective_rows(communicator.ledger.entries())
        if self.health is not None:
            rows += (
                MetricRow(series, tuple(labels), value) for (series, *labels), value in self.health.figures.items()
            )
        if (delay := run_delay_s(Sysfs())) is not None:
            rows.append(MetricRow("rank_run_delay_seconds_total", (), delay))
        rows += p.durations.to_rows("step_duration_seconds")
        if self.experts is not None:
            rows += self.experts.to_rows()
        if self.scheduler:
            rows += (MetricRow(series, (), value) for series, value in self.scheduler.items())
            by_position = "spec_decode_num_accepted_tokens_per_pos_total"
            rows += (MetricRow(by_position, (str(at),), float(count)) for at, count in enumerate(self.accepted))
            rows += (*p.sizes.to_rows("iteration_tokens"), *self.latencies.to_rows())
        return Beat(
            step=p.step,
            busy_s=0.0 if since is None else max(0.0, time.monotonic() - since),
            step_tokens=tokens,
            last_tokens=p.last_tokens,
            last_s=p.last_seconds,
            collective=collectives,
            waiting=waiting,
            rows=tuple(rows),
        )

    def dump(self) -> dict[str, Any]:
        """The rank's part of a diagnostics bundle, with its last collectives, oldest first."""
        communicator, p = self.communicator, self.progress
        out: dict[str, Any] = {"step": p.step, "step_tokens": p.step_tokens, "collectives": []}
        if communicator is None:
            return out
        names = ("seq", "op", "strategy", "layer", "bytes", "start_s", "in_flight_s", "waited_s")
        out["started"], out["waiting"] = communicator.ledger.place()
        out["collectives"] = [{name: getattr(r, name) for name in names} for r in communicator.ledger.history()]
        return out


def loading_words(done: int, total: int, seconds: float) -> str:
    """`weights 12.3 of 50.6 GB, 2.10 GB/s, 0:18 left`; sizes in bytes. No estimate during the first second."""
    words = f"weights {done / 1e9:.1f} of {total / 1e9:.1f} GB"
    if total < 1e9:
        words = f"weights {done / 1e6:.1f} of {total / 1e6:.1f} MB"
    if seconds < 1 or not done:
        return words
    left = round(seconds * (total - done) / done)
    return f"{words}, {done / seconds / 1e9:.2f} GB/s, {left // 60}:{left % 60:02d} left"


PERIOD_S = 5.0


def run_delay_s(fs: Sysfs) -> float | None:
    """Seconds that this process's main thread waited for a CPU; None if the kernel does not count them."""
    words = fs.text("proc/self/schedstat").split()
    return int(words[1]) * 1e-9 if len(words) == 3 and words[1].isdecimal() else None


class HealthWatch:
    """Updates `figures` periodically by calling `look` on its own thread; an exception clears them until the next
    call."""

    def __init__(self, look: Callable[[], Figures], period_s: float = PERIOD_S) -> None:
        self._look, self._period_s = look, period_s
        self.figures: Figures = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stops the thread, without waiting for a call that hangs."""
        self._end.set()
        self._thread.join(0.2)

    def _run(self) -> None:
        while True:
            try:
                self.figures = self._look()
            except Exception:  # missing figures must not stop a rank
                self.figures = {}
            if self._end.wait(self._period_s):
                return


def make_look(fs: Sysfs, ports: bool, gpu_uuid: str | None, nvml: Any | None = None) -> Callable[[], Figures]:
    """Makes the function that reads a rank's figures: the host's ports if `ports`, memory, its GPU if it has one."""
    if gpu_uuid is not None:
        nvml = nvml or load_nvml()
    begun = False

    def look() -> Figures:
        nonlocal begun
        out = port_counters(fs) if ports else {}
        if resident := resident_bytes(fs):
            out["rank_resident_memory_bytes",] = float(resident)
        if nvml is not None and gpu_uuid is not None:
            if not begun:
                nvml.nvmlInit()
                begun = True
            out |= gpu_figures(nvml, gpu_uuid)
        return out

    return look
