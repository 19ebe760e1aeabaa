"""A changed deployment file: what may change, and what a daemon makes of it. Jobs that do what the test says."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner
from fake_launch import FakeLaunch
from job_tools import Listener, bounded
from laddertron.engine.config.load import Deployment, LoadedDeployment, read
from laddertron.engine.daemon.store.disk import FolderLock, holder_pid
from laddertron.engine.daemon.store.disk_watch import DiskWatch
from laddertron.engine.metrics.observer import Observer
from laddertron.engine.text.text_files import text_digest
from laddertron.launchers import serve
from laddertron.launchers.cli import __main__ as cli
from laddertron.launchers.job import replica
from laddertron.launchers.job.bundle import newest
from laddertron.launchers.job.detect import JobFailure
from laddertron.launchers.job.reload import OUTCOME, SERVING, WAITS, Reloader, Serving, serving_in, unchangeable
from laddertron.launchers.job.replica import Replica, ReplicaSpec
from test_bundle import contents
from test_replace import spec, turns
from waiting import HANG_S, until

ROOT = Path(__file__).resolve().parents[3]
DEMO = str(ROOT / "configs" / "demo.yaml")


@pytest.mark.parametrize(
    ("change", "key", "why"),
    [
        ("daemon.port=8001", "daemon.port", "restart `laddertron serve`"),
        ("daemon.data_dir=elsewhere", "daemon.data_dir", "restart `laddertron serve`"),
        ("daemon.limits.max_lines=3", "daemon.limits", "restart `laddertron serve`"),
        ("metrics.vllm_names=true", "metrics.vllm_names", "restart `laddertron serve`"),
        ("parallel.replicas=2", "parallel.replicas", "as many queues"),
        ("model.served_model_name=other", "model.served_model_name", "clients ask for 'demo'"),
        ("model.tool_format=glm", "model.tool_format", "restart"),
        ("engine.max_num_seqs=3", None, ""),
        ("parallel.tensor_parallel_size=1", None, ""),
        ("launch.env={A: b}", None, ""),
        ("daemon.standby=1", None, ""),
        ("daemon.heartbeat_timeout=20s", None, ""),
    ],
)
def test_what_belongs_to_the_daemon_cannot_change(change: str, key: str | None, why: str) -> None:
    found = list(unchangeable(read(DEMO).deployment, read(DEMO, [change]).deployment))
    assert [name for name, _ in found] == ([] if key is None else [key])
    assert all(why in text for _, text in found)


def test_a_model_cannot_grow_longer_than_the_text_workers_take() -> None:
    short, shorter, free = (read(DEMO, [f"model.max_model_len={n}"]).deployment for n in ("64", "32", "null"))
    assert not list(unchangeable(short, shorter))
    assert not list(unchangeable(free, short))
    for longer in (short, free):
        ((key, text),) = unchangeable(shorter, longer)
        assert (key, "up to 32 tokens" in text) == ("model.max_model_len", True)


def test_the_text_side_is_known_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    before = text_digest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert text_digest(tmp_path) == before
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert text_digest(tmp_path) != before


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[FakeLaunch]:
    monkeypatch.setattr(replica, "Launch", FakeLaunch)
    monkeypatch.setattr(FakeLaunch, "made", [])
    return FakeLaunch.made


class Daemon:
    """A reloader over ready replicas, its file as the test has it. `faults`: by replica, what its next launch fails
    with."""

    def __init__(self, folder: Path, replicas: int = 1) -> None:
        self.sets = [f"daemon.data_dir={folder}"]
        self.folder, self.outcomes, self.faults = folder, list[str](), dict[int, str]()
        self.count = replicas
        self.replicas = [Replica(one) for one in self.specs(self.read().deployment)]
        self.now = 0.0
        self.check: Callable[[LoadedDeployment], object] = lambda loaded: None
        self.reloader = Reloader(
            self.read(),
            self.read,
            self.specs,
            self.replicas,
            self.outcomes.append,
            lambda loaded: self.check(loaded),
            DiskWatch(monotonic=lambda: self.now),
        )

    def read(self) -> LoadedDeployment:
        return read(DEMO, self.sets)

    def specs(self, deployment: Deployment) -> Sequence[ReplicaSpec]:
        names = [f"{index} of {deployment.engine.max_num_seqs}" for index in range(self.count)]
        return [spec(name) for name in names]

    async def start(self) -> asyncio.Task[None]:
        for one in self.replicas:
            await one.start(Listener())
        await turns()
        for launch in list(FakeLaunch.made):
            launch.ready()
        return asyncio.create_task(self.reloader.run())

    def outcome(self) -> dict[str, Any]:
        outcome: dict[str, Any] = json.loads((self.folder / OUTCOME).read_text())
        return outcome

    def serving(self) -> list[str]:
        launches: list[Any] = [one.serving.launch for one in self.replicas if one.serving is not None]
        return [launch.name for launch in launches]

    async def ask(self) -> None:
        """And waits for the outcome, while launches come up or fail."""
        before, handled = len(self.outcomes), len(FakeLaunch.made)
        self.reloader.ask()
        while len(self.outcomes) == before:
            await asyncio.sleep(0.01)
            for launch in FakeLaunch.made[handled:]:
                handled += 1
                if (fault := self.faults.pop(int(launch.name[0]), None)) is not None:
                    launch.fail(fault)
                    continue
                launch.stand()
                await turns()
                launch.ready()
        await turns()

    async def close(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        for one in self.replicas:
            await one.close()


def test_it_refuses_with_each_reason_and_takes_what_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, launches: list[FakeLaunch]
) -> None:
    """1. Another port, and no such key: refused by file, line and key. 2. The file is right again: the replica goes
    over; what was refused before is forgotten. 3. The next one fails as it comes up: the second serves on."""
    caplog.set_level(logging.INFO)

    async def run() -> None:
        daemon = Daemon(tmp_path)
        task = await daemon.start()
        daemon.sets.append("daemon.port=8001")
        await daemon.ask()
        assert daemon.outcome()["outcome"] == "refused"
        assert "daemon.port: cannot change by a reload" in daemon.outcome()["reasons"][0]
        daemon.sets[-1] = "engine.no_such_key=1"
        await daemon.ask()
        assert "no_such_key" in daemon.outcome()["reasons"][0]
        daemon.sets[-1] = "engine.max_num_seqs=3"
        await daemon.ask()
        outcome = daemon.outcome()
        assert outcome.pop("began") <= time.time()
        assert outcome == {"pid": os.getpid(), "outcome": "done", "reasons": []}
        assert daemon.serving() == ["0 of 3"]
        daemon.sets[-1], daemon.faults[0] = "engine.max_num_seqs=4", "no such weights"
        await daemon.ask()
        assert daemon.outcome()["outcome"] == "failed"
        assert daemon.outcome()["reasons"] == ["replica 0 keeps the old configuration: no such weights"]
        assert daemon.serving() == ["0 of 3"]
        assert daemon.outcomes == ["refused", "refused", "done", "failed"]
        await daemon.close(task)

    bounded(run)


def test_each_replica_is_restored_to_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches: list[FakeLaunch]
) -> None:
    """The second of two replicas does not come up: the first has the new configuration. The next reload fails in the
    first one's place: that is what it comes back with."""

    async def run() -> None:
        daemon = Daemon(tmp_path, replicas=2)
        task = await daemon.start()
        daemon.sets.append("engine.max_num_seqs=3")
        daemon.faults[1] = "no such weights"
        await daemon.ask()
        assert daemon.outcomes == ["failed"]
        assert [one.engine.max_num_seqs for one in daemon.reloader.deployments] == [3, 8]
        assert daemon.serving() == ["0 of 3", "1 of 8"]
        monkeypatch.setattr(FakeLaunch, "room", False)
        daemon.sets[-1] = "engine.max_num_seqs=4"
        daemon.reloader.ask()
        while launches[-1].name != "0 of 4":
            await asyncio.sleep(0.01)
        launches[-1].fail("no such weights")
        while len(daemon.outcomes) < 2:
            await asyncio.sleep(0.01)
        assert daemon.serving() == ["0 of 3", "1 of 8"]
        daemon.reloader.ask()
        while launches[-1].done or launches[-1].name != "0 of 4":
            await asyncio.sleep(0.01)
        launches[-1].stand()
        while "load" not in launches[-1].done:
            await asyncio.sleep(0.01)
        launches[-1].fail("no such weights", "refused")
        while len(daemon.outcomes) < 3:
            await asyncio.sleep(0.01)
        await turns()
        assert (launches[-1].name, launches[-1].standby) == ("0 of 3", False)
        await daemon.close(task)

    bounded(run)


