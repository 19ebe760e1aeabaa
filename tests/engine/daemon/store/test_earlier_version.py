"""A data folder as version 6 of the schema left it, written here table by table: its files, batches and answers are
served, its open batches are resumed or fail by name."""

from __future__ import annotations

import hashlib
import json
import random
import sqlite3
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from daemon_tools import deployment, line, lines_of, served, submit, wait_batch
from laddertron.engine.daemon.store.check import check_store
from laddertron.engine.metrics.observer import Observer
from tiny_text import write_folder

SCHEMA_6 = """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL);
    CREATE TABLE files (
        no INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, purpose TEXT NOT NULL,
        filename TEXT NOT NULL, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, batch_id TEXT
    );
    CREATE INDEX files_by_owner ON files (owner, no);
    CREATE TABLE batches (
        no INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, endpoint TEXT NOT NULL,
        input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL, status TEXT NOT NULL, errors TEXT,
        output_file_id TEXT, error_file_id TEXT, metadata TEXT,
        total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
        created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, in_progress_at INTEGER, finalizing_at INTEGER,
        completed_at INTEGER, failed_at INTEGER, expired_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER
    );
    CREATE INDEX batches_by_owner ON batches (owner, no);
    CREATE TABLE results (
        batch_id TEXT NOT NULL, custom_id TEXT NOT NULL, number INTEGER NOT NULL, epoch INTEGER NOT NULL,
        ok INTEGER NOT NULL, line TEXT NOT NULL, PRIMARY KEY (batch_id, custom_id)
    );
    CREATE UNIQUE INDEX results_in_order ON results (batch_id, number);
    CREATE TABLE suspects (
        batch_id TEXT NOT NULL, number INTEGER NOT NULL, deaths INTEGER NOT NULL, PRIMARY KEY (batch_id, number)
    );
    CREATE TABLE repeats (
        owner TEXT NOT NULL, key TEXT NOT NULL, digest TEXT NOT NULL, batch_id TEXT NOT NULL,
        created_at INTEGER NOT NULL, PRIMARY KEY (owner, key)
    );
    ALTER TABLE batches ADD COLUMN input_tokens INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE batches ADD COLUMN cached_tokens INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE batches ADD COLUMN output_tokens INTEGER NOT NULL DEFAULT 0;
    CREATE TABLE usage (
        owner TEXT NOT NULL, day INTEGER NOT NULL, requests INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
        cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, PRIMARY KEY (owner, day)
    );
    ALTER TABLE files ADD COLUMN expires_at INTEGER;
    ALTER TABLE batches ADD COLUMN output_seconds INTEGER;
    ALTER TABLE batches ADD COLUMN reuse_batch_id TEXT;
    ALTER TABLE files ADD COLUMN digest TEXT;
    ALTER TABLE batches ADD COLUMN model_digest TEXT;
    PRAGMA user_version = 6;
"""
AT = int(time.time()) - 2 * 86400
COUNT = 6
ASKED = b"".join(line(f"r-{n}", f"say {n}") for n in range(COUNT - 1)) + line("bad", model="other")


def answer(n: int) -> str:
    usage = {"prompt_tokens": 6, "completion_tokens": 8, "total_tokens": 14}
    choice = {"index": 0, "text": f" answer {n}", "logprobs": None, "finish_reason": "length"}
    body = {"id": f"cmpl-{n}", "object": "text_completion", "created": AT, "model": "tiny", "choices": [choice]}
    response = {"status_code": 200, "request_id": f"req_{n}", "body": {**body, "usage": usage}}
    return json.dumps({"id": f"batch_req_{n}", "custom_id": f"r-{n}", "response": response, "error": None}) + "\n"


def refusal() -> str:
    error = {"code": "model_not_found", "message": "this server has tiny", "type": "invalid_request_error"}
    return json.dumps({"id": "batch_req_b", "custom_id": "bad", "response": None, "error": error}) + "\n"


