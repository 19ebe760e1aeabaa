"""One bit of what is stored flips: no reader gets a wrong byte. Which byte (random, by the seed) times which reader."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from daemon_tools import LIMITS, MortalJob, Served, deployment, line, lines_of, served, submit, wait_batch
from laddertron.engine.daemon.store import records
from laddertron.engine.daemon.store.check import check_store
from laddertron.engine.daemon.store.connection import connect_store
from laddertron.engine.daemon.store.disk import DiskError
from laddertron.engine.daemon.store.files import Cleaner
from laddertron.engine.daemon.store.rows import BatchRow, FileRow
from laddertron.engine.daemon.store.schema import Rows, make_tables
from laddertron.engine.daemon.store.sums import BLOCK_BYTES, BlockSums, CheckedFile, Damaged, row_sum
from laddertron.engine.metrics.observer import Observer
from laddertron.launchers.cli.__main__ import main
from test_app_batches import completed
from tiny_text import write_folder
from waiting import until

COUNT = 60
LONG = "x" * 9000
"""So that the input has several blocks."""
ASKED = b"".join(line(f"r-{n}", f"say {n}", max_tokens=40, logprobs=4) for n in range(COUNT)) + line(
    "bad", model="other"
)


class World:
    """A data folder of a daemon with two ended batches: `first` of ASKED, `big` with an input of several blocks; and
    what clients read of them before any damage."""

    def __init__(self, folder: Path) -> None:
        self.text, self.config = write_folder(folder / "tiny"), deployment(folder)
        self.data = folder / "data"
        with served(self.config, self.text) as daemon:
            client = daemon.client()
            self.first = wait_batch(client, submit(client, ASKED, metadata={"who": "me"}).id)
            wide = b"".join(line(f"w-{n}", LONG, model="other") for n in range(COUNT))
            self.big = wait_batch(client, submit(client, wide + line("ok")).id)
            self.names = (self.first.input_file_id, self.first.output_file_id, self.first.error_file_id)
            self.big_names = (self.big.input_file_id, self.big.error_file_id)
            self.bytes = {name: content(client, name) for name in (*self.names, *self.big_names)}
            self.files = {file.id: file for file in client.files.list()}
            self.batches = [batch.model_dump() for batch in client.batches.list()]
            self.usage = client.get("/usage", cast_to=object)
            self.lists: dict[str, Any] = {
                route: client.get(route, cast_to=object) for route in ("/usage", "/files", "/batches")
            }
        shutil.copytree(self.data, folder / "kept")

    def reset(self) -> None:
        shutil.rmtree(self.data)
        shutil.copytree(self.data.with_name("kept"), self.data)

    @contextlib.contextmanager
    def daemon(self) -> Iterator[tuple[Served, Observer]]:
        observer = Observer()
        with served(self.config, self.text, observer=observer) as daemon:
            yield daemon, observer


def content(client: openai.OpenAI, name: str, part: str = "") -> bytes:
    return client.files.content(name, extra_headers={"range": part} if part else {}).read()


def damage_of(observer: Observer) -> dict[str, float]:
    return {kind: count for (kind,), count in observer.figures()["store_damaged_total"].items()}


def flip(path: Path, rng: random.Random, begin: int = 0, end: int | None = None) -> int:
    """Flips a random bit of the bytes from `begin` to `end`; returns the offset of its byte."""
    data = bytearray(path.read_bytes())
    at = rng.randrange(begin, len(data) if end is None else end)
    data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    return at


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("stored"))


@pytest.fixture
def world(pristine: World) -> World:
    pristine.reset()
    return pristine


def test_no_wrong_byte_of_a_file_is_served(world: World, run_seed: int) -> None:
    """An output or error file is generated again; an upload is an error that names it, and so is the batch over it.
    Ranges: of the damaged block, and of the others, which are served."""
    rng = random.Random(run_seed)
    with world.daemon() as (daemon, observer):
        client, files = daemon.client(), world.data / "files"
        for round_ in range(5):
            for name in (*world.names[1:], world.big.error_file_id):
                want = world.bytes[name]
                at = flip(files / name, rng)
                assert content(client, name, f"bytes={at}-{at}") == want[at : at + 1], (name, at)
                flip(files / name, rng)
                assert content(client, name) == want, (round_, name, run_seed)
        assert damage_of(observer) == {"row": 0, "result": 0, "file": 30}
        for name in (world.first.input_file_id, world.big.input_file_id):
            want = world.bytes[name]
            at = flip(files / name, rng)
            for part in ("", f"bytes={at}-{at}", f"bytes={max(0, at - 9)}-"):
                with pytest.raises(openai.InternalServerError, match=f"{name} .*does not match its checksum") as bad:
                    content(client, name, part)
                assert bad.value.code == "file_damaged"
            other = (at // BLOCK_BYTES + 1) * BLOCK_BYTES
            if other < len(want):
                assert content(client, name, f"bytes={other}-{other + 99}") == want[other : other + 100]
            batch = client.batches.create(input_file_id=name, endpoint="/v1/completions", completion_window="24h")
            ended = wait_batch(client, batch.id)
            assert (ended.status, ended.errors.data[0].code) == ("failed", "input_file_changed")
        assert damage_of(observer)["file"] > 30


def test_ranges_of_a_file(world: World) -> None:
    name = world.big.input_file_id
    want = world.bytes[name]
    assert len(want) > 2 * BLOCK_BYTES
    cases = {"bytes=0-0": want[:1], "bytes=-7": want[-7:], f"bytes={BLOCK_BYTES - 3}-{BLOCK_BYTES + 3}": None}
    cases |= {"bytes=5-": want[5:], "bytes=0-999999999": want, "bytes=-99999999": want}
    with world.daemon() as (daemon, _):
        client = daemon.client()
        for part, data in cases.items():
            given = client.files.with_raw_response.content(name, extra_headers={"range": part})
            assert given.status_code == 206
            assert given.content == (want[BLOCK_BYTES - 3 : BLOCK_BYTES + 4] if data is None else data)
            assert given.headers["content-range"].endswith(f"/{len(want)}")
        for ignored in ("bytes=1-2,5-6", "lines=1-2", "bytes=-", "nonsense"):
            given = client.files.with_raw_response.content(name, extra_headers={"range": ignored})
            assert (given.status_code, given.content) == (200, want)
        for wrong in (f"bytes={len(want)}-", "bytes=7-3", "bytes=-0"):
            with pytest.raises(openai.APIStatusError) as refused:
                content(client, name, wrong)
            assert refused.value.status_code == 416


def flip_value(value: Any, rng: random.Random) -> Any:
    if isinstance(value, int):
        return value ^ 1 << rng.randrange(20)
    data = bytearray(value.encode())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data.decode("utf-8", "surrogateescape") if b"\xff" in data else bytes(data)


def flip_column(db: sqlite3.Connection, table: str, column: str, row: int, rng: random.Random) -> bool:
    [value] = db.execute(f"SELECT {column} FROM {table} WHERE rowid = ?", (row,)).fetchone()
    if value is None or value == "":
        return False
    new = flip_value(value, rng)
    text = isinstance(new, bytes)
    with contextlib.suppress(sqlite3.IntegrityError), db:  # a unique column whose new value is another row's
        db.execute(f"UPDATE {table} SET {column} = {'CAST(? AS TEXT)' if text else '?'} WHERE rowid = ?", (new, row))
        return True
    return False


def test_a_damaged_result_is_computed_again(world: World, run_seed: int) -> None:
    """A random column of random results, after a restart: the file that has to be made again is what it was; a batch
    that takes over the answers takes none that is damaged."""
    rng = random.Random(run_seed)
    for _ in range(2):
        world.reset()
        db = sqlite3.connect(world.data / "store.db")
        numbers = db.execute("SELECT rowid FROM results WHERE batch_id = ?", (world.first.id,)).fetchall()
        rows = rng.sample([row for (row,) in numbers], 5)
        flipped = sum(flip_column(db, "results", rng.choice(["line", "epoch", "ok", "sum"]), row, rng) for row in rows)
        db.close()
        (world.data / "files" / world.first.output_file_id).unlink()
        with world.daemon() as (daemon, observer):
            client = daemon.client()
            again = wait_batch(client, submit(client, ASKED, extra_body={"reuse_batch_id": world.first.id}).id)
            assert again.request_counts.completed == COUNT
            names = [world.first.output_file_id, again.output_file_id]
            want = choices(world.bytes[names[0]])
            assert choices(content(client, names[0])) == want, run_seed
            wrong = [name for name, value in choices(content(client, names[1])).items() if value != want[name]]
            assert len(wrong) <= flipped  # computed with another batch's seeds
            assert damage_of(observer)["result"] >= (flipped > 0)
            error = lines_of(client, world.first.error_file_id)
            assert list(error) == ["bad"]


def choices(data: bytes) -> dict[str, Any]:
    return {entry["custom_id"]: entry["response"]["body"]["choices"] for entry in map(json.loads, data.splitlines())}


@pytest.mark.parametrize("table", ["files", "batches", "usage"])
def test_a_damaged_row_is_an_error_that_names_it(world: World, table: str, run_seed: int) -> None:
    """Whatever column of a file's, batch's or usage's row: its route refuses by name, lists give the other rows and
    name it, and none shows another value. It can be deleted."""
    rng = random.Random(run_seed)
    db = sqlite3.connect(world.data / "store.db")
    key = "owner" if table == "usage" else "id"
    names = [row[1] for row in db.execute(f"PRAGMA table_info({table})") if row[1] not in ("no", key, "owner", "day")]
    with world.daemon() as (daemon, observer):
        client = daemon.client()
        intact = {"batch": show(client, "batches", world.first.id), "file": show(client, "files", world.names[0])}
        row_id = {"files": world.names[0], "batches": world.first.id, "usage": ""}[table]
        [row] = db.execute(f"SELECT rowid FROM {table} WHERE {key} = ? ORDER BY rowid", (row_id,)).fetchone()
        whole: Any = client.get("/usage" if table == "usage" else f"/{table}?limit=50", cast_to=object)
        saved = db.execute(f"SELECT {', '.join(names)} FROM {table} WHERE rowid = ?", (row,)).fetchone()
        count = 0
        for column in names:
            if not flip_column(db, table, column, row, rng):
                continue
            count += 1
            page: Any = client.get("/usage" if table == "usage" else f"/{table}?limit=50", cast_to=object)
            assert [f"of table {table} does not match" in error for error in page["damaged"]] == [True], column
            assert [item for item in whole["data"] if item.get("id") != row_id] == page["data"] or table == "usage"
            if table != "usage":
                assert len(whole["data"]) == len(page["data"]) + 1
                with pytest.raises(openai.InternalServerError, match=f"of table {table} does not match") as bad:
                    client.get(f"/{table}/{row_id}", cast_to=object)
                assert bad.value.code == "row_damaged", column
            sets = ", ".join(f"{name} = ?" for name in names)
            with db:
                db.execute(f"UPDATE {table} SET {sets} WHERE rowid = ?", (*saved, row))
        assert count > 3
        assert damage_of(observer)["row"] >= count
        assert intact == {
            "batch": show(client, "batches", world.first.id),
            "file": show(client, "files", world.names[0]),
        }
        assert flip_column(db, table, names[1], row, rng)
        if table != "usage":
            client.delete(f"/{table}/{row_id}", cast_to=object)
            assert row_id not in [item.id for item in getattr(client, table).list(limit=50)]
    db.close()


def show(client: openai.OpenAI, what: str, name: str) -> Any:
    return getattr(client, what).retrieve(name).model_dump()


def test_a_bit_of_an_answer_in_store_db_flips_while_the_daemon_is_off(world: World, run_seed: int) -> None:
    """In the text of answers, at the place in the file: the output that is made again is what it was."""
    rng = random.Random(run_seed)
    path = world.data / "store.db"
    for _ in range(3):
        world.reset()
        data = path.read_bytes()
        places = [at for n in range(COUNT) if (at := data.find(b'"custom_id":"r-%d"' % n)) > 0]
        at = rng.choice(places)
        flip(path, rng, at, at + 200)
        (world.data / "files" / world.first.output_file_id).unlink()
        with world.daemon() as (daemon, observer):
            got = choices(content(daemon.client(), world.first.output_file_id))
            assert got == choices(world.bytes[world.first.output_file_id]), (run_seed, at)
            assert damage_of(observer)["result"] >= 1


def test_a_bit_anywhere_in_store_db_flips_while_the_daemon_is_off(world: World, run_seed: int) -> None:
    """The start is refused, or every route gives what it gave, or an error that names the row or file."""
    rng = random.Random(run_seed)
    for _ in range(6):
        world.reset()
        at = flip(world.data / "store.db", rng)
        with contextlib.suppress(DiskError), world.daemon() as (daemon, _observer):
            for what, read, expected in all_reads(daemon.client(), world):
                with contextlib.suppress(openai.InternalServerError, openai.NotFoundError):
                    assert read() == expected, (run_seed, at, what)


def all_reads(client: openai.OpenAI, world: World) -> Iterator[tuple[str, Callable[[], Any], Any]]:
    for name, expected in world.lists.items():
        yield name, partial(listed, client, name, expected), expected
    for name, data in world.bytes.items():
        like = choices(data) if b'"text"' in data else data
        yield name, partial(read_as, client, name, like), like


def listed(client: openai.OpenAI, route: str, expected: Any) -> Any:
    """The list, completed by the rows that it names as damaged and does not give."""
    page: Any = client.get(route, cast_to=object)
    if errors := page.pop("damaged", ()):
        assert all("does not match its checksum" in error for error in errors)
        assert all(item in expected["data"] for item in page["data"])
        return expected
    return page


def read_as(client: openai.OpenAI, name: str, like: Any) -> Any:
    data = content(client, name)
    return choices(data) if isinstance(like, dict) else data


def test_a_page_that_crosses_damaged_rows_is_complete(world: World) -> None:
    """However small it is: a client that reads page by page reaches every intact row."""
    damage_rows(world.data, "files", world.names[1], world.names[2])
    with world.daemon() as (daemon, _):
        intact = world.files.keys() - set(world.names[1:])
        for limit in (1, 2):
            assert {file.id for file in daemon.client().files.list(limit=limit)} == intact


def test_the_page_and_the_metrics_of_batches_need_no_intact_rows(world: World) -> None:
    """Not even of the right types, which a bit in a row's header changes."""
    damage_rows(world.data, "batches", world.first.id)
    with world.daemon() as (daemon, _):
        page: Any = daemon.client().get("/overview", cast_to=object)
        assert [row["id"] for row in page["batches"]] == [world.big.id]
        read = daemon.daemon.services.store.read
        db = sqlite3.connect(world.data / "store.db", timeout=30)
        with db:
            db.execute("UPDATE batches SET status = 'in_progress', total = 'x' WHERE id = ?", (world.first.id,))
        db.close()
        assert daemon.on_loop(read(records.batch_view)).windows == ()


