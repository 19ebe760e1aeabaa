"""Batches through whatever happens: every line has exactly one answer, and the files follow from the store."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import sqlite3
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from daemon_tools import (
    LIMITS,
    NAME,
    MortalJob,
    Served,
    deployment,
    line,
    lines_of,
    served,
    submit,
    wait_batch,
)
from fake_job import FakeJob
from laddertron.engine.config.schema import LimitsConfig
from laddertron.engine.daemon.store.store import StoreOptions
from laddertron.engine.request import TokensEvent
from test_store import BadFiles, Failing, failing
from tiny_text import write_folder
from waiting import until

ABOARD = 4 * LIMITS.max_num_seqs
"""Lines that a job is given before it has ended any."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


def many(count: int, **body: Any) -> bytes:
    return b"".join(line(f"r-{n}", f"say {n}", **body) for n in range(count))


def completed(client: openai.OpenAI, batch_id: str) -> int:
    """Lines that have their answer."""
    counts = client.batches.retrieve(batch_id).request_counts
    return 0 if counts is None else counts.completed


def complete(client: openai.OpenAI, batch_id: str, count: int) -> dict[str, Any]:
    """Its answers, all of them there once."""
    batch = wait_batch(client, batch_id)
    assert (batch.status, batch.request_counts.completed) == ("completed", count), batch
    answers = lines_of(client, batch.output_file_id)
    assert set(answers) == {f"r-{n}" for n in range(count)}
    return answers


# the daemon


def test_a_daemon_that_stops_in_the_middle_goes_on_where_it_was(folder: Path, tmp_path: Path) -> None:
    """Three daemons on one folder, each stopped in the middle; finished lines are never computed again, and the
    answers are those that one undisturbed daemon gives."""
    config = deployment(tmp_path)
    submitted = []
    with served(config, folder, lambda: [FakeJob(LIMITS)]) as daemon:
        batch = submit(daemon.client(), many(300))
        until(lambda: completed(daemon.client(), batch.id) > 50)
        daemon.on_loop(daemon.jobs[0].hold)
        daemon.stop()
        submitted.append({r.request_id for r in daemon.jobs[0].submitted})
    with served(config, folder, lambda: [FakeJob(LIMITS)]) as daemon:
        before = completed(daemon.client(), batch.id)
        until(lambda: completed(daemon.client(), batch.id) > 150)
        assert before > 50
        daemon.stop()
    with served(config, folder) as daemon:
        answers = complete(daemon.client(), batch.id, 300)
        submitted.append({r.request_id for r in daemon.jobs[0].submitted})
        assert len(submitted[1]) <= 150
        again = submit(daemon.client(), many(300, seed=1))
        wait_batch(daemon.client(), again.id)
    assert {a["response"]["status_code"] for a in answers.values()} == {200}


def test_lines_of_a_lost_replica_run_on_the_other(folder: Path, tmp_path: Path, run_seed: int) -> None:
    """Two replicas; one dies again and again while 200 lines run: one answer each, in the words of an undisturbed
    run."""
    rng = random.Random(run_seed)
    with served(deployment(tmp_path), folder, lambda: [MortalJob(LIMITS, most=9) for _ in range(2)]) as daemon:
        client = daemon.client()
        calm = wait_batch(client, submit(client, many(200, seed=5)).id)
        batch = submit(client, many(200, seed=5))
        for _ in range(6):
            time.sleep(rng.uniform(0, 0.05))
            # a link that was cut: no rank to blame, so no line becomes a suspect
            daemon.on_loop(lambda: daemon.jobs[rng.randrange(2)].die(None, "the link is cut"))
        answers = complete(client, batch.id, 200)
        expected = lines_of(client, calm.output_file_id)
        for name, answer in answers.items():
            assert answer["response"]["body"]["choices"] == expected[name]["response"]["body"]["choices"]


@pytest.mark.parametrize("after", [0, 5], ids=["in its prefill", "after five tokens"])
@pytest.mark.parametrize("company", [0, 40])
def test_a_request_that_kills_its_rank_is_given_up_at_its_second_kill_alone(
    folder: Path, tmp_path: Path, company: int, after: int
) -> None:
    """In the middle of others, which are answered, it kills beside them twice before."""
    poison = [299, *[1] * 7]

    def make() -> list[MortalJob]:
        return [MortalJob(LIMITS, poison=299, poison_after=after, hold=True)]

    with served(deployment(tmp_path), folder, make) as daemon:
        client, job = daemon.client(), daemon.jobs[0]
        data = many(company // 2) + line("poison", poison)
        data += b"".join(line(f"r-{n}", f"say {n}") for n in range(company // 2, company))
        asked = submit(client, data)
        until(lambda: len(job.submitted) == min(company + 1, ABOARD))
        daemon.on_loop(job.release)
        batch = wait_batch(client, asked.id)
        assert batch.status == "completed"
        assert (batch.request_counts.completed, batch.request_counts.failed) == (company, 1)
        error = lines_of(client, batch.error_file_id)["poison"]["response"]["body"]["error"]
        assert error["code"] == "quarantined"
        assert error["message"].startswith(f"a rank exited {4 if company else 2} times")
        assert [running > 1 for running in job.company] == [True, True, False, False][0 if company else 2 :]
        assert set(lines_of(client, batch.output_file_id)) == {f"r-{n}" for n in range(company)}
        with pytest.raises(openai.InternalServerError) as given_up:
            client.completions.create(model=NAME, prompt=poison, extra_body={"ignore_eos": True})
        assert given_up.value.code == "quarantined"


def go_on(job: MortalJob, steps: int) -> None:
    job.pause_at = job.steps + steps
    job.release()


def test_neighbours_of_crashes_that_no_line_caused_are_all_answered(folder: Path, tmp_path: Path) -> None:
    """A rank dies at six moments of 60 lines that have nothing to do with it: nobody is given up, each line is
    answered as in an undisturbed run."""
    with served(deployment(tmp_path), folder, lambda: [MortalJob(LIMITS, most=9)]) as daemon:
        client, job = daemon.client(), daemon.jobs[0]
        lines = b"".join(line(f"r-{n}", f"say {n}", max_tokens=10 + n % 7, seed=n) for n in range(60))
        calm = wait_batch(client, submit(client, lines).id)
        known = len(job.submitted)
        daemon.on_loop(job.hold)
        batch = submit(client, lines)
        until(lambda: len(job.submitted) == known + ABOARD)
        daemon.on_loop(partial(go_on, job, 23))
        for _ in range(6):
            until(lambda: not job.running.is_set())
            daemon.on_loop(job.die)
            daemon.on_loop(partial(go_on, job, 11))
        assert job.company == [LIMITS.max_num_seqs] * 6
        job.pause_at = None
        daemon.on_loop(job.release)
        expected = {k: v["response"]["body"]["choices"] for k, v in lines_of(client, calm.output_file_id).items()}
        found = complete(client, batch.id, 60)
        assert {k: v["response"]["body"]["choices"] for k, v in found.items()} == expected


def test_deaths_are_remembered_over_a_restart(folder: Path, tmp_path: Path) -> None:
    """Two lines in the step of a death, then another daemon: its first death is their second."""
    config = deployment(tmp_path)
    with served(config, folder, lambda: [MortalJob(LIMITS, hold=True)]) as daemon:
        batch = submit(daemon.client(), line("poison", [299]) + line("r-0", "say 0"))
        until(lambda: daemon.on_loop(lambda: len(daemon.jobs[0].sequences)) == 2)
        daemon.on_loop(daemon.jobs[0].die)
        until(lambda: _deaths(tmp_path, batch.id) == {1: 1, 2: 1})
    with served(config, folder, lambda: [MortalJob(LIMITS, poison=299, hold=True)]) as daemon:
        until(lambda: daemon.on_loop(lambda: len(daemon.jobs[0].sequences)) == 2)
        daemon.on_loop(daemon.jobs[0].release)
        done = wait_batch(daemon.client(), batch.id)
        assert (done.request_counts.completed, done.request_counts.failed) == (1, 1)
        assert daemon.jobs[0].company == [2, 1, 1]


def test_what_gets_a_little_further_each_time_is_found(folder: Path, tmp_path: Path) -> None:
    """A line that kills after ever more tokens, as one does that runs out of memory."""
    with served(deployment(tmp_path), folder, lambda: [MortalJob(LIMITS, poison=299, hold=True)]) as daemon:
        job, kept = daemon.jobs[0], daemon.jobs[0].die

        def die() -> None:
            job.poison_after += 6
            kept()

        job.die = die
        lines = line("poison", [299], max_tokens=40) + b"".join(line(f"r-{n}", "x", max_tokens=99) for n in range(12))
        batch = submit(daemon.client(), lines)
        until(lambda: len(job.submitted) == 13)
        daemon.on_loop(job.release)
        batch = wait_batch(daemon.client(), batch.id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (12, 1)
        assert [running > 1 for running in job.company] == [True, True, False, False]


def _deaths(folder: Path, batch_id: str) -> dict[int, int]:
    with sqlite3.connect(folder / "data" / "store.db") as db:
        return dict(db.execute("SELECT number, deaths FROM suspects WHERE batch_id = ?", (batch_id,)).fetchall())


def test_a_crash_loop_fails_the_batch_and_ends_the_daemon(folder: Path, tmp_path: Path) -> None:
    """The fourth failure without progress: what was answered stays, the rest has error lines, the reason is in the
    batch, the daemon's exit code is 1; a batch that never ran waits for the next daemon."""
    config = deployment(tmp_path)
    daemon = Served(config, folder, lambda: [MortalJob(LIMITS, hold=True)])
    client = daemon.client()
    batch = submit(client, many(30))
    until(lambda: daemon.on_loop(lambda: len(daemon.jobs[0].sequences)) > 8)
    for _ in range(4):
        daemon.on_loop(lambda: daemon.jobs[0].die(None, "rank 0 cannot load"))
    assert daemon.join() == 1
    with served(config, folder) as after:
        client = after.client()
        failed: Any = client.batches.retrieve(batch.id)
        assert failed.status == "failed"
        assert "4 failures in a row" in failed.errors.data[0].message
        assert len(lines_of(client, failed.error_file_id)) == 30


def test_replicas_that_never_come_up_fail_no_batch(folder: Path, tmp_path: Path) -> None:
    config = deployment(tmp_path)
    daemon = Served(config, folder, lambda: [MortalJob(LIMITS, hold=True)])
    batch = submit(daemon.client(), many(3))
    until(lambda: daemon.client().batches.retrieve(batch.id).status == "in_progress")
    daemon.stop()
    assert Served(config, folder, lambda: [FakeJob(LIMITS, refuse="bad weights")]).join() == 1
    with served(config, folder) as after:
        complete(after.client(), batch.id, 3)


def test_a_batch_that_is_deleted_while_it_is_cancelled_is_not_found(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends and goes between the look at it and the change."""
    with served(deployment(tmp_path), folder) as daemon:
        client, batches = daemon.client(), daemon.daemon.services.batches
        daemon.on_loop(daemon.jobs[0].hold)
        batch = submit(client, many(3))
        cancel = batches.cancel

        async def late(batch_id: str) -> Any:
            daemon.jobs[0].release()
            await asyncio.to_thread(complete, client, batch_id, 3)
            await asyncio.to_thread(daemon.client().delete, f"/batches/{batch_id}", cast_to=object)
            return await cancel(batch_id)

        monkeypatch.setattr(batches, "cancel", late)
        with pytest.raises(openai.NotFoundError):
            client.batches.cancel(batch.id)


# the disk


@pytest.mark.parametrize("why", ["database or disk is full", "disk I/O error"])
def test_a_disk_that_fails_pauses_everything_and_loses_nothing(folder: Path, tmp_path: Path, why: str) -> None:
    """In the middle of a batch the store's commits fail: uploads are 507, answers wait; with a disk that works again
    all lines are there, once. A full disk leaves the daemon ready, since it answers; a broken one does not."""
    with served(deployment(tmp_path), folder, store=StoreOptions(connect=failing)) as daemon:
        client, job = daemon.client(), daemon.jobs[0]
        daemon.on_loop(job.hold)
        batch = submit(client, many(200))
        until(lambda: len(job.submitted) == ABOARD)
        Failing.broken = why
        try:
            daemon.on_loop(job.release)
            until(lambda: daemon.on_loop(lambda: daemon.daemon.services.store.failure))
            for call in (
                lambda: submit(client, line("a")),
                lambda: client.batches.cancel(batch.id),
            ):
                with pytest.raises(openai.InternalServerError) as refused:
                    call()
                assert refused.value.status_code == 507
            assert client.batches.retrieve(batch.id).id == batch.id
            ready = daemon.raw(b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert (b" 200 " if "full" in why else b" 503 ") in ready.splitlines()[0]
            assert why.encode() in ready
            assert client.completions.create(model=NAME, prompt="a", max_tokens=2).choices[0].text
        finally:
            Failing.broken = ""
        complete(client, batch.id, 200)


def test_an_upload_that_cannot_be_written_is_507_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    files = BadFiles()
    with served(deployment(tmp_path), folder, store=StoreOptions(files=files)) as daemon:
        client = daemon.client()
        for kind in ("write_error", "fsync_error"):
            setattr(files, kind, 28)
            with pytest.raises(openai.InternalServerError) as refused:
                client.files.create(file=("a.jsonl", line("a")), purpose="batch")
            assert refused.value.status_code == 507
            setattr(files, kind, 0)
        assert client.files.list().data == []
        assert list((tmp_path / "data" / "files").iterdir()) == []


def test_too_little_room_pauses_batches(folder: Path, tmp_path: Path) -> None:
    config = deployment(tmp_path)
    limits = replace(config.daemon.limits, min_free_disk=1 << 60)
    with served(config, folder) as daemon:
        daemon.on_loop(daemon.jobs[0].hold)
        batch = submit(daemon.client(), many(20))
        until(lambda: daemon.client().batches.retrieve(batch.id).status == "in_progress")
    with served(replace(config, daemon=replace(config.daemon, limits=limits)), folder) as daemon:
        with pytest.raises(openai.InternalServerError) as refused:
            daemon.client().files.create(file=("a.jsonl", line("a")), purpose="batch")
        assert refused.value.status_code == 507
        time.sleep(0.2)
        assert daemon.jobs[0].submitted == []
    with served(config, folder) as daemon:
        complete(daemon.client(), batch.id, 20)


def test_files_are_made_again_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    """The output and the error file removed from the disk; and everything but the export: a fresh node has the same
    bytes."""
    config = deployment(tmp_path, export_dir=str(tmp_path / "export"))
    with served(config, folder) as daemon:
        client = daemon.client()
        batch = wait_batch(client, submit(client, many(50) + line("bad", "x" * 3000)).id)
        names = (batch.input_file_id, batch.output_file_id, batch.error_file_id)
        before = [client.files.content(name).read() for name in names]
        assert all(before)
        for name in names[1:]:
            (tmp_path / "data" / "files" / name).unlink()
        assert [client.files.content(name).read() for name in names] == before
    (tmp_path / "data").rename(tmp_path / "lost")
    with served(config, folder) as daemon:
        assert [daemon.client().files.content(name).read() for name in names] == before


# order and streams


def test_interactive_requests_go_before_batch_lines(folder: Path, tmp_path: Path) -> None:
    with served(deployment(tmp_path), folder, lambda: [FakeJob(LIMITS, hold=True)]) as daemon:
        client = daemon.client()
        submit(client, many(100))
        job = daemon.jobs[0]
        until(lambda: len(job.submitted) >= 8)
        asked = threading.Thread(target=lambda: client.completions.create(model=NAME, prompt="x"))
        asked.start()
        until(lambda: any(r.priority == 0 for r in job.submitted))
        assert len(job.submitted) < 60  # it did not wait for the lines before it
        daemon.on_loop(job.release)
        asked.join()


def test_requests_whose_engine_was_lost_before_it_began_are_answered(folder: Path, tmp_path: Path) -> None:
    """A stream and an answer in one piece. test_going_on.py has those that were seen in part."""
    with served(deployment(tmp_path), folder, lambda: [MortalJob(LIMITS)]) as daemon:
        client, job = daemon.client(), daemon.jobs[0]
        options = {"model": NAME, "prompt": "hello", "max_tokens": 100, "seed": 3, "extra_body": {"ignore_eos": True}}
        expected = client.completions.create(**options).choices[0].text  # type: ignore[call-overload]
        daemon.on_loop(job.hold)
        got: list[str] = []
        asking = [
            threading.Thread(target=lambda: got.append(client.completions.create(**options).choices[0].text)),  # type: ignore[call-overload]
            threading.Thread(
                target=lambda: got.append(
                    "".join(c.choices[0].text for c in client.completions.create(stream=True, **options))  # type: ignore[call-overload]
                )
            ),
        ]
        for thread in asking:
            thread.start()
        until(lambda: len(job.submitted) == 3)
        daemon.on_loop(job.die)
        daemon.on_loop(job.release)
        for thread in asking:
            thread.join()
        assert got == [expected, expected]


def test_a_stop_ends_the_engine_early(folder: Path, tmp_path: Path) -> None:
    """A stop string is the door's: it tells the engine after how many tokens to end."""
    with served(deployment(tmp_path), folder, lambda: [FakeJob(LIMITS, {(ord("a"),): (75, 76, 77, 78)})]) as daemon:
        client = daemon.client()
        text = client.completions.create(model=NAME, prompt=[97], max_tokens=4).choices[0].text
        end = text[2:3]
        answer = client.completions.create(model=NAME, prompt=[97], max_tokens=200, stop=[end])
        assert answer.choices[0].finish_reason == "stop"
        assert end not in answer.choices[0].text
        assert daemon.jobs[0].stops


def test_numerical_errors_end_only_their_request(folder: Path, tmp_path: Path) -> None:
    with served(deployment(tmp_path), folder, lambda: [FakeJob(LIMITS, fail=frozenset({299}))]) as daemon:
        client = daemon.client()
        batch = wait_batch(client, submit(client, many(10) + line("nan", [299])).id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (10, 1)
        error = lines_of(client, batch.error_file_id)["nan"]["response"]
        assert (error["status_code"], error["body"]["error"]["code"]) == (500, "numerical_error")
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model=NAME, prompt=[299])


def test_an_answer_that_cannot_be_made_is_an_error_and_no_hang(folder: Path, tmp_path: Path) -> None:
    """Tokens of a choice that was never asked for: that line alone fails."""

    class Wild(FakeJob):
        def next_event(self, sequence: Any) -> TokensEvent:
            event = super().next_event(sequence)
            return replace(event, choice=99) if sequence.request.prompt[0] == 299 else event

    with served(deployment(tmp_path), folder, lambda: [Wild(LIMITS)]) as daemon:
        batch = wait_batch(daemon.client(), submit(daemon.client(), many(5) + line("wild", [299])).id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (5, 1)


def test_interactive_requests_are_bounded(folder: Path, tmp_path: Path) -> None:
    limits = replace(LimitsConfig(), max_interactive_requests=2)
    with served(deployment(tmp_path, limits), folder, lambda: [FakeJob(LIMITS, hold=True)]) as daemon:
        client = daemon.client()
        codes: list[int] = []

        def ask() -> None:
            try:
                client.completions.create(model=NAME, prompt="x")
            except openai.APIStatusError as error:
                codes.append(error.status_code)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        until(lambda: codes.count(429) == 2)
        daemon.on_loop(daemon.jobs[0].release)
        for thread in threads:
            thread.join()
        assert codes == [429, 429]


def test_two_daemons_on_one_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    with served(deployment(tmp_path), folder), pytest.raises(Exception, match=f"used by process {os.getpid()}"):
        Served(deployment(tmp_path), folder)


def test_the_access_log_says_why_and_leaves_polling_out(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal with its reason, from whichever layer it comes; asking for a batch's status again and again is no
    news, unless it fails."""
    caplog.set_level(logging.INFO, "laddertron.engine.daemon.http.guard")
    with served(deployment(tmp_path), folder) as daemon:
        client = daemon.client()
        batch = wait_batch(client, submit(client, line("a")).id)
        with pytest.raises(openai.NotFoundError):
            client.batches.retrieve("batch_0")
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=NAME, prompt="x", extra_body={"max_tokenz": 3})
        with pytest.raises(openai.NotFoundError):
            client.post("/nowhere", cast_to=object)
    said = [record.getMessage() for record in caplog.records]
    assert "GET /v1/batches/batch_0 404: no batch 'batch_0' here" in said
    assert any(text.startswith("POST /v1/nowhere 404: no route '/v1/nowhere': there are /") for text in said)
    (refused,) = (r for r in caplog.records if "max_tokenz" in r.getMessage())
    assert refused.getMessage().startswith("POST /v1/completions 400: unknown field 'max_tokenz'")
    assert refused.__dict__["reason"].startswith("unknown field 'max_tokenz'")
    assert not any(f"GET /v1/batches/{batch.id}" in text for text in said)
    assert any(text.startswith("POST /v1/batches 200") for text in said)


def test_the_audit_and_the_logs_are_one_json_object_a_line(folder: Path, tmp_path: Path) -> None:
    import io

    from laddertron.engine.daemon.logs import JsonFormatter, TextFormatter

    record = logging.LogRecord("laddertron.x", logging.WARNING, "f", 1, "rank %d\nis late", (3,), None)
    record.rank, record.node = 3, "node-a"
    said = json.loads(JsonFormatter().format(record))
    assert (said["level"], said["rank"], said["node"]) == ("warning", 3, "node-a")
    assert "\n" not in JsonFormatter().format(record)
    assert "warning: rank 3 is late" in TextFormatter().format(record)
    record.msg = "is %d late"
    assert "warning rank=3 node=node-a: is 3 late" in TextFormatter().format(record)
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    audit = logging.getLogger("laddertron.audit")
    audit.addHandler(handler)
    audit.setLevel(logging.INFO)
    try:
        with served(deployment(tmp_path), folder) as daemon:
            file = daemon.client().files.create(file=("a", line("a")), purpose="batch")
            daemon.client().files.delete(file.id)
    finally:
        audit.removeHandler(handler)
    events = [json.loads(row) for row in stream.getvalue().splitlines()]
    assert [e["event"] for e in events if e.get("id") == file.id] == ["file.created", "file.deleted"]