def test_a_bundle_names_the_configuration_of_its_own_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches: list[FakeLaunch]
) -> None:
    """`serve`, reloaded once: the launch before it and the one after it fail, each with what it was launched with."""
    sets, reports = [f"daemon.data_dir={tmp_path}", "daemon.port=0"], list[Any]()

    def specs(deployment: Deployment, failed: Any, **keys: Any) -> list[ReplicaSpec]:
        reports.append(failed)
        return [spec("0")]

    async def story(deployment: Deployment, parts: Any, reloader: Reloader, *listeners: Any) -> int:
        (job,) = parts.jobs
        await job.start(Listener())
        await turns()
        launches[0].ready()
        task = asyncio.create_task(reloader.run())
        sets.append("engine.max_num_seqs=3")
        reloader.ask()
        while len(launches) < 2:
            await asyncio.sleep(0.01)
        launches[1].stand()
        await turns()
        launches[1].ready()
        while not (tmp_path / OUTCOME).exists():
            await asyncio.sleep(0.01)
        task.cancel()
        assert [one.engine.max_num_seqs for one in reloader.deployments] == [3]
        for number, report in enumerate(reports, 1):
            report(0, JobFailure("silent", "rank 1 is silent"))
            while len(newest(tmp_path / "bundles")) < number:
                await asyncio.sleep(0.01)
        await job.close()
        return 0

    monkeypatch.setattr(serve, "replica_specs", specs)
    monkeypatch.setattr(serve, "_run", story)
    monkeypatch.setattr(serve, "set_up", lambda *to: None)
    text, serving = cast(Any, None), cast(Any, SimpleNamespace(read_again=lambda: read(DEMO, sets)))
    assert serve.serve(read(DEMO, sets), text, serving, Observer()) == 0
    configs = [contents(path)["config.json"] for path in reversed(newest(tmp_path / "bundles"))]
    assert [json.loads(config)["engine"]["max_num_seqs"] for config in configs] == [8, 3]


