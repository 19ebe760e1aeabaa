"""Request spans for OpenTelemetry (extra `otel`): made when a body has been answered, from the times that were kept
anyway, so that nothing is paid before. W3C `traceparent` says whose child a request is; parsing needs no library.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..daemon.observe import AnswerTimes

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class TracingError(RuntimeError):
    """OpenTelemetry is not there; the message says how to get it."""


@dataclass(frozen=True, slots=True)
class Parent:
    """Who sent a request: 128-bit trace, 64-bit span, and whether the sender records its trace."""

    trace_id: int
    span_id: int
    sampled: bool


def parse_traceparent(header: str | None) -> Parent | None:
    """The header of https://www.w3.org/TR/trace-context/; None where it is absent or wrong: a bad header never costs
    the request. A later version is read as this one, as the standard wants."""
    found = _TRACEPARENT.fullmatch((header or "").strip())
    if found is None:
        return None
    version, trace, span, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest) or not int(trace, 16) or not int(span, 16):
        return None
    return Parent(int(trace, 16), int(span, 16), bool(int(flags, 16) & 1))


class RequestSpans:
    """Turns answered bodies into a span `request` with the children `queue`, `prefill` and `decode` (as far as their
    times are known), and hands them to `provider`."""

    def __init__(self, provider: Any, model: str = "") -> None:
        """provider: an opentelemetry TracerProvider. Raises TraceError without OpenTelemetry."""
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise TracingError("traces need OpenTelemetry: pip install 'laddertron[otel]'") from error
        self._trace: Any = trace
        self._provider, self._model = provider, model
        self._tracer: Any = provider.get_tracer("laddertron")

    def finished(self, times: AnswerTimes) -> None:
        """Returns at once: a batching exporter sends from a thread of its own."""
        trace, parent, context = self._trace, parse_traceparent(times.traceparent), None
        if parent is not None:
            flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if parent.sampled else 0)
            remote = trace.SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=flags)
            context = trace.set_span_in_context(trace.NonRecordingSpan(remote))
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
