"""The archive of diagnostics: the cause in its first line, its contents, and that collecting them has no effect."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import tarfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from laddertron.engine.config.load import Deployment, load
from laddertron.engine.job import Culprit
from laddertron.launchers.cli.__main__ import group
from laddertron.launchers.cli.commands.bundle import ask_daemon, collect, local_ranks
from laddertron.launchers.job.bundle import KEPT, FailureBundles, newest, parts_of, redacted, verdict, write_bundle
from laddertron.launchers.job.detect import JobFailure
from waiting import HANG_S, until

CONFIG = Path(__file__).resolve().parents[3] / "configs/demo.yaml"


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return load(CONFIG, (f"daemon.data_dir={tmp_path}", "launch.env={NCCL_DEBUG: INFO, WANDB_API_KEY: abc123secret}"))


def contents(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        return {
            member.name.partition("/")[2]: archive.extractfile(member).read()  # type: ignore[union-attr]
            for member in archive.getmembers()
        }


def dump(step: int, started: int, waiting: str = "") -> dict[str, Any]:
    return {"step": step, "started": started, "waiting": waiting, "collectives": [{"seq": 1}], "stacks": {"Main": "x"}}


@pytest.mark.parametrize(
    ("dumps", "words"),
    [
        ({}, "no rank responded"),
        ({"0": dump(5, 90, "collective 89 (gather)"), "1": dump(5, 88)}, "rank 1 is behind"),
        ({"0": dump(5, 90, "c 89"), "1": dump(4, 90)}, "rank 1 is behind: step 4"),
        ({"0": dump(5, 90, "c 89"), "1": dump(5, 90, "c 89")}, "all ranks wait in c 89: suspect the link"),
        ({"0": dump(5, 90, "c 89"), "1": dump(5, 90)}, "rank 1 is behind"),
        ({"0": dump(5, 90), "1": dump(5, 90)}, "no rank is behind"),
        ({"0": dump(5, 90, "c 89")}, "all ranks wait in c 89"),
    ],
)
def test_the_first_line_names_who_did_not_arrive(dumps: dict[str, Any], words: str) -> None:
    assert words in verdict(None, dumps)


def test_a_failures_own_words_come_first() -> None:
    failure = JobFailure(
        "silent",
        "rank 1 (node b, pid 7): no heartbeat for 10.0 s",
        Culprit(1, "b", collective="collective 12 (gather)"),
    )
    assert verdict(failure, {}) == (
        "silent: rank 1 (node b, pid 7): no heartbeat for 10.0 s (in collective 12 (gather))"
    )


def test_secrets_are_taken_out_and_paths_stay() -> None:
    given = {
        "env": {"HF_TOKEN": "hf_x", "NCCL_DEBUG": "INFO", "PROXY": "http://u:pw@proxy:1"},
        "api_key_file": "/etc/keys.json",
        "tls_key": "/etc/tls.pem",
        "words": ["Authorization: Bearer abcdefghijkl", "sk-lt-0123456789abcdef"],
    }
    found = json.dumps(redacted(given))
    for secret in ("hf_x", "pw@", "abcdefghijkl", "0123456789abcdef"):
        assert secret not in found
    for kept in ("INFO", "/etc/keys.json", "/etc/tls.pem", "proxy:1"):
        assert kept in found


def test_what_is_in_the_archive(deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README first, its first line the verdict; stacks and collectives by rank; the last words; NCCL's recordings as
    they are; only its owner may read it; the secret in the environment is not there."""
    (tmp_path / "nccl_trace_rank_3").write_bytes(b"\x80\x04raw")
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(tmp_path / "nccl_trace_rank_"))
    dumps = {0: dump(5, 90, "collective 89 (gather)")}
    failure = JobFailure(
        "rank_lost", "rank 1: gone", Culprit(1, "b"), output=("Killed", "key sk-lt-0123456789"), dumps=dumps
    )
    assert not any(name.startswith("host/nccl") for name in parts_of(deployment, {}))  # ranks on CPUs wrote none
    deployment = replace(deployment, engine=replace(deployment.engine, device="auto"))
    path = write_bundle(tmp_path / "b.tar.gz", parts_of(deployment, {"state": {"phase": "ready"}}, failure))
    with tarfile.open(path) as archive:
        assert archive.getnames()[0] == "b/README.txt"
    found = contents(path)
    assert found["README.txt"].splitlines()[0] == b"rank_lost: rank 1: gone"
    assert b"--- Main" in found["ranks/0/stacks.txt"]
    assert json.loads(found["ranks/0/collectives.json"])["waiting"] == "collective 89 (gather)"
    assert found["host/nccl/nccl_trace_rank_3"] == b"\x80\x04raw"
    assert json.loads(found["host/topology.json"])["nodes"]
    assert b"Killed" in found["output.txt"]
    assert all(b"abc123secret" not in part and b"0123456789" not in part for part in found.values())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_failures_write_themselves_and_the_oldest_go(deployment: Deployment, tmp_path: Path) -> None:
    folder = tmp_path / "bundles"
    bundles = FailureBundles(deployment, folder)
    for number in range(KEPT + 3):
        writing = bundles.failed(1, JobFailure("stalled", f"failure {number}"))
        assert writing is not None
        writing.join(HANG_S)
    kept = newest(folder)
    assert len(kept) == KEPT
    assert contents(kept[0])["README.txt"].startswith(f"stalled: failure {KEPT + 2}".encode())
    assert not list(folder.glob(".*"))
    assert bundles.failed(1, JobFailure("refused", "model.safetensors: 3 bytes are missing")) is None