def test_another_tokenizer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launches: list[FakeLaunch]
) -> None:
    async def run() -> None:
        daemon = Daemon(tmp_path)
        task = await daemon.start()
        monkeypatch.setattr("laddertron.launchers.job.reload.text_digest", lambda folder: "another")
        await daemon.ask()
        assert "another tokenizer or chat template" in daemon.outcome()["reasons"][0]
        await daemon.close(task)

    bounded(run)


# the command


def serving(folder: Path, pid: int, *more: str) -> None:
    """As a daemon writes it that was started for this folder."""
    Serving(pid, DEMO, (f"daemon.data_dir={folder}", *more), str(folder)).write(folder)


def reload(folder: Path, *more: str, config: str = DEMO) -> tuple[int, str]:
    words = ["reload", config, "--set", f"daemon.data_dir={folder}", *more]
    result = CliRunner().invoke(cli.group, words, standalone_mode=False)
    if result.exception is not None:
        return getattr(result.exception, "exit_code", 99), str(result.exception)
    return result.return_value, result.output


def test_the_command_finds_no_daemon_in_a_folder_that_nobody_holds(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": ""}))
    code, text = reload(tmp_path)
    assert (code, f"no daemon on this host uses {tmp_path}" in text) == (2, True)


def test_the_holder_of_a_folder_is_known_while_it_lives(tmp_path: Path) -> None:
    assert holder_pid(tmp_path) is None
    lock = FolderLock(tmp_path)
    assert holder_pid(tmp_path) == os.getpid()
    mine = (tmp_path / "lock").read_text()
    for said in ('{"pid": 1}', "junk", json.dumps({"pid": os.getpid(), "host": "elsewhere"}), '["x"]'):
        (tmp_path / "lock").write_text(said)
        assert holder_pid(tmp_path) is None
    (tmp_path / "lock").write_text(mine)
    lock.release()
    assert holder_pid(tmp_path) is None


@pytest.mark.parametrize(("outcome", "code"), [("done", 0), ("refused", 1)])
def test_the_command_signals_the_daemon_and_waits_for_what_came_of_it(outcome: str, code: int, tmp_path: Path) -> None:
    """A process that holds the folder answers SIGHUP as the daemon does."""
    script = (
        "import json, os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from laddertron.engine.daemon.store.disk import FolderLock\n"
        "folder = Path(sys.argv[1])\n"
        "lock = FolderLock(folder)\n"
        "signal.signal(signal.SIGHUP, print)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])\n"
        "(folder / 'up').touch()\n"
        "signal.sigwait([signal.SIGHUP])\n"
        "reasons = [] if sys.argv[2] == 'done' else ['daemon.port: no']\n"
        "said = {'pid': os.getpid(), 'began': time.time(), 'outcome': sys.argv[2], 'reasons': reasons}\n"
        f"(folder / '{OUTCOME}.part').write_text(json.dumps(said))\n"
        f"(folder / '{OUTCOME}.part').rename(folder / '{OUTCOME}')\n"
        "sys.stdin.read()\n"
    )
    daemon = subprocess.Popen([sys.executable, "-c", script, str(tmp_path), outcome], stdin=subprocess.PIPE)
    try:
        until((tmp_path / "up").exists, lambda: "no folder lock", 0.01)
        serving(tmp_path, daemon.pid)
        found, text = reload(tmp_path)
        assert (found, f"reload: {outcome}" in text) == (code, True)
        assert ("daemon.port: no" in text) == (outcome == "refused")
    finally:
        assert daemon.stdin is not None
        daemon.stdin.close()
        daemon.wait(HANG_S)


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[int]:
    """A process that holds the folder, and says on stdout if it gets SIGHUP."""
    script = (
        "import signal, sys\n"
        "from pathlib import Path\n"
        "from laddertron.engine.daemon.store.disk import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[1]))\n"
        "signal.signal(signal.SIGHUP, lambda *_: print('signalled', flush=True))\n"
        "(Path(sys.argv[1]) / 'up').touch()\n"
        "sys.stdin.read()\n"
    )
    words = [sys.executable, "-c", script, str(tmp_path)]
    daemon = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        until((tmp_path / "up").exists, lambda: "no folder lock", 0.01)
        yield daemon.pid
    finally:
        assert daemon.communicate(timeout=HANG_S)[0] == "", "a refused reload signals nobody"


def test_what_the_daemon_would_not_read_is_refused(tmp_path: Path, silent: int) -> None:
    """Another file, a --set that it was not started with, one that is missing, and before it has said what it serves:
    each refused with what the daemon reads, and no signal sent."""
    code, text = reload(tmp_path)
    assert (code, "has not reported its deployment" in text) == (2, True)
    serving(tmp_path, silent, "engine.max_num_seqs=3")
    code, text = reload(tmp_path, "--set", "engine.max_num_seqs=4")
    assert (code, "which differs in engine.max_num_seqs:" in text) == (2, True)
    assert f"laddertron serve {DEMO} --set daemon.data_dir={tmp_path} --set engine.max_num_seqs=3" in text
    code, text = reload(tmp_path)
    assert (code, "which differs in engine.max_num_seqs:" in text) == (2, True)
    other = tmp_path / "other.yaml"
    other.write_text(Path(DEMO).read_text().replace("path: ", f"path: {Path(DEMO).parent}/"))
    code, text = reload(
        tmp_path, "--set", "engine.max_num_seqs=3", "--set", "parallel.split_steps=never", config=str(other)
    )
    assert (code, f"laddertron serve {DEMO} " in text, "parallel.split_steps" in text) == (2, True, True)


def test_what_a_daemon_serves_is_read_in_its_own_working_directory(tmp_path: Path) -> None:
    """Relative paths; and no other process's word is taken."""
    (tmp_path / "d.yaml").write_text("model: {path: m}\n")
    Serving(7, "d.yaml", ("daemon.data_dir=data",), str(tmp_path)).write(tmp_path)
    found = serving_in(tmp_path, 7)
    assert found is not None
    assert found.read_again().deployment.daemon.data_dir == str(tmp_path / "data")
    assert found.read_again().deployment.model.path == str(tmp_path / "m")
    assert serving_in(tmp_path, 8) is None
    for said in ("junk", "[]", '{"pid": 7}', "[" * 100_000):
        (tmp_path / SERVING).write_text(said)
        assert serving_in(tmp_path, 7) is None


def test_the_command_checks_the_file_first(tmp_path: Path) -> None:
    code, text = reload(tmp_path, "--set", "engine.no_such_key=1")
    assert (code, "no_such_key" in text) == (99, True)  # ConfigError: main prints it and ends with 2


def test_the_command_does_not_end_a_daemon_that_has_no_handler(tmp_path: Path) -> None:
    """One of an earlier version: SIGHUP would end it without a word."""
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from laddertron.engine.daemon.store.disk import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[1]))\n"
        "(Path(sys.argv[1]) / 'up').touch()\n"
        "sys.stdin.read()\n"
    )
    daemon = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE)
    try:
        until((tmp_path / "up").exists, lambda: "no folder lock", 0.01)
        code, text = reload(tmp_path)
        assert (code, "earlier version" in text) == (2, True)
        assert daemon.poll() is None
    finally:
        assert daemon.stdin is not None
        daemon.stdin.close()
        daemon.wait(HANG_S)


def test_a_model_folder_that_does_not_answer_is_named(
    tmp_path: Path, launches: list[FakeLaunch], caplog: pytest.LogCaptureFixture
) -> None:
    """In the log and for `laddertron reload`, while the reload waits; when the disk answers, it is done."""
    answers = threading.Event()

    async def go() -> None:
        daemon = Daemon(tmp_path)
        task = await daemon.start()
        daemon.check = lambda loaded: answers.wait(HANG_S)
        asking = asyncio.create_task(daemon.ask())
        while not (tmp_path / OUTCOME).exists():
            daemon.now += 60.0
            await asyncio.sleep(0.01)
        waiting = daemon.outcome()
        assert waiting["outcome"] == WAITS
        [reason] = waiting["reasons"]
        assert reason.startswith(f"{daemon.read().deployment.text_folder} (")
        assert reason in caplog.text
        assert not asking.done()
        answers.set()
        await asking
        assert daemon.outcomes == ["done"]
        assert daemon.outcome()["outcome"] == "done"
        await daemon.close(task)

    asyncio.run(go())
