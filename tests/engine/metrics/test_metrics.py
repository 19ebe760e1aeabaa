"""The series: what goes in comes out under its name, counters survive relaunches, labels stay in their sets, and a
scrape of many ranks is quick."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from laddertron.engine.daemon.store.records import batch_view
from laddertron.engine.daemon.store.schema import Rows, make_tables
from laddertron.engine.job import NOBODY, Culprit, JobPhase, JobState, MetricRow, RankHeartbeat
from laddertron.engine.metrics.catalogue import CATALOGUE, FAILURE_KINDS, LABELS, REPORTED
from laddertron.engine.metrics.histogram import STEP_SECONDS, Buckets
from laddertron.engine.metrics.observer import MAX_KEYS, MAX_ROUTES, AnswerTimes, BatchView, Observer, overdue_s
from laddertron.engine.request import ModelLimits, TokensEvent
from laddertron.launchers.cli.__main__ import group
from laddertron.launchers.cli.commands.monitoring import markdown
from laddertron.launchers.job.detect import FailureKind
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as parse_text
from waiting import cheapest

ROOT = Path(__file__).resolve().parents[3]
parse_openmetrics: Callable[[str], Iterator[Any]] = openmetrics_families
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> Observer:
    return Observer(CollectorRegistry(), clock=clock)


def value(metrics: Observer, name: str, **labels: str) -> float | None:
    return metrics.series.registry.get_sample_value(f"laddertron_{name}", labels)


def report(
    rank: int,
    at: float,
    steps: int = 10,
    seconds: float = 1.0,
    exposed: float = 0.1,
    pid: int = 7,
    more: Iterable[MetricRow] = (),
) -> RankHeartbeat:
    durations = Buckets(STEP_SECONDS)
    durations.observe(seconds / max(1, steps), steps)
    where = ("all_reduce", "net")
    rows = [
        MetricRow("collective_seconds_total", (*where, "hidden"), 3 * exposed),
        MetricRow("collective_seconds_total", (*where, "exposed"), exposed),
        MetricRow("layer_collective_seconds_total", ("ladder mlp", "net", "hidden"), 2 * exposed),
        MetricRow("layer_collective_seconds_total", ("ladder mlp", "net", "exposed"), exposed / 2),
        MetricRow("collective_bytes_total", where, 1000.0 * steps),
        MetricRow("collectives_total", where, 4.0 * steps),
        *durations.to_rows("step_duration_seconds"),
        *more,
    ]
    if rank == 0:
        rows += [MetricRow("num_requests_running", (), 3.0), MetricRow("engine_oldest_waiting_age_seconds", (), 2.0)]
        rows += [MetricRow("unknown_gauge", (), 1.0), MetricRow("store_writable", (), 7.0)]
    return RankHeartbeat(rank, f"n{rank // 8}", pid + rank, steps, at, tuple(rows))


def test_a_report_becomes_series(metrics: Observer, clock: Clock) -> None:
    """Rank 0's schedule goes by replica, what every rank has by rank; the exposures are apart; a name that is no
    series of a rank is left out."""
    metrics.report(1, report(0, clock.now))
    metrics.report(1, report(8, clock.now))
    assert value(metrics, "num_requests_running", replica="1") == 3.0
    assert value(metrics, "engine_oldest_waiting_age_seconds", replica="1") == 2.0
    where = {"replica": "1", "rank": "8", "node": "n1", "op": "all_reduce", "link": "net"}
    assert value(metrics, "collective_seconds_total", **where, exposure="hidden") == pytest.approx(0.3)
    assert value(metrics, "collective_seconds_total", **where, exposure="exposed") == pytest.approx(0.1)
    assert value(metrics, "collective_bytes_total", **where) == 10_000.0
    me = {"replica": "1", "rank": "8", "node": "n1"}
    layer = {**me, "layer": "ladder mlp", "link": "net"}
    assert value(metrics, "layer_collective_seconds_total", **layer, exposure="hidden") == pytest.approx(0.2)
    assert value(metrics, "layer_collective_seconds_total", **layer, exposure="exposed") == pytest.approx(0.05)
    assert value(metrics, "rank_up", **me) == 1.0
    assert value(metrics, "step_duration_seconds_count", **me) == 10.0
    assert value(metrics, "step_duration_seconds_sum", **me) == pytest.approx(1.0)
    assert value(metrics, "step_duration_seconds_bucket", **me, le="0.1024") == 10.0
    assert value(metrics, "step_duration_seconds_bucket", **me, le="0.0512") == 0.0
    assert b"unknown_gauge" not in metrics.render("")[0]
    assert value(metrics, "store_writable") is None


def test_a_silent_rank_is_down_and_a_relaunch_counts_on(metrics: Observer, clock: Clock) -> None:
    """Heartbeats end: down after 3 s. A new process starts at zero and moves to another node: its counters go on where
    the old one's stood, under the new node alone."""
    first = {"replica": "0", "rank": "0", "node": "n0"}
    metrics.report(0, report(0, clock.now, steps=100))
    clock.now += 4.0
    assert value(metrics, "rank_up", **first) == 0.0
    metrics.report(0, replace(report(0, clock.now, steps=5, pid=99), node="n5"))
    moved = first | {"node": "n5"}
    assert value(metrics, "rank_up", **moved) == 1.0
    assert value(metrics, "rank_up", **first) is None
    assert value(metrics, "step_duration_seconds_count", **moved) == 105.0
    assert value(metrics, "collective_bytes_total", **moved, op="all_reduce", link="net") == 105_000.0


