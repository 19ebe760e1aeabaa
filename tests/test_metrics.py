"""The series: what goes in comes out under its name, counters survive relaunches, labels stay in their sets, and a
scrape of many ranks is quick."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from laddertron.engine.daemon.job import JobState, RankReport
from laddertron.engine.daemon.observe import RequestTimes
from laddertron.engine.daemon.store_schema import migrate
from laddertron.engine.histogram import STEP_SECONDS, Buckets
from laddertron.engine.metrics import MAX_ROUTES, BatchView, Metrics, overdue_s
from laddertron.engine.metrics_catalogue import CATALOGUE, FAILURE_KINDS, LABELS
from laddertron.engine.metrics_observer import MetricsObserver, batch_view
from laddertron.engine.metrics_text import markdown
from laddertron.engine.request import TokensEvent
from laddertron.launchers.cli import group
from laddertron.launchers.detect import FailureKind
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as parse_text
from waiting import cheapest

ROOT = Path(__file__).resolve().parent.parent
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
def metrics(clock: Clock) -> Metrics:
    return Metrics(CollectorRegistry(), clock)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics._registry.get_sample_value(f"laddertron_{name}", labels)


def report(
    rank: int,
    at: float,
    steps: int = 10,
    seconds: float = 1.0,
    exposed: float = 0.1,
    pid: int = 7,
    counters: dict[str, float] | None = None,
) -> RankReport:
    durations = Buckets(STEP_SECONDS)
    durations.observe(seconds / max(1, steps), steps)
    found = {
        "steps_total": float(steps),
        "step_seconds_total": seconds,
        "collective_hidden_seconds/all_reduce/net": 3 * exposed,
        "collective_exposed_seconds/all_reduce/net": exposed,
        "layer_hidden_seconds/ladder mlp/net": 2 * exposed,
        "layer_exposed_seconds/ladder mlp/net": exposed / 2,
        "collective_bytes/all_reduce/net": 1000.0 * steps,
        "collectives/all_reduce/net": 4.0 * steps,
        **durations.to_counters("step_duration_seconds"),
        **(counters or {}),
    }
    gauges = {"num_requests_running": 3.0, "oldest_queued_request_age_seconds": 2.0, "unknown_gauge": 1.0}
    return RankReport(rank, f"n{rank // 8}", pid + rank, steps, at, found, gauges if rank == 0 else {})


def test_a_report_becomes_series(metrics: Metrics, clock: Clock) -> None:
    """Rank 0's schedule goes by replica, what every rank has by rank; the exposures are apart; a name that is no
    series is left out."""
    metrics.observe_report(report(0, clock.now), replica=1)
    metrics.observe_report(report(8, clock.now), replica=1)
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
    assert b"unknown_gauge" not in metrics.render()[0]


def test_a_silent_rank_is_down_and_a_relaunch_counts_on(metrics: Metrics, clock: Clock) -> None:
    """Heartbeats end: down after 3 s. A new process starts at zero and moves to another node: its counters go on where
    the old one's stood, under the new node alone."""
    first = {"replica": "0", "rank": "0", "node": "n0"}
    metrics.observe_report(report(0, clock.now, steps=100))
    clock.now += 4.0
    assert value(metrics, "rank_up", **first) == 0.0
    metrics.observe_report(replace(report(0, clock.now, steps=5, pid=99), node="n5"))
    moved = first | {"node": "n5"}
    assert value(metrics, "rank_up", **moved) == 1.0
    assert value(metrics, "rank_up", **first) is None
    assert value(metrics, "step_duration_seconds_count", **moved) == 105.0
    assert value(metrics, "collective_bytes_total", **moved, op="all_reduce", link="net") == 105_000.0


def test_a_replica_that_ends_takes_its_ranks_down_at_once(metrics: Metrics, clock: Clock) -> None:
    for replica in (0, 1):
        metrics.observe_state(JobState("ready"), replica)
        metrics.observe_report(report(0, clock.now), replica)
    metrics.observe_state(JobState("restarting", "rank 1 is gone"), 1)
    up = [value(metrics, "rank_up", replica=str(r), rank="0", node="n0") for r in (0, 1)]
    assert up == [1.0, 0.0]
    assert value(metrics, "engine_ready", replica="0") == 1.0
    assert value(metrics, "engine_phase", replica="1", phase="restarting") == 1.0
    assert value(metrics, "num_requests_running", replica="1") is None