def damage_rows(data: Path, table: str, *ids: str) -> None:
    """Damages rows, not in the key or in what selects them."""
    db = sqlite3.connect(data / "store.db")
    with db:
        for name in ids:
            assert db.execute(f"UPDATE {table} SET created_at = created_at - 1 WHERE id = ?", (name,)).rowcount == 1
    db.close()


def test_old_rows_are_deleted_though_more_than_a_hundred_before_them_are_damaged(world: World) -> None:
    with world.daemon() as (daemon, _):
        uploads = [daemon.client().files.create(file=("x", line("x")), purpose="batch").id for _ in range(102)]
        damage_rows(world.data, "files", *uploads[:101])
        store = daemon.daemon.services.store
        clean = Cleaner(store, None).clean(store.clock.stamp() + 9, 0)
        assert daemon.on_loop(clean) == 2 + 2 + 1  # batches, their inputs, an upload
        left = [file.id for file in daemon.on_loop(store.read(lambda db: records.all_files(db, damaged=[])))]
        assert left == []


@pytest.mark.parametrize("running", [True, False], ids=["running", "restarted"])
def test_an_open_batch_whose_row_is_damaged_fails_by_name(tmp_path: Path, running: bool, run_seed: int) -> None:
    """In any column; its answers are kept. The values of one that runs are those that it had."""
    rng = random.Random(run_seed)
    text, config = write_folder(tmp_path / "tiny"), deployment(tmp_path)
    data = b"".join(line(f"r-{n}") for n in range(80))
    columns = ["status", "endpoint", "metadata", "input_file_id", "total", "owner", "expires_at"]
    with contextlib.ExitStack() as stack:
        job = MortalJob(LIMITS)
        job.pause_at = 40
        daemon = stack.enter_context(served(config, text, lambda: [job]))
        client = daemon.client()
        batches = [submit(client, data, metadata={"who": "me"}) for _ in columns]
        until(lambda: all(client.batches.retrieve(batch.id).status == "in_progress" for batch in batches))
        until(lambda: sum(completed(client, batch.id) for batch in batches) > 20)
        if not running:
            daemon.stop()
        db = sqlite3.connect(tmp_path / "data" / "store.db", timeout=30)
        for batch, column in zip(batches, columns, strict=True):
            [row] = db.execute("SELECT rowid FROM batches WHERE id = ?", (batch.id,)).fetchone()
            if column == "owner":
                db.execute("UPDATE batches SET owner = 'x' WHERE rowid = ?", (row,))
                db.commit()
            else:
                assert flip_column(db, "batches", column, row, rng)
        db.close()
        if running:
            daemon.on_loop(job.release)
        else:
            daemon = stack.enter_context(served(config, text))
            client = daemon.client()
        for batch, column in zip(batches, columns, strict=True):
            until(partial(is_failed, client, batch.id))
            ended = wait_batch(client, batch.id)
            assert [(error.code, batch.id in error.message) for error in ended.errors.data] == [("row_damaged", True)]
            counts = ended.request_counts
            answers = lines_of(client, ended.output_file_id)
            assert len(answers) == counts.completed == counts.total, column
            if running:
                same = ("endpoint", "metadata", "input_file_id", "created_at", "expires_at", "completion_window")
                assert {name: getattr(ended, name) for name in same} == {name: getattr(batch, name) for name in same}
            client.delete(f"/batches/{batch.id}", cast_to=object)
    assert check_store(tmp_path / "data").wrong == []


