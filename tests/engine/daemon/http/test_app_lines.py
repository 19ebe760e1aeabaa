"""Batch files of generated lines, good, odd and broken, through the whole daemon: each line has one answer or one error
with its number, nothing is a server's failure. A bounded share in `make test`; `make fuzz` runs more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from daemon_tools import LIMITS, NAME, Served, deployment, line, lines_of, served, submit, wait_batch
from fake_job import FakeJob
from hypothesis import HealthCheck, Phase, example, given, seed, settings
from hypothesis import strategies as st
from openai import OpenAI
from tiny_text import write_folder

FILES = 4 * int(os.environ.get("LADDERTRON_FUZZ_CASES", "6"))

NUMBERS = st.one_of(
    st.integers(-3, 5), st.floats(-1, 3, allow_nan=False), st.sampled_from([0.0, 1e-9, 10**40, -(2**63)])
)
TEXTS = st.one_of(st.text(max_size=40), st.sampled_from(["", "hello", "\u2028", "a" * 2000, "{{", "<|end|>"]))
VALUES: Any = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
PROMPTS = st.one_of(
    TEXTS,
    st.lists(TEXTS, min_size=1, max_size=3),
    st.lists(st.integers(-1, 305), min_size=1, max_size=5),
    st.lists(st.lists(st.integers(0, 299), min_size=1, max_size=4), min_size=1, max_size=2),
)
FIELDS: dict[str, Any] = {
    "max_tokens": st.integers(0, 600),
    "n": st.integers(0, 9),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 50),
    "stop": st.one_of(TEXTS, st.lists(TEXTS, max_size=4)),
    "seed": st.integers(0, 2**64),
    "echo": st.booleans(),
    "logprobs": st.integers(0, 6),
    "logit_bias": st.dictionaries(st.integers(0, 310).map(str), st.floats(-100, 100), max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 310), max_size=3),
    "min_tokens": st.integers(0, 9),
    "stream": st.booleans(),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}, {"type": "x"}]),
    "no_such_field": VALUES,
}
BODIES = st.fixed_dictionaries({}, optional=FIELDS)


def render(name: str, prompt: Any, body: dict[str, Any]) -> bytes:
    return line(name, prompt, **{"max_tokens": 4, **body})


def broken(raw: bytes, at: float, cut: int, put: bytes) -> bytes:
    """The line with a piece of it replaced; still one line."""
    place = int(at * len(raw))
    return (raw[:place] + put + raw[place + cut :]).replace(b"\n", b" ") + b"\n"


GOOD = st.builds(lambda n: render(f"good-{n}", "hello", {}), st.integers(0, 10**9))
ODD = st.builds(lambda n, p, b: render(f"odd-{n}", p, b), st.integers(0, 10**9), PROMPTS, BODIES)
STRANGE = st.builds(lambda n: render(f"strange-{n}", "x", {"model": "another"}), st.integers(0, 10**9))
ENVELOPES = st.dictionaries(
    st.sampled_from(["custom_id", "method", "url", "body", "x"]), st.one_of(VALUES, st.just("/v1/completions"))
).map(lambda value: json.dumps(value).encode() + b"\n")
PIECES = st.one_of(
    st.binary(max_size=6),
    st.sampled_from([b"NaN", b"1e999", b"\\ud800", b'"custom_id":"a",', b"[" * 99, b"\xef\xbb\xbf"]),
)
BROKEN = st.builds(broken, st.one_of(GOOD, ODD), st.floats(0, 1), st.integers(0, 9), PIECES)
LINES = st.lists(st.one_of(GOOD, GOOD, ODD, STRANGE, BROKEN, ENVELOPES, st.just(b"\n")), min_size=1, max_size=12)
"""Two good ones to each other kind, so that what is left of a file is worth running."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_folder(tmp_path_factory.mktemp("tiny"))
    made = lambda: [FakeJob(LIMITS, tokens_a_step=64)]  # noqa: E731
    with served(deployment(tmp_path_factory.mktemp("lines")), folder, made) as running:
        yield running


def one_answer_each(client: OpenAI, batch: Any, count: int) -> None:
    """A completed batch of `count` lines: every custom_id once, in one of the two files."""
    output, errors = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    assert not output.keys() & errors.keys()
    assert (len(output), len(errors)) == (batch.request_counts.completed, batch.request_counts.failed)
    assert len(output) + len(errors) == batch.request_counts.total == count
    for row in errors.values():
        assert 400 <= row["response"]["status_code"] < 500, row
        said = row["response"]["body"]["error"]
        assert said["message"]
        assert said["line"] >= 1


def test_each_line_has_one_answer_or_one_error_with_its_number(daemon: Served, run_seed: int) -> None:
    """1. A file of generated lines: the batch completes, and every line has one row; or it fails and names lines, each
    once and each a line that is there. 2. Without those it completes: they were bad, and no other was. 3. Afterwards
    the daemon still does its work."""
    client = daemon.client()
    ends = {"completed": 0, "failed": 0}

    @seed(run_seed)
    @settings(
        max_examples=FILES,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(raw=LINES)
    @example(raw=[line("good")])
    @example(raw=[line("good"), b"[]\n"])
    def run(raw: list[bytes]) -> None:
        there = {n for n, one in enumerate(raw, 1) if one.strip()}
        batch = wait_batch(client, submit(client, b"".join(raw)).id)
        ends[batch.status] += 1
        if batch.status == "completed":
            one_answer_each(client, batch, len(there))
            return
        named = [error.line for error in batch.errors.data]
        assert all(error.message and error.code for error in batch.errors.data)
        if not there:
            assert [error.code for error in batch.errors.data] == ["empty_file"]
            return
        assert len(set(named)) == len(named)
        assert set(named) <= there
        rest = [raw[n - 1] for n in sorted(there - set(named))]
        if rest:
            batch = wait_batch(client, submit(client, b"".join(rest)).id)
            assert batch.status == "completed", (batch.errors, rest)
            ends["completed"] += 1
            one_answer_each(client, batch, len(rest))

    run()
    print(f"{ends} batches")
    assert min(ends.values()) > 0
    assert wait_batch(client, submit(client, line("last", model=NAME)).id).request_counts.completed == 1
