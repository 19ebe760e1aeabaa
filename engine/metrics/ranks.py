"""What ranks' heartbeats say, as series: counters go on over relaunches. Data in, data out; engine/metrics/collector.py
holds the lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..job import MetricRow, RankHeartbeat
from .catalogue import REPORTED
from .window import Windows

MAX_ROWS = 4096
"""Of one rank; more come from no rank of this version."""

Labels = tuple[str, ...]
Values = dict[str, dict[Labels, float]]
Histograms = dict[str, dict[Labels, tuple[list[int], float]]]
_Rows = dict[tuple[str, Labels], MetricRow]


@dataclass(slots=True)
class _Rank:
    """`base` is what processes before this one counted, `rows` what it reports itself."""

    node: str
    pid: int
    heard: float = 0.0
    base: _Rows = field(default_factory=dict)
    rows: _Rows = field(default_factory=dict)


class RankFigures:
    """`add` what is reported, `fill` a scrape."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[int, int], _Rank] = {}
        self._windows = Windows()

    def add(self, replica: int, report: RankHeartbeat) -> None:
        rank = self._ranks.setdefault((replica, report.rank), _Rank(report.node, report.pid))
        if rank.pid != report.pid or rank.node != report.node:
            for key, row in rank.rows.items():
                # counts of ports and GPUs are the host's and go on by themselves
                if REPORTED[row.series].kind != "gauge" and not row.series.startswith(("infiniband_", "gpu_")):
                    rank.base[key] = _sum(row, rank.base.get(key))
            rank.pid, rank.node = report.pid, report.node
        rank.heard = report.received_at
        rank.rows = {(row.series, row.labels): row for row in report.rows[:MAX_ROWS] if _fits(row)}
        self._windows.add(replica, replace(report, rows=tuple(rank.rows.values())))

    def down(self, replica: int) -> None:
        """The replica's processes are gone or going: what they measured holds no more."""
        for (of, _), rank in self._ranks.items():
            if of == replica:
                rank.heard = 0.0
                rank.rows = {key: row for key, row in rank.rows.items() if REPORTED[row.series].kind != "gauge"}
        self._windows.forget(replica)

    def fill(self, values: Values, histograms: Histograms, now: float, up_s: float) -> None:
        for (replica, number), rank in self._ranks.items():
            me = {"replica": str(replica), "rank": str(number), "node": rank.node}
            where = tuple(me.values())
            values["rank_up"][where] = float(now - rank.heard < up_s)
            if rank.heard:
                values["rank_heartbeat_timestamp_seconds"][where] = rank.heard
            for key, row in {**rank.base, **rank.rows}.items():
                series = REPORTED[row.series]
                labels = (*(me[name] for name in series.labels if name in me), *row.labels)
                if series.kind == "gauge":
                    values[series.name][labels] = row.value
                    continue
                total = _sum(row, rank.base.get(key) if key in rank.rows else None)
                if series.kind == "histogram":
                    histograms[series.name][labels] = list(total.counts), total.value
                else:
                    values[series.name][labels] = total.value
        for (replica, number), score in self._windows.straggler_scores(now).items():
            values["straggler_score"][str(replica), str(number), self._ranks[replica, number].node] = score
        for (replica, op, link), ratio in self._windows.overlap_ratios(now).items():
            values["overlap_ratio"][str(replica), op, link] = ratio


def _fits(row: MetricRow) -> bool:
    """Whether the row is of a series that ranks report, with its labels, its buckets, and a value that can be."""
    series = REPORTED.get(row.series)
    if series is None:
        return False
    wanted = sum(name not in ("replica", "rank", "node") for name in series.labels)
    buckets = len(series.bounds) + 1 if series.kind == "histogram" else 0
    return len(row.labels) == wanted and len(row.counts) == buckets and (series.kind == "gauge" or row.value >= 0)


def _sum(row: MetricRow, base: MetricRow | None) -> MetricRow:
    if base is None:
        return row
    counts = tuple(map(sum, zip(row.counts, base.counts, strict=True)))
    return row._replace(value=row.value + base.value, counts=counts)