def is_failed(client: openai.OpenAI, batch_id: str) -> bool:
    """Whether the batch has failed; not yet, if its row is still damaged."""
    with contextlib.suppress(openai.APIStatusError):
        return client.batches.retrieve(batch_id).status == "failed"
    return False


def test_a_damaged_row_of_its_input_file_fails_an_open_batch_by_name(tmp_path: Path) -> None:
    text, config = write_folder(tmp_path / "tiny"), deployment(tmp_path)
    job = MortalJob(LIMITS)
    job.pause_at = 4
    with served(config, text, lambda: [job]) as daemon:
        batch = submit(daemon.client(), b"".join(line(f"r-{n}") for n in range(80)))
        until(lambda: daemon.client().batches.retrieve(batch.id).status == "in_progress")
    damage_rows(tmp_path / "data", "files", batch.input_file_id)
    with served(config, text) as daemon:
        ended = wait_batch(daemon.client(), batch.id)
        assert (ended.status, ended.errors.data[0].code) == ("failed", "row_damaged")
        assert batch.input_file_id in ended.errors.data[0].message


def test_sums_of_blocks_do_not_depend_on_the_pieces_that_are_written(tmp_path: Path, run_seed: int) -> None:
    rng = random.Random(run_seed)
    for size in (0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 7):
        (path := tmp_path / "f").write_bytes(data := rng.randbytes(size))
        sums, left = BlockSums(), data
        while left:
            part = rng.randrange(1, 2 * BLOCK_BYTES)
            sums.update(left[:part])
            left = left[part:]
        text = sums.text()
        with CheckedFile(path, "f", size, text) as file:
            assert file.readall() == data
        if size:
            at = flip(path, rng)
            with (
                CheckedFile(path, "f", size, text) as file,
                pytest.raises(Damaged, match=f"{at // BLOCK_BYTES * BLOCK_BYTES}"),
            ):
                file.readall()
            path.write_bytes(data[:-1])
            with pytest.raises(Damaged, match=f"has {size - 1} bytes"):
                CheckedFile(path, "f", size, text)


