"""Daemon, keeper, mpirun, ranks, standbys and text workers killed at seeded points of batches and streams: every line
has exactly one answer, no stream breaks but by the daemon's own death.

FAULT_SEED replays a run; a row's variable sets how many kills it has. Part of `make fault-test`."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster.launching import Job
from cluster.nodes import Cluster, why_not
from job_tools import MPIRUN
from laddertron.launchers.control import processes

from faults.night import Night, StreamReader, line, until

pytestmark = pytest.mark.slow
SEED = int(os.environ.get("FAULT_SEED", random.SystemRandom().randrange(2**32)))
LINES = 200
READERS, SEEDS = 3, 4
WINDOW = 4 * 8 + 8 + READERS
"""Requests that may be in flight at once: four times max_num_seqs lines in the engine, and as many more as wait for it;
streams."""
STRUCK = ("rank", "rank", "mpirun", "keeper")


@dataclass(frozen=True)
class Row:
    """`points`: how many kills, unless `variable` says so. `standby`: a launch stands by, who is struck of STRUCK is of
    the one that serves, and the next kill waits until one stands by again."""

    variable: str
    points: int
    victims: tuple[str, ...]
    real: bool = True
    standby: bool = False
    nodes: int = 0


ROWS = {
    "fake-ranks": Row("FAULT_FAKE", 160, (*STRUCK, "daemon"), real=False),
    "mpirun": Row("FAULT_REAL", 40, (*STRUCK, "daemon")),
    "standby": Row("FAULT_STANDBY", 20, (*STRUCK, "standby", "text worker"), standby=True),
    "nodes": Row("FAULT_NODES", 6, (*STRUCK, "standby", "text worker"), standby=True, nodes=2),
}
SKIPPED = {
    "fake-ranks": None,
    "mpirun": None if MPIRUN.exists() else f"no Open MPI at {MPIRUN}",
}
SKIPPED |= {"standby": SKIPPED["mpirun"], "nodes": SKIPPED["mpirun"] or why_not()}


class Run:
    """What was struck, when, and what was in the store before."""

    def __init__(self, night: Night, row: Row, rng: random.Random) -> None:
        self.night, self.row, self.rng = night, row, rng
        self.struck: list[str] = []
        self.before: list[tuple[int, set[str]]] = []
        self.batches: list[str] = []
        self.orphans_s: list[float] = []

    def point(self, spread_s: float) -> None:
        """One kill. Mostly of a job that serves, at times of one that is just coming up."""
        night, rng = self.night, self.rng
        if self.row.standby:
            night.stands()
        elif rng.random() < 0.75:
            night.ready()
        if not self.batches or (self.status() == 200 and night.batch(self.batches[-1])["status"] == "completed"):
            self.batches.append(night.submit([line(f"line-{n}", 4 + n % 24, n) for n in range(LINES)]))
        time.sleep(rng.uniform(0.0, spread_s))
        what = rng.choice(self.row.victims)
        known, done = night.everyone(), night.committed()
        at = night.starts.stat().st_size
        launches = night.launches()
        if self.row.standby:
            launches = launches[1:] if what == "standby" else launches[:1]
        kind = rng.choice(STRUCK) if what == "standby" else what
        if night.strike(kind, rng, launches) is None:
            return
        self.struck.append(what)
        self.before.append((at, done))
        if self.row.standby and what != "text worker":
            (known,) = launches
            gone = until("no orphan", lambda: not any(processes.is_alive(p) for p in known), 30.0)
            self.orphans_s.append(gone)
            until("its notice", lambda: night.replica()["standby"] != "ready", 30.0)
        if what == "daemon":
            night.process.wait()
            gone = until("no orphan", lambda: not any(processes.is_alive(p) for p in known), 10.0)
            self.orphans_s.append(gone)
            night.start()
            until("a daemon that listens", lambda: self.status() == 200, 60.0)

    def status(self) -> int:
        return self.night.status("/health")


class Reader(threading.Thread):
    """Reads one stream after the other until `over` is set, each of the next seed."""

    def __init__(self, night: Night) -> None:
        super().__init__()
        self._night = night
        self.over = threading.Event()
        self.read: list[tuple[int, StreamReader]] = []
        self.refused: Counter[int] = Counter()
        self.start()

    def run(self) -> None:
        while not self.over.is_set():
            seed = len(self.read) % SEEDS
            stream = ask(self._night, seed)
            if stream.status == 200:
                self.read.append((seed, stream))
            else:
                self.refused[stream.status] += 1
                self.over.wait(0.1)  # 503 while the engine is away


def ask(night: Night, seed: int) -> StreamReader:
    stream = StreamReader(
        night.port, "completions", {"prompt": "def g(", "max_tokens": 80, "seed": seed, "temperature": 0}
    )
    stream.join()
    return stream


def answers(night: Night, batch_id: str, names: set[str]) -> dict[str, Any]:
    """Texts by custom_id; asserts that every line has one answer, and none was given up."""
    batch = night.batch(batch_id)
    out, errors = night.rows(batch, "output"), night.rows(batch, "error")
    assert not errors
    count = Counter(row["custom_id"] for row in out)
    assert set(count) == names, f"lost: {sorted(names - set(count))}"
    assert set(count.values()) == {1}, f"twice: {[name for name, times in count.items() if times > 1]}"
    return {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in out}


def rework(run: Run) -> int:
    """Starts beyond each line's first; asserts that nothing that was in the store ever started again."""
    log = run.night.starts.read_bytes()
    for at, done in run.before:
        again = {name.decode()[:37] for name in log[at:].splitlines()} & done
        assert not again, f"ran again although finished: {sorted(again)[:3]}"
    names = [name[:37] for name in log.splitlines()]
    return len(names) - len(set(names))


