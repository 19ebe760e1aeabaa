"""The values of catalogue.py's series for a scrape. Thread-safe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from ..job import RankHeartbeat
from .catalogue import CATALOGUE, FINISH_REASONS, STORED_KINDS, Series
from .histogram import Buckets
from .ranks import Histograms, Labels, RankFigures, Values
from .vllm_names import made, summed, vllm_series

RANK_UP_S = 3.0
_KINDS: dict[str, type[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class Collector:
    """One daemon's series, by name. `clock`: unix seconds. `vllm`: the model's name and the KV cache's block size, if
    the series are also exported with vLLM's names."""

    def __init__(
        self,
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.time,
        vllm: tuple[str, int] | None = None,
    ) -> None:
        self.registry, self._clock, self._vllm = registry, clock, vllm
        self._lock = threading.Lock()
        self._values: dict[str, dict[Labels, float]] = {name: {} for name in CATALOGUE}
        self.histograms: dict[str, dict[Labels, Buckets]] = {name: {} for name in CATALOGUE}
        self._ranks = RankFigures()
        self._begin_at_zero()
        registry.register(self)

    def _begin_at_zero(self) -> None:
        """Initialises series whose labels are known to 0, so that a rate includes their first event."""
        for name in ("quarantined_requests_total", "nonfinite_logits_total", "store_errors_total"):
            self.set(name, 0.0)
        for kind in STORED_KINDS:
            self.set("store_damaged_total", 0.0, kind)
        for reason in FINISH_REASONS:
            self.set("request_success_total", 0.0, reason)
        for series in CATALOGUE.values():
            if series.kind == "histogram" and not series.labels:
                self.histograms[series.name][()] = Buckets(series.bounds)

    def add_heartbeat(self, replica: int, report: RankHeartbeat) -> None:
        with self._lock:
            self._ranks.add(replica, report)

    def take_down(self, replica: int) -> None:
        """Removes the gauges of a replica whose processes have exited or are exiting."""
        with self._lock:
            self._ranks.down(replica)

    def is_full(self, name: str, limit: int, *labels: str) -> bool:
        """Whether a histogram lacks these labels and has `limit` sets of labels already."""
        return labels not in self.histograms[name] and len(self.histograms[name]) >= limit

    def set(self, name: str, value: float, *labels: str) -> None:
        with self._lock:
            self._values[name][_fitting(name, labels)] = float(value)

    def put(self, name: str, value: float | None, *labels: str) -> None:
        """Sets a series; None removes it: it has no value now."""
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
            key, histograms = _fitting(name, labels), self.histograms[name]
            if key not in histograms:
                histograms[key] = Buckets(CATALOGUE[name].bounds)
            histograms[key].observe(value, times)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Renders the body of a scrape and its content type, for the header `accept`."""
        # prometheus_client's OpenMetrics encoder writes a sample's `vllm:` as `vllm_`; its text encoder does not
        encoder, content_type = choose_encoder("" if self._vllm else accept)
        return encoder(self.registry), content_type

    def figures(self) -> tuple[Values, Histograms]:
        with self._lock:
            values = {name: dict(series) for name, series in self._values.items()}
            histograms = {
                name: {labels: (list(b.counts), b.total) for labels, b in series.items()}
                for name, series in self.histograms.items()
            }
            self._ranks.fill(values, histograms, self._clock(), RANK_UP_S)
        return values, histograms

    def collect(self) -> Iterator[Metric]:
        values, histograms = self.figures()
        yield from _families(CATALOGUE, values, histograms)
        if self._vllm is not None:
            model, block_size = self._vllm
            yield from _families(vllm_series(), *summed(values, histograms, model))
            yield from made(values, model, block_size)


def _fitting(name: str, labels: Labels) -> Labels:
    label_names = CATALOGUE[name].labels
    if len(labels) != len(label_names):
        raise ValueError(f"{name} has labels {label_names}, not {labels}")
    return labels


def _families(catalogue: Mapping[str, Series], values: Values, histograms: Histograms) -> Iterator[Metric]:
    """Yields the series that have a value, in the catalogue's order; values and histograms by its keys."""
    for name, series in catalogue.items():
        family = _KINDS[series.kind](series.full_name, series.help, labels=series.labels)
        if isinstance(family, HistogramMetricFamily):
            for labels, (counts, total) in histograms[name].items():
                family.add_metric(labels, _cumulative(series, counts), total)
        else:
            for labels, value in values[name].items():
                family.add_metric(labels, value)
        if family.samples:
            yield family


def _cumulative(series: Series, counts: Sequence[int]) -> list[tuple[str, float]]:
    out, so_far = [], 0.0
    for bound, count in zip((*series.bounds, float("inf")), counts, strict=True):
        so_far += count
        out.append(("+Inf" if bound == float("inf") else repr(bound), so_far))
    return out
