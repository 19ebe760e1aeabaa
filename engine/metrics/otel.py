"""Request spans for OpenTelemetry (extra `otel`): made when a body has been answered, from the times that were kept
anyway, so that nothing is paid before. W3C `traceparent` says whose child a request is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .observer import AnswerTimes


class TracingError(RuntimeError):
    """OpenTelemetry is not there; the message says how to get it."""


class RequestSpans:
    """Turns answered bodies into a span `request` with the children `queue`, `prefill` and `decode` (as far as their
    times are known), and hands them to `provider`."""

    def __init__(self, provider: Any, model: str = "") -> None:
        """provider: an opentelemetry TracerProvider. Raises TraceError without OpenTelemetry."""
        try:
            from opentelemetry import trace
            from opentelemetry.trace.propagation import tracecontext
        except ImportError as error:
            raise TracingError("traces need OpenTelemetry: pip install 'laddertron[otel]'") from error
        self._trace: Any = trace
        self._headers: Any = tracecontext.TraceContextTextMapPropagator()
        self._provider, self._model = provider, model
        self._tracer: Any = provider.get_tracer("laddertron")

    def finished(self, times: AnswerTimes) -> None:
        """Returns at once: a batching exporter sends from a thread of its own."""
        trace, sent = self._trace, times.traceparent
        context = None if sent is None else self._headers.extract({"traceparent": sent})  # a bad header is as none
        attributes = {
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": times.prompt_tokens,
            "gen_ai.usage.output_tokens": times.completion_tokens,
            "gen_ai.response.finish_reasons": [times.finish],
            "laddertron.interactive": times.interactive,
        }
        kind = trace.SpanKind.SERVER
        whole = self._tracer.start_span("request", context, kind, attributes, start_time=_ns(times.arrived))
        inside = trace.set_span_in_context(whole)
        for name, start, end in _stages(times):
            self._tracer.start_span(name, inside, start_time=_ns(start)).end(_ns(end))
        if times.finish in ("error", "timeout", "numerical_error"):
            whole.set_status(trace.Status(trace.StatusCode.ERROR, times.finish))
        whole.end(_ns(times.ended))

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


def exporting(endpoint: str, model: str, service: str = "laddertron") -> RequestSpans:
    """Spans to an OTLP/HTTP collector, such as http://127.0.0.1:4318/v1/traces. Raises TraceError."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracingError("traces need OpenTelemetry: pip install 'laddertron[otel]'") from error
    make: Callable[..., Any] = TracerProvider
    provider = make(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return RequestSpans(provider, model)


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