def test_a_replica_that_ends_takes_its_ranks_down_at_once(metrics: Observer, clock: Clock) -> None:
    for replica in (0, 1):
        metrics.state(replica, JobState("ready"))
        metrics.report(replica, report(0, clock.now))
    metrics.state(1, JobState("restarting", "rank 1 is gone"))
    up = [value(metrics, "rank_up", replica=str(r), rank="0", node="n0") for r in (0, 1)]
    assert up == [1.0, 0.0]
    assert value(metrics, "engine_ready", replica="0") == 1.0
    assert value(metrics, "engine_phase", replica="1", phase="restarting") == 1.0
    assert value(metrics, "num_requests_running", replica="1") is None


def test_how_long_a_load_took_and_when_a_phase_began(metrics: Observer, clock: Clock) -> None:
    """What a phase says of itself meanwhile begins no new one; a load that failed is none."""

    def seen(at: float, phase: JobPhase, reason: str = "") -> tuple[float | None, float | None]:
        clock.now = at
        metrics.state(0, JobState(phase, reason))
        names = ("engine_phase_start_timestamp_seconds", "engine_load_seconds")
        began, took = (value(metrics, name, replica="0") for name in names)
        return began, took

    assert seen(100.0, "starting") == (100.0, 0.0)
    assert seen(110.0, "loading") == (110.0, 0.0)
    assert seen(120.0, "loading", "half of it") == (110.0, 0.0)
    assert seen(150.0, "ready") == (150.0, 40.0)
    assert seen(160.0, "restarting") == (160.0, 40.0)
    assert seen(170.0, "loading") == (170.0, 40.0)
    assert seen(175.0, "restarting") == (175.0, 40.0)
    assert seen(180.0, "loading") == (180.0, 40.0)
    assert seen(240.0, "ready") == (240.0, 60.0)


def test_port_and_gpu_counters_are_the_hosts(metrics: Observer, clock: Clock) -> None:
    """They do not begin again with a process, so nothing is added up."""
    more = (
        MetricRow("infiniband_errors_total", ("symbol", "mlx5_0", "1"), 5.0),
        MetricRow("gpu_ecc_errors_total", ("uncorrected",), 2.0),
    )
    for pid in (1, 2):
        metrics.report(0, report(0, clock.now, pid=pid, more=more))
    assert value(metrics, "infiniband_errors_total", node="n0", error="symbol", hca="mlx5_0", port="1") == 5.0
    me = {"replica": "0", "rank": "0", "node": "n0"}
    assert value(metrics, "gpu_ecc_errors_total", **me, error="uncorrected") == 2.0


def test_the_straggler_is_who_computes_while_others_wait(metrics: Observer, clock: Clock) -> None:
    """All four ranks' steps take as long, for all wait for rank 2; what is left without the waits names it. An idle job
    has no score."""
    for second in range(3):
        for rank in range(4):
            exposed = 0.02 if rank == 2 else 0.9
            metrics.report(0, report(rank, clock.now + second, 10 * second, 1.0 * second, exposed * second))
    clock.now += 2
    scores = [value(metrics, "straggler_score", replica="0", rank=str(r), node="n0") for r in range(4)]
    assert scores[2] == pytest.approx(9.8)
    assert all(score is not None and score < 0.5 for rank, score in enumerate(scores) if rank != 2)
    assert value(metrics, "overlap_ratio", replica="0", op="all_reduce", link="net") == pytest.approx(0.75)
    clock.now += 60
    assert value(metrics, "straggler_score", replica="0", rank="2", node="n0") is None


