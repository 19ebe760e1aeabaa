"""vLLM's names (metrics.vllm_names): what its dashboards, llm-d's and endpoint pickers query, summed over replicas."""

from __future__ import annotations

import http.server
import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from laddertron.engine.job import JobState, MetricRow, RankHeartbeat
from laddertron.engine.metrics.catalogue import CATALOGUE
from laddertron.engine.metrics.histogram import RANK_HISTOGRAMS, Buckets
from laddertron.engine.metrics.observer import AnswerTimes, Observer
from laddertron.engine.metrics.vllm_names import NAMES
from laddertron.engine.request import ModelLimits, TokensEvent
from prometheus_client import CollectorRegistry
from waiting import HANG_S

LIMITS = ModelLimits(max_model_len=64, vocab_size=100, max_num_seqs=4, kv_tokens=1600)
_PICK = 'model_name="demo"'
QUERIES = [
    f"sum(rate(vllm:{name}_total{{{_PICK}}}[30s]))"
    for name in ("prompt_tokens", "generation_tokens", "prefix_cache_hits", "prefix_cache_queries", "num_preemptions")
] + [
    f"histogram_quantile({share}, sum by (le) (rate(vllm:{name}_bucket{{{_PICK}}}[30s])))"
    for share in (0.5, 0.95, 0.99)
    for name in (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
        "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
        "request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total",
    )
] + [
    f"sum by (finished_reason) (increase(vllm:request_success_total{{{_PICK}}}[30s]))",
    f"vllm:num_requests_running{{{_PICK}}}",
    f"vllm:num_requests_waiting{{{_PICK}}}",
    f"vllm:kv_cache_usage_perc{{{_PICK}}} > 0.5 < 0.7",
    f'max by (num_gpu_blocks, block_size) (vllm:cache_config_info{{{_PICK}, num_gpu_blocks="200", block_size="16"}})',
    f"sum(rate(vllm:e2e_request_latency_seconds_sum{{{_PICK}}}[30s])) / "
    f"sum(rate(vllm:e2e_request_latency_seconds_count{{{_PICK}}}[30s]))",
    "sum(rate(vllm:prefix_cache_hits_total[30s])) / sum(rate(vllm:prefix_cache_queries_total[30s]))",
]  # fmt: skip
"""As the dashboards ask, with the job's and the instance's filters left out."""


def heartbeat(replica: int, count: int) -> RankHeartbeat:
    """Rank 0 of a replica after `count` requests."""
    rows = [
        MetricRow("num_requests_running", (), 2.0 + replica),
        MetricRow("num_requests_waiting", (), 1.0),
        MetricRow("kv_cache_usage_ratio", (), 0.5 + 0.2 * replica),
        MetricRow("prompt_tokens_total", (), 10.0 * count),
        MetricRow("prefix_cache_queries_total", (), 10.0 * count),
        MetricRow("prefix_cache_hits_total", (), 5.0 * count),
        MetricRow("num_preemptions_total", (), float(count)),
    ]
    for name in (*(name for name in RANK_HISTOGRAMS if "request" in name), "iteration_tokens"):
        buckets = Buckets(RANK_HISTOGRAMS[name])
        buckets.observe(0.4, count)
        rows += buckets.to_rows(name)
    return RankHeartbeat(0, f"n{replica}", 7, count, time.time(), tuple(rows))


def served(observer: Observer, count: int) -> None:
    """Two replicas have served `count` requests each; request `count` is the latest."""
    for replica in range(2):
        observer.state(replica, JobState("ready", limits=LIMITS))
        observer.report(replica, heartbeat(replica, count))
        name = f"{replica}-{count}"
        for token in range(2):
            observer.tokens(replica, [TokensEvent(name, 0, token, (token,), finish="stop" if token else None)], 1)
        observer.request(AnswerTimes(10.0, 10.0, 10.1, 10.5, 10, 2, "stop", interactive=True))


def value(observer: Observer, name: str, **labels: str) -> float | None:
    return observer.series.registry.get_sample_value(name, labels)


