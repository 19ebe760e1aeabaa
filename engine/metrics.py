"""Every series of metrics_catalogue.py: what the daemon and its ranks tell, collected for a scrape.

The registry is passed in; nothing is global. The daemon calls `observe_*` and mounts `render`; any thread may. What
ranks count goes on over a relaunch; a rank that is silent for RANK_UP_S is down. Knows no HTTP.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from .daemon.job import JobState, RankReport
from .histogram import Buckets
from .metrics_catalogue import (
    BATCH_STATUSES,
    CATALOGUE,
    FAILURE_KINDS,
    FINISH_REASONS,
    PHASES,
    Series,
)
from .metrics_ranks import RankFigures

RANK_UP_S = 3.0
ETA_WINDOW_S = 300.0
MAX_ROUTES = 128
_DOWN = ("starting", "restarting", "stopped", "failed")

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BatchView:
    """Lines of the batches under way, as of now. `oldest` is when the oldest batch with lines left was created,
    `first_expiry` when the first expires, in unix seconds, None where there is none. `windows`: each batch's lines left
    and when it expires."""

    left: int = 0
    completed: int = 0
    failed: int = 0
    oldest: float | None = None
    first_expiry: float | None = None
    windows: tuple[tuple[int, float], ...] = ()


def overdue_s(windows: Sequence[tuple[int, float]], rate: float, now: float) -> float | None:
    """The most by which a batch would miss its window, seconds; negative: all are kept. Batches share `rate`, lines a
    second, evenly: while one of n lines runs, each other one gets up to n lines too. None without lines or rate."""
    if rate <= 0:
        return None
    worst, before = None, 0
    ordered = sorted(window for window in windows if window[0] > 0)
    for index, (left, expiry) in enumerate(ordered):
        ahead = before + left * (len(ordered) - index)
        late = now + ahead / rate - expiry
        worst, before = late if worst is None else max(worst, late), before + left
    return worst


class Metrics:
    """One daemon's figures. `clock`: unix seconds."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.time) -> None:
        self._registry, self._clock = registry, clock
        self._lock = threading.Lock()
        self._values: dict[str, dict[Labels, float]] = {name: {} for name in CATALOGUE}
        self._histograms: dict[str, dict[Labels, Buckets]] = {name: {} for name in CATALOGUE}
        self._ranks = RankFigures()
        self._answered: deque[tuple[float, int]] = deque()
        self._done = 0
        self._begin_at_zero()
        registry.register(self)

    def _begin_at_zero(self) -> None:
        """Series whose labels are known are there from the start: a rate sees their first event."""
        for name in ("quarantined_requests_total", "nonfinite_logits_total", "store_errors_total"):
            self.set(name, 0.0)
        for reason in FINISH_REASONS:
            self.set("request_success_total", 0.0, reason)
        for series in CATALOGUE.values():
            if series.kind == "histogram" and not series.labels:
                self._histograms[series.name][()] = Buckets(series.bounds)

    # what the daemon tells

    def describe_build(self, version: str, model: str, wiring: str) -> None:
        """Once, at the start."""
        self.set("build_info", 1.0, version, model, wiring)

    def observe_report(self, report: RankReport, replica: int = 0) -> None:
        """A rank's heartbeat."""
        with self._lock:
            self._ranks.add(replica, report)

    def observe_state(self, state: JobState, replica: int = 0) -> None:
        with self._lock:
            ready, phases = self._values["engine_ready"], self._values["engine_phase"]
            ready[str(replica),] = float(state.phase == "ready")
            for phase in PHASES:
                phases[str(replica), phase] = float(phase == state.phase)
            for name in ("rank_desync_total", "engine_restarts_total"):
                for labels in [(str(replica),)] if name == "rank_desync_total" else _by_kind(replica):
                    self._values[name].setdefault(labels, 0.0)
            if state.phase in _DOWN:
                self._ranks.down(replica)

    def observe_failure(self, kind: str, reason: str, replica: int = 0) -> None:
        """A launch that ended badly: `kind` and `reason` of its JobFailure."""
        self.add("engine_restarts_total", 1.0, str(replica), kind if kind in FAILURE_KINDS else "other")
        if "DesyncError" in reason:
            self.add("rank_desync_total", 1.0, str(replica))

    def observe_quarantine(self, requests: int = 1) -> None:
        """Requests that kept ending the engine and were given up."""
        self.add("quarantined_requests_total", requests)

    def observe_request(
        self, first_token_s: float | None, whole_s: float, prompt_tokens: int, generation_tokens: int
    ) -> None:
        """An answered body: seconds from its arrival, as its client saw them."""
        if first_token_s is not None:
            self.observe("time_to_first_token_seconds", first_token_s)
        self.observe("e2e_request_latency_seconds", whole_s)
        self.observe("request_prompt_tokens", prompt_tokens)
        self.observe("request_generation_tokens", generation_tokens)

    def observe_finish(self, reason: str) -> None:
        """A choice ended."""
        self.add("request_success_total", 1.0, reason if reason in FINISH_REASONS else "error")
        if reason == "numerical_error":
            self.add("nonfinite_logits_total", 1.0)

    def observe_gap(self, seconds: float, tokens: int = 1) -> None:
        """`tokens` tokens of a choice came `seconds` after the ones before."""
        self.observe("inter_token_latency_seconds", seconds / max(1, tokens), times=tokens)

    def observe_queues(self, jobs: Mapping[str, int], waiting: int, in_flight: int) -> None:
        """Batches by status; bodies that wait for a replica, and those there or waiting."""
        for status in BATCH_STATUSES:
            self.set("batch_jobs", jobs.get(status, 0), status)
        self.set("dispatch_requests", waiting, "waiting")
        self.set("dispatch_requests", max(0, in_flight - waiting), "in_flight")

    def observe_batches(self, view: BatchView) -> None:
        """To be called about once a second: the rate of answers is seen here."""
        now = self._clock()
        for status in ("left", "completed", "failed"):
            self.set("batch_requests", getattr(view, status), status)
        done = view.completed + view.failed
        grown = max(0, done - self._done)  # a batch that ends takes its lines out of the count
        self._done = done
        self._answered.append((now, self._answered[-1][1] + grown if self._answered else 0))
        while len(self._answered) > 2 and self._answered[1][0] < now - ETA_WINDOW_S:
            self._answered.popleft()
        since, before = self._answered[0]
        rate = (self._answered[-1][1] - before) / (now - since) if now > since else 0.0
        self.put("batch_eta_seconds", 0.0 if not view.left else view.left / rate if rate > 0 else None)
        oldest = 0.0 if view.oldest is None else max(0.0, now - view.oldest)
        self.set("oldest_queued_request_age_seconds", oldest)
        self.put("batch_deadline_seconds", None if view.first_expiry is None else view.first_expiry - now)
        self.put("batch_overdue_seconds", overdue_s(view.windows, rate, now))

    def observe_commit(self, seconds: float) -> None:
        """A grouped commit to the store, fsync included."""
        self.observe("store_commit_seconds", seconds)

    def observe_store(self, writable: bool, failed_writes: int = 0) -> None:
        self.set("store_writable", float(writable))
        self.add("store_errors_total", failed_writes)

    def observe_disk(self, free_bytes: int, size_bytes: int) -> None:
        """Of the data folder's disk."""
        self.set("disk_free_bytes", free_bytes)
        self.set("disk_size_bytes", size_bytes)

    def observe_http(self, route: str, code: int, seconds: float) -> None:
        """`route`: the template, never the path that was asked."""
        known = self._histograms["http_request_duration_seconds"]
        if (route,) not in known and len(known) >= MAX_ROUTES:
            route = "other"
        self.add("http_requests_total", 1.0, route, str(code))
        self.observe("http_request_duration_seconds", seconds, route)

    # one series

    def set(self, name: str, value: float, *labels: str) -> None:
        with self._lock:
            self._values[name][_fitting(name, labels)] = float(value)

    def put(self, name: str, value: float | None, *labels: str) -> None:
        """None takes the series away: it has no value now."""
        if value is not None:
            self.set(name, value, *labels)
            return
        with self._lock:
            self._values[name].pop(labels, None)

    def add(self, name: str, value: float, *labels: str) -> None:
        with self._lock:
            values, key = self._values[name], _fitting(name, labels)
            values[key] = values.get(key, 0.0) + value

    def observe(self, name: str, value: float, *labels: str, times: int = 1) -> None:
        with self._lock:
            key, histograms = _fitting(name, labels), self._histograms[name]
            if key not in histograms:
                histograms[key] = Buckets(CATALOGUE[name].bounds)
            histograms[key].observe(value, times)

    # the scrape

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The body and its content type, for a scraper that accepts `accept`."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type

    def describe(self) -> Sequence[Metric]:
        return [_family(series) for series in CATALOGUE.values()]

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        with self._lock:
            now = self._clock()
            values = {name: dict(found) for name, found in self._values.items()}
            histograms = {
                name: {labels: (list(b.counts), b.total) for labels, b in found.items()}
                for name, found in self._histograms.items()
            }
            self._ranks.fill(values, histograms, now, RANK_UP_S)
        for series in CATALOGUE.values():
            family = _family(series)
            if isinstance(family, HistogramMetricFamily):
                for labels, (counts, total) in histograms[series.name].items():
                    family.add_metric(labels, _cumulative(series, counts), total)
            else:
                for labels, value in values[series.name].items():
                    family.add_metric(labels, value)
            if family.samples:
                yield family


def _by_kind(replica: int) -> list[Labels]:
    return [(str(replica), kind) for kind in FAILURE_KINDS]


def _fitting(name: str, labels: Labels) -> Labels:
    wanted = CATALOGUE[name].labels
    if len(labels) != len(wanted):
        raise ValueError(f"{name} has labels {wanted}, not {labels}")
    return labels


def _family(series: Series) -> CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily:
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    made: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
    made = kinds[series.kind](series.full_name, series.help, labels=series.labels)
    return made


def _cumulative(series: Series, counts: Sequence[int]) -> list[tuple[str, float]]:
    out, so_far = [], 0.0
    for bound, count in zip((*series.bounds, float("inf")), counts, strict=True):
        so_far += count
        out.append(("+Inf" if bound == float("inf") else repr(bound), so_far))
    return out