def test_a_rank_without_a_processor_is_the_straggler_though_it_seems_to_wait(metrics: Observer, clock: Clock) -> None:
    """Both ranks seem to wait 0.6 s of each second for the other; but rank 1 could have gone on in 0.5 s of its waits,
    had it had a processor. No more than what was waited counts; a kernel without such an account changes nothing."""

    def beats(pid: int, delays: tuple[float | None, ...]) -> list[float | None]:
        clock.now += 60
        for second in range(3):
            for rank, delay in enumerate(delays):
                told = [] if delay is None else [MetricRow("rank_run_delay_seconds_total", (), delay * second)]
                metrics.report(0, report(rank, clock.now + second, 10 * second, 1.0 * second, 0.6 * second, pid, told))
        clock.now += 2
        return [value(metrics, "straggler_score", replica="0", rank=str(r), node="n0") for r in range(len(delays))]

    assert beats(1, (0.0, 0.5)) == [pytest.approx(0.4 / 0.9), pytest.approx(0.9 / 0.4)]
    assert beats(2, (0.0, 7.0))[1] == pytest.approx(1.0 / 0.4)
    assert beats(3, (None, None)) == [pytest.approx(1.0)] * 2


def watched(clock: Clock) -> Observer:
    return Observer(CollectorRegistry(), clock=clock, monotonic=clock)


def test_gaps_between_tokens_and_ends_of_choices(clock: Clock) -> None:
    """Two tokens 0.4 s after the first: two gaps of 0.2 s. Choices count one by one; bad logits are told. Nothing is
    kept of what has ended, nor of what a dying replica takes with it."""
    observer = watched(clock)
    observer.tokens(0, [TokensEvent("a", 0, 0, (5,)), TokensEvent("b", 0, 0, (5,))], 2)
    clock.now += 0.4
    observer.tokens(0, [TokensEvent("a", 0, 1, (6, 7), "length"), TokensEvent("a", 1, 0, (), "numerical_error")], 2)
    metrics = observer
    assert value(metrics, "inter_token_latency_seconds_count") == 2.0
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.4)
    assert value(metrics, "request_success_total", finished_reason="length") == 1.0
    assert value(metrics, "nonfinite_logits_total") == 1.0
    assert list(observer.last) == [("b", 0)]
    observer.state(0, JobState("restarting"))
    assert observer.last == {}


def test_latencies_as_the_client_sees_them(clock: Clock) -> None:
    told: list[AnswerTimes] = []
    observer = Observer(CollectorRegistry(), on_request=told.append, clock=clock, monotonic=clock)
    observer.request(AnswerTimes(1000.0, 1000.1, 1002.0, 1003.5, 10, 20, "stop", interactive=True))
    observer.request(AnswerTimes(1000.0, 1000.1, None, 1001.0, 10, 0, "cancelled", interactive=True))
    assert value(observer, "time_to_first_token_seconds_sum") == 2.0
    assert value(observer, "time_to_first_token_seconds_count") == 1.0
    assert value(observer, "e2e_request_latency_seconds_sum") == 4.5
    assert value(observer, "request_generation_tokens_sum") == 20.0
    assert [times.finish for times in told] == ["stop", "cancelled"]


def test_the_observer_passes_everything_on(clock: Clock) -> None:
    """Every method of the daemon's Observer."""
    observer = watched(clock)
    observer.report(0, report(0, clock.now))
    observer.failure(0, "silent", "no heartbeat", NOBODY)
    observer.quarantined()
    observer.commit(0.004)
    observer.http("/v1/batches/{id}", 404, 0.02)
    observer.store("EIO", (5, 9))
    observer.clock(-7200.0)
    observer.queues({"in_progress": 2}, 3, 10)
    observer.batches(BatchView(10, 5, 0, 900.0, 2000.0))
    body = observer.render("")[0].decode()
    for line in (
        'engine_restarts_total{reason="silent",replica="0"} 1.0',
        "quarantined_requests_total 1.0",
        "store_commit_seconds_count 1.0",
        'http_requests_total{code="404",route="/v1/batches/{id}"} 1.0',
        "store_writable 0.0",
        "clock_jump_seconds -7200.0",
        'batch_jobs{status="in_progress"} 2.0',
        'dispatch_requests{status="in_flight"} 7.0',
    ):
        assert f"laddertron_{line}" in body
    assert [value(observer, f"disk_{name}_bytes") for name in ("free", "size")] == [5.0, 9.0]
    observer.store(None, "it cannot be accessed")
    assert value(observer, "disk_free_bytes") == 5.0