def test_port_and_gpu_counters_are_the_hosts(metrics: Metrics, clock: Clock) -> None:
    """They do not begin again with a process, so nothing is added up."""
    port = "infiniband_errors_total/symbol/mlx5_0/1"
    for pid in (1, 2):
        extra = {port: 5.0, "gpu_ecc_errors_total/uncorrected": 2.0}
        metrics.observe_report(report(0, clock.now, pid=pid, counters=extra))
    assert value(metrics, "infiniband_errors_total", node="n0", error="symbol", hca="mlx5_0", port="1") == 5.0
    me = {"replica": "0", "rank": "0", "node": "n0"}
    assert value(metrics, "gpu_ecc_errors_total", **me, error="uncorrected") == 2.0


def test_the_straggler_is_who_computes_while_others_wait(metrics: Metrics, clock: Clock) -> None:
    """All four ranks' steps take as long, for all wait for rank 2; what is left without the waits names it. An idle job
    has no score."""
    for second in range(3):
        for rank in range(4):
            exposed = 0.02 if rank == 2 else 0.9
            metrics.observe_report(report(rank, clock.now + second, 10 * second, 1.0 * second, exposed * second))
    clock.now += 2
    scores = [value(metrics, "straggler_score", replica="0", rank=str(r), node="n0") for r in range(4)]
    assert scores[2] == pytest.approx(9.8)
    assert all(score is not None and score < 0.5 for rank, score in enumerate(scores) if rank != 2)
    assert value(metrics, "overlap_ratio", replica="0", op="all_reduce", link="net") == pytest.approx(0.75)
    clock.now += 60
    assert value(metrics, "straggler_score", replica="0", rank="2", node="n0") is None


def test_a_rank_without_a_processor_is_the_straggler_though_it_seems_to_wait(metrics: Metrics, clock: Clock) -> None:
    """Both ranks seem to wait 0.6 s of each second for the other; but rank 1 could have gone on in 0.5 s of its waits,
    had it had a processor. No more than what was waited counts; a kernel without such an account changes nothing."""

    def beats(pid: int, delays: tuple[float | None, ...]) -> list[float | None]:
        clock.now += 60
        for second in range(3):
            for rank, delay in enumerate(delays):
                told = {} if delay is None else {"run_delay_seconds_total": delay * second}
                metrics.observe_report(
                    report(rank, clock.now + second, 10 * second, 1.0 * second, 0.6 * second, pid, told)
                )
        clock.now += 2
        return [value(metrics, "straggler_score", replica="0", rank=str(r), node="n0") for r in range(len(delays))]

    assert beats(1, (0.0, 0.5)) == [pytest.approx(0.4 / 0.9), pytest.approx(0.9 / 0.4)]
    assert beats(2, (0.0, 7.0))[1] == pytest.approx(1.0 / 0.4)
    assert beats(3, (None, None)) == [pytest.approx(1.0)] * 2


def watched(clock: Clock, data_dir: Path | None = None) -> MetricsObserver:
    return MetricsObserver(CollectorRegistry(), data_dir, clock=clock)


def test_gaps_between_tokens_and_ends_of_choices(clock: Clock) -> None:
    """Two tokens 0.4 s after the first: two gaps of 0.2 s. Choices count one by one; bad logits are told. Nothing is
    kept of what has ended, nor of what a dying replica takes with it."""
    observer = watched(clock)
    observer.tokens([TokensEvent("a", 0, 0, (5,)), TokensEvent("b", 0, 0, (5,))])
    clock.now += 0.4
    observer.tokens([TokensEvent("a", 0, 1, (6, 7), "length"), TokensEvent("a", 1, 0, (), "numerical_error")])
    metrics = observer.metrics
    assert value(metrics, "inter_token_latency_seconds_count") == 2.0
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.4)
    assert value(metrics, "request_success_total", finished_reason="length") == 1.0
    assert value(metrics, "nonfinite_logits_total") == 1.0
    assert list(observer._last) == [("b", 0)]
    observer.state(0, JobState("restarting"))
    assert observer._last == {}


