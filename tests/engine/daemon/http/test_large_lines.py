"""Batch lines above 64 KiB: what becomes of them is what becomes of small ones, and this process looks at none."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon_tools import LIMITS, Served, deployment, line, lines_of, served, submit, wait_batch
from fake_job import FakeJob
from laddertron.engine.daemon import batch_feed
from laddertron.engine.openai import batch_input
from laddertron.engine.openai.batch_input import BatchLine
from laddertron.engine.openai.body_worker import answer, prepare_line
from laddertron.engine.openai.errors import ApiError
from laddertron.engine.text.pool import LARGE_BYTES, PromptError
from laddertron.topology.json_codec import parse
from tiny_text import write_folder
from waiting import until

BLANKS = b" " * (LARGE_BYTES + 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def daemon(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """This process, worker processes apart, parses no large line."""

    def small(raw: bytes) -> Any:
        assert len(raw) <= LARGE_BYTES, "a large line was parsed beside the loop"
        return parse(raw)

    monkeypatch.setattr(batch_input, "parse", small)
    with served(deployment(tmp_path), folder) as running:
        yield running


def wide(raw: bytes) -> bytes:
    return BLANKS + raw


LINES = [
    line("text"),
    line("chat of another kind", ["a", "b"], n=2),
    line("ids", [5, 6, 7], echo=True, seed=4),
    line("echo", "hello", echo=True, logprobs=1, seed=4),
    line("too long", [5] * 600),
    line("longer than its file's lines", [5] * 600_000),
    line("cannot be", "x", n=100),
    line("other", "x", model="other"),
]


def outcome(client: Any, data: bytes) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Counts, usage and lines of a batch, without what differs from batch to batch."""
    batch = wait_batch(client, submit(client, data).id)
    found = {**lines_of(client, batch.output_file_id), **lines_of(client, batch.error_file_id)}
    for value in found.values():
        value.pop("id")
        body = (value["response"] or {}).pop("body")
        value["response"].pop("request_id")
        error = body.get("error") or {}
        error.pop("message", None)  # a prompt that is too long is found out earlier
        for choice in body.get("choices", ()):
            choice.pop("text", None)  # the seed follows from the batch's id
            choice.pop("logprobs", None)
        value["body"] = {name: body.get(name) for name in ("choices", "usage", "error")}
    return batch.request_counts, batch.usage and batch.usage.to_dict(), found


def test_large_lines_become_what_small_ones_do(daemon: Served) -> None:
    client = daemon.client()
    small = [raw for raw in LINES if len(raw) <= LARGE_BYTES]
    counts, usage, found = outcome(client, b"".join(small))
    again = outcome(client, b"".join(map(wide, small)))
    assert again == (counts, usage, found)
    assert usage["input_tokens"]
    assert usage["output_tokens"]
    assert len(outcome(client, b"".join(map(wide, LINES)))[2]) == len(LINES)


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (wide(b'{"custom_id": "x"}\n'), "missing_required_parameter"),
        (wide(b"[" * 70_000 + b"\n"), "invalid_json_line"),
        (wide(line("x", temperature=9)), "invalid_value"),
        (wide(line("x", stream=True)), "unsupported_value"),
        (wide(line("first")), "duplicate_custom_id"),
        (line("x", [-1] * 40_000), "invalid_value"),
    ],
    ids=["envelope", "json", "body", "stream", "twice", "ids"],
)
def test_a_bad_large_line_fails_its_file_by_number(daemon: Served, bad: bytes, code: str) -> None:
    client = daemon.client()
    batch = wait_batch(client, submit(client, line("first") + bad + line("last")).id)
    assert batch.status == "failed"
    assert [(error.line, error.code) for error in batch.errors.data] == [(2, code)]


def test_large_lines_of_a_cancelled_batch_have_their_error_each(folder: Path, tmp_path: Path) -> None:
    with served(deployment(tmp_path), folder, lambda: [FakeJob(LIMITS, hold=True)]) as daemon:
        client = daemon.client()
        batch = submit(client, b"".join(wide(line(f"r{n}")) for n in range(5)))
        until(lambda: len(daemon.jobs[0].submitted) == 5)
        client.batches.cancel(batch.id)
        batch = wait_batch(client, batch.id)
        assert sorted(lines_of(client, batch.error_file_id)) == [f"r{n}" for n in range(5)]


def test_large_answers_that_wait_when_their_batch_is_cancelled_are_discarded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They wait for their key's turn while another file is read; the batch is cancelled; then it is their turn."""
    monkeypatch.setattr(batch_feed, "LARGE_VALUES", 0)
    with served(deployment(tmp_path), folder, lambda: [FakeJob(LIMITS, hold=True)]) as daemon:
        client, job = daemon.client(), daemon.jobs[0]
        batch = submit(client, b"".join(line(f"r{n}") for n in range(3)))
        until(lambda: len(job.submitted) == 3)
        turn = daemon.daemon.services.store.turns[""]
        daemon.on_loop(turn.acquire())
        daemon.on_loop(job.release)
        until(lambda: not job.sequences)
        client.batches.cancel(batch.id)
        until(lambda: not daemon.daemon.services.batches.feeds)
        daemon.on_loop(turn.release)
        batch = wait_batch(client, batch.id)
        assert sorted(lines_of(client, batch.error_file_id)) == ["r0", "r1", "r2"]
    gc.collect()  # a task's exception that was never retrieved is logged when the task is freed
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_a_batchs_usage_is_the_sum_of_its_lines(folder: Path, tmp_path: Path) -> None:
    """Those that failed count nothing; it stays after the results were deleted, and over a restart."""
    with served(deployment(tmp_path), folder) as daemon:
        client = daemon.client()
        data = b"".join(line(f"r{n}", "say " * (n + 1), max_tokens=n + 1) for n in range(20)) + line("bad", n=100)
        batch = wait_batch(client, submit(client, data).id)
        each = [entry["response"]["body"]["usage"] for entry in lines_of(client, batch.output_file_id).values()]
        assert len(each) == 20
        assert batch.usage is not None
        usage = batch.usage.to_dict()
        assert usage["input_tokens"] == sum(one["prompt_tokens"] for one in each)
        assert usage["output_tokens"] == sum(one["completion_tokens"] for one in each)
        assert usage["total_tokens"] == sum(one["total_tokens"] for one in each)
        client.files.delete(batch.output_file_id)
    with served(deployment(tmp_path), folder) as daemon:
        again = daemon.client().batches.retrieve(batch.id).usage
        assert again is not None
        assert again.to_dict() == usage


def test_lines_that_cost_too_much_keep_their_names() -> None:
    """A worker that gives up on a line says no custom_id: its form alone is read again for it."""
    asked: list[bool] = []

    class Costly:
        async def ask(self, payload: dict[str, Any], size: int, blob: bytes) -> dict[str, Any]:
            asked.append(payload["ids"])
            if payload["ids"]:
                raise PromptError("it took 10 s", "prompt_too_costly")
            return answer(text, {"blob": blob, **payload}, 64)

    text: Any = None  # the form needs no model
    raw = line("mine", [1] * 40_000)
    costly: Any = Costly()
    found, bad = asyncio.run(prepare_line(BatchLine(7, len(raw), raw=raw), "/v1/completions", "tiny", 64, costly))
    assert (found.custom_id, found.body, asked) == ("mine", None, [True, False])
    assert isinstance(bad, ApiError)
    assert (bad.code, "line 7: it took 10 s" in bad.message) == ("prompt_too_costly", True)
