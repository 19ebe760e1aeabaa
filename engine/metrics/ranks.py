"""Ranks' heartbeats as series: counters continue over relaunches; straggler scores and overlap ratios are rates over
the last seconds. Not thread-safe.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...topology.comm.ledger import overlap_ratio
from ..job import MetricRow, RankHeartbeat
from .catalogue import REPORTED

WINDOW_S = 15.0


@dataclass(frozen=True, slots=True)
class _Mark:
    at: float
    pid: int
    steps: int
    seconds: float
    delay: float
    rows: float | None  # None: the rank's stage has no experts
    collectives: Mapping[tuple[str, ...], float]
    """Seconds by operation, link and exposure."""


class Windows:
    """The last WINDOW_S of every rank's heartbeats."""

    def __init__(self) -> None:
        self._marks: defaultdict[tuple[int, int], deque[_Mark]] = defaultdict(deque)

    def add(self, replica: int, report: RankHeartbeat) -> None:
        """Adds a heartbeat; the window of a restarted rank begins anew."""
        marks = self._marks[replica, report.rank]
        figures = {row.series: row for row in report.rows if not row.labels}
        durations = figures.get("step_duration_seconds", MetricRow(""))
        delay = figures.get("rank_run_delay_seconds_total", MetricRow("")).value
        computed = figures.get("rank_expert_rows_total")
        rows = None if computed is None else computed.value
        collectives = {row.labels: row.value for row in report.rows if row.series == "collective_seconds_total"}
        if marks and marks[-1].pid != report.pid:
            marks.clear()
        steps = sum(durations.counts)
        marks.append(_Mark(report.received_at, report.pid, steps, durations.value, delay, rows, collectives))
        while len(marks) > 2 and marks[1].at < report.received_at - WINDOW_S:
            marks.popleft()

    def forget(self, replica: int) -> None:
        for key in [key for key in self._marks if key[0] == replica]:
            del self._marks[key]

    def straggler_scores(self, now: float) -> dict[tuple[int, int], float]:
        """A rank's own time per step over the mean of the replica's other ranks. Own time is all but waits for others;
        the part of a wait in which this rank had no processor (run delay) is its own too."""
        own: defaultdict[int, dict[int, float]] = defaultdict(dict)
        for (replica, rank), (first, last) in self._spans(now).items():
            steps = last.steps - first.steps
            waited = sum(_grown(first, last, labels) for labels in last.collectives if labels[-1] == "exposed")
            if steps > 0:
                computed = max(0.0, last.seconds - first.seconds - waited)
                own[replica][rank] = (computed + min(waited, last.delay - first.delay)) / steps
        scores = {}
        for replica, ranks in own.items():
            for rank, mine in ranks.items():
                others = (sum(ranks.values()) - mine) / (len(ranks) - 1) if len(ranks) > 1 else 0.0
                if others > 0:
                    scores[replica, rank] = mine / others
        return scores

    def expert_imbalances(self, now: float) -> dict[int, float]:
        """The largest number of rows of a rank's experts over the mean, by replica with experts and rows."""
        rows: defaultdict[int, list[float]] = defaultdict(list)
        for (replica, _), (first, last) in self._spans(now).items():
            if last.rows is not None:
                rows[replica].append(last.rows - (first.rows or 0.0))
        return {replica: max(grown) * len(grown) / sum(grown) for replica, grown in rows.items() if sum(grown) > 0}

    def overlap_ratios(self, now: float) -> dict[tuple[int, str, str], float]:
        """The hidden share of seconds in flight by replica, op and link, if anything was in flight."""
        sums: defaultdict[tuple[int, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for (replica, _), (first, last) in self._spans(now).items():
            for labels in last.collectives:
                op, link, exposure = labels
                sums[replica, op, link][exposure == "exposed"] += _grown(first, last, labels)
        ratios = {key: overlap_ratio(hidden, exposed) for key, (hidden, exposed) in sums.items()}
        return {key: ratio for key, ratio in ratios.items() if ratio is not None}

    def _spans(self, now: float) -> dict[tuple[int, int], tuple[_Mark, _Mark]]:
        """The first and last heartbeat in the window, of each rank with a recent one."""
        return {
            key: (marks[0], marks[-1])
            for key, marks in self._marks.items()
            if len(marks) > 1 and marks[-1].at > now - WINDOW_S
        }


def _grown(first: _Mark, last: _Mark, labels: tuple[str, ...]) -> float:
    return last.collectives[labels] - first.collectives.get(labels, 0.0)


MAX_ROWS = 4096
"""Rows of one rank's heartbeat; this version sends fewer."""

Labels = tuple[str, ...]
Values = dict[str, dict[Labels, float]]
Histograms = dict[str, dict[Labels, tuple[list[int], float]]]
_Rows = dict[tuple[str, Labels], MetricRow]


@dataclass(slots=True)
class _Rank:
    """`base`: counts of earlier processes of this rank; `rows`: the reports of the current one."""

    node: str
    pid: int
    heard: float = 0.0
    base: _Rows = field(default_factory=dict)
    rows: _Rows = field(default_factory=dict)


class RankFigures:
    """Call `add` for each heartbeat and `fill` for each scrape."""

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
        """Removes the gauges of a replica whose processes have exited or are exiting."""
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
        for replica, imbalance in self._windows.expert_imbalances(now).items():
            values["expert_imbalance"][str(replica),] = imbalance
        for (replica, op, link), ratio in self._windows.overlap_ratios(now).items():
            values["overlap_ratio"][str(replica), op, link] = ratio


def _fits(row: MetricRow) -> bool:
    """Whether the row belongs to a series of ranks, with valid labels, buckets and value."""
    series = REPORTED.get(row.series)
    if series is None:
        return False
    expected = sum(name not in ("replica", "rank", "node") for name in series.labels)
    buckets = len(series.bounds) + 1 if series.kind == "histogram" else 0
    return len(row.labels) == expected and len(row.counts) == buckets and (series.kind == "gauge" or row.value >= 0)


def _sum(row: MetricRow, base: MetricRow | None) -> MetricRow:
    if base is None:
        return row
    counts = tuple(map(sum, zip(row.counts, base.counts, strict=True)))
    return row._replace(value=row.value + base.value, counts=counts)
