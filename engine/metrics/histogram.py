"""A histogram cheap enough for every step. One thread observes; another may read, and misses at most the last value."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from ..job import MetricRow

STEP_SECONDS = tuple(1e-4 * 2.0**k for k in range(18))
"""100 us to 13 s, doubling: a decode step of a small model to a long prefill."""
EXPERT_ROWS = (0.0, *(float(1 << k) for k in range(13)))
STEP_TOKENS = (1.0, *(float(8 << k) for k in range(12)))
REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip

RANK_HISTOGRAMS: Mapping[str, tuple[float, ...]] = {
    "step_duration_seconds": STEP_SECONDS,
    "iteration_tokens": STEP_TOKENS,
    "expert_rows": EXPERT_ROWS,
    "request_queue_time_seconds": REQUEST_SECONDS,
    "request_prefill_time_seconds": REQUEST_SECONDS,
    "request_decode_time_seconds": REQUEST_SECONDS,
}
"""Bounds of the histograms that ranks send over the control channel, by series: both ends must know them."""


class Buckets:
    """`counts[i]` is the number of values above `bounds[i - 1]` and at most `bounds[i]`; the last entry counts values
    above all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def to_rows(self, series: str) -> tuple[MetricRow, ...]:
        """One row, or none if no value was observed."""
        return (MetricRow(series, (), self.total, tuple(self.counts)),) if any(self.counts) else ()
