"""Progress and outcome of a run as data, made by engine/run/run.py. Knows no terminal."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

from ..job import RankHeartbeat

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Progress of a run. `total` counts the file's lines that are not blank."""

    phase: str
    total: int
    skipped: int = 0
    ok: int = 0
    failed: int = 0
    in_flight: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def done(self) -> int:
        return self.skipped + self.ok + self.failed


@dataclass(frozen=True, slots=True)
class LayerTime:
    """All-reduces of one kind of layer ("ladder attention") over one link class, in seconds, means over the ranks."""

    layer: str
    link: str
    hidden_seconds: float
    exposed_seconds: float


@dataclass(frozen=True, slots=True)
class FailureCause:
    """Lines that failed with one error code: how many, and the message of the first."""

    count: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class RankKind:
    """Ranks with the same device, tier and threads. `cpu_tier`: see topology/hardware/cpu_tier.py."""

    ranks: int
    device: str
    cpu_tier: str
    threads: str


@dataclass(frozen=True, slots=True)
class Summary:
    """The outcome of a run. `requests`: lines of the file; `skipped`: finished earlier; `changed`: redone because their
    input changed; `lost`: in flight when it ended early, for `reason` (`stopped`: on request). Seconds of communication
    are means over the ranks, None if no rank reported; `layers`: the all-reduces' share. `causes`: of failed lines, the
    most frequent first."""

    requests: int
    ok: int
    failed: int
    skipped: int
    prompt_tokens: int
    tokens: int
    seconds: float
    hidden_seconds: float | None = None
    exposed_seconds: float | None = None
    layers: tuple[LayerTime, ...] = ()
    causes: tuple[FailureCause, ...] = ()
    computed: tuple[RankKind, ...] = ()
    drafted: int = 0
    accepted: int = 0
    reason: str | None = None
    lost: int = 0
    stopped: bool = False
    changed: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class Communication:
    """The ranks' heartbeats: each rank's last one before the first request, and its newest."""

    def __init__(self) -> None:
        self._first: dict[tuple[int, int], RankHeartbeat] = {}  # by replica and rank
        self._last: dict[tuple[int, int], RankHeartbeat] = {}

    @property
    def reported(self) -> bool:
        return bool(self._last)

    def add(self, replica: int, report: RankHeartbeat, before: bool) -> None:
        """Adds a heartbeat; `before`: no request has been submitted yet."""
        self._last[replica, report.rank] = report
        if before:
            self._first[replica, report.rank] = report

    def newer_than(self, moment: float) -> bool:
        """Whether every rank has reported since (unix seconds)."""
        return all(report.received_at >= moment for report in self._last.values())

    def seconds(self) -> tuple[float | None, float | None]:
        """(hidden, exposed) of all-reduces, means over the ranks that count them."""
        means = self._means("collective_seconds_total", lambda op, _, exposure: exposure if op == "all_reduce" else "")
        return (means.get("hidden", 0.0), means.get("exposed", 0.0)) if self._last else (None, None)

    def layers(self) -> tuple[LayerTime, ...]:
        """Seconds by kind of layer and link class, the longest in flight first."""
        means = self._means("layer_collective_seconds_total", lambda *labels: labels)
        places = {(layer, link) for layer, link, _ in means}
        times = [LayerTime(*at, means.get((*at, "hidden"), 0.0), means.get((*at, "exposed"), 0.0)) for at in places]
        return tuple(sorted(times, key=lambda t: (-t.hidden_seconds - t.exposed_seconds, t.layer, t.link)))

    def drafts(self) -> tuple[int, int]:
        """The numbers of (verified, accepted) drafts."""
        names = ("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total")
        drafted, accepted = (int(sum(self._means(name, lambda *_: "").values())) for name in names)
        return drafted, accepted

    def computed(self) -> tuple[RankKind, ...]:
        ranks_by_kind = Counter(
            row.labels for report in self._last.values() for row in report.rows if row.series == "rank_info"
        )
        return tuple(RankKind(ranks, *labels) for labels, ranks in ranks_by_kind.most_common())

    def _means(self, series: str, key: Callable[[str, str, str], K]) -> dict[K, float]:
        """Increase of a series since before the first request, mean over the ranks, by `key` of a row's labels."""
        grown: defaultdict[K, defaultdict[tuple[int, int], float]] = defaultdict(lambda: defaultdict(float))
        for sign, reports in ((1, self._last), (-1, self._first)):
            for rank, report in reports.items():
                for row in report.rows:
                    if row.series == series:
                        grown[key(*row.labels)][rank] += sign * row.value
        return {name: sum(ranks.values()) / len(ranks) for name, ranks in grown.items()}