def test_latencies_as_the_client_sees_them(clock: Clock) -> None:
    told: list[RequestTimes] = []
    observer = MetricsObserver(CollectorRegistry(), on_request=told.append, clock=clock)
    observer.request(RequestTimes(1000.0, 1000.1, 1002.0, 1003.5, 10, 20, "stop", interactive=True))
    observer.request(RequestTimes(1000.0, 1000.1, None, 1001.0, 10, 0, "cancelled", interactive=True))
    assert value(observer.metrics, "time_to_first_token_seconds_sum") == 2.0
    assert value(observer.metrics, "time_to_first_token_seconds_count") == 1.0
    assert value(observer.metrics, "e2e_request_latency_seconds_sum") == 4.5
    assert value(observer.metrics, "request_generation_tokens_sum") == 20.0
    assert [times.finish for times in told] == ["stop", "cancelled"]


def test_the_observer_passes_everything_on(clock: Clock, tmp_path: Path) -> None:
    """Every method of the daemon's Observer, and the disk of its data folder."""
    observer = watched(clock, tmp_path)
    observer.report(0, report(0, clock.now))
    observer.failure(0, "silent", "no heartbeat")
    observer.quarantined()
    observer.commit(0.004)
    observer.http("/v1/batches/{id}", 404, 0.02)
    observer.store("EIO")
    observer.queues({"in_progress": 2}, 3, 10)
    observer.batches(BatchView(10, 5, 0, 900.0, 2000.0))
    body = observer.render("")[0].decode()
    for line in (
        'engine_restarts_total{reason="silent",replica="0"} 1.0',
        "quarantined_requests_total 1.0",
        "store_commit_seconds_count 1.0",
        'http_requests_total{code="404",route="/v1/batches/{id}"} 1.0',
        "store_writable 0.0",
        'batch_jobs{status="in_progress"} 2.0',
        'dispatch_requests{status="in_flight"} 7.0',
    ):
        assert f"laddertron_{line}" in body
    assert (value(observer.metrics, "disk_free_bytes") or 0) > 0


def test_the_stores_batches_in_one_query() -> None:
    """Only batches under way count; one whose lines are all answered has no age."""
    db = sqlite3.connect(":memory:")
    migrate(db)
    row = (
        "INSERT INTO batches (id, owner, endpoint, input_file_id, completion_window, status, total, completed, failed, "
    )
    row += "created_at, expires_at) VALUES (?, '', '', '', '24h', ?, ?, ?, ?, ?, ?)"
    assert batch_view(db) == BatchView()
    db.execute(row, ("b1", "completed", 100, 100, 0, 50, 60))
    db.execute(row, ("b2", "finalizing", 10, 9, 1, 100, 1000))
    assert batch_view(db) == BatchView(0, 9, 1, None, 1000, ((0, 1000),))
    db.execute(row, ("b3", "in_progress", 50, 20, 5, 200, 900))
    view = batch_view(db)
    assert replace(view, windows=()) == BatchView(25, 29, 6, 100, 900)
    assert sorted(view.windows) == [(0, 1000), (25, 900)]
    db.close()


def test_failures_by_kind_and_desync(metrics: Metrics) -> None:
    """Kinds are there with 0 from the first state on, so that `increase` sees the first failure; an unknown kind is
    `other`."""
    metrics.observe_state(JobState("ready"))
    assert value(metrics, "engine_restarts_total", replica="0", reason="silent") == 0.0
    metrics.observe_failure("rank_error", "rank 1: DesyncError: sampling step 7: rank 1 of 2 drew other ids")
    metrics.observe_failure("witchcraft", "?")
    assert value(metrics, "engine_restarts_total", replica="0", reason="rank_error") == 1.0
    assert value(metrics, "engine_restarts_total", replica="0", reason="other") == 1.0
    assert value(metrics, "rank_desync_total", replica="0") == 1.0


def test_the_failure_kinds_are_the_supervisors() -> None:
    assert {*FAILURE_KINDS} == {*FailureKind.__args__, "other"}  # type: ignore[attr-defined]