def test_the_stores_batches_in_one_query() -> None:
    """Only batches under way count; one whose lines are all answered has no age."""
    db = sqlite3.connect(":memory:")
    db.row_factory = sqlite3.Row
    make_tables(db)
    empty = {"owner": "", "endpoint": "", "input_file_id": "", "completion_window": "24h"}
    names = ("id", "status", "total", "completed", "failed", "created_at", "expires_at")

    def add(*values: object) -> None:
        Rows(db).insert("batches", empty | dict(zip(names, values, strict=True)))

    assert batch_view(db) == BatchView()
    add("b1", "completed", 100, 100, 0, 50, 60)
    add("b2", "finalizing", 10, 9, 1, 100, 1000)
    assert batch_view(db) == BatchView(0, 9, 1, None, 1000, ((0, 1000),))
    add("b3", "in_progress", 50, 20, 5, 200, 900)
    view = batch_view(db)
    assert replace(view, windows=()) == BatchView(25, 29, 6, 100, 900)
    assert sorted(view.windows) == [(0, 1000), (25, 900)]
    db.close()


def test_failures_by_kind_and_desync(metrics: Observer) -> None:
    """Kinds are there with 0 from the first state on, so that `increase` sees the first failure; an unknown kind is
    `other`."""
    metrics.state(0, JobState("ready"))
    assert value(metrics, "engine_restarts_total", replica="0", reason="silent") == 0.0
    culprit: dict[str, Any] = {"rank": 1, "node": "b", "stage": None, "device": "cuda:1", "collective": "all_reduce 7"}
    words = {name: "" if word is None else str(word) for name, word in culprit.items()}
    metrics.failure(
        0, "rank_error", "rank 1: DesyncError: sampling step 7: rank 1 of 2 drew other ids", Culprit(**culprit)
    )
    last = "engine_last_failure_timestamp_seconds"
    assert value(metrics, last, replica="0", reason="rank_error", **words) == 1000.0
    metrics.failure(0, "witchcraft", "?", NOBODY)
    assert value(metrics, last, replica="0", reason="rank_error", **words) is None, "the last one alone"
    assert value(metrics, "engine_restarts_total", replica="0", reason="rank_error") == 1.0
    assert value(metrics, "engine_restarts_total", replica="0", reason="other") == 1.0
    assert value(metrics, "rank_desync_total", replica="0") == 1.0


def test_the_failure_kinds_are_the_supervisors() -> None:
    assert {*FAILURE_KINDS} == {*FailureKind.__args__, "other"}  # type: ignore[attr-defined]


def test_eta_from_the_rate_of_answers(metrics: Observer, clock: Clock) -> None:
    """50 lines in 10 s, 100 left: 20 s. Without any progress there is no estimate; with nothing left it is 0. A batch
    that ends takes its lines out of the count: the rate goes on with what it knows."""
    metrics.batches(BatchView(left=150))
    assert value(metrics, "batch_eta_seconds") is None
    clock.now += 10
    metrics.batches(BatchView(100, 48, 2, oldest=900.0, first_expiry=5e3))
    assert value(metrics, "batch_eta_seconds") == pytest.approx(20.0)
    assert value(metrics, "oldest_queued_request_age_seconds") == 110.0
    assert value(metrics, "batch_deadline_seconds") == 3990.0
    clock.now += 10
    metrics.batches(BatchView(80, 0, 0))
    assert value(metrics, "batch_eta_seconds") == pytest.approx(80 / 2.5)
    clock.now += 5
    metrics.batches(BatchView(30, 50, 0))
    assert value(metrics, "batch_eta_seconds") == pytest.approx(30 / 4.0)
    metrics.batches(BatchView())
    assert value(metrics, "batch_eta_seconds") == 0.0
    assert value(metrics, "batch_deadline_seconds") is None
    metrics.queues({"in_progress": 2}, 3, 10)
    assert value(metrics, "batch_jobs", status="in_progress") == 2.0
    assert value(metrics, "dispatch_requests", status="in_flight") == 7.0


