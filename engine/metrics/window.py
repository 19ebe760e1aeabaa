"""Rates over the last seconds of heartbeats: who takes longest a step for itself, how much of the travel time was
hidden. Pure; times are arguments, unix seconds.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from ...topology.comm.ledger import overlap_ratio
from ..job import MetricRow, RankHeartbeat

WINDOW_S = 15.0


@dataclass(frozen=True, slots=True)
class _Mark:
    at: float
    pid: int
    steps: int
    seconds: float
    delay: float
    collectives: Mapping[tuple[str, ...], float]
    """Seconds by operation, link and exposure."""


class Windows:
    """The last WINDOW_S of every rank's heartbeats."""

    def __init__(self) -> None:
        self._marks: defaultdict[tuple[int, int], deque[_Mark]] = defaultdict(deque)

    def add(self, replica: int, report: RankHeartbeat) -> None:
        """A rank that was started anew begins anew."""
        marks = self._marks[replica, report.rank]
        figures = {row.series: row for row in report.rows if not row.labels}
        durations = figures.get("step_duration_seconds", MetricRow(""))
        delay = figures.get("rank_run_delay_seconds_total", MetricRow("")).value
        collectives = {row.labels: row.value for row in report.rows if row.series == "collective_seconds_total"}
        if marks and marks[-1].pid != report.pid:
            marks.clear()
        steps = sum(durations.counts)
        marks.append(_Mark(report.received_at, report.pid, steps, durations.value, delay, collectives))
        while len(marks) > 2 and marks[1].at < report.received_at - WINDOW_S:
            marks.popleft()

    def forget(self, replica: int) -> None:
        for key in [key for key in self._marks if key[0] == replica]:
            del self._marks[key]

    def straggler_scores(self, now: float) -> dict[tuple[int, int], float]:
        """Own time a step over the mean of the other ranks' of the replica; ranks without steps are left out. Own is
        what is not waiting for others; a wait that went on because this rank had no processor to take the result with
        is its own too, and the kernel alone can tell the two apart."""
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

    def overlap_ratios(self, now: float) -> dict[tuple[int, str, str], float]:
        """By replica, op and link: hidden over hidden and exposed, where anything travelled."""
        sums: defaultdict[tuple[int, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for (replica, _), (first, last) in self._spans(now).items():
            for labels in last.collectives:
                op, link, exposure = labels
                sums[replica, op, link][exposure == "exposed"] += _grown(first, last, labels)
        ratios = {key: overlap_ratio(hidden, exposed) for key, (hidden, exposed) in sums.items()}
        return {key: ratio for key, ratio in ratios.items() if ratio is not None}

    def _spans(self, now: float) -> dict[tuple[int, int], tuple[_Mark, _Mark]]:
        """First and last heartbeat of each rank that was heard lately."""
        return {
            key: (marks[0], marks[-1])
            for key, marks in self._marks.items()
            if len(marks) > 1 and marks[-1].at > now - WINDOW_S
        }


def _grown(first: _Mark, last: _Mark, labels: tuple[str, ...]) -> float:
    return last.collectives[labels] - first.collectives.get(labels, 0.0)
