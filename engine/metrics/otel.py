"""Spans and histograms of requests by OpenTelemetry's conventions for generative AI (extra `otel`). They are made from
the times of an answered body, so they cost nothing before the end of a request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .observer import AnswerTimes

SERVER_HISTOGRAMS = {
    "gen_ai.server.request.duration": (
        0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
    ),
    "gen_ai.server.time_to_first_token": (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    ),
    "gen_ai.server.time_per_output_token": (
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    ),
}  # fmt: skip
"""Seconds, with the bucket bounds that the conventions advise."""
_FAILED = ("error", "timeout", "numerical_error")


class TelemetryError(RuntimeError):
    """OpenTelemetry is not installed; the message has the fix."""

    def __init__(self) -> None:
        super().__init__("OpenTelemetry is not installed: pip install 'laddertron[otel]'")


class RequestSpans:
    """Passes answered bodies to `provider` as a span with the children `queue`, `prefill` and `decode`."""

    def __init__(self, provider: Any, model: str = "") -> None:
        """provider: an opentelemetry TracerProvider. Raises TelemetryError without OpenTelemetry."""
        try:
            from opentelemetry import trace
            from opentelemetry.trace.propagation import tracecontext
        except ImportError as error:
            raise TelemetryError from error
        self._trace: Any = trace
        self._headers: Any = tracecontext.TraceContextTextMapPropagator()
        self._provider, self._model = provider, model
        self._tracer: Any = provider.get_tracer("laddertron")

    def finished(self, times: AnswerTimes) -> None:
        """Records a body's spans; returns at once, since a batching exporter sends on its own thread."""
        trace, sent = self._trace, times.traceparent
        context = None if sent is None else self._headers.extract({"traceparent": sent})  # a bad header is as none
        attributes = {
            **_attributes(times, self._model),
            "gen_ai.usage.input_tokens": times.prompt_tokens,
            "gen_ai.usage.output_tokens": times.completion_tokens,
            "gen_ai.response.finish_reasons": [times.finish],
            "laddertron.interactive": times.interactive,
        }
        kind, name = trace.SpanKind.SERVER, f"{attributes['gen_ai.operation.name']} {self._model}"
        request_span = self._tracer.start_span(name, context, kind, attributes, start_time=_ns(times.arrived))
        inside = trace.set_span_in_context(request_span)
        for stage, start, end in _stages(times):
            self._tracer.start_span(stage, inside, start_time=_ns(start)).end(_ns(end))
        if times.finish in _FAILED:
            request_span.set_status(trace.Status(trace.StatusCode.ERROR, times.finish))
        request_span.end(_ns(times.ended))

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


class RequestHistograms:
    """SERVER_HISTOGRAMS of answered bodies. provider: an opentelemetry MeterProvider."""

    def __init__(self, provider: Any, model: str = "") -> None:
        self._provider, self._model = provider, model
        meter = provider.get_meter("laddertron")
        self._duration, self._first, self._each = (
            meter.create_histogram(name, "s", explicit_bucket_boundaries_advisory=bounds)
            for name, bounds in SERVER_HISTOGRAMS.items()
        )

    def finished(self, times: AnswerTimes) -> None:
        """Records a body's times; an exporter sends on its own thread. Lines of batches have no time of first token."""
        attributes = _attributes(times, self._model)
        failed = {"error.type": times.finish} if times.finish in _FAILED else {}
        self._duration.record(times.ended - times.arrived, attributes | failed)
        if times.first is not None:
            self._first.record(times.first - times.arrived, attributes)
            if times.completion_tokens > 1:
                self._each.record((times.ended - times.first) / (times.completion_tokens - 1), attributes)

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


def export_spans(endpoint: str, model: str, service: str = "laddertron") -> RequestSpans:
    """Exports spans to an OTLP/HTTP collector, such as http://127.0.0.1:4318/v1/traces. Raises TelemetryError."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TelemetryError from error
    make: Callable[..., Any] = TracerProvider
    provider = make(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return RequestSpans(provider, model)


def export_histograms(endpoint: str, model: str, service: str = "laddertron") -> RequestHistograms:
    """Exports histograms every minute to a collector (http://127.0.0.1:4318/v1/metrics). Raises TelemetryError."""
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
    except ImportError as error:
        raise TelemetryError from error
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(endpoint=endpoint))
    provider = MeterProvider([reader], Resource.create({"service.name": service}))
    return RequestHistograms(provider, model)


def _attributes(times: AnswerTimes, model: str) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": "chat" if times.chat else "text_completion",
        "gen_ai.provider.name": "laddertron",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
    }


def _stages(times: AnswerTimes) -> list[tuple[str, float, float]]:
    if times.first is None:
        return [("queue", times.arrived, times.submitted)]
    return [
        ("queue", times.arrived, times.submitted),
        ("prefill", times.submitted, times.first),
        ("decode", times.first, times.ended),
    ]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
