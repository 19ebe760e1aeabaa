"""A launch that stands by and a changed configuration, on real ranks (the demo model under mpirun) below a real daemon.
Part of `make fault-test`; FAULT_SEED replays a run."""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_tools import MPIRUN
from laddertron.launchers.control import processes
from laddertron.launchers.control.processes import ProcessId

from faults.night import ROOT, Night, StreamReader, line, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MPIRUN.exists(), reason=f"no Open MPI at {MPIRUN}"),
]
SEED = int(os.environ.get("FAULT_SEED", random.SystemRandom().randrange(2**32)))
LINES = 200


@pytest.fixture
def night(tmp_path: Path) -> Iterator[Night]:
    """Its deployment file may be changed by the test."""
    config = tmp_path / "demo.yaml"
    shutil.copy(ROOT / "configs" / "demo.yaml", config)
    shutil.copytree(ROOT / "configs" / "demo" / "demo-ladder", tmp_path / "demo" / "demo-ladder")
    made = Night(tmp_path, real=True, sets=("daemon.standby=1", "engine.kv_cache_memory=16MiB"), config=config)
    yield made
    made.close()


def ranks(night: Night) -> list[list[ProcessId]]:
    """Of each launch."""
    return [night.victims("rank", [launch]) for launch in night.launches()]


def complete(night: Night, batch: str) -> None:
    until("the batch's end", lambda: night.batch(batch)["status"] == "completed", 180, 0.1)
    names = [row["custom_id"] for row in night.rows(night.batch(batch), "output")]
    assert sorted(names) == sorted(f"line-{n}" for n in range(LINES))


@pytest.mark.parametrize("struck", ["serving", "both"])
def test_a_rank_is_lost_while_a_launch_stands_by(struck: str, night: Night) -> None:
    """In the middle of a batch a serving rank is killed: the launch that stood by serves, and a new one stands behind
    it. Or a rank of that one too: a cold start, and the log says why. Every line has one answer; nothing of the old
    launches is left, and nothing at all at the end."""
    rng = random.Random(f"{SEED} {struck}")
    night.start()
    night.stands()
    batch = night.submit([line(f"line-{n}", 64, n) for n in range(LINES)])
    until("answers", lambda: len(night.committed()) >= 20, 60)
    serving, waiting = ranks(night)
    if struck == "both":
        assert processes.kill(rng.choice(waiting))
        until("no standby", lambda: night.replica()["standby"] != "ready", 10)
    assert processes.kill(rng.choice(serving))
    began, before = time.monotonic(), len(night.committed())
    until("recovery", lambda: night.events("recovered"), 120)
    until("the next answer", lambda: len(night.committed()) > before, 60)
    again = time.monotonic() - began
    (told,) = night.events("recovered")
    now = ranks(night)[0]
    assert told["standby"] == (struck == "serving"), told
    assert ({p.pid for p in now} == {p.pid for p in waiting}) == (struck == "serving")
    assert not any(processes.is_alive(p) for p in serving)
    said = " ".join(event["message"] for event in night.events("standby"))
    assert ("standby: takes over" in said) == (struck == "serving")
    assert ("standby: lost (rank_lost)" in said) == (struck == "both")
    complete(night, batch)
    night.stands()
    print(f"\nFAULT_SEED={SEED} {struck}: the next answer after {again:.2f} s; {told['message']}")
    known = night.everyone()
    assert night.stop() == 0
    assert not any(processes.is_alive(p) for p in known)