class OldFolder:
    """A data folder with an ended batch, and two that were at work: of the model `old`, and of an unknown one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "files").mkdir(parents=True, mode=0o700)
        (folder / "store.id").write_bytes(b"77\n")
        head = struct.pack("<4sQ", b"LTC1", 9)
        folder.joinpath("store.count").write_bytes((head + struct.pack("<I", zlib.crc32(head))).ljust(512, b"\0") * 2)
        self.answers = "".join(map(answer, range(COUNT - 1))).encode()
        self.errors = refusal().encode()
        db = sqlite3.connect(folder / "store.db", isolation_level=None)
        db.executescript("PRAGMA auto_vacuum = INCREMENTAL; PRAGMA journal_mode = WAL;" + SCHEMA_6)
        meta = {"generation": 3, "commits": 9, "store": 77, "seen": int(time.time())}
        db.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        for name in ("ended", "open", "unknown"):
            self._file(db, f"file-{name}", "batch", "in.jsonl", ASKED)
        self._file(db, "file-out", "batch_output", "batch_ended_output.jsonl", self.answers, "batch_ended")
        self._file(db, "file-err", "batch_output", "batch_ended_error.jsonl", self.errors, "batch_ended")
        ended = {"output_file_id": "file-out", "error_file_id": "file-err", "completed_at": AT + 9}
        tokens = {"input_tokens": 30, "output_tokens": 40, "model_digest": "old"}
        self._batch(db, "ended", COUNT, status="completed", completed=COUNT - 1, failed=1, **ended, **tokens)
        self._batch(db, "open", 2, status="in_progress", completed=2, model_digest="old")
        self._batch(db, "unknown", 2, status="in_progress", completed=2)
        db.execute("INSERT INTO suspects VALUES ('batch_unknown', 4, 1)")
        db.execute("INSERT INTO repeats VALUES ('', 'again', 'another body', 'batch_ended', ?)", (AT,))
        db.execute("INSERT INTO usage VALUES ('', ?, 6, 30, 0, 40)", (AT // 86400,))
        db.close()

    def _file(
        self, db: sqlite3.Connection, name: str, purpose: str, filename: str, data: bytes, of: Any = None
    ) -> None:
        digest = None if of else hashlib.blake2b(data, digest_size=16).hexdigest()
        row = (name, purpose, filename, len(data), AT, of, digest)
        names = "id, owner, purpose, filename, bytes, created_at, batch_id, digest"
        db.execute(f"INSERT INTO files ({names}) VALUES (?, '', ?, ?, ?, ?, ?, ?)", row)
        (self.folder / "files" / name).write_bytes(data)

    def _batch(self, db: sqlite3.Connection, name: str, results: int, **values: Any) -> None:
        row: dict[str, Any] = {
            "id": f"batch_{name}",
            "owner": "",
            "endpoint": "/v1/completions",
            "input_file_id": f"file-{name}",
        }
        row |= {"completion_window": "24h", "created_at": AT, "expires_at": AT + (1 << 30), "in_progress_at": AT + 1}
        row |= {"total": COUNT, "metadata": '{"who": "me"}', **values}
        names = ", ".join(row)
        db.execute(f"INSERT INTO batches ({names}) VALUES ({', '.join(':' + key for key in row)})", row)
        for n in range(results):
            ok = int(n < COUNT - 1)
            custom_id, text = (f"r-{n}", answer(n)) if ok else ("bad", refusal())
            db.execute("INSERT INTO results VALUES (?, ?, ?, 3, ?, ?)", (f"batch_{name}", custom_id, n + 1, ok, text))


@pytest.fixture
def old(tmp_path: Path) -> OldFolder:
    return OldFolder(tmp_path / "data")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "tiny")


def test_files_batches_and_answers_of_schema_6_are_served(tmp_path: Path, old: OldFolder, text: Path) -> None:
    before = check_store(old.folder)
    assert (before.wrong, before.files, before.unsummed) == ([], 5, 5 + 3 + COUNT + 4 + 3 + 2)
    with served(deployment(tmp_path), text, observer=(observer := Observer())) as daemon:
        client = daemon.client()
        assert {file.id for file in client.files.list()} >= {"file-ended", "file-open", "file-out", "file-err"}
        for name, data in (("file-ended", ASKED), ("file-out", old.answers), ("file-err", old.errors)):
            assert client.files.content(name).read() == data
            assert client.files.content(name, extra_headers={"range": "bytes=9-19"}).read() == data[9:20]
        batch = wait_batch(client, "batch_ended")
        assert (batch.status, batch.metadata, batch.completed_at) == ("completed", {"who": "me"}, AT + 9)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (COUNT - 1, 1)
        assert (batch.usage.input_tokens, batch.usage.output_tokens) == (30, 40)
        usage: Any = client.get("/usage?days=400", cast_to=object)
        assert [row["completion_tokens"] for row in usage["data"]][-1] == 40
        resumed = wait_batch(client, "batch_unknown")
        assert (resumed.status, resumed.request_counts.completed) == ("completed", COUNT - 1)
        given = lines_of(client, resumed.output_file_id)
        assert [given[f"r-{n}"]["id"] for n in range(2)] == ["batch_req_0", "batch_req_1"]
        assert lines_of(client, resumed.error_file_id).keys() == {"bad"}
        refused = wait_batch(client, "batch_open")
        assert (refused.status, [error.code for error in refused.errors.data]) == ("failed", ["model_changed"])
        assert lines_of(client, refused.output_file_id).keys() == {"r-0", "r-1"}
        with pytest.raises(openai.BadRequestError, match="another model answered it"):
            submit(client, ASKED, extra_body={"reuse_batch_id": "batch_ended"})
        with pytest.raises(openai.ConflictError):
            submit(client, ASKED, extra_headers={"idempotency-key": "again"})
        (old.folder / "files" / "file-out").unlink()
        assert client.files.content("file-out").read() == old.answers
    assert {kind: count for (kind,), count in observer.figures()["store_damaged_total"].items()} == {
        "row": 0,
        "result": 0,
        "file": 0,
    }
    assert check_store(old.folder).wrong == []


def changed_digit(data: bytes, rng: random.Random) -> bytes:
    """Another byte of an input, which stays JSON."""
    at = rng.choice([i for i in range(len(data)) if data[i : i + 1].isdigit()])
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("damage", [changed_digit, lambda data, rng: data[:-7]], ids=["changed", "cut"])
def test_a_damaged_upload_of_schema_6_is_refused_by_its_digest(
    tmp_path: Path, old: OldFolder, text: Path, run_seed: int, damage: Callable[[bytes, random.Random], bytes]
) -> None:
    path = old.folder / "files" / "file-unknown"
    path.write_bytes(damage(ASKED, random.Random(run_seed)))
    assert ["file-unknown" in wrong for wrong in check_store(old.folder).wrong] == [True]
    with served(deployment(tmp_path), text) as daemon:
        client = daemon.client()
        ended = wait_batch(client, "batch_unknown")
        assert (ended.status, ended.errors.data[0].code) == ("failed", "input_file_changed")
        with pytest.raises(openai.InternalServerError, match="file-unknown"):
            client.files.content("file-unknown")
        assert client.files.content("file-open").read() == ASKED
