"""Lines of a batch: what is read, checked and refused, each with its number."""

from __future__ import annotations

import asyncio
import io
import json
import random
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from door import USER
from laddertron.engine.openai.batch_input import (
    BatchLine,
    FileCheck,
    LineRules,
    check_file,
    check_line,
    error_line,
    read_lines,
)
from laddertron.engine.openai.schema import CHAT, COMPLETIONS
from waiting import cheapest


def line(**over: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": USER}
    return {"custom_id": "a", "method": "POST", "url": CHAT, "body": body, **over}


@pytest.mark.parametrize(
    ("value", "code", "said"),
    [
        ([], "invalid_json_line", "must be a JSON object"),
        ({"custom_id": "a"}, "missing_required_parameter", "method is missing"),
        (line(custom_id=7), "invalid_custom_id", "1 to 512"),
        (line(custom_id="x" * 513), "invalid_custom_id", "1 to 512"),
        (line(custom_id=""), "invalid_custom_id", "1 to 512"),
        (line(method="GET"), "invalid_method", "must be 'POST'"),
        (line(url="/v1/embeddings"), "invalid_url", "/v1/completions"),
        (line(url=[CHAT]), "invalid_url", "array"),
        (line(url=COMPLETIONS, body={"model": "m", "prompt": "x"}), "mismatched_url", "endpoint is /v1/chat"),
        (line(boddy={}), "unknown_parameter", "did you mean body?"),
        (line(body=[]), "invalid_type", "must be a JSON object"),
        (line(body={**line()["body"], "stream": True}), "unsupported_value", "stream"),
    ],
)
def test_a_bad_line_says_its_number(value: Any, code: str, said: str) -> None:
    found = check_line(json.dumps(value).encode(), 17, LineRules(endpoint=CHAT))
    assert found.body is None
    assert found.error is not None
    assert found.error.message.startswith("line 17: ")
    assert (found.error.code, said in found.error.message) == (code, True), found.error.message
    assert found.number == 17


def test_lines_are_read_as_a_stream_and_long_ones_skipped() -> None:
    """A 10 MB line among good ones: its error, then the next line; memory stays under 4 MB."""
    raw = [json.dumps(line(custom_id=f"c{i}")).encode() for i in range(3)]
    data = raw[0] + b"\r\n" + b"\n  \n" + b"x" * 10_000_000 + b"\n" + raw[1] + b"\n" + raw[0] + b"\n" + raw[2]
    file = io.BytesIO(data)
    tracemalloc.start()
    found = list(read_lines(file, LineRules(max_line_bytes=1_000_000)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(x.number, x.error.code if x.error else x.custom_id) for x in found] == [
        (1, "c0"), (4, "line_too_long"), (5, "c1"), (6, "duplicate_custom_id"), (7, "c2"),
    ]  # fmt: skip
    assert found[2].length == len(raw[1]) + 1
    assert peak < 4_000_000


def checked_file(data: bytes, rules: LineRules, served: str) -> FileCheck:
    async def here(work: Callable[[], list[BatchLine]]) -> list[BatchLine]:
        return work()

    async def large(line: BatchLine) -> BatchLine:
        raise AssertionError(f"line {line.number} is large")

    return asyncio.run(check_file(io.BytesIO(data), rules, served, here, large))


def test_a_whole_file_is_checked_before_anything_runs() -> None:
    """The first hundred bad lines are named, and those for another model; too many lines, or none, are errors too."""
    good = [json.dumps(line(custom_id=f"c{i}")).encode() for i in range(50)]
    bad = [b"{" for _ in range(150)]
    check = checked_file(b"\n".join(good + bad), LineRules(endpoint=CHAT), "m")
    assert (check.lines, check.unserved, len(check.errors)) == (200, 0, 100)
    assert check.errors[0][0] == 51
    check = checked_file(b"\n".join(good), LineRules(max_lines=40), "other")
    assert (check.unserved, [error.code for _, error in check.errors]) == (40, ["too_many_lines"])
    assert check.unserved_errors[0][0] == 1
    assert str(check.unserved_errors[0][1]).startswith("line 1: the model")
    assert checked_file(b"\n\n", LineRules(), "m").errors[0][1].code == "empty_file"


def test_no_bytes_make_a_line_raise(run_seed: int) -> None:
    """Random damage to good lines: a Line each time, with a body or an error, and every error can be written. Every
    other one has a byte that is not UTF-8."""
    rng = random.Random(run_seed)
    base = json.dumps(line(body={**line()["body"], "stop": ["a"], "logit_bias": {"1": 1}, "n": 2, "seed": 5})).encode()
    bits = [
        b'"',
        b"{",
        b"[",
        b"]",
        b"}",
        b"null",
        b"NaN",
        b"1e999",
        b"\\ud800",
        b"\xff",
        b"-",
        b":",
        b",",
        b"9" * 30,
        b"true",
    ]
    for number in range(3000):
        raw = bytearray(base)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(raw))
            raw[at : at + rng.randint(0, 6)] = rng.choice(bits)
        if number % 2 == 0:
            raw.insert(rng.randrange(len(raw)), 0xFF)
        found = check_line(bytes(raw))
        assert (found.body is None) != (found.error is None)
        assert found.error is not None or number % 2
        if found.error is not None:
            error_line(found.custom_id, "x", found.error, found.number)


def test_lines_are_checked_fast_enough() -> None:
    """20,000 lines a second on one core is the aim, and three times that what is reached: as long as it takes to read
    a line's JSON thrice. Ten times that would be too long on any machine."""
    said = "What is the capital of France, and why do people ask that all the time? " * 3
    body = {"model": "m", "messages": [{"role": "user", "content": said}], "temperature": 0.7, "max_tokens": 64}
    data = b"".join(json.dumps(line(custom_id=f"r-{i}", body=body)).encode() + b"\n" for i in range(5000))
    raw = data.splitlines()
    assert sum(x.error is None for x in read_lines(io.BytesIO(data))) == 5000
    checking = cheapest(lambda: list(read_lines(io.BytesIO(data))))
    reading = cheapest(lambda: [json.loads(one) for one in raw])
    print(f"{5000 / checking:.0f} lines/s, {checking / reading:.1f} times as long as reading the JSON")
    assert checking < 10 * reading