def test_eta_from_the_rate_of_answers(metrics: Metrics, clock: Clock) -> None:
    """50 lines in 10 s, 100 left: 20 s. Without any progress there is no estimate; with nothing left it is 0. A batch
    that ends takes its lines out of the count: the rate goes on with what it knows."""
    metrics.observe_batches(BatchView(left=150))
    assert value(metrics, "batch_eta_seconds") is None
    clock.now += 10
    metrics.observe_batches(BatchView(100, 48, 2, oldest=900.0, first_expiry=5e3))
    assert value(metrics, "batch_eta_seconds") == pytest.approx(20.0)
    assert value(metrics, "oldest_queued_request_age_seconds") == 110.0
    assert value(metrics, "batch_deadline_seconds") == 3990.0
    clock.now += 10
    metrics.observe_batches(BatchView(80, 0, 0))
    assert value(metrics, "batch_eta_seconds") == pytest.approx(80 / 2.5)
    clock.now += 5
    metrics.observe_batches(BatchView(30, 50, 0))
    assert value(metrics, "batch_eta_seconds") == pytest.approx(30 / 4.0)
    metrics.observe_batches(BatchView())
    assert value(metrics, "batch_eta_seconds") == 0.0
    assert value(metrics, "batch_deadline_seconds") is None
    metrics.observe_queues({"in_progress": 2}, 3, 10)
    assert value(metrics, "batch_jobs", status="in_progress") == 2.0
    assert value(metrics, "dispatch_requests", status="in_flight") == 7.0


def test_the_batch_that_will_be_late(metrics: Metrics, clock: Clock) -> None:
    """Ten lines a second, shared evenly. 100 and 1000 lines: the small batch is done after 20 s though 110 s of work
    are queued, the large one after 110 s. What the most is late by counts; nothing under way, or no rate: no figure."""
    assert overdue_s(((100, 30.0), (1000, 500.0)), 10.0, 0.0) == pytest.approx(-10.0)
    assert overdue_s(((1000, 100.0), (100, 30.0)), 10.0, 0.0) == pytest.approx(10.0)
    assert overdue_s(((50, 10.0), (50, 5.0)), 10.0, 0.0) == pytest.approx(5.0)
    assert overdue_s(((0, 10.0),), 10.0, 0.0) is None
    assert overdue_s(((10, 10.0),), 0.0, 0.0) is None
    metrics.observe_batches(BatchView(100, windows=((100, 1100.0),)))
    assert value(metrics, "batch_overdue_seconds") is None
    clock.now += 10
    metrics.observe_batches(BatchView(90, 10, windows=((90, 1100.0),)))
    assert value(metrics, "batch_overdue_seconds") == pytest.approx(0.0)
    metrics.observe_batches(BatchView())
    assert value(metrics, "batch_overdue_seconds") is None


def test_routes_are_bounded(metrics: Metrics) -> None:
    """Whoever mounts routes by mistake with a path in them fills `other`, not the memory."""
    for i in range(3 * MAX_ROUTES):
        metrics.observe_http(f"/v1/files/{i}", 200, 0.01)
    routes = set(metrics._histograms["http_request_duration_seconds"])
    assert len(routes) == MAX_ROUTES + 1
    assert value(metrics, "http_requests_total", route="other", code="200") == 2 * MAX_ROUTES


def test_wrong_labels_are_refused(metrics: Metrics) -> None:
    with pytest.raises(ValueError, match="has labels"):
        metrics.set("rank_up", 1.0, "0")
    with pytest.raises(KeyError):
        metrics.add("no_such_series", 1.0)