def test_the_newest_is_known_by_its_name_whatever_the_clock_does(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second's end, a clock that stands and one that is set back."""
    times = iter([1_999_999_999, 2_000_000_000, 2_000_000_000, 1_500_000_000])
    with monkeypatch.context() as patched:
        patched.setattr("laddertron.launchers.job.bundle.time.time_ns", lambda: next(times))
        bundles = FailureBundles(deployment, tmp_path)
        written = [bundles.write({}, JobFailure("stalled", f"failure {number}")) for number in range(4)]
    assert newest(tmp_path) == written[::-1]


def test_a_folder_that_cannot_be_written_harms_nobody(
    deployment: Deployment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert FailureBundles(deployment, tmp_path / "file").write({}) is None
    assert "no bundle was written" in caplog.text


def test_without_a_daemon_the_host_and_the_last_failure_are_taken(deployment: Deployment, tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").write_text('{"a": 1}\n')
    FailureBundles(deployment, tmp_path / "bundles").write({}, JobFailure("silent", "rank 1 is silent"))
    path, source = collect(deployment, CONFIG, tmp_path / "out.tar.gz")
    assert source == "no daemon runs here"
    found = contents(path)
    assert b"no daemon runs here; the last failure is laddertron-" in found["README.txt"].splitlines()[0]
    assert b"failure.json" not in found["README.txt"]  # there is none
    assert "job.json" not in found
    assert found["logs/audit.jsonl"] == b'{"a": 1}\n'
    (tmp_path / "inner.tar.gz").write_bytes(found["last-failure.tar.gz"])
    assert contents(tmp_path / "inner.tar.gz")["README.txt"].startswith(b"silent: rank 1 is silent")


def test_ranks_of_another_deployment_are_not_taken(tmp_path: Path) -> None:
    """Two launchers with a rank each, one of this file and one of another: a rank belongs to whose launcher it is."""
    mine, other = tmp_path / "mine.yaml", tmp_path / "other.yaml"
    rank = "sys.executable, '-c', 'import sys; sys.stdin.read()', '.'.join(('laddertron.launchers', 'rank.worker'))"
    launcher = f"import subprocess, sys; subprocess.run([{rank}])"
    with contextlib.ExitStack() as stack:
        for config in (mine, other):
            config.write_text("")
            words = [sys.executable, "-c", launcher, "laddertron", config.name]
            started = subprocess.Popen(words, stdin=subprocess.PIPE, cwd=tmp_path)
            stack.callback(started.wait)
            stack.callback(started.stdin.close)  # type: ignore[union-attr]
        for config in (mine, other):
            until(lambda config=config: len(local_ranks(config)) == 1)  # type: ignore[misc]
        assert local_ranks(mine).keys().isdisjoint(local_ranks(other))
        assert local_ranks(tmp_path) == {}


def test_what_happened_before_is_read_first(deployment: Deployment) -> None:
    state = {"phase": "restarting", "restarts": 2, "reason": "rank 1: gone"}
    job = {"state": state, "failures": [{"kind": "silent", "reason": "rank 0 is silent"}]}
    said = parts_of(deployment, job, JobFailure("rank_lost", "rank 1: gone"))["README.txt"].decode()
    assert "phase restarting, 2 restarts: rank 1: gone" in said
    assert "failed before: silent: rank 0 is silent" in said
    assert "ranks/" not in said


def test_a_daemon_is_asked_by_signal(deployment: Deployment, tmp_path: Path) -> None:
    """A process that writes a bundle on SIGUSR1 is asked and answers; one that does not is given up in time."""
    folder = tmp_path / "bundles"
    bundles = FailureBundles(deployment, folder)
    parts = {"state": {"phase": "ready"}, "dumps": {"0": dump(3, 9, "c 8"), "1": dump(3, 9, "c 8")}}

    async def story() -> Path | None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, lambda: threading.Thread(target=bundles.write, args=(parts,)).start())
        try:
            return await asyncio.to_thread(ask_daemon, os.getpid(), folder, HANG_S)
        finally:
            loop.remove_signal_handler(signal.SIGUSR1)

    made = asyncio.run(story())
    assert made is not None
    assert contents(made)["README.txt"].startswith(b"all ranks wait in c 8")
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        assert ask_daemon(os.getpid(), folder, 0.3) is None
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_command(deployment: Deployment, tmp_path: Path) -> None:
    data = f"daemon.data_dir={replace(deployment.daemon).data_dir}"
    out = tmp_path / "asked.tar.gz"
    done = CliRunner().invoke(group, ["bundle", str(CONFIG), "--set", data, "-o", str(out)], standalone_mode=False)
    assert done.exception is None
    assert "README.txt" in contents(out)
    wrong = CliRunner().invoke(group, ["bundle", str(CONFIG), "-o", "x.zip"])
    assert wrong.exit_code == 2
