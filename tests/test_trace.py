"""Request spans: the header of the W3C, and what a collector gets to see."""

from __future__ import annotations

import random
from typing import Any

import pytest
from laddertron.engine.daemon.observe import RequestTimes
from laddertron.engine.trace import Parent, RequestSpans, parse_traceparent

GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("header", "parent"),
    [
        (GOOD, Parent(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True)),
        (GOOD[:-2] + "00", Parent(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, False)),
        ("cc" + GOOD[2:] + "-what-comes-later", Parent(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True)),
        (GOOD + "-more", None),
        ("ff" + GOOD[2:], None),
        (GOOD.upper(), None),
        ("00-" + "0" * 32 + "-b7ad6b7169203331-01", None),
        ("00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01", None),
        ("", None),
        (None, None),
    ],
)
def test_the_header_as_the_standard_has_it(header: str | None, parent: Parent | None) -> None:
    assert parse_traceparent(header) == parent


def test_no_header_costs_a_request() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for _ in range(2000):
        text = list(GOOD)
        for _ in range(dice.randint(1, 6)):
            text[dice.randrange(len(text))] = chr(dice.randrange(1, 300))
        parse_traceparent("".join(text))


@pytest.fixture
def collected() -> tuple[RequestSpans, Any]:
    pytest.importorskip("opentelemetry.sdk.trace", reason="the extra `otel` is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, kept = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    return RequestSpans(provider, "demo"), kept


def test_an_answer_becomes_a_span_with_its_stages(collected: tuple[RequestSpans, Any]) -> None:
    """The request is the sender's child, the stages are the request's; their times are those that were measured."""
    spans, kept = collected
    spans.finished(RequestTimes(10.0, 10.5, 12.0, 15.0, 100, 30, "stop", True, GOOD))
    found = {span.name: span for span in kept.get_finished_spans()}
    whole = found["request"]
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
    spans.finished(RequestTimes(1.0, 1.0, None, 2.0, 5, 0, "timeout", interactive=False))
    found = {span.name: span for span in kept.get_finished_spans()}
    assert found.keys() == {"request", "queue"}
    assert found["request"].status.status_code.name == "ERROR"
    assert found["request"].parent is None
    spans.close()