def test_a_stream_goes_on_by_the_standby_and_says_the_same(night: Night) -> None:
    """FAULT_TAKEOVERS (20) times a serving rank, its mpirun or its keeper is killed amid a stream, the next once a
    launch stands by again: each stream is whole, and says what an undisturbed one says, digests of all logits too.
    Prints how long the next token took from the kill on, and where that time went."""
    rng, body = random.Random(SEED), {"prompt": "def f(", "max_tokens": 200, "seed": 5, "logprobs": 1}
    night.argv += ["--set", "parallel.deterministic=true"]
    night.start()
    night.stands()
    body["return_digest"] = True
    undisturbed = StreamReader(night.port, "completions", body)
    undisturbed.join()
    assert undisturbed.whole, undisturbed.said
    took: list[float] = []
    for number in range(int(os.environ.get("FAULT_TAKEOVERS", "20"))):
        night.stands()
        stream = StreamReader(night.port, "completions", body)
        until("tokens", lambda: len(stream.events) > 8, 30, 0.001)  # noqa: B023 (called before the next)
        what = rng.choice(("rank", "rank", "mpirun", "keeper"))
        assert night.strike(what, rng, night.launches()[:1]) is not None
        began = time.monotonic()
        until("recovery", lambda: len(night.events("recovered")) > number, 120, 0.005)  # noqa: B023
        seen = len(stream.events)
        until("the next token", lambda: len(stream.events) > seen or stream.whole, 60, 0.001)  # noqa: B023
        took.append(time.monotonic() - began)
        stream.join()
        assert stream.whole
        assert stream.said == undisturbed.said, what
    told = night.events("recovered")
    assert all(event["standby"] for event in told), told
    assert night.log_path.read_text().count("the rest lay in memory") >= len(took)
    took.sort()
    middle, most, last = statistics.median(took), took[int(0.99 * len(took))], took[-1]
    print(f"\nFAULT_SEED={SEED}: {len(took)} takeovers, next token after {middle:.2f} s in the median,", end=" ")
    print(f"{most:.2f} s at the 99th percentile, {last:.2f} s at most")
    print(*(event["message"] for event in told[-3:]), sep="\n")
    assert not night.events("quarantined")
    assert night.stop() == 0


def test_a_changed_file_serves_and_no_request_is_lost(night: Night) -> None:
    """Clients ask all the while. 1. max_num_seqs changes: `laddertron reload` returns 0 once new ranks serve. 2. A port
    changes: refused, 1. 3. The weights are damaged: failed, 1, and what serves goes on. Every request is answered with
    200, every line of the batch once; none of the first ranks is left. The weights that the first launch packed serve
    the second."""
    night.argv += ["--set", "parallel.deterministic=true"]
    night.start()
    night.stands()
    batch = night.submit([line(f"line-{n}", 64, n) for n in range(LINES)])
    first = ranks(night)[0]
    config = night.folder / "demo.yaml"
    original = config.read_text()
    over, statuses = threading.Event(), list[int]()

    def ask() -> None:
        data = json.dumps({"model": "demo", "prompt": "def f(", "max_tokens": 16}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{night.port}/v1/completions", data, {"content-type": "application/json"}
        )
        while not over.is_set():
            try:
                with urllib.request.urlopen(request, timeout=120) as answer:
                    statuses.append(answer.status)
            except urllib.error.HTTPError as error:
                statuses.append(error.code)

    clients = [threading.Thread(target=ask) for _ in range(2)]
    for client in clients:
        client.start()
    try:
        config.write_text(original.replace("max_num_seqs: 8", "max_num_seqs: 4"))
        assert "max_num_seqs: 4" in config.read_text()
        assert reload(night) == 0
        assert not any(processes.is_alive(p) for p in first)
        assert "the rest lay in memory" in night.log_path.read_text()
        config.write_text(f"{original}\nmetrics:\n  port: 9\n")
        assert reload(night) == 1
        config.write_text(original)
        with (night.folder / "demo" / "demo-ladder" / "model.safetensors").open("r+b") as file:
            file.truncate(1_000_000)
        assert reload(night) == 1
        asked = len(statuses)
        until("more answers", lambda: len(statuses) > asked + 2, 60)
    finally:
        over.set()
        for client in clients:
            client.join()
    assert set(statuses) == {200}, statuses
    complete(night, batch)
    assert night.stop() == 0


def reload(night: Night) -> int:
    words = [word for word in night.argv if word != "serve"]
    words.insert(words.index("laddertron.launchers.cli") + 1, "reload")
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    print(done.stdout, done.stderr)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode
