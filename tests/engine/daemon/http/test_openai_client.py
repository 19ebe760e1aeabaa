"""The unmodified `openai` package against a real daemon on loopback, with a fake engine behind it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from daemon_tools import NAME, Served, deployment, line, lines_of, served, submit, wait_batch
from openai import OpenAI
from tiny_text import write_folder
from waiting import HANG_S, until


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_folder(tmp_path_factory.mktemp("tiny"))
    with served(deployment(tmp_path_factory.mktemp("daemon")), folder) as running:
        yield running


@pytest.fixture(scope="module")
def client(daemon: Served) -> OpenAI:
    return daemon.client()


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "laddertron"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_completions_and_chats_whole_and_streamed_say_the_same(client: OpenAI) -> None:
    """One seed, one answer: the stream's pieces put together are the whole text, usage and finish reason agree."""
    options = {"model": NAME, "max_tokens": 12, "seed": 7, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(prompt="hello", **options)  # type: ignore[call-overload]
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    chunks = list(
        client.completions.create(prompt="hello", stream=True, stream_options={"include_usage": True}, **options)  # type: ignore[call-overload]
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage

    said = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(messages=said, n=2, **options)  # type: ignore[call-overload]
    assert [choice.index for choice in chat.choices] == [0, 1]
    stream = client.chat.completions.create(messages=said, n=2, stream=True, **options)  # type: ignore[call-overload]
    texts = ["", ""]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in chat.choices]


def test_errors_are_its_exception_types(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=NAME, prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-x", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=NAME, prompt="x" * 2000)
    assert long.value.code == "context_length_exceeded"
    for call in (client.files.retrieve, client.files.delete, client.files.content, client.batches.retrieve):
        with pytest.raises(openai.NotFoundError):
            call("file-unknown")
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=("x.jsonl", b"{}\n"), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError):
        submit(client, line("a"), completion_window="forever")


def test_routes_that_there_are_not_name_those_that_there_are(client: OpenAI) -> None:
    for call, kind in (
        (lambda: client.embeddings.create(model=NAME, input="x"), "embeddings"),
        (lambda: client.moderations.create(input="x"), "moderations"),
    ):
        with pytest.raises(openai.NotFoundError, match=rf"{kind} are not supported; there are /.*/v1/completions, "):
            call()
    with pytest.raises(openai.NotFoundError, match=r"no route '/v1/completion': there are .*/v1/completions, "):
        client.post("/completion", cast_to=object)
    with pytest.raises(openai.APIStatusError, match="DELETE '/v1/completions': this route allows POST") as refused:
        client.delete("/completions", cast_to=object)
    assert refused.value.status_code == 405


def test_a_batch_from_end_to_end(client: OpenAI) -> None:
    """100 good lines, one whose prompt is too long, one of two prompts: answers and the error where they belong, the
    counts right, metadata kept, ids paged, the file's bytes as the store has them."""
    data = b"".join(line(f"r-{i}", f"say {i}") for i in range(100))
    data += line("long", "x" * 2000) + line("two", ["one", "another"], n=2)
    batch = submit(client, data, metadata={"who": "me"})
    assert batch.status == "validating"
    assert batch.metadata == {"who": "me"}
    batch = wait_batch(client, batch.id)
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (102, 101, 1)
    answers, errors = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    assert set(answers) == {f"r-{i}" for i in range(100)} | {"two"}
    assert len(answers["two"]["response"]["body"]["choices"]) == 4
    assert errors["long"]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert errors["long"]["response"]["status_code"] == 400
    file = client.files.retrieve(batch.output_file_id)
    assert file.bytes == len(client.files.content(file.id).read())
    assert file.purpose == "batch_output"


def test_a_bad_file_fails_whole_and_names_every_line(client: OpenAI) -> None:
    good = line("a")
    bad = [b"{not json\n", line("a"), json.dumps({"custom_id": "c"}).encode() + b"\n", line("m", model="gpt-x")]
    batch = wait_batch(client, submit(client, good + b"".join(bad)).id)
    assert batch.status == "failed"
    found = {error.line: error.code for error in batch.errors.data}
    assert found == {
        2: "invalid_json_line",
        3: "duplicate_custom_id",
        4: "missing_required_parameter",
        5: "model_not_found",
    }
    assert batch.output_file_id is None
    empty = wait_batch(client, submit(client, b"\n\n").id)
    assert empty.errors.data[0].code == "empty_file"


def test_a_line_for_another_model_is_an_error_line_and_the_rest_runs(client: OpenAI) -> None:
    """Among good lines it fails alone, as 404; a file of nothing else fails the batch, since it came to the wrong
    server."""
    strange = [line("m", model="gpt-x"), line("n", model="gpt-y")]
    batch = wait_batch(client, submit(client, line("a") + strange[0] + line("b") + strange[1]).id)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 2, 2)
    assert lines_of(client, batch.output_file_id).keys() == {"a", "b"}
    errors = lines_of(client, batch.error_file_id)
    assert errors.keys() == {"m", "n"}
    for row, number in (errors["m"], 2), (errors["n"], 4):
        assert row["response"]["status_code"] == 404
        said = row["response"]["body"]["error"]
        assert (said["code"], said["param"], said["line"]) == ("model_not_found", "model", number)
        assert f"use '{NAME}'" in said["message"]
    batch = wait_batch(client, submit(client, b"".join(strange)).id)
    assert batch.status == "failed"
    assert [(error.line, error.code) for error in batch.errors.data] == [(1, "model_not_found"), (2, "model_not_found")]


def test_cancel_keeps_what_is_finished(daemon: Served, client: OpenAI) -> None:
    """40 lines, the engine held after some of them: cancelled, the rest is in the error file; a second cancel is a
    conflict."""
    job = daemon.jobs[0]
    daemon.on_loop(job.hold)
    try:
        batch = submit(client, b"".join(line(f"c-{i}") for i in range(40)))
        cancelled = client.batches.cancel(batch.id)
        assert cancelled.status == "cancelling"
        ended = wait_batch(client, batch.id)
    finally:
        daemon.on_loop(job.release)
    assert ended.status == "cancelled"
    assert ended.cancelled_at is not None
    answers, errors = lines_of(client, ended.output_file_id), lines_of(client, ended.error_file_id)
    assert len(answers) + len(errors) == 40
    assert {entry["error"]["code"] for entry in errors.values()} == {"batch_cancelled"}
    assert all(entry["response"] is None for entry in errors.values())
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_a_batch_cancelled_while_its_file_is_checked_counts_its_lines(daemon: Served, client: OpenAI) -> None:
    checking = daemon.daemon.services.batches.checking[""]
    daemon.on_loop(checking.acquire())
    try:
        batch = submit(client, b"".join(line(f"c-{i}") for i in range(5)))
        client.batches.cancel(batch.id)
    finally:
        daemon.on_loop(checking.release)
    ended = wait_batch(client, batch.id)
    assert (ended.status, len(lines_of(client, ended.error_file_id))) == ("cancelled", 5)
    assert ended.request_counts.to_dict() == {"total": 5, "completed": 0, "failed": 5}


def test_idempotency_key(client: OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", line("a")), purpose="batch")
    options = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    key = {"Idempotency-Key": "once"}
    first = client.batches.create(**options, extra_headers=key)  # type: ignore[arg-type]
    assert client.batches.create(**options, extra_headers=key).id == first.id  # type: ignore[arg-type]
    with pytest.raises(openai.ConflictError):
        client.batches.create(**options, metadata={"a": "b"}, extra_headers=key)  # type: ignore[arg-type]
    wait_batch(client, first.id)
    client.files.delete(file.id)  # a late repeat gets the batch all the same
    assert client.batches.create(**options, extra_headers=key).id == first.id  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="no such file"):
        client.batches.create(**options, extra_headers={"Idempotency-Key": "new"})  # type: ignore[arg-type]


def test_lists_are_paged(client: OpenAI) -> None:
    made = [client.files.create(file=(f"{i}.jsonl", line("a")), purpose="batch").id for i in range(5)]
    assert client.files.list(limit=2).has_more
    every = [file.id for file in client.files.list(limit=2)]
    assert len(every) == len(set(every))
    assert set(made) <= set(every)
    oldest_first = [file.id for file in client.files.list(limit=100, order="asc")]
    assert [name for name in oldest_first if name in made] == made
    batches = [submit(client, line("a")).id for _ in range(3)]
    assert [batch.id for batch in client.batches.list(limit=1)][:3] == batches[::-1]
    with pytest.raises(openai.NotFoundError):
        client.files.list(after="file-unknown")
    with pytest.raises(openai.BadRequestError):
        client.batches.list(limit=1000)


def test_a_deleted_file_is_gone_and_one_in_use_is_not(daemon: Served, client: OpenAI, tmp_path: Path) -> None:
    batch = wait_batch(client, submit(client, line("a")).id)
    for file_id in (batch.input_file_id, batch.output_file_id):
        assert client.files.delete(file_id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.content(file_id)
    daemon.on_loop(daemon.jobs[0].hold)
    try:
        running = submit(client, line("a"))
        with pytest.raises(openai.ConflictError):
            client.files.delete(running.input_file_id)
    finally:
        daemon.on_loop(daemon.jobs[0].release)
    wait_batch(client, running.id)


def test_a_file_that_is_deleted_as_its_batch_is_created(daemon: Served, client: OpenAI) -> None:
    """Both look at the store while it is clear for either; the one that is written first wins."""
    store, busy, go_on = daemon.daemon.services.store, threading.Event(), threading.Event()
    file = client.files.create(file=("in.jsonl", line("a")), purpose="batch")

    def create() -> str:
        return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id

    def hold_up(rows: object) -> None:
        busy.set()
        go_on.wait(HANG_S)

    with ThreadPoolExecutor() as threads:
        try:
            asyncio.run_coroutine_threadsafe(store.write(hold_up), daemon.loop)
            assert busy.wait(HANG_S)
            calls: list[Future[Any]] = [threads.submit(create), threads.submit(client.files.delete, file.id)]
            until(lambda: store.writes.qsize() == len(calls))
        finally:
            go_on.set()
        created, deleted = (call.exception() for call in calls)
    if created is None:
        assert isinstance(deleted, openai.ConflictError)
        assert wait_batch(client, calls[0].result()).status == "completed"
    else:
        assert isinstance(created, openai.BadRequestError)
        assert deleted is None
