"""Batches whose input or results were damaged on the disk: they fail by name, and what can be read is kept."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from daemon_tools import LIMITS, MortalJob, Served, deployment, line, lines_of, served, submit, wait_batch
from laddertron.engine.daemon.store.check import check_store
from laddertron.engine.daemon.store.connection import connect_store
from laddertron.engine.daemon.store.schema import Rows
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
        daemon.on_loop(daemon.daemon.services.batches.checking[""].acquire())
        batch = submit(daemon.client(), many(COUNT))
        daemon.stop()
    edit(tmp_path / "data" / "files" / batch.input_file_id)
    with served(config, folder) as daemon:
        ended = wait_batch(daemon.client(), batch.id)
        assert (ended.status, ended.errors.data[0].code) == ("failed", "input_file_changed")
        assert ended.output_file_id is None


def test_a_file_that_lost_its_checksums_fails_its_batch(folder: Path, tmp_path: Path) -> None:
    config = deployment(tmp_path)
    with served(config, folder, half) as daemon:
        batch = stopped_half_way(daemon, many(COUNT))
    assert alter(tmp_path, "DELETE FROM blocks WHERE file_id = ?", batch.input_file_id) == 1
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
    with contextlib.closing(connect_store(tmp_path / "data", sqlite3.connect)) as db, db:
        total = db.execute("SELECT total FROM batches").fetchone()[0]
        assert Rows(db).update("batches", {"id": batch.id, "total": total + 3})
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
        assert lines_of(client, edited.output_file_id).keys() == {"r-0", "r-5"}
        left = lines_of(client, client.batches.retrieve(edited.id).error_file_id)
        assert {name: entry["error"]["code"] for name, entry in left.items()} == {
            f"r-{n}": "result_unreadable" for n in range(1, 5)
        }


def lines_in(data: bytes) -> dict[str, Any]:
    return {entry["custom_id"]: entry for entry in map(json.loads, data.splitlines())}


def choices_of(lines: dict[str, Any]) -> dict[str, Any]:
    return {name: entry["response"]["body"]["choices"] for name, entry in lines.items()}


def test_an_export_of_a_store_with_an_unreadable_result_is_rebuilt(folder: Path, tmp_path: Path) -> None:
    """It could not even begin: no snapshot could be made."""
    config = deployment(tmp_path, export_dir=str(tmp_path / "export"))
    with served(config, folder, half) as daemon:
        batch = stopped_half_way(daemon, many(COUNT))
    one = "number = (SELECT min(number) FROM results)"  # which lines are answered by now is not certain
    assert alter(tmp_path, f"UPDATE results SET line = CAST(x'7bff7d0a' AS TEXT) WHERE {one}") == 1
    with served(config, folder) as daemon:
        daemon.stop()
    (tmp_path / "data").rename(tmp_path / "lost")
    with served(config, folder) as daemon:
        counts = wait_batch(daemon.client(), batch.id).request_counts
        assert (counts.completed, counts.failed) == (COUNT, 0)


def allows(tokens: int) -> list[MortalJob]:
    return [MortalJob(replace(LIMITS, max_model_len=tokens))]


SHORT, LONG = "say 1", "long " * 60


@pytest.mark.parametrize("others", [0, 3], ids=["no-other-line", "other-lines"])
@pytest.mark.parametrize("first", [100, 512], ids=["error-then-answer", "answer-then-error"])
def test_a_line_computed_again_with_the_other_outcome_is_in_one_file(
    folder: Path, tmp_path: Path, first: int, others: int
) -> None:
    """The results of the long lines are damaged and their file is gone; a daemon with another limit computes them. The
    file that they move to may not exist before; if it does, it is intact."""
    data = b"".join(line(f"long-{n}", LONG) for n in range(2))
    data += b"".join(line(f"{n}", SHORT) + line(f"bad-{n}", model="another") for n in range(others))
    config = deployment(tmp_path)
    with served(config, folder, lambda: allows(first)) as daemon:
        batch = wait_batch(daemon.client(), submit(daemon.client(), data).id)
        assert batch.status == "completed"
    counts, total = batch.request_counts, 2 + 2 * others
    assert (counts.completed, counts.failed) == ((others, others + 2) if first == 100 else (others + 2, others))
    assert alter(tmp_path, "UPDATE results SET line = '{}' WHERE custom_id LIKE 'long%'") == 2
    source = batch.error_file_id if first == 100 else batch.output_file_id
    (tmp_path / "data" / "files" / source).unlink()
    with served(config, folder, lambda: allows(612 - first)) as daemon:
        client = daemon.client()
        if not others:  # its size was not 0 when the range was asked for
            with pytest.raises(openai.APIStatusError, match="the file has 0 bytes"):
                client.files.content(source, extra_headers={"range": "bytes=5-9"})
        assert len(lines_of(client, source)) == others
        batch = wait_batch(client, batch.id)
        answers, errors = both(client, batch)
        assert answers.keys() | errors.keys() == {json.loads(raw)["custom_id"] for raw in data.splitlines()}
        assert len(answers) + len(errors) == total
        assert {"long-0", "long-1"} <= (answers if first == 100 else errors).keys()
        used = [entry["response"]["body"]["usage"]["completion_tokens"] for entry in answers.values()]
        assert batch.usage.output_tokens == sum(used) + (0 if first == 100 else 2 * 8)  # they were computed
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (total, len(answers), len(errors))
        assert {file.id for file in client.files.list()} >= {batch.output_file_id, batch.error_file_id}
    checked = check_store(tmp_path / "data")
    assert (checked.wrong, checked.files) == ([], 3 if others else 1 + len({source, *moved_to(batch)}))


def moved_to(batch: Any) -> set[str]:
    return {name for name in (batch.output_file_id, batch.error_file_id) if name is not None}


def test_a_line_that_cannot_be_computed_again_is_an_error_in_the_error_file(folder: Path, tmp_path: Path) -> None:
    config = deployment(tmp_path)
    with served(config, folder) as daemon:
        batch = wait_batch(daemon.client(), submit(daemon.client(), many(6)).id)
    assert alter(tmp_path, "UPDATE results SET ok = 0 WHERE number = 2") == 1  # in neither file's rows
    assert alter(tmp_path, "UPDATE results SET line = '{}' WHERE number = 4") == 1
    for name in (batch.input_file_id, batch.output_file_id):
        (tmp_path / "data" / "files" / name).unlink()
    with served(config, folder) as daemon:
        client = daemon.client()
        assert lines_of(client, batch.output_file_id).keys() == {"r-0", "r-2", "r-4", "r-5"}
        batch = wait_batch(client, batch.id)
        errors = lines_of(client, batch.error_file_id)
        assert {name: entry["error"]["code"] for name, entry in errors.items()} == dict.fromkeys(
            ("r-1", "r-3"), "result_unreadable"
        )
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 4, 2)


def test_lines_of_a_deleted_file_are_not_computed_again_with_a_damaged_one(folder: Path, tmp_path: Path) -> None:
    config = deployment(tmp_path)
    with served(config, folder, lambda: allows(100)) as daemon:
        client = daemon.client()
        batch = wait_batch(client, submit(client, many(5) + line("long", LONG) + line("bad", model="x")).id)
        client.files.delete(batch.output_file_id)
    assert alter(tmp_path, "UPDATE results SET line = '{}' WHERE custom_id = 'long'") == 1
    (tmp_path / "data" / "files" / batch.error_file_id).unlink()
    with served(config, folder) as daemon:
        client = daemon.client()
        assert lines_of(client, batch.error_file_id).keys() == {"bad"}
        batch = wait_batch(client, batch.id)
        assert lines_of(client, batch.output_file_id).keys() == {"long"}
        assert (batch.request_counts.completed, batch.request_counts.failed) == (6, 1)
        assert len(daemon.jobs[0].submitted) == 1
