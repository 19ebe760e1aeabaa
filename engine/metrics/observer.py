"""Converts the daemon's events to metrics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass

from prometheus_client import CollectorRegistry

from ..job import Culprit, JobState, RankHeartbeat
from ..request import TokensEvent
from .catalogue import BATCH_STATUSES, FAILURE_KINDS, PHASES
from .collector import Collector

Figures = Mapping[str, Mapping[tuple[str, ...], float]]
ETA_WINDOW_S = 300.0
MAX_ROUTES, MAX_KEYS = 128, 256
_MAX_TIMED = 1 << 16
_DOWN = ("starting", "restarting", "stopped", "failed")


@dataclass(frozen=True, slots=True)
class BatchView:
    """Lines of the open batches. `oldest`: creation of the oldest batch with lines left, `first_expiry`: the first
    expiry, unix seconds or None. `windows`: each batch's lines left and its expiry."""

    left: int = 0
    completed: int = 0
    failed: int = 0
    oldest: float | None = None
    first_expiry: float | None = None
    windows: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """Times of one answered body, in unix seconds; `first`: None without tokens. `finish`: the first choice's."""

    arrived: float
    submitted: float
    first: float | None
    ended: float
    prompt_tokens: int
    completion_tokens: int
    finish: str
    interactive: bool
    traceparent: str | None = None
    """The client's W3C header, unchanged."""
    chat: bool = False
    ignored_fields: int = 0
    unparsed_calls: int = 0


def overdue_s(windows: Sequence[tuple[int, float]], rate: float, now: float) -> float | None:
    """The largest predicted delay of a batch beyond its window, in seconds; negative if all finish in time. Batches
    share `rate` (lines a second) evenly: while a batch of n lines runs, each other one gets up to n lines, too. None
    without lines or rate."""
    if rate <= 0:
        return None
    worst, before = None, 0
    ordered = sorted(window for window in windows if window[0] > 0)
    for index, (left, expiry) in enumerate(ordered):
        ahead = before + left * (len(ordered) - index)
        late = now + ahead / rate - expiry
        worst, before = late if worst is None else max(worst, late), before + left
    return worst


