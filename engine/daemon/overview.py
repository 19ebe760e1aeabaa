"""Overview of the engine: replicas, ranks and links as data, from a scrape's figures and an hour of samples. Pure."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..job import JobState
from ..metrics.observer import Figures

SAMPLE_SECONDS, RECENT_SECONDS, HOUR_SECONDS = 5.0, 10.0, 3600.0
HISTORY_POINTS = 120


@dataclass(frozen=True, slots=True)
class Sample:
    """Counters at the time `at` (monotonic seconds): generated tokens by replica; by link class the hidden seconds,
    exposed seconds and message bytes of collectives, summed over the ranks."""

    at: float
    tokens: Mapping[str, float]
    links: Mapping[str, tuple[float, float, float]]
    restarts: float = 0.0


def take_sample(figures: Figures, at: float) -> Sample:
    links: dict[str, list[float]] = {}
    for (*_, link, exposure), seconds in figures.get("collective_seconds_total", {}).items():
        links.setdefault(link, [0.0, 0.0, 0.0])[exposure == "exposed"] += seconds
    for (*_, link), size in figures.get("collective_bytes_total", {}).items():
        links.setdefault(link, [0.0, 0.0, 0.0])[2] += size
    restarts = sum(figures.get("engine_restarts_total", {}).values())
    tokens = {replica: count for (replica,), count in figures.get("generation_tokens_total", {}).items()}
    return Sample(at, tokens, {link: (a, b, c) for link, (a, b, c) in links.items()}, restarts)


def engine_view(
    figures: Figures, states: Sequence[JobState], newest: Sample, recent: Sample, oldest: Sample, now: float
) -> dict[str, Any]:
    """The overview as JSON. `newest` was made from `figures`, `recent` shortly before; `now`: unix seconds."""
    seconds = newest.at - recent.at

    def per_second(grown: float) -> float:
        return max(0.0, grown) / seconds if seconds > 0 else 0.0

    def one(name: str, replica: str) -> float:
        return figures.get(name, {}).get((replica,), 0.0)

    replicas: list[dict[str, Any]] = []
    for index, state in enumerate(states):
        of = str(index)
        replicas.append(
            {
                "phase": state.phase,
                "reason": state.reason,
                "restarts": state.restarts,
                "standby": state.standby or "none",
                "tokens_per_second": per_second(newest.tokens.get(of, 0.0) - recent.tokens.get(of, 0.0)),
                "running": int(one("num_requests_running", of)),
                "waiting": int(one("num_requests_waiting", of)),
                "kv_use": one("kv_cache_usage_ratio", of),
                "ranks": _ranks(figures, of, now),
            }
        )
    drafted = sum(figures.get("spec_decode_num_draft_tokens_total", {}).values())
    accepted = sum(figures.get("spec_decode_num_accepted_tokens_total", {}).values())
    return {
        "tokens_per_second": sum(replica["tokens_per_second"] for replica in replicas),
        "running": sum(replica["running"] for replica in replicas),
        "waiting": sum(replica["waiting"] for replica in replicas),
        "kv_use": max((replica["kv_use"] for replica in replicas), default=0.0),
        "acceptance": accepted / drafted if drafted else None,
        "replicas": replicas,
        "links": [
            {
                "link": link,
                "bytes_per_second": per_second(total - recent.links.get(link, (0.0, 0.0, 0.0))[2]),
                "hidden": _hidden(link, newest, recent),
                "hidden_hour": _hidden(link, newest, oldest),
            }
            for link, (_, _, total) in sorted(newest.links.items())
        ],
    }


def _ranks(figures: Figures, replica: str, now: float) -> list[dict[str, Any]]:
    memory = {**figures.get("rank_resident_memory_bytes", {}), **figures.get("gpu_memory_used_bytes", {})}
    rows = []
    for labels, up in figures.get("rank_up", {}).items():
        if labels[0] == replica:
            stepped = figures.get("last_step_timestamp_seconds", {}).get(labels)
            rows.append(
                {
                    "rank": int(labels[1]),
                    "node": labels[2],
                    "up": up == 1.0,
                    "memory": memory.get(labels),
                    "step_age": max(0.0, now - stepped) if stepped else None,
                }
            )
    return sorted(rows, key=lambda rank: rank["rank"])


def _hidden(link: str, newest: Sample, before: Sample) -> float | None:
    """The hidden share of the seconds of collectives between two samples; None if there were none."""
    hidden, exposed = (
        now - then for now, then in zip(newest.links[link][:2], before.links.get(link, (0.0, 0.0))[:2], strict=True)
    )
    return hidden / (hidden + exposed) if hidden + exposed > 0 else None


def history(samples: Sequence[Sample], now: float) -> list[dict[str, Any]]:
    """At most HISTORY_POINTS intervals of an hour's samples: their end in seconds ago, tokens per second, and whether a
    launch failed within them."""
    step = max(1, -(-len(samples) // HISTORY_POINTS))
    points = []
    for before, after in pairwise(samples[::step]):
        grown = max(0.0, sum(after.tokens.values()) - sum(before.tokens.values()))
        rate = grown / (after.at - before.at) if after.at > before.at else 0.0
        restarted = after.restarts > before.restarts
        points.append({"ago": now - after.at, "tokens_per_second": rate, "restarted": restarted})
    return points


class Samples:
    """An hour of samples, one every SAMPLE_SECONDS."""

    def __init__(self) -> None:
        self._kept: deque[Sample] = deque(maxlen=int(HOUR_SECONDS / SAMPLE_SECONDS))
        self.looked = time.monotonic()
        """Time of the last call of `take` by the daemon's loop, in monotonic seconds."""

    def take(self, figures: Callable[[], Figures], at: float) -> None:
        """Adds a sample if the last one is at least SAMPLE_SECONDS old."""
        self.looked = at
        if not self._kept or at - self._kept[-1].at >= SAMPLE_SECONDS:
            self._kept.append(take_sample(figures(), at))

    def history(self, at: float) -> list[dict[str, Any]]:
        return history(list(self._kept), at)

    def before(self, at: float) -> tuple[Sample, Sample]:
        """Returns the newest sample that is at least RECENT_SECONDS old (else the oldest), and the oldest."""
        oldest = self._kept[0] if self._kept else Sample(at, {}, {})
        return next((sample for sample in reversed(self._kept) if at - sample.at >= RECENT_SECONDS), oldest), oldest
