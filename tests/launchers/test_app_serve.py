"""`laddertron serve`, `keys` and `batch` as processes: the demo model on two real ranks, a rank killed in the middle of
a batch, SIGTERM; and the client's commands against it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from click.testing import CliRunner
from daemon_tools import deployment, line, served
from laddertron.engine.sampling import grammar
from laddertron.launchers.cli import __main__ as cli
from laddertron.launchers.cli.batch_client import ApiError, BatchClient
from laddertron.launchers.cli.commands.batch import BatchPace, seconds_left
from laddertron.models.cpu.kernels import Kernels
from openai import OpenAI
from pydantic import BaseModel
from tiny_text import write_folder
from waiting import FOR_EVER_S, HANG_S, until

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs" / "demo.yaml"
DETERMINISTIC = Kernels.find() is not None
LADDERTRON = (sys.executable, "-m", "laddertron.launchers.cli")


def run_cli(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.group, list(words), standalone_mode=False)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return getattr(result.exception, "exit_code", 99), str(result.exception)
    return result.return_value or 0, result.output


class Process:
    """A `laddertron serve` of the demo model, its log kept."""

    def __init__(self, folder: Path, *more: str, words: tuple[str, ...] = ("serve", str(DEMO))) -> None:
        self.log_path = folder / "log"
        sets = [f"daemon.data_dir={folder / 'data'}", "daemon.port=0", "daemon.limits.min_free_disk=0", *more]
        words = (*LADDERTRON, *words, *(w for s in sets for w in ("--set", s)))
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(words, stderr=log, cwd=folder)
        self.port = next(e["port"] for e in self.wait_for("listening"))
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def events(self) -> list[dict[str, Any]]:
        """What is logged so far."""
        rows = self.log_path.read_text().splitlines()
        return [json.loads(row) for row in rows if row.startswith("{") and row.endswith("}")]

    def wait_for(self, event: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []

        def told() -> bool:
            assert self.process.poll() is None, self.log_path.read_text()
            found[:] = [e for e in self.events() if e.get("event") == event]
            return bool(found)

        until(told, self.log_path.read_text, 0.05)
        return found

    def ready(self) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.log_path.read_text()
            return self.status("/ready") == 200

        until(is_ready, self.log_path.read_text, 0.05)

    def status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=HANG_S) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def rank_pids(self) -> list[int]:
        """Of the latest launch, by rank."""
        found = [e for e in self.events() if "is pid" in e["message"]]
        return [int(e["message"].split()[4]) for e in sorted(found[-2:], key=lambda e: int(e["rank"]))]

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(HANG_S)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Process]:
    """With patience for heartbeats on a slow machine: what is seen here is not seen by their silence."""
    sets = f"daemon.heartbeat_timeout={FOR_EVER_S:g}s", f"parallel.deterministic={str(DETERMINISTIC).lower()}"
    process = Process(tmp_path, *sets)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()


class Verdict(BaseModel):
    good: bool
    grade: Literal["a", "b"]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def test_a_batch_outlives_a_rank_and_sigterm_drains(demo: Process, tmp_path: Path) -> None:
    """The real thing: 40 lines on two ranks; one is killed half way; /ready is 503 until the relaunch; every line has
    its answer, once, of the same bits as that of the same request, whichever ranks computed it in what company; a chat
    streams; SIGTERM ends it with 0 and no rank is left."""
    [said] = [entry["message"] for entry in demo.wait_for("ready")]
    door = demo.url.removesuffix("/v1")
    ranks = r"all 2 ranks of 1 replica( \(pids \d+ \d+\))?"
    assert re.fullmatch(f"ready: {demo.url} serves demo: {ranks}, metrics at {door}/metrics, page at {door}/", said)
    client = OpenAI(base_url=demo.url, api_key="none", max_retries=0)
    lines = tmp_path / "in.jsonl"
    asked = {"model": "demo", "max_tokens": 48, "temperature": 0, "return_digest": True}
    lines.write_bytes(b"".join(line(f"r-{n}", f"def f{n % 20}(", **asked) for n in range(40)))
    code, batch_id = run_cli("batch", "--url", demo.url, "submit", str(lines))
    batch_id = batch_id.strip().splitlines()[-1]
    assert code == 0
    until(lambda: client.batches.retrieve(batch_id).request_counts.completed >= 5)  # type: ignore[union-attr]
    first = demo.rank_pids()
    os.kill(first[1], signal.SIGKILL)
    until(lambda: demo.status("/ready") != 200)
    demo.ready()
    code, said = run_cli("batch", "--url", demo.url, "wait", batch_id, "-o", str(tmp_path / "out.jsonl"))
    assert code == 0, said
    found = [json.loads(row) for row in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert sorted(entry["custom_id"] for entry in found) == sorted(f"r-{n}" for n in range(40))
    digests = {entry["custom_id"]: entry["response"]["body"]["choices"][0]["digest"] for entry in found}
    assert len(set(digests.values())) >= 20
    assert not DETERMINISTIC or all(digests[f"r-{n}"] == digests[f"r-{n + 20}"] for n in range(20))
    failure = next(e for e in demo.events() if e.get("event") == "failure")
    assert failure["rank"] == 1
    stream = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "def add("}], max_tokens=8, stream=True
    )
    assert [c.choices[0].finish_reason for c in stream if c.choices][-1] is not None
    if grammar.available:
        said = [{"role": "user", "content": "def add("}]
        parsed = client.chat.completions.parse(model="demo", messages=said, response_format=Verdict, temperature=0)
        assert parsed.choices[0].message.parsed is not None, parsed
    assert len([entry for entry in demo.events() if entry.get("event") == "ready"]) == 1
    last = demo.rank_pids()
    assert demo.stop() == 0
    assert not any(alive(pid) for pid in (*first, *last))


def test_the_clients_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """submit --wait, list, status, fetch, cancel against a daemon; refusals are one line and exit code 1 or 2."""
    folder = write_folder(tmp_path / "tiny")
    lines = tmp_path / "in.jsonl"
    lines.write_bytes(b"".join(line(f"r-{n}") for n in range(150)) + line("long", "x" * 3000))
    with served(deployment(tmp_path), folder) as daemon:
        url = ("batch", "--url", f"{daemon.url}/v1")
        out = tmp_path / "out.jsonl"
        code, said = run_cli(*url, "submit", str(lines), "--metadata", "who=me", "--wait", "-o", str(out))
        assert code == 0
        batch_id = said.split()[0]
        assert len(out.read_bytes().splitlines()) == 150
        assert len((tmp_path / "out.errors.jsonl").read_bytes().splitlines()) == 1
        assert json.loads(run_cli(*url, "status", batch_id)[1])["metadata"] == {"who": "me"}
        listed = run_cli(*url, "list")[1]
        assert batch_id in listed
        assert max(map(len, listed.splitlines())) <= 80
        before, create = out.read_bytes(), BatchClient.create
        for words in (("submit", str(lines), "--wait"), ("wait", batch_id)):
            code, said = run_cli(*url, *words, "-o", str(out))
            assert (code, f"{out} exists: " in said, out.read_bytes() == before) == (2, True, True)
            code, said = run_cli(*url, *words, "-o", str(tmp_path / "nowhere" / "out.jsonl"))
            assert (code, "cannot be written" in said) == (2, True)
        refused = tmp_path / "refused.jsonl"
        for data, why in (
            (b"\n \n", "has no lines"),
            (b"\xef\xbb\xbf\r\n", "has no lines"),
            (lines.read_bytes().decode().encode("utf-16"), "is UTF-16"),
            (lines.read_bytes().decode().encode("utf-16-le"), "is UTF-16"),
            (line("a") + b"\n{bad\n", "refused.jsonl:3: not JSON"),
            (line("a") + b"[]\n", "refused.jsonl:2: a line must be a JSON object"),
            (
                line("a", model="x") + line("b", model="y"),
                "no line names a served model: the lines have x, y, the server has tiny",
            ),
        ):
            refused.write_bytes(data)
            for more in ((), ("--endpoint", "/v1/completions")):
                code, said = run_cli(*url, "submit", str(refused), *more)
                assert (code, why in said) == (2, True), said
        assert len([each for each in run_cli(*url, "list")[1].splitlines() if "batch_" in each]) == 1, (
            "nothing was submitted"
        )
        gone = tmp_path / "gone"
        gone.mkdir()
        with monkeypatch.context() as during:
            during.setattr(BatchClient, "download", lambda *_: os.listdir(tmp_path / "removed"))
            code, said = run_cli(*url, "wait", batch_id, "-o", str(gone / "a.jsonl"))
        assert (code, f"fetch {batch_id} -o {gone / 'a.jsonl'}" in said, "Traceback" in said) == (1, True, False)
        late = tmp_path / "late.jsonl"
        with monkeypatch.context() as during:
            during.setattr(BatchClient, "create", lambda *words: late.write_text("precious") and create(*words))
            code, said = run_cli(*url, "submit", str(lines), "--wait", "-o", str(late))
        assert (code, f"-o {late.with_name(said.split()[0])}.jsonl" in said, late.read_text()) == (1, True, "precious")
        marked = tmp_path / "marked.jsonl"
        marked.write_bytes(b"\xef\xbb\xbf" + (line("a") + line("b")).replace(b"\n", b"\r\n"))
        assert run_cli(*url, "submit", str(marked), "--wait")[0] == 0
        again = tmp_path / "again.jsonl"
        assert run_cli(*url, "fetch", batch_id, "-o", str(again))[0] == 0
        assert again.read_bytes() == out.read_bytes()
        os.mkfifo(pipe := tmp_path / "pipe")
        (linked := tmp_path / "linked.jsonl").symlink_to(target := tmp_path / "target.jsonl")
        for place in (str(pipe), str(tmp_path), ".", "-"):
            code, said = run_cli(*url, "fetch", batch_id, "-o", place)
            assert (code, "is not a regular file" in said, pipe.is_fifo()) == (2, True, True), said
        assert run_cli(*url, "fetch", batch_id, "-o", str(linked))[0] == 0
        assert (linked.is_symlink(), target.read_bytes() == out.read_bytes()) == (True, True)
        assert run_cli(*url, "submit", str(pipe)) == (
            2,
            f"{pipe} is not a regular file: its size is sent first, and it is read twice",
        )
        assert run_cli(*url, "cancel", batch_id) == (1, "409: the batch is completed already")
        for typed in ("batch_x", "batch_1f…", "a b/../c", "\udcff", ""):
            code, said = run_cli(*url, "wait", typed)
            assert (code, said.count("\n"), said.startswith("404: no ")) == (1, 0, True), said
        strange = tmp_path / os.fsdecode(b"\xff.jsonl")
        strange.write_bytes(line("a"))
        assert run_cli(*url, "submit", str(strange), "--wait")[0] == 0
        daemon.on_loop(daemon.jobs[0].hold)
        code, running = run_cli(*url, "submit", str(lines))
        assert run_cli(*url, "fetch", running.strip(), "-o", str(again))[0] == 1
        assert run_cli(*url, "cancel", running.strip())[0] == 0
        bad = tmp_path / "bad.jsonl"
        bad.write_text('{"no": "url"}\n')
        assert run_cli(*url, "submit", str(bad))[0] == 2
        code, said = run_cli(*url, "submit", str(bad), "--endpoint", "/v1/completions", "--wait")
        assert code == 1
        assert "missing_required_parameter" in said
        assert re.search(r"failed +0 +0 +0 +\d\d-\d\d \d\d:\d\d line 1", listed := run_cli(*url, "list")[1]), listed
        code, said = run_cli(*url, "wait", batch_id)
        assert f"laddertron batch --url {daemon.url}/v1 fetch {batch_id} -o answers.jsonl" in said
        code, going_on = run_cli(*url, "submit", str(marked))
        until(lambda: json.loads(run_cli(*url, "status", going_on.strip())[1])["status"] == "in_progress")
        assert run_cli(*url, "delete", going_on.strip()) == (1, "409: the batch is in_progress: cancel it first")
        files = ("files", "--url", f"{daemon.url}/v1")
        batch = json.loads(run_cli(*url, "status", batch_id)[1])
        assert all(batch[f"{kind}_file_id"] in run_cli(*files, "list")[1] for kind in ("input", "output", "error"))
        assert run_cli(*url, "delete", batch_id)[0] == 0
        assert batch_id not in run_cli(*url, "list")[1]
        said = run_cli(*files, "list")[1]
        assert [batch[f"{kind}_file_id"] in said for kind in ("input", "output", "error")] == [True, False, False]
        assert run_cli(*files, "delete", batch["input_file_id"])[0] == 0
        assert batch["input_file_id"] not in run_cli(*files, "list")[1]
        assert run_cli(*files, "delete", batch["input_file_id"])[0] == 1
    for bad_url in ("ftp://x", "http://a:x/v1", "http://a:99999/v1", "http://[::1/v1", "http://a/v1é", "http://a/v 1"):
        code, said = run_cli("batch", "--url", bad_url, "list")
        assert (code, "must be an http or https URL" in said) == (2, True), said
    for secret in ("lt-…", "lt-1\n"):
        monkeypatch.setenv("LADDERTRON_API_KEY", secret)
        code, said = run_cli("batch", "--url", "http://a/v1", "list")
        assert (code, "must be printable ASCII" in said, secret in said) == (2, True, False), said


def test_a_waiting_client_says_that_the_daemon_is_away_and_how_to_come_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens: the bar says so and asks again until its patience is over; ^C names the command that goes on."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
    client, pauses, errors = BatchClient(url), [], []  # type: ignore[var-annotated]
    with pytest.raises(ApiError, match="refused"):
        client.wait("batch_1", lambda batch: None, errors.append, pauses.append, away_s=60.0)
    assert sum(pauses) >= 60.0
    assert len(errors) == len(pauses)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert cli.main(["batch", "--url", url, "list"]) == 1
    assert capsys.readouterr().err.count("no answer, asking again") == 1

    def interrupted(_: BatchClient, batch_id: str, shown: object, away: Callable[[ApiError], None]) -> None:
        away(errors[0])
        away(errors[1])
        raise KeyboardInterrupt

    monkeypatch.setattr(BatchClient, "wait", interrupted)
    assert cli.main(["batch", "--url", url, "wait", "batch_1", "-o", "a.jsonl"]) == 130
    said = capsys.readouterr().err
    assert f"laddertron batch --url {url} wait batch_1 -o a.jsonl" in said
    assert said.count("retrying") == 1, "a pipe, which has no bar, is told once"


@contextmanager
def answering(response: bytes) -> Iterator[BatchClient]:
    """The client of a server that gives one request this response."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(response)

        thread = threading.Thread(target=answer)
        thread.start()
        yield BatchClient(f"http://127.0.0.1:{server.getsockname()[1]}/v1")
        thread.join()


