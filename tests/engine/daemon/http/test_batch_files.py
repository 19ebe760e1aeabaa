"""How long files stay, and answers that a batch takes over from an earlier one."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from daemon_tools import (
    LIMITS,
    NAME,
    deployment,
    line,
    lines_of,
    served,
    submit,
    wait_batch,
)
from fake_job import FakeJob
from laddertron.engine.daemon.keys import add_key
from laddertron.engine.daemon.store import records
from test_app_batches import many
from tiny_text import write_folder
from waiting import until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


def test_a_stored_line_has_the_digest_of_the_same_request_alone(folder: Path, tmp_path: Path) -> None:
    """Of each choice, from a store that was opened anew; a line that did not ask has none."""
    asked = {"seed": 5, "n": 2, "temperature": 1.0, "max_tokens": 9}
    lines = line("plain", **asked) + line("audited", return_digest=True, **asked)
    with served(deployment(tmp_path), folder) as daemon:
        batch = wait_batch(daemon.client(), submit(daemon.client(), lines).id)
        extra = {"return_digest": True, "ignore_eos": True}
        alone = daemon.client().completions.create(model=NAME, prompt="hello", extra_body=extra, **asked)  # type: ignore[call-overload]
    with served(deployment(tmp_path), folder) as daemon:
        found = lines_of(daemon.client(), batch.output_file_id)
    plain, audited = (found[name]["response"]["body"]["choices"] for name in ("plain", "audited"))
    assert [choice["text"] for choice in plain] == [choice["text"] for choice in audited]
    assert "digest" not in plain[0]
    digests = [choice["digest"] for choice in audited]
    assert digests == [choice.to_dict()["digest"] for choice in alone.choices]
    assert len(set(digests)) == 2


def test_expiry_and_retention(folder: Path, tmp_path: Path) -> None:
    """A batch whose window is over gets its finished answers and error lines for the rest; what is older than the
    retention is deleted, results included."""
    config = deployment(tmp_path)
    with served(config, folder) as daemon:
        client = daemon.client()
        first = wait_batch(client, submit(client, many(3)).id)
        daemon.on_loop(daemon.jobs[0].hold)
        batch = submit(client, many(30), completion_window="1m")
        until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
        store = daemon.daemon.services.store
        daemon.on_loop(store.write(lambda rows: records.change_batch(rows, batch.id, expires_at=int(time.time()))))
    with served(config, folder, lambda: [FakeJob(LIMITS, hold=True)]) as daemon:
        client = daemon.client()
        ended = wait_batch(client, batch.id)
        assert ended.status == "expired"
        assert ended.expired_at is not None
        errors = lines_of(client, ended.error_file_id)
        answers = lines_of(client, ended.output_file_id)
        assert len(errors) + len(answers) == 30
        assert {entry["error"]["code"] for entry in errors.values()} == {"batch_expired"}
        store = daemon.daemon.services.store
        daemon.on_loop(store.write(lambda rows: records.change_batch(rows, first.id, created_at=1)))
    with served(replace(config, daemon=replace(config.daemon, retention=60.0)), folder) as daemon:
        client = daemon.client()
        until(lambda: len(client.batches.list().data) == 1)
        with pytest.raises(openai.NotFoundError):
            client.files.content(first.output_file_id)
        with sqlite3.connect(tmp_path / "data" / "store.db") as db:
            assert db.execute("SELECT count(*) FROM results WHERE batch_id = ?", (first.id,)).fetchone() == (0,)
        client.batches.retrieve(batch.id)


def test_files_expire_by_their_own_time(folder: Path, tmp_path: Path) -> None:
    """`expires_after` of an upload, `output_expires_after` of a batch, without any retention: gone when the time has
    come, not before; the batch stays."""
    config = deployment(tmp_path, retention=None)
    soon: Any = {"anchor": "created_at", "seconds": 3600}
    with served(config, folder) as daemon:
        client = daemon.client()
        upload = client.files.create(file=("in.jsonl", many(2)), purpose="batch", expires_after=soon)
        assert upload.expires_at == upload.created_at + 3600
        assert client.files.create(file=("x.jsonl", many(2)), purpose="batch").expires_at is None
        made = client.batches.create(
            input_file_id=upload.id, endpoint="/v1/completions", completion_window="24h", output_expires_after=soon
        )
        batch = wait_batch(client, made.id)
        output = client.files.retrieve(batch.output_file_id)
        assert output.expires_at == output.created_at + 3600
        wrong: list[Any] = [{**soon, "seconds": 3599}, {**soon, "seconds": 30 * 86400 + 1}, {**soon, "anchor": "now"}]
        for bad in wrong:
            with pytest.raises(openai.BadRequestError, match="expires_after"):
                client.files.create(file=("in.jsonl", many(2)), purpose="batch", expires_after=bad)
            with pytest.raises(openai.BadRequestError, match="expires_after"):
                client.batches.create(
                    input_file_id=upload.id,
                    endpoint="/v1/completions",
                    completion_window="24h",
                    output_expires_after=bad,
                )
        clean = daemon.daemon.services.batches.cleaner.clean
        assert daemon.on_loop(clean(0, upload.created_at + 3599)) == 0
        assert daemon.on_loop(clean(0, output.created_at + 3600)) == 2
        assert len(client.files.list().data) == 1
        assert client.batches.retrieve(batch.id).output_file_id is None


def test_a_batch_takes_over_answers_to_the_same_lines(folder: Path, tmp_path: Path) -> None:
    """Of a batch that was cancelled half way: unchanged lines with an answer are not computed again, changed and
    failed ones are; the output file is whole, usage is of the rest. Another's batch is refused."""
    path = tmp_path / "keys.json"
    alice, bob = (add_key(path, name)[1] for name in ("alice", "bob"))
    config = deployment(tmp_path, api_key_file=str(path))
    with served(config, folder, keys=path) as daemon:
        client, job = daemon.client(alice), daemon.jobs[0]
        first = wait_batch(client, submit(client, line("a") + line("b") + line("c") + line("bad", "x" * 3000)).id)
        assert (first.request_counts.completed, first.request_counts.failed) == (3, 1)
        assert first.model == NAME
        answers, ran = lines_of(client, first.output_file_id), len(job.submitted)
        before = daemon.on_loop(daemon.daemon.services.read(lambda db: records.read_usage(db, None, 0)))
        again = line("new") + line("c") + line("b", "changed") + line("a") + line("bad", "short now")
        reuse = {"reuse_batch_id": first.id}
        second = wait_batch(client, submit(client, again, extra_body=reuse).id)
        found = lines_of(client, second.output_file_id)
        assert list(found) == ["new", "c", "b", "a", "bad"]
        assert [found[name] == answers[name] for name in ("a", "b", "c")] == [True, False, True]
        assert len(job.submitted) - ran == 3
        used = daemon.on_loop(daemon.daemon.services.read(lambda db: records.read_usage(db, None, 0)))
        assert used[0]["requests"] - before[0]["requests"] == 3
        assert second.usage.output_tokens == 3 * 8
        for asked, name in ((daemon.client(bob), first.id), (client, "batch_0")):
            with pytest.raises(openai.BadRequestError, match="reuse_batch_id"):
                submit(asked, again, extra_body={"reuse_batch_id": name})
        client.files.delete(first.input_file_id)
        with pytest.raises(openai.BadRequestError, match="reuse_batch_id"):
            submit(client, again, extra_body=reuse)