def filled(ranks: int = 16, clock: Clock | None = None) -> Metrics:
    """Every series with a value."""
    clock = clock or Clock()
    metrics = Metrics(CollectorRegistry(), clock)
    metrics.describe_build("0.1", "demo", "ladder")
    metrics.observe_state(JobState("ready"))
    schedule = {
        name: 1.0
        for name, series in CATALOGUE.items()
        if series.labels == ("replica",) and series.kind == "counter" and not name.startswith(("engine", "rank"))
    }
    health = {
        "infiniband_received_bytes_total/mlx5_0/1": 1.0,
        "infiniband_transmitted_bytes_total/mlx5_0/1": 1.0,
        "infiniband_transmit_wait_ticks_total/mlx5_0/1": 1.0,
        "infiniband_errors_total/symbol/mlx5_0/1": 1.0,
        "gpu_ecc_errors_total/corrected": 1.0,
        "gpu_ecc_errors_total/uncorrected": 0.0,
        "run_delay_seconds_total": 0.5,
    }
    gauges = {
        "kv_cache_usage_ratio": 0.5, "kv_cached_blocks": 7.0, "num_requests_waiting": 1.0, "num_requests_running": 3.0,
        "oldest_queued_request_age_seconds": 1.0,
    }  # fmt: skip
    each = {
        "gpu_memory_used_bytes": 1.0, "gpu_memory_total_bytes": 2.0, "gpu_utilization_ratio": 0.9,
        "gpu_sm_clock_hertz": 1e9, "gpu_temperature_celsius": 70.0, "gpu_power_watts": 600.0,
        "gpu_throttled/thermal": 0.0, "infiniband_port_up/mlx5_0/1": 1.0,
        "resident_memory_bytes": 1e9, "last_step_timestamp_seconds": 999.0,
    }  # fmt: skip
    times = Buckets(CATALOGUE["request_queue_time_seconds"].bounds)
    times.observe(0.4)
    for at in (0.0, 1.0):
        for rank in range(ranks):
            one = report(rank, clock.now + at, 10 + int(at) * 10, 1.0 + at, 0.1 + at / 10, counters=health)
            if rank == 0:
                histograms: dict[str, float] = {}
                for name in ("iteration_tokens", "request_queue_time_seconds", "request_prefill_time_seconds"):
                    histograms |= times.to_counters(name)
                histograms |= times.to_counters("request_decode_time_seconds")
                one = replace(one, counters={**one.counters, **schedule, **histograms}, gauges={**gauges, **each})
            else:
                one = replace(one, gauges=each)
            metrics.observe_report(one)
    clock.now += 1.0
    metrics.observe_gap(0.01, 3)
    metrics.observe_request(0.1, 1.0, 10, 20)
    metrics.observe_queues({"in_progress": 1}, 2, 5)
    metrics.observe_batches(BatchView(10, 0, 0, 990.0, 2000.0, ((10, 2000.0),)))
    clock.now += 1.0
    metrics.observe_batches(BatchView(5, 5, 0, 990.0, 2000.0, ((5, 2000.0),)))
    metrics.observe_commit(0.003)
    metrics.observe_store(True)
    metrics.observe_disk(1 << 30, 1 << 40)
    metrics.observe_http("/v1/batches/{id}", 200, 0.01)
    metrics.observe_failure("silent", "no heartbeat")
    metrics.observe_quarantine(0)
    metrics.add("rank_desync_total", 0.0, "0")
    return metrics


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


def test_reports_that_make_no_sense_break_nothing(metrics: Metrics, clock: Clock) -> None:
    """What a rank of another version might send, a hundred times over: the scrape still parses."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    pieces = [
        "collective_bytes",
        "step_duration_seconds_bucket",
        "gpu_throttled",
        "x",
        "",
        "0",
        "99",
        "all_reduce",
        'é\n"',
    ]
    for _ in range(100):
        names = ["/".join(dice.choices(pieces, k=dice.randint(1, 5))) for _ in range(8)]
        figures = {name: dice.choice([0.0, -1.0, 1e300]) for name in names}
        metrics.observe_report(RankReport(dice.randrange(3), 'n"\\', 1, 1, clock.now, figures, figures))
    list(parse_openmetrics(metrics.render(OPENMETRICS)[0].decode()))


def test_the_page_of_docs_is_the_catalogue() -> None:
    assert (ROOT / "docs/metrics.md").read_text() == markdown(), (
        "make it anew: laddertron metrics --markdown > docs/metrics.md"
    )
    assert all(label in LABELS for series in CATALOGUE.values() for label in series.labels)


def test_the_command_prints_all_of_it() -> None:
    out = CliRunner().invoke(group, ["metrics"], standalone_mode=False)
    assert out.exit_code == 0
    names = {item["name"] for item in json.loads(CliRunner().invoke(group, ["metrics", "--json"]).output)}
    assert names <= set(out.output.split())  # whole, however narrow the terminal: `| grep` finds them
    assert names == {series.full_name for series in CATALOGUE.values()}
    assert CliRunner().invoke(group, ["metrics", "--markdown"]).output == markdown()