def test_the_batch_that_will_be_late(metrics: Observer, clock: Clock) -> None:
    """Ten lines a second, shared evenly. 100 and 1000 lines: the small batch is done after 20 s though 110 s of work
    are queued, the large one after 110 s. What the most is late by counts; nothing under way, or no rate: no figure."""
    assert overdue_s(((100, 30.0), (1000, 500.0)), 10.0, 0.0) == pytest.approx(-10.0)
    assert overdue_s(((1000, 100.0), (100, 30.0)), 10.0, 0.0) == pytest.approx(10.0)
    assert overdue_s(((50, 10.0), (50, 5.0)), 10.0, 0.0) == pytest.approx(5.0)
    assert overdue_s(((0, 10.0),), 10.0, 0.0) is None
    assert overdue_s(((10, 10.0),), 0.0, 0.0) is None
    metrics.batches(BatchView(100, windows=((100, 1100.0),)))
    assert value(metrics, "batch_overdue_seconds") is None
    clock.now += 10
    metrics.batches(BatchView(90, 10, windows=((90, 1100.0),)))
    assert value(metrics, "batch_overdue_seconds") == pytest.approx(0.0)
    metrics.batches(BatchView())
    assert value(metrics, "batch_overdue_seconds") is None


def test_routes_are_bounded(metrics: Observer) -> None:
    """Whoever mounts routes by mistake with a path in them fills `other`, not the memory."""
    for i in range(3 * MAX_ROUTES):
        metrics.http(f"/v1/files/{i}", 200, 0.01)
    routes = set(metrics.series.histograms["http_request_duration_seconds"])
    assert len(routes) == MAX_ROUTES + 1
    assert value(metrics, "http_requests_total", route="other", code="200") == 2 * MAX_ROUTES


def test_wrong_labels_are_refused(metrics: Observer) -> None:
    with pytest.raises(ValueError, match="has labels"):
        metrics.series.set("rank_up", 1.0, "0")
    with pytest.raises(KeyError):
        metrics.series.add("no_such_series", 1.0)


def filled(ranks: int = 16, clock: Clock | None = None) -> Observer:
    """Every series with a value."""
    clock = clock or Clock()
    metrics = Observer(CollectorRegistry(), clock=clock, monotonic=clock)
    metrics.series.set("build_info", 1.0, "0.1", "demo", "ladder")
    metrics.state(0, JobState("ready", limits=ModelLimits(64, 100, 4, 1600)))
    rows = []
    for series in REPORTED.values():
        labels = tuple(name for name in series.labels if name not in ("replica", "rank", "node"))
        counts = (1,) * (len(series.bounds) + 1) if series.kind == "histogram" else ()
        rows.append(MetricRow(series.name, labels, 1.0, counts))
    for at in (0.0, 1.0):
        for rank in range(ranks):
            one = report(rank, clock.now + at, 10 + int(at) * 10, 1.0 + at, 0.1 + at / 10)
            ours = [row for row in rows if rank == 0 or "rank" in CATALOGUE[row.series].labels]
            grown = MetricRow("rank_expert_rows_total", (), 1.0 + at)
            metrics.report(0, replace(one, rows=(*ours, grown, *one.rows)))
    clock.now += 1.0
    metrics.tokens(0, [TokensEvent("a", 0, 0, (5,)), TokensEvent("a", 0, 1, (6,))], 2)
    metrics.request(AnswerTimes(1000.0, 1000.0, 1000.1, 1001.0, 10, 20, "stop", interactive=True))
    metrics.used("key_1", 1, 10, 20)
    metrics.limited("key_1", "tokens_per_day")
    metrics.queues({"in_progress": 1}, 2, 5)
    metrics.batches(BatchView(10, 0, 0, 990.0, 2000.0, ((10, 2000.0),)))
    clock.now += 1.0
    metrics.batches(BatchView(5, 5, 0, 990.0, 2000.0, ((5, 2000.0),)))
    metrics.commit(0.003)
    metrics.store(None, (5, 9))
    metrics.clock(0.0)
    metrics.evicted(1)
    metrics.http("/v1/batches/{id}", 200, 0.01)
    metrics.failure(0, "silent", "no heartbeat", NOBODY)
    metrics.reloaded("done")
    return metrics