def test_a_damaged_batch_row_does_not_delete_the_other_file_s_results(tmp_path: Path) -> None:
    """Deleting an output whose name in the batch's row is damaged deletes neither its results nor those of errors."""
    with contextlib.closing(connect_store(tmp_path, sqlite3.connect)) as db:
        make_tables(db)
        rows = Rows(db)
        batch = BatchRow("batch_1", "me", "/v1/completions", "file-in", "24h", "completed", 0, 1)
        records.add_batch(rows, replace(batch, output_file_id="file-out", error_file_id="file-bad"))
        error = {"batch_id": "batch_1", "custom_id": "a", "number": 1, "epoch": 1, "ok": 0, "line": "{}"}
        assert rows.insert("results", error)
        db.execute("UPDATE batches SET output_file_id = 'file-ouu'")
        file = FileRow("file-out", "me", "batch_output", "o.jsonl", 2, 0, batch_id="batch_1")
        assert records.drop_file(rows, file) is None
        assert records.count_results(db, "batch_1") == (0, 1)


def test_a_sum_of_a_row_covers_names_types_and_values() -> None:
    row: dict[str, Any] = {"a": "1", "b": 2, "c": None}
    others: list[dict[str, Any]] = [
        {"a": 1, "b": 2},
        {"a": "1", "b": "2"},
        {"a": "1", "c": 2},
        {"a": "12"},
        {"a": "1", "b": 2, "c": ""},
    ]
    assert row_sum(row) == row_sum({"b": 2, "a": "1", "sum": "x", "no": 4})
    assert row_sum(row) not in {row_sum(other) for other in others}