def test_answers_of_another_model_are_not_taken_over(folder: Path, tmp_path: Path) -> None:
    """By a model that was changed since, of a batch that two models answered, and where the change comes after the
    batch was created, before its file is checked."""
    with served(deployment(tmp_path), folder) as daemon:
        client, job = daemon.client(), daemon.jobs[0]

        def again(batch: Any) -> Any:
            return submit(client, line("a") + line("b"), extra_body={"reuse_batch_id": batch.id})

        first = wait_batch(client, submit(client, line("a") + line("b")).id)
        for other in ("another", ""):  # "": a reload is under way
            daemon.model = other
            with pytest.raises(openai.BadRequestError, match=f"digest a model; now {other or 'of several'}"):
                again(first)
        assert len(job.submitted) == 2
        daemon.model = "another"
        second = wait_batch(client, submit(client, line("a") + line("b")).id)
        wait_batch(client, again(second).id)
        assert len(job.submitted) == 4
        daemon.on_loop(daemon.daemon.services.batches.checking[""].acquire())
        waiting = again(second)
        daemon.model = "a third"
        daemon.on_loop(daemon.daemon.services.batches.checking[""].release)
        wait_batch(client, waiting.id)
        assert len(job.submitted) == 6
        mixed = client.batches.retrieve(waiting.id)
        with pytest.raises(openai.BadRequestError, match="digest of several models, or unknown; now a third"):
            again(mixed)