def test_the_imbalance_is_the_busiest_ranks_rows_over_the_mean(metrics: Observer, clock: Clock) -> None:
    """Of rows since the window began; ranks of a stage without experts do not count, a replica without has none."""
    for at, rows in ((0.0, (100.0, 100.0)), (1.0, (130.0, 110.0))):
        clock.now = 1000.0 + at
        for rank, count in enumerate(rows):
            more = [MetricRow("rank_expert_rows_total", (), count)]
            metrics.report(0, report(rank, clock.now, more=more))
            metrics.report(0, report(2 + rank, clock.now))
            metrics.report(1, report(rank, clock.now))
    assert value(metrics, "expert_imbalance", replica="0") == pytest.approx(30 / 20)
    assert value(metrics, "expert_imbalance", replica="1") is None
    assert value(metrics, "rank_expert_rows_total", replica="0", rank="1", node="n0") == 110.0


def test_both_forms_parse_and_hold_the_whole_catalogue() -> None:
    """Every series of the catalogue can be filled, and nothing else is exported; OpenMetrics' and Prometheus' parsers
    read the same names."""
    metrics = filled()
    body, content_type = metrics.render(OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    families = {family.name: family for family in parse_openmetrics(body.decode())}
    wanted = {s.full_name.removesuffix("_total") if s.kind == "counter" else s.full_name for s in CATALOGUE.values()}
    assert families.keys() == wanted
    plain, plain_type = metrics.render("*/*")
    assert plain_type.startswith("text/plain")
    assert {family.name for family in parse_text(plain.decode())} == wanted
    for family in families.values():
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        assert labels <= set(LABELS), family.name


def test_promtool_has_nothing_to_say() -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    found = subprocess.run([tool, "check", "metrics"], input=filled().render("*/*")[0], capture_output=True)
    assert (found.returncode, found.stdout, found.stderr) == (0, b"", b"")


def test_a_scrape_of_16_ranks_is_quick() -> None:
    """Twelve milliseconds where this was written; bounded generously."""
    metrics = filled()
    took = cheapest(lambda: metrics.render(OPENMETRICS))
    print(f"scrape of 16 ranks: {took * 1e3:.1f} ms, {len(metrics.render(OPENMETRICS)[0]) >> 10} KiB")
    assert took < 0.25


def test_reports_that_make_no_sense_break_nothing(metrics: Observer, clock: Clock, run_seed: int) -> None:
    """What a rank of another version might send, a hundred times over: the scrape still parses."""
    dice = random.Random(run_seed)
    series = ["collective_bytes_total", "step_duration_seconds", "gpu_throttled", "rank_up", "x", ""]
    pieces = ["", "0", "99", "all_reduce", 'é\n"']
    for _ in range(100):
        rows = tuple(
            MetricRow(
                dice.choice(series),
                tuple(dice.choices(pieces, k=dice.randint(0, 4))),
                dice.choice([0.0, -1.0, 1e300]),
                (1,) * dice.choice([0, 0, 3, len(STEP_SECONDS) + 1]),
            )
            for _ in range(8)
        )
        metrics.report(0, RankHeartbeat(dice.randrange(3), 'n"\\', dice.randrange(9), 1, clock.now, rows))
    list(parse_openmetrics(metrics.render(OPENMETRICS)[0].decode()))


def test_the_page_of_docs_is_the_catalogue() -> None:
    assert (ROOT / "docs/metrics.md").read_text() == markdown(), (
        "make it anew: laddertron monitoring metrics --markdown > docs/metrics.md"
    )
    assert all(label in LABELS for series in CATALOGUE.values() for label in series.labels)


def test_the_command_prints_all_of_it() -> None:
    out = CliRunner().invoke(group, ["monitoring", "metrics"], standalone_mode=False)
    assert out.exit_code == 0
    names = {item["name"] for item in json.loads(CliRunner().invoke(group, ["monitoring", "metrics", "--json"]).output)}
    assert names <= set(out.output.split())  # whole, however narrow the terminal: `| grep` finds them
    assert names == {series.full_name for series in CATALOGUE.values()}
    assert CliRunner().invoke(group, ["monitoring", "metrics", "--markdown"]).output == markdown()


def test_keys_have_series_of_their_own_up_to_a_bound(clock: Clock) -> None:
    observer = watched(clock)
    for number in range(MAX_KEYS + 5):
        observer.used(f"key_{number}", 1, 3, 4)
    observer.used("", 2, 0, 0)
    assert value(observer, "key_tokens_total", key="key_7", tokens="completion") == 4.0
    assert value(observer, "key_requests_total", key="other") == 7.0