class Observer:
    """Call methods on the event loop, `commit` and `store_error` on the store's thread, `render` on the probe
    listener's; all return at once. `registry=None`: counts, but `render` is empty. `on_request` is also called for
    every answered body (traces)."""

    def __init__(
        self,
        registry: CollectorRegistry | None = None,
        on_request: Callable[[AnswerTimes], None] = lambda times: None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        vllm: tuple[str, int] | None = None,
    ) -> None:
        self._exposed = registry is not None
        self.series = Collector(registry or CollectorRegistry(), clock, vllm)
        self._on_request, self._clock, self._monotonic = on_request, clock, monotonic
        self.last: dict[tuple[str, int], float] = {}
        self._answered: deque[tuple[float, int]] = deque()
        self._done = 0
        self._pids: dict[tuple[int, int], int] = {}
        self._failed: dict[int, tuple[str, ...]] = {}
        self._keys: set[str] = set()
        self._phases: dict[int, tuple[str, float]] = {}

    def tokens(self, replica: int, events: list[TokensEvent], counted: int) -> None:
        """Counts a replica's events; `counted`: the number of their tokens in the answers' usage."""
        now, last = self._monotonic(), self.last
        self.series.add("generation_tokens_total", counted, str(replica))
        for event in events:
            key = (event.request_id, event.choice)
            if event.tokens:
                if (before := last.get(key)) is not None:
                    n = len(event.tokens)
                    self.series.observe("inter_token_latency_seconds", (now - before) / n, times=n)
                if len(last) < _MAX_TIMED:
                    last[key] = now
            if event.finish is not None:
                last.pop(key, None)
                self.series.add("request_success_total", 1.0, event.finish)
                if event.finish == "numerical_error":
                    self.series.add("nonfinite_logits_total", 1.0)

    def report(self, replica: int, report: RankHeartbeat) -> None:
        self._pids[replica, report.rank] = report.pid
        self.series.add_heartbeat(replica, report)

    def pids(self) -> list[int]:
        """The processes of the ranks that have sent a heartbeat, in order of replica and rank."""
        return [pid for _, pid in sorted(self._pids.items())]

    def state(self, replica: int, state: JobState) -> None:
        of = str(replica)
        self.series.set("engine_ready", float(state.phase == "ready"), of)
        now, (before, since) = self._clock(), self._phases.get(replica, ("", 0.0))
        if state.phase != before:
            self._phases[replica] = state.phase, now
            self.series.set("engine_phase_start_timestamp_seconds", now, of)
            if not before or (before == "loading" and state.phase == "ready"):
                self.series.set("engine_load_seconds", now - since if before else 0.0, of)
        self.series.set("engine_standby", float(state.standby == "ready"), of)
        if state.limits is not None:
            self.series.set("kv_cache_tokens", state.limits.kv_tokens, of)
        for phase in PHASES:
            self.series.set("engine_phase", float(phase == state.phase), of, phase)
        for name in ("rank_desync_total", "generation_tokens_total"):
            self.series.add(name, 0.0, of)
        for kind in FAILURE_KINDS:
            self.series.add("engine_restarts_total", 0.0, of, kind)
        if state.phase in _DOWN:
            self.series.take_down(replica)
        if state.phase in ("restarting", "failed", "stopped"):
            self.last.clear()  # whose choices are lost is not known here: the next gap of the others is not counted

    def failure(self, replica: int, kind: str, reason: str, culprit: Culprit) -> None:
        """Counts a failed launch: its kind (a closed set), the reason, and the culprit."""
        kind = kind if kind in FAILURE_KINDS else "other"
        self.series.add("engine_restarts_total", 1.0, str(replica), kind)
        labels = (str(replica), kind, *("" if value is None else str(value) for value in astuple(culprit)))
        if (before := self._failed.get(replica)) is not None:
            self.series.put("engine_last_failure_timestamp_seconds", None, *before)
        self._failed[replica] = labels
        self.series.set("engine_last_failure_timestamp_seconds", self._clock(), *labels)
        if "DesyncError" in reason:
            self.series.add("rank_desync_total", 1.0, str(replica))

    def reloaded(self, outcome: str) -> None:
        """Counts a reload of the configuration by outcome: done, refused or failed."""
        self.series.add("config_reloads_total", 1.0, outcome)

    def request(self, times: AnswerTimes) -> None:
        if times.first is not None:
            self.series.observe("time_to_first_token_seconds", times.first - times.arrived)
        self.series.observe("e2e_request_latency_seconds", times.ended - times.arrived)
        self.series.observe("request_prompt_tokens", times.prompt_tokens)
        self.series.observe("request_generation_tokens", times.completion_tokens)
        self.series.add("ignored_fields_total", times.ignored_fields)
        self.series.add("unparsed_tool_calls_total", times.unparsed_calls)
        self._on_request(times)

    def used(self, owner: str, requests: int, prompt: int, completion: int) -> None:
        """Counts computed requests or lines of a key; `owner`: the key's id, "" without keys."""
        key = self._key(owner)
        self.series.add("key_requests_total", requests, key)
        self.series.add("key_tokens_total", prompt, key, "prompt")
        self.series.add("key_tokens_total", completion, key, "completion")

    def limited(self, owner: str, limit: str) -> None:
        self.series.add("key_limited_total", 1.0, self._key(owner), limit)

    def _key(self, owner: str) -> str:
        """The label of a key: its id, or "other" for more than MAX_KEYS keys."""
        if owner not in self._keys and len(self._keys) >= MAX_KEYS:
            return "other"
        self._keys.add(owner)
        return owner or "none"

    def quarantined(self) -> None:
        self.series.add("quarantined_requests_total", 1.0)

    def clock(self, jump: float) -> None:
        """Sets the seconds by which the wall clock has jumped, 0 while it is trusted; called about once a second."""
        self.series.set("clock_jump_seconds", jump)

    def commit(self, seconds: float) -> None:
        self.series.observe("store_commit_seconds", seconds)

    def store_error(self) -> None:
        """Counts a failed commit or failed write of a file."""
        self.series.add("store_errors_total", 1.0)

    def evicted(self, count: int) -> None:
        """Counts stored responses that were deleted before their time; may be called on the store's thread."""
        self.series.add("responses_evicted_total", count)

    def damage(self, kind: str) -> None:
        """Counts something stored that did not match its checksum: a row, a result or a file."""
        self.series.add("store_damaged_total", 1.0, kind)

    def http(self, route: str, code: int, seconds: float) -> None:
        """Counts a response; `route`: the template, never the requested path."""
        if self.series.is_full("http_request_duration_seconds", MAX_ROUTES, route):
            route = "other"
        self.series.add("http_requests_total", 1.0, route, str(code))
        self.series.observe("http_request_duration_seconds", seconds, route)

    def store(self, refusal: str | None, room: tuple[int, int] | str) -> None:
        """Sets the reason why the store refuses writes, or None, and the free bytes and size of its disk, if they are
        known; called about once a second, and when the reason changes."""
        self.series.set("store_writable", float(refusal is None))
        if not isinstance(room, str):
            self.series.set("disk_free_bytes", room[0])
            self.series.set("disk_size_bytes", room[1])

    def queues(self, batches: Mapping[str, int], waiting: int, in_flight: int) -> None:
        """Sets the numbers of batches by status and of bodies in the dispatcher; called about once a second."""
        for status in BATCH_STATUSES:
            self.series.set("batch_jobs", batches.get(status, 0), status)
        self.series.set("dispatch_requests", waiting, "waiting")
        self.series.set("dispatch_requests", max(0, in_flight - waiting), "in_flight")

    def batches(self, view: BatchView) -> None:
        """Sets the progress of the running batches; called about once a second."""
        now, series = self._clock(), self.series
        for status in ("left", "completed", "failed"):
            series.set("batch_requests", getattr(view, status), status)
        rate = self._rate(now, view.completed + view.failed)
        series.put("batch_eta_seconds", 0.0 if not view.left else view.left / rate if rate > 0 else None)
        oldest = 0.0 if view.oldest is None else max(0.0, now - view.oldest)
        series.set("oldest_queued_request_age_seconds", oldest)
        series.put("batch_deadline_seconds", None if view.first_expiry is None else view.first_expiry - now)
        series.put("batch_overdue_seconds", overdue_s(view.windows, rate, now))

    def _rate(self, now: float, done: int) -> float:
        """Answered lines a second, over the last ETA_WINDOW_S."""
        grown = max(0, done - self._done)  # a batch that ends takes its lines out of the count
        self._done = done
        self._answered.append((now, self._answered[-1][1] + grown if self._answered else 0))
        while len(self._answered) > 2 and self._answered[1][0] < now - ETA_WINDOW_S:
            self._answered.popleft()
        since, before = self._answered[0]
        return (self._answered[-1][1] - before) / (now - since) if now > since else 0.0

    def figures(self) -> Figures:
        """Current counters and gauges, by name in engine/metrics/catalogue.py and values of labels."""
        return self.series.figures()[0]

    def render(self, accept: str) -> tuple[bytes, str]:
        if not self._exposed:
            return b"", "text/plain; version=0.0.4; charset=utf-8"
        return self.series.render(accept)
