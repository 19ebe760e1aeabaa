"""Request spans: the header of the W3C, and what a collector gets to see."""

from __future__ import annotations

import gzip
import http.server
import json
import random
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults.night import Night
from laddertron.engine.metrics.observer import AnswerTimes
from laddertron.engine.metrics.otel import (
    SERVER_HISTOGRAMS,
    RequestHistograms,
    RequestSpans,
    export_histograms,
    export_spans,
)
from waiting import HANG_S

GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def collected() -> tuple[RequestSpans, Any]:
    pytest.importorskip("opentelemetry.sdk.trace", reason="the extra `otel` is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, kept = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    return RequestSpans(provider, "demo"), kept


def request_spans(collected: tuple[RequestSpans, Any], header: str | None) -> list[Any]:
    spans, kept = collected
    kept.clear()
    spans.finished(AnswerTimes(1.0, 2.0, None, 3.0, 1, 0, "stop", True, header))
    return [span for span in kept.get_finished_spans() if span.name == "text_completion demo"]


@pytest.mark.parametrize("header", [GOOD, "cc" + GOOD[2:] + "-what-comes-later"])
def test_a_request_is_its_senders_child(collected: tuple[RequestSpans, Any], header: str) -> None:
    """Of any version; what the sender does not record is not recorded."""
    (span,) = request_spans(collected, header)
    assert (span.parent.trace_id, span.parent.span_id) == (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
    assert not request_spans(collected, GOOD[:-2] + "00")


BAD = [GOOD + "-more", "ff" + GOOD[2:], GOOD.upper(), GOOD.replace("b7ad6b7169203331", "0" * 16), "", None]


@pytest.mark.parametrize("header", [*BAD, GOOD.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32)])
def test_a_bad_header_is_as_none(collected: tuple[RequestSpans, Any], header: str | None) -> None:
    assert [span.parent for span in request_spans(collected, header)] == [None]


def test_no_header_costs_a_request(collected: tuple[RequestSpans, Any], run_seed: int) -> None:
    dice = random.Random(run_seed)
    for _ in range(500):
        text = list(GOOD)
        for _ in range(dice.randint(1, 6)):
            text[dice.randrange(len(text))] = chr(dice.randrange(1, 300))
        request_spans(collected, "".join(text))


def test_an_answer_becomes_a_span_with_its_stages(collected: tuple[RequestSpans, Any]) -> None:
    """The request is the sender's child, the stages are the request's; their times are those that were measured."""
    spans, kept = collected
    spans.finished(AnswerTimes(10.0, 10.5, 12.0, 15.0, 100, 30, "stop", True, GOOD))
    found = {span.name: span for span in kept.get_finished_spans()}
    whole = found["text_completion demo"]
    assert whole.context.trace_id == 0x0AF7651916CD43DD8448EB211C80319C
    assert whole.parent.span_id == 0xB7AD6B7169203331
    assert (whole.start_time, whole.end_time) == (10 * 10**9, 15 * 10**9)
    assert whole.attributes["gen_ai.usage.output_tokens"] == 30
    stages = {
        name: (found[name].start_time / 1e9, found[name].end_time / 1e9) for name in ("queue", "prefill", "decode")
    }
    assert stages == {"queue": (10.0, 10.5), "prefill": (10.5, 12.0), "decode": (12.0, 15.0)}
    assert all(found[name].parent.span_id == whole.context.span_id for name in stages)
    assert whole.status.is_ok or whole.status.status_code.name == "UNSET"


def test_an_error_without_tokens(collected: tuple[RequestSpans, Any]) -> None:
    spans, kept = collected
    spans.finished(AnswerTimes(1.0, 1.0, None, 2.0, 5, 0, "timeout", interactive=False))
    found = {span.name: span for span in kept.get_finished_spans()}
    assert found.keys() == {"text_completion demo", "queue"}
    assert found["text_completion demo"].status.status_code.name == "ERROR"
    assert found["text_completion demo"].parent is None
    spans.close()


class _Collector(http.server.BaseHTTPRequestHandler):
    """An OTLP/HTTP collector as far as an exporter sees it: decodes the body, answers with an empty message."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        assert self.headers["content-type"] == "application/x-protobuf"
        self.server.took(self.path, body)  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *words: object) -> None: ...


class Collector(http.server.ThreadingHTTPServer):
    """Listens on a port of loopback until `close`; keeps spans, and the services they came from."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Collector)
        self.spans: dict[str, list[Any]] = {}
        self.services: set[str] = set()
        self.arrived = threading.Condition()
        self._thread = threading.Thread(target=self.serve_forever)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    def took(self, path: str, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        assert path == "/v1/traces"
        with self.arrived:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                named = {item.key: item.value.string_value for item in resource.resource.attributes}
                self.services.add(named["service.name"])
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        self.spans.setdefault(span.name, []).append(span)
            self.arrived.notify_all()

    def wait_for(self, name: str) -> list[Any]:
        """The spans of that name, once there are any."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: name in self.spans, HANG_S), f"no span {name!r}: {list(self.spans)}"
            return self.spans[name]

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `otel` is not installed")
    collector = Collector()
    yield collector
    collector.close()


def test_the_exporter_reaches_a_collector(collector: Collector) -> None:
    """Over HTTP in protobuf: the request is the child of the header's span, in its trace; the stages are the request's
    children; what nobody sent begins a trace of its own. `close` sends what is left."""
    spans = export_spans(collector.endpoint, "demo", "laddertron-test")
    spans.finished(AnswerTimes(10.0, 10.5, 12.0, 15.0, 100, 30, "stop", True, GOOD))
    spans.finished(AnswerTimes(1.0, 1.0, None, 2.0, 5, 0, "timeout", interactive=False))
    spans.close()
    assert collector.services == {"laddertron-test"}
    sent, own = collector.spans["text_completion demo"]
    assert (sent.trace_id.hex(), sent.parent_span_id.hex()) == (GOOD[3:35], GOOD[36:52])
    assert own.parent_span_id == b""
    assert own.trace_id != sent.trace_id
    assert (sent.start_time_unix_nano, sent.end_time_unix_nano) == (10 * 10**9, 15 * 10**9)
    numbers = {item.key: item.value.int_value for item in sent.attributes}
    assert (numbers["gen_ai.usage.input_tokens"], numbers["gen_ai.usage.output_tokens"]) == (100, 30)
    for name in ("queue", "prefill", "decode"):
        child = collector.spans[name][0]
        assert (child.trace_id, child.parent_span_id) == (sent.trace_id, sent.span_id)
    assert (sent.status.code, own.status.code) == (0, 2)  # unset, error


def test_a_served_request_is_its_senders_child(collector: Collector, tmp_path: Path) -> None:
    """The daemon as a process with metrics.traces_endpoint set, ranks that are stand-ins: a completion sent with a
    traceparent shows up at the collector when the daemon has drained, as a child of its sender."""
    night = Night(tmp_path, real=False, sets=(f"metrics.traces_endpoint={collector.endpoint}",))
    try:
        night.start()
        night.ready()
        body = {"model": "demo", "prompt": "def f(", "max_tokens": 3, "temperature": 0}
        url = f"http://127.0.0.1:{night.port}/v1/completions"
        headers = {"content-type": "application/json", "traceparent": GOOD}
        with urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=HANG_S
        ) as said:
            assert json.load(said)["usage"]["completion_tokens"] == 3
        assert night.stop() == 0
    finally:
        night.close()
    (whole,) = collector.wait_for("text_completion demo")
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (GOOD[3:35], GOOD[36:52])
    assert {span.parent_span_id for name in ("queue", "prefill", "decode") for span in collector.spans[name]} == {
        whole.span_id
    }


def test_histograms_are_those_of_the_conventions() -> None:
    """In the SDK's own reader: names, unit, advised bounds, attributes and values; an error has its type."""
    pytest.importorskip("opentelemetry.sdk.metrics", reason="the extra `otel` is not installed")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    histograms = RequestHistograms(MeterProvider([reader]), "demo")
    histograms.finished(AnswerTimes(10.0, 10.5, 12.0, 15.0, 100, 31, "stop", True, GOOD, chat=True))
    histograms.finished(AnswerTimes(1.0, 1.0, None, 3.0, 5, 0, "timeout", interactive=False))
    (resource,) = reader.get_metrics_data().resource_metrics
    metrics = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    assert metrics.keys() == SERVER_HISTOGRAMS.keys()
    common = {"gen_ai.provider.name": "laddertron", "gen_ai.request.model": "demo", "gen_ai.response.model": "demo"}
    chat, text = ({**common, "gen_ai.operation.name": name} for name in ("chat", "text_completion"))
    wanted: dict[str, Any] = {
        "gen_ai.server.request.duration": [(5.0, chat), (2.0, {**text, "error.type": "timeout"})],
        "gen_ai.server.time_to_first_token": [(2.0, chat)],
        "gen_ai.server.time_per_output_token": [(0.1, chat)],
    }
    for name, metric in metrics.items():
        points = metric.data.data_points
        assert metric.unit == "s"
        assert all(point.explicit_bounds == SERVER_HISTOGRAMS[name] for point in points)
        assert [(round(point.sum, 6), dict(point.attributes)) for point in points] == wanted[name]


@pytest.mark.parametrize("export", [export_spans, export_histograms])
def test_a_collector_that_is_gone_costs_no_request(export: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process listens there: requests go on as if nothing were exported; the telemetry of that time is lost."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")  # seconds that the exporter tries for
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `otel` is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        spans = export(f"http://127.0.0.1:{probe.getsockname()[1]}/v1/traces", "demo")
        given, closed = threading.Event(), threading.Event()

        def requests() -> None:
            for _ in range(100):
                spans.finished(AnswerTimes(10.0, 10.5, 12.0, 15.0, 100, 30, "stop", True, GOOD))
            given.set()
            spans.close()
            closed.set()

        threading.Thread(target=requests, daemon=True).start()
        assert given.wait(HANG_S), "each would try for seconds, were it sent here and now"
        assert closed.wait(HANG_S)