def test_replicas_are_summed_under_the_models_name() -> None:
    observer = Observer(CollectorRegistry(), vllm=("demo", 16))
    served(observer, 3)
    observer.tokens(
        0, [TokensEvent("x", 0, 0, (), finish="cancelled"), TokensEvent("y", 0, 0, (), finish="numerical_error")], 0
    )
    of = {"model_name": "demo"}
    assert value(observer, "vllm:num_requests_running", **of) == 5.0
    assert value(observer, "vllm:num_requests_waiting", **of) == 2.0
    assert value(observer, "vllm:kv_cache_usage_perc", **of) == pytest.approx(0.6)
    assert value(observer, "vllm:prompt_tokens_total", **of) == 60.0
    assert value(observer, "vllm:generation_tokens_total", **of) == 4.0
    assert value(observer, "vllm:cache_config_info", **of, block_size="16", num_gpu_blocks="200") == 1.0
    assert value(observer, "vllm:request_queue_time_seconds_count", **of) == 6.0
    assert value(observer, "vllm:request_queue_time_seconds_sum", **of) == pytest.approx(2.4)
    assert value(observer, "vllm:iteration_tokens_total_count", **of) == 6.0
    reasons = {"stop": 2.0, "length": 0.0, "abort": 1.0, "error": 1.0}
    assert {r: value(observer, "vllm:request_success_total", **of, finished_reason=r) for r in reasons} == reasons
    assert value(observer, "laddertron_num_requests_running", replica="1") == 3.0


def test_every_name_is_there_before_the_first_request() -> None:
    """A rate sees the first event; without the key not one is there."""
    observer = Observer(CollectorRegistry(), vllm=("demo", 16))
    observer.state(0, JobState("ready", limits=LIMITS))
    text = observer.render("")[0].decode()
    reported = {"counter", "gauge"}  # those of ranks come with their first heartbeat
    always = [
        name
        for own, name in NAMES.items()
        if CATALOGUE[own].kind not in reported or "replica" not in CATALOGUE[own].labels
    ]
    assert [name for name in always if f"# TYPE vllm:{name.removesuffix('_total')}" not in text] == []
    scraper = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    assert '\nvllm:kv_cache_usage_perc{model_name="demo"} 0.0\n' in observer.render(scraper)[0].decode()
    assert "vllm:" not in Observer(CollectorRegistry()).render("")[0].decode()


@pytest.fixture
def scraped(tmp_path: Path) -> Iterator[tuple[Observer, str]]:
    """An observer, and the address of a Prometheus that scrapes it every other second."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is not installed (Debian: prometheus)")
    observer = Observer(CollectorRegistry(), vllm=("demo", 16))

    class Metrics(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body, kind = observer.render(self.headers.get("accept", ""))
            self.send_response(200)
            self.send_header("content-type", kind)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s"},
        "scrape_configs": [{"job_name": "d", "static_configs": [{"targets": [f"127.0.0.1:{server.server_port}"]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    words = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb"]
    with (tmp_path / "log").open("w") as log:
        running = subprocess.Popen([binary, *words, f"--web.listen-address=127.0.0.1:{port}"], stderr=log)
    try:
        yield observer, f"http://127.0.0.1:{port}/api/v1/query"
    finally:
        running.kill()
        running.wait()
        server.shutdown()
        server.server_close()
        thread.join()


def found(address: str, query: str) -> list[Any]:
    try:
        with urllib.request.urlopen(f"{address}?{urllib.parse.urlencode({'query': query})}", timeout=HANG_S) as answer:
            series: list[Any] = json.load(answer)["data"]["result"]
            return [one for one in series if one["value"][1] != "NaN"]
    except (ConnectionError, urllib.error.URLError):
        return []


def test_the_dashboards_queries_find_their_series(scraped: tuple[Observer, str]) -> None:
    observer, address = scraped
    left, count, end = QUERIES, 0, time.monotonic() + HANG_S
    while left:
        assert time.monotonic() < end, left
        served(observer, count := count + 1)
        time.sleep(1.0)  # a scrape cannot be waited for otherwise
        left = [query for query in left if not found(address, query)]