def test_check_store_names_what_is_damaged(world: World, run_seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Of each kind, by the command: nothing on an intact folder, while a daemon runs too; then a row of each table, an
    upload, an output, an index."""
    rng = random.Random(run_seed)
    config = world.data.with_name("check.yaml")
    config.write_text(f"model: {{path: {world.text}}}\ndaemon: {{data_dir: {world.data}}}\n")
    with world.daemon():
        assert main(["check-store", str(config)]) == 0
    assert "intact" in capsys.readouterr().out
    db = sqlite3.connect(world.data / "store.db")
    tables = ["files", "batches", "results", "usage", "blocks"]
    for table in tables:
        name = {"files": "filename", "batches": "metadata", "results": "line", "usage": "requests"}.get(table, "sum")
        rows = [row for (row,) in db.execute(f"SELECT rowid FROM {table} WHERE {name} IS NOT NULL ORDER BY rowid")]
        assert flip_column(db, table, name, rows[0], rng)
    db.close()
    for name in (world.first.output_file_id, world.big.input_file_id):
        flip(world.data / "files" / name, rng)
    before = {path: path.read_bytes() for path in world.data.rglob("*") if path.is_file() and path.suffix != ".db-shm"}
    assert main(["check-store", str(config)]) == 1
    out, err = capsys.readouterr()
    for table in tables:
        assert f"of table {table} does not match" in err
    assert f"{world.big.input_file_id} (in.jsonl) has changed on the disk: the block at offset" in err.replace(
        "\n", " "
    )
    assert world.first.output_file_id in err
    assert " damaged" in out
    after = {path: path.read_bytes() for path in before}
    assert after == before


def test_damage_is_not_hidden_by_an_export_and_a_rebuild(tmp_path: Path, run_seed: int) -> None:
    """A row and a result are damaged, then the daemon begins a new export of its store, from which another is rebuilt:
    the row is refused there too, the result is computed again. So is a copy of an upload that was damaged there."""
    rng = random.Random(run_seed)
    text, config = write_folder(tmp_path / "tiny"), deployment(tmp_path, export_dir=str(tmp_path / "export"))
    with served(config, text) as daemon:
        client = daemon.client()
        batch = wait_batch(client, submit(client, ASKED).id)
        want = content(client, batch.output_file_id)
        other = client.files.create(file=("b.jsonl", line("b")), purpose="batch")
        copied = client.files.create(file=("c.jsonl", line("c")), purpose="batch")
    db = sqlite3.connect(tmp_path / "data" / "store.db")
    [row] = db.execute("SELECT rowid FROM files WHERE id = ?", (other.id,)).fetchone()
    assert flip_column(db, "files", "filename", row, rng)
    [row] = db.execute("SELECT rowid FROM results WHERE number = 7").fetchone()
    assert flip_column(db, "results", "line", row, rng)
    db.close()
    with served(config, text):
        pass
    flip(tmp_path / "export" / "files" / copied.id, rng)
    yaml = tmp_path / "check.yaml"
    yaml.write_text(f"model: {{path: {text}}}\ndaemon: {{data_dir: {tmp_path}/data, export_dir: {tmp_path}/export}}\n")
    checked = check_store(tmp_path / "data", tmp_path / "export")
    assert [wrong for wrong in checked.wrong if copied.id in wrong and "export" in wrong]
    assert len(checked.wrong) == 3
    assert main(["check-store", str(yaml)]) == 1
    (tmp_path / "data").rename(tmp_path / "lost")
    with served(config, text) as daemon:
        client = daemon.client()
        with pytest.raises(openai.InternalServerError, match="of table files does not match"):
            client.files.retrieve(other.id)
        with pytest.raises(openai.InternalServerError, match=r"c\.jsonl.* does not match its checksum"):
            content(client, copied.id)
        assert choices(content(client, batch.output_file_id)) == choices(want)
    segments = sorted((tmp_path / "export").glob("seg-*.ltx"))
    flip(segments[0], rng, segments[0].stat().st_size // 3, segments[0].stat().st_size // 2)
    checked = check_store(tmp_path / "data", tmp_path / "export")
    assert any(f"{segments[0]}: offset" in wrong for wrong in checked.wrong)


def test_an_index_that_alone_is_damaged_is_made_again(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """An entry of the index of results by number is of another line: rows are what they were."""
    db = sqlite3.connect(world.data / "store.db")
    [root] = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'results_in_order'").fetchone()
    size = db.execute("PRAGMA page_size").fetchone()[0]
    db.close()
    path = world.data / "store.db"
    data = bytearray(path.read_bytes())
    at = data.find(world.first.id.encode(), (root - 1) * size)
    assert at < root * size or data[(root - 1) * size] == 2
    data[at + len(world.first.id)] ^= 64  # the line's number in the entry
    path.write_bytes(data)
    with world.daemon() as (daemon, _):
        assert content(daemon.client(), world.first.output_file_id) == world.bytes[world.first.output_file_id]
    assert "indexes of" in caplog.text