def test_a_download_that_ends_early_leaves_no_file(tmp_path: Path) -> None:
    """A daemon that is killed closes the connection as if all had been sent."""
    with (
        answering(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n{}\n") as client,
        pytest.raises(ApiError, match="was interrupted"),
    ):
        client.download("file-1", tmp_path / "a.jsonl")
    assert not list(tmp_path.iterdir())


def test_a_refused_key_says_where_it_is_read_from() -> None:
    with (
        answering(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n") as client,
        pytest.raises(ApiError, match=r"^401: .*LADDERTRON_API_KEY or OPENAI_API_KEY$"),
    ):
        client.list(1)


def test_a_refusal_whose_body_is_cut_off_keeps_its_status() -> None:
    with (
        answering(b"HTTP/1.1 404 Not Found\r\ntransfer-encoding: chunked\r\n\r\n9\r\n{") as client,
        pytest.raises(ApiError, match=r"^404: Not Found$"),
    ):
        client.list(1)


def test_the_pace_of_a_watched_batch() -> None:
    pace = BatchPace()

    def said(at: float, status: str, completed: int, failed: int, tokens: int) -> str:
        counts = {"total": 100, "completed": completed, "failed": failed}
        return pace.text({"status": status, "request_counts": counts, "usage": {"output_tokens": tokens}}, at)

    assert said(0.0, "validating", 0, 0, 0) == ""
    assert said(10.0, "in_progress", 10, 0, 1000) == ""
    assert said(20.0, "in_progress", 28, 2, 3000) == "2 failed, 200 tokens/s, 0:35 left"
    assert said(30.0, "completed", 98, 2, 9000) == "2 failed"


@pytest.mark.parametrize(
    ("status", "began", "completed", "failed", "left"),
    [
        ("in_progress", 1000, 30, 10, 150),
        ("in_progress", 1000, 0, 0, None),
        ("in_progress", None, 5, 0, None),
        ("in_progress", 2000, 5, 5, 0),
        ("finalizing", 1000, 90, 10, None),
    ],
)
def test_the_seconds_left_of_a_batch(
    status: str, began: int | None, completed: int, failed: int, left: int | None
) -> None:
    """100 seconds after it began, or while the clocks disagree."""
    counts = {"total": 100, "completed": completed, "failed": failed}
    assert seconds_left({"status": status, "in_progress_at": began, "request_counts": counts}, 1100.0) == left


def test_the_keys_command(tmp_path: Path) -> None:
    path = str(tmp_path / "keys.json")
    code, secret = run_cli("keys", "add", path, "alice")
    assert code == 0
    assert secret.strip().splitlines()[-1].startswith("sk-lt-")
    assert "alice" in run_cli("keys", "list", path)[1]
    code, rotated = run_cli("keys", "rotate", path, "alice", "--old-for", "90m")
    assert code == 0
    assert rotated.strip().splitlines()[-1].startswith("sk-lt-")
    assert rotated.strip().splitlines()[-1] != secret.strip().splitlines()[-1]
    code, said = run_cli("keys", "rotate", path, "alice", "--old-for", "-1")
    assert code == 2
    assert "a time such as 1ms, 30s or 24h" in said
    assert "the old secret works no more" in run_cli("keys", "rotate", path, "alice", "--old-for", "0")[1]
    assert run_cli("keys", "revoke", path, "alice")[0] == 0
    assert run_cli("keys", "revoke", path, "alice")[0] == 2
    assert run_cli("keys", "add", path, "a\nb")[0] == 2


def test_serve_says_what_is_wrong_before_anything_is_launched(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A folder that is held, a port in use, no key file, an outer mpirun: exit code 2 and one line that names the
    fix."""

    def serve(*words: str) -> tuple[int, str]:
        return cli.main(["serve", config, *sets, *words]), capfd.readouterr().err

    config = str(ROOT / "configs" / "demo.yaml")
    sets = ("--set", f"daemon.data_dir={tmp_path / 'data'}")
    folder = write_folder(tmp_path / "tiny")
    with served(deployment(tmp_path), folder) as daemon:
        code, said = serve("--set", "daemon.port=0")
        assert (code, "is used by process" in said) == (2, True)
        code, said = serve("--set", f"daemon.port={daemon.port}")
        assert (code, "set daemon.port" in said) == (2, True)
    (tmp_path / "data" / "store.db").write_bytes(b"")
    code, said = serve("--set", "daemon.port=0")
    assert (code, "serve --adopt" in said) == (2, True)
    spoilt = tmp_path / "keys.json"
    spoilt.write_text("[]")
    code, said = serve("--set", f"daemon.api_key_file={spoilt}")
    assert (code, "is not a key file" in said) == (2, True)
    outer = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    environment = {**os.environ, **outer, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    done = subprocess.run([*LADDERTRON, "serve", config], capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert "laddertron run" in done.stderr


def test_ranks_log_their_own_words_and_their_libraries_warnings() -> None:
    code = """
import logging
from laddertron.launchers.job.rank_logs import set_up_logs
set_up_logs(1, "n0")
for name in ("laddertron.engine.step.build", "megatron.core.hyper_comm_grid"):
    logging.getLogger(name).info("told by %s", name)
logging.getLogger("megatron.core").warning("trouble")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [line.split(" ", 2)[2] for line in done.stderr.splitlines()] == [
        "INFO rank 1 on n0 laddertron.engine.step.build: told by laddertron.engine.step.build",
        "WARNING rank 1 on n0 megatron.core: trouble",
    ]


def test_a_kept_alive_client_is_the_same_everywhere() -> None:
    """The package that judges is the published one, unmodified."""
    assert openai.__file__ is not None
    assert "site-packages" in openai.__file__
