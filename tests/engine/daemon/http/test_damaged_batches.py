"""Batches whose input or results were damaged on the disk: they fail by name, and what can be read is kept."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from daemon_tools import LIMITS, MortalJob, Served, deployment, line, lines_of, served, submit, wait_batch
from openai import OpenAI
from test_app_batches import completed, many
from tiny_text import write_folder
from waiting import until

COUNT = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


def half(pause_at: int | None = None) -> list[MortalJob]:
    job = MortalJob(LIMITS)
    job.pause_at = pause_at
    return [job]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(line("one more"))


def edit(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b"say 399", b"sax 399"))


def remove(path: Path) -> None:
    path.unlink()


def stopped_half_way(daemon: Served, data: bytes) -> Any:
    """A batch of COUNT lines, some of which have their results in the store; the daemon has ended."""
    job = daemon.jobs[0]
    job.pause_at = job.steps + 80
    batch = submit(daemon.client(), data)
    until(lambda: completed(daemon.client(), batch.id) > 50)
    batch = daemon.client().batches.retrieve(batch.id)
    daemon.stop()
    return batch


def both(client: OpenAI, batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)


DAMAGES = (cut, append, edit, remove)


def test_an_input_that_changed_between_two_daemons_fails_its_batch_and_keeps_its_results(
    folder: Path, tmp_path: Path
) -> None:
    config = deployment(tmp_path)
    with served(config, folder, half) as daemon:
        client = daemon.client()
        daemon.jobs[0].pause_at = 80
        batches = [submit(client, many(COUNT)) for _ in DAMAGES]
        until(lambda: sum(completed(client, batch.id) for batch in batches) > 50)
        had = sum(completed(client, batch.id) for batch in batches)
    for damage, batch in zip(DAMAGES, batches, strict=True):
        damage(tmp_path / "data" / "files" / batch.input_file_id)
    with served(config, folder) as daemon:
        client = daemon.client()
        for damage, batch in zip(DAMAGES, batches, strict=True):
            ended = wait_batch(client, batch.id)
            assert ended.status == "failed"
            assert ended.failed_at is not None
            [error] = ended.errors.data
            assert error.code == ("input_file_missing" if damage is remove else "input_file_changed")
            assert damage is remove or f"{ended.input_file_id} (in.jsonl)" in error.message
            answers, errors = both(client, ended)
            assert len(answers) == ended.request_counts.completed < COUNT
            assert not errors
            had -= len(answers)
        assert had <= 0
        assert not daemon.jobs[0].submitted
        assert wait_batch(client, submit(client, many(2)).id).status == "completed"


def test_an_input_that_changed_before_it_was_checked_fails_by_name(folder: Path, tmp_path: Path) -> None:
    config = deployment(tmp_path)
    with served(config, folder) as daemon:
        daemon.on_loop(daemon.daemon.services.batches._checking[""].acquire())
        batch = submit(daemon.client(), many(COUNT))
        daemon.stop()
    edit(tmp_path / "data" / "files" / batch.input_file_id)
    with served(config, folder) as daemon:
        ended = wait_batch(daemon.client(), batch.id)
        assert (ended.status, ended.errors.data[0].code) == ("failed", "input_file_changed")
        assert ended.output_file_id is None


def test_a_file_of_a_version_that_kept_no_digest_is_compared_by_its_size(folder: Path, tmp_path: Path) -> None:
    config = deployment(tmp_path)
    with served(config, folder, half) as daemon:
        batch = stopped_half_way(daemon, many(COUNT))
    assert alter(tmp_path, "DELETE FROM blocks WHERE file_id = ?", batch.input_file_id) == 1
    edit(tmp_path / "data" / "files" / batch.input_file_id)
    before = batch.request_counts.completed
    with served(config, folder, lambda: half(40)) as daemon:
        until(lambda: completed(daemon.client(), batch.id) > before)
        daemon.stop()
    cut(tmp_path / "data" / "files" / batch.input_file_id)
    with served(config, folder) as daemon:
        assert wait_batch(daemon.client(), batch.id).errors.data[0].code == "input_file_changed"


def test_a_batch_is_not_continued_by_another_model(folder: Path, tmp_path: Path) -> None:
    """It fails by name and keeps its answers; one without answers yet is computed."""
    config = deployment(tmp_path)
    with served(config, folder, half) as daemon:
        batch = stopped_half_way(daemon, many(COUNT))
    with served(config, folder, model="another") as daemon:
        client = daemon.client()
        ended = wait_batch(client, batch.id)
        [error] = ended.errors.data
        assert (ended.status, error.code) == ("failed", "model_changed")
        assert "by model a model" in error.message
        assert "serves another" in error.message
        assert len(both(client, ended)[0]) == ended.request_counts.completed > 0
        assert not daemon.jobs[0].submitted
        daemon.on_loop(daemon.jobs[0].hold)
        waiting = submit(client, many(2))
    with served(config, folder, model="a third") as daemon:
        assert wait_batch(daemon.client(), waiting.id).status == "completed"


def alter(folder: Path, query: str, *values: object) -> int:
    db = sqlite3.connect(folder / "data" / "store.db")
    with db:
        count = db.execute(query, values).rowcount
    db.close()
    return count


def test_a_batch_whose_counts_do_not_add_up_is_not_completed(folder: Path, tmp_path: Path) -> None:
    """Lines that the batch counted and nothing answered: here the total is what differs."""
    config = deployment(tmp_path)
    with served(config, folder, half) as daemon:
        batch = stopped_half_way(daemon, many(COUNT))
    assert alter(tmp_path, "UPDATE batches SET total = total + 3, sum = NULL") == 1
    with served(config, folder) as daemon:
        client = daemon.client()
        ended = wait_batch(client, batch.id)
        assert (ended.status, ended.errors.data[0].code) == ("failed", "results_missing")
        assert f"of {COUNT + 3} lines {COUNT} have a result" in ended.errors.data[0].message
        assert len(lines_of(client, ended.output_file_id)) == COUNT


DAMAGED_LINES = ("x'ff00'", "CAST(x'7bff7d0a' AS TEXT)", "substr(line, 1, 20)", "''")


def test_a_result_that_cannot_be_read_is_computed_again(folder: Path, tmp_path: Path) -> None:
    """In a batch that ends after the damage, in one that ended before and whose file is gone, and in one that takes
    over its answers. If the input was edited meanwhile, the line fails alone."""
    config = deployment(tmp_path)
    with served(config, folder, half) as daemon:
        client = daemon.client()
        ended = wait_batch(client, submit(client, many(6)).id)
        before = client.files.content(ended.output_file_id).read()
        edited = wait_batch(client, submit(client, line("r-0", "say 399") + many(6).partition(b"\n")[2]).id)
        batch = stopped_half_way(daemon, many(COUNT))
    for number, damaged in enumerate(DAMAGED_LINES, 2):
        query = f"UPDATE results SET line = {damaged} WHERE batch_id = ? AND number = {number}"
        assert [alter(tmp_path, query, b.id) for b in (batch, ended, edited)] == [1, 1, 1]
    for made in (ended, edited):
        (tmp_path / "data" / "files" / made.output_file_id).unlink()
    edit(tmp_path / "data" / "files" / edited.input_file_id)
    with served(config, folder) as daemon:
        client = daemon.client()
        found = wait_batch(client, batch.id)
        counts = found.request_counts
        assert (found.status, counts.total, counts.completed, counts.failed) == ("completed", COUNT, COUNT, 0)
        answers, errors = both(client, found)
        assert (set(answers), errors) == ({f"r-{n}" for n in range(COUNT)}, {})
        page = daemon.raw(b"GET /v1/overview HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert page.startswith(b"HTTP/1.1 200")
        ran = len(daemon.jobs[0].submitted)
        again = wait_batch(client, submit(client, many(6), extra_body={"reuse_batch_id": ended.id}).id)
        assert (again.status, again.request_counts.completed) == ("completed", 6)
        assert len(daemon.jobs[0].submitted) - ran == 4
        assert choices_of(lines_of(client, ended.output_file_id)) == choices_of(lines_in(before))
        assert len(lines_of(client, again.output_file_id)) == 6
        assert len(daemon.jobs[0].submitted) - ran == 8
        left = lines_of(client, edited.output_file_id)
        assert {name for name, entry in left.items() if entry["error"] is None} == {"r-0", "r-5"}
        assert {left[f"r-{n}"]["error"]["code"] for n in range(1, 5)} == {"result_unreadable"}


def lines_in(data: bytes) -> dict[str, Any]:
    return {entry["custom_id"]: entry for entry in map(json.loads, data.splitlines())}


def choices_of(lines: dict[str, Any]) -> dict[str, Any]:
    return {name: entry["response"]["body"]["choices"] for name, entry in lines.items()}


def test_an_export_of_a_store_with_an_unreadable_result_is_rebuilt(folder: Path, tmp_path: Path) -> None:
    """It could not even begin: no snapshot could be made."""
    config = deployment(tmp_path, export_dir=str(tmp_path / "export"))
    with served(config, folder, half) as daemon:
        batch = stopped_half_way(daemon, many(COUNT))
    assert alter(tmp_path, "UPDATE results SET line = CAST(x'7bff7d0a' AS TEXT) WHERE number = 2") == 1
    with served(config, folder) as daemon:
        daemon.stop()
    (tmp_path / "data").rename(tmp_path / "lost")
    with served(config, folder) as daemon:
        counts = wait_batch(daemon.client(), batch.id).request_counts
        assert (counts.completed, counts.failed) == (COUNT, 0)