def nights(row: Row, folder: Path, stack: contextlib.ExitStack) -> Night:
    """On this machine, or with the daemon on the first of emulated nodes that have a stage each."""
    sets = ["daemon.max_restarts=1000", "engine.max_num_seqs=8", "parallel.deterministic=true"]
    if row.standby:
        sets += ["daemon.standby=1", "engine.kv_cache_memory=16MiB"]
    if not row.nodes:
        return Night(folder, real=row.real, sets=tuple(sets))
    cluster = stack.enter_context(Cluster(row.nodes))
    stack.enter_context(cluster.network(0))
    (folder / "hosts").write_text("".join(f"{name} slots=2\n" for name in cluster.names))
    launch = f"launcher: openmpi, hostfile: ./hosts, rsh_agent: {cluster.agent}, interface: eth0"
    job = Job(folder, launch, tp=2, more=f", pipeline_parallel_size: {row.nodes}")
    return Night(folder, real=True, sets=tuple(sets), config=job.config, cluster=cluster)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.skipif(SKIPPED[name] is not None, reason=SKIPPED[name] or ""))
        for name in ROWS
    ],
)
def test_kill_points(name: str, tmp_path: Path) -> None:
    """1. A batch and streams run undisturbed: what the answers are. 2. Batches and streams run while something is
    killed again and again. 3. Once it stops, every batch completes: every line one answer, the same one, and none given
    up; every stream that the daemon outlived is whole and the same; with fake ranks also: what the store had never ran
    again, and no more ran twice than was in flight. 4. SIGTERM ends it with 0 and nothing is left."""
    with contextlib.ExitStack() as stack:
        kill_points(ROWS[name], nights(ROWS[name], tmp_path, stack))


def kill_points(row: Row, night: Night) -> None:
    points, rng, real = int(os.environ.get(row.variable, row.points)), random.Random(SEED), row.real
    print(f"\nFAULT_SEED={SEED} {row.variable}={points}", flush=True)
    run = Run(night, row, rng)
    names = {f"line-{n}" for n in range(LINES)}
    night.start()
    readers: list[Reader] = []
    try:
        night.ready()
        assert len(night.victims("rank", night.launches()[:1])) == 2 * max(1, row.nodes)
        told = [ask(night, seed).events for seed in range(SEEDS)]
        calm = night.submit([line(f"line-{n}", 4 + n % 24, n) for n in range(LINES)])
        finish(night, calm)
        wanted = answers(night, calm, names)
        began, least = time.monotonic(), night.starts.read_bytes().count(b"\n")
        assert real or least == LINES + SEEDS
        readers = [Reader(night) for _ in range(READERS)]
        while len(run.struck) < points:
            run.point(1.5)
        struck_s = time.monotonic() - began
        differing = 0
        for batch_id in run.batches:
            finish(night, batch_id)
            texts = answers(night, batch_id, names)
            differing += sum(texts[name] != wanted[name] for name in texts)
        for reader in readers:
            reader.over.set()
            reader.join()
        streams = [one for reader in readers for one in reader.read]
        broken = [(seed, stream) for seed, stream in streams if not stream.whole]
        assert not [stream for _, stream in streams if any("error" in event for event in stream.events)]
        refused = sum((reader.refused for reader in readers), Counter())
        assert set(refused) <= {0, 503}, refused
        assert len(broken) <= READERS * run.struck.count("daemon")
        differing += sum(stream.events != told[seed][: len(stream.events)] for seed, stream in streams)
        twice = 0 if real else rework(run)
        recovered = Counter("standby" if event["standby"] else "cold start" for event in night.events("recovered"))
        assert not night.events("quarantined")
        known = night.everyone()
        assert night.stop() == 0
        assert not any(processes.is_alive(process) for process in known)
    finally:
        for reader in readers:
            reader.over.set()
        night.close()
    lines = LINES * len(run.batches)
    print(
        f"{len(run.struck)} kills in {struck_s:.0f} s {dict(Counter(run.struck))}, {len(run.batches)} batches: "
        f"{lines} lines, {lines} answers, 0 lost, 0 duplicate, 0 torn, 0 quarantined; {len(streams)} streams, "
        f"{len(broken)} cut by the daemon's death, the others whole; {differing} differ; "
        + ("rework not counted" if real else f"rework {twice} <= {WINDOW * len(run.struck)}")
        + f"; orphans gone <= {max(run.orphans_s, default=0.0):.1f} s; recovered by {dict(recovered)}"
    )
    assert differing == 0
    assert twice <= WINDOW * len(run.struck)
    assert max(run.orphans_s, default=0.0) <= 5.0


def finish(night: Night, batch_id: str, seconds: float = 240.0) -> None:
    def ended() -> bool:
        assert night.process.poll() is None, night.tail()
        return night.batch(batch_id)["status"] in ("completed", "failed")

    until("the batch's end", ended, seconds, 0.1)
    assert night.batch(batch_id)["status"] == "completed"
