"""What ranks' heartbeats say, as series: flat names become labels, counters go on over relaunches. Data in, data out;
its one caller, engine/metrics.py, holds the lock.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from .daemon.job import RankReport
from .histogram import RANK_HISTOGRAMS
from .metrics_catalogue import CATALOGUE
from .metrics_window import Windows

MAX_NAMES = 4096
"""Of one rank; more come from no rank of this version."""

Labels = tuple[str, ...]
Values = dict[str, dict[Labels, float]]
Histograms = dict[str, dict[Labels, tuple[list[int], float]]]

_OF_REPLICA = {
    "oldest_queued_request_age_seconds": "engine_oldest_waiting_age_seconds",
    **{
        name: name
        for name, series in CATALOGUE.items()
        if series.labels == ("replica",) and not name.startswith(("engine_", "rank_")) and name not in RANK_HISTOGRAMS
    },
}
"""Rank 0's figures of the schedule: heartbeat name -> series."""
_OF_RANK = {
    "resident_memory_bytes": "rank_resident_memory_bytes",
    "run_delay_seconds_total": "rank_run_delay_seconds_total",
    "last_step_timestamp_seconds": "last_step_timestamp_seconds",
    **{name: name for name in CATALOGUE if name.startswith(("gpu_", "infiniband_"))},
}
_COLLECTIVES = {
    "collective_hidden_seconds": ("collective_seconds_total", ("hidden",)),
    "collective_exposed_seconds": ("collective_seconds_total", ("exposed",)),
    "layer_hidden_seconds": ("layer_collective_seconds_total", ("hidden",)),
    "layer_exposed_seconds": ("layer_collective_seconds_total", ("exposed",)),
    "collective_bytes": ("collective_bytes_total", ()),
    "collectives": ("collectives_total", ()),
}


@dataclass(slots=True)
class _Rank:
    """Counters are `base`, what processes before this one counted, and `counters`, what it counts itself."""

    node: str
    pid: int
    heard: float = 0.0
    base: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)


class RankFigures:
    """`add` what is reported, `fill` a scrape."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[int, int], _Rank] = {}
        self._windows = Windows()

    def add(self, replica: int, report: RankReport) -> None:
        rank = self._ranks.setdefault((replica, report.rank), _Rank(report.node, report.pid))
        if rank.pid != report.pid or rank.node != report.node:
            for name, value in rank.counters.items():
                if not name.startswith(("infiniband_", "gpu_")):  # those are the host's and go on by themselves
                    rank.base[name] += value
            rank.pid, rank.node = report.pid, report.node
        rank.heard = report.received_at
        rank.counters = dict(list(report.counters.items())[:MAX_NAMES])
        rank.gauges = dict(list(report.gauges.items())[:MAX_NAMES])
        self._windows.add(replica, report)

    def down(self, replica: int) -> None:
        """The replica's processes are gone or going: what they measured holds no more."""
        for (of, _), rank in self._ranks.items():
            if of == replica:
                rank.heard, rank.gauges = 0.0, {}
        self._windows.forget(replica)

    def fill(self, values: Values, histograms: Histograms, now: float, up_s: float) -> None:
        for (replica, number), rank in self._ranks.items():
            me = (str(replica), str(number), rank.node)
            values["rank_up"][me] = float(now - rank.heard < up_s)
            if rank.heard:
                values["rank_heartbeat_timestamp_seconds"][me] = rank.heard
            for name, value in rank.gauges.items():
                _place(name, value, me, values)
            counts: dict[str, dict[int, int]] = {}
            for name in rank.counters.keys() | rank.base.keys():
                value = max(0.0, rank.counters.get(name, 0.0) + rank.base.get(name, 0.0))
                series, _, index = name.partition("_bucket/")
                if index and series in RANK_HISTOGRAMS:
                    if index.isascii() and index.isdecimal():
                        counts.setdefault(series, {})[int(index)] = max(0, int(value))
                else:
                    _place(name, value, me, values)
            for series, found in counts.items():
                total = rank.counters.get(f"{series}_sum", 0.0) + rank.base.get(f"{series}_sum", 0.0)
                labels = me if len(CATALOGUE[series].labels) == 3 else me[:1]
                all_counts = [found.get(i, 0) for i in range(len(RANK_HISTOGRAMS[series]) + 1)]
                histograms[series][labels] = all_counts, total
        for key, score in self._windows.straggler_scores(now).items():
            values["straggler_score"][str(key[0]), str(key[1]), self._ranks[key].node] = score
        for (replica, op, link), ratio in self._windows.overlap_ratios(now).items():
            values["overlap_ratio"][str(replica), op, link] = ratio


def _place(name: str, value: float, me: Labels, values: Values) -> None:
    """A heartbeat's figure under its series; names that are none are left out."""
    head, _, rest = name.partition("/")
    labels = tuple(rest.split("/")) if rest else ()
    if (series := _OF_REPLICA.get(name)) is not None:
        values[series][me[:1]] = value
    elif head in _COLLECTIVES and rest:
        series, exposure = _COLLECTIVES[head]
        of, _, link = rest.partition("/")  # the operation, or the layer
        values[series][(*me, of, link, *exposure)] = value
    elif (series := _OF_RANK.get(head)) is not None:
        wanted = CATALOGUE[series].labels
        full = (me[2], *labels) if wanted[0] == "node" else (*me, *labels)
        if len(full) == len(wanted):
            values[series][full] = value
