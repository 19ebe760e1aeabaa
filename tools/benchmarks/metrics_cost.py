"""What metrics cost: decode tokens/s of two ranks with metrics and heartbeats over the rate without, in mixed pairs.

    python tools/benchmarks/metrics_cost.py [--pairs 20]

On: counters and histograms of steps, rank 0's snapshots, the look at memory and ports, a heartbeat a second from each
rank over loopback to this process, which keeps the series and renders a scrape every fifth heartbeat. Off: none
of that. Both go on in the same ranks, in turns of 32 steps: the switch follows the number of the step, so that
all ranks turn it together, and a block is a fraction of a second. At the end: a scrape of 16 ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from laddertron.engine.config import load as deploy
from laddertron.engine.job import RankHeartbeat
from laddertron.engine.metrics.observer import Observer
from laddertron.engine.request import Request, SamplingParams
from laddertron.engine.schedule.scheduler import Scheduler
from laddertron.engine.step.engine import Engine, StepProgress, follow
from laddertron.launchers.compose.mpi import compose
from laddertron.launchers.control.messages import Beat, from_wire, to_wire
from laddertron.launchers.job.fleet import Fleet
from laddertron.launchers.rank.rank import choose_device, join_group, set_threads
from laddertron.launchers.rank.rank_health import HealthWatch, make_look
from laddertron.launchers.rank.rank_status import Status
from laddertron.topology.hardware.sysfs import Sysfs
from laddertron.topology.placement.identity import identify
from prometheus_client import CollectorRegistry

CONFIG = Path(__file__).resolve().parents[2] / "configs/demo.yaml"
REAL_LINK = ("parallel.collective=auto", "parallel.emulated_delay=0s")
SEQUENCES, PROMPT, TOKENS = 8, 16, 224
SCRAPE_EVERY, BLOCK, CYCLES = 5, 32, 32
"""Heartbeats (seconds) between two scrapes; steps of a turn's quarter; turns of on, off, off, on in a pair."""
BEAT_S, SNAPSHOT_S, LOOK_EVERY = 1.0, 0.25, 5
"""As a rank has them: a heartbeat a second, rank 0's snapshot of the schedule four times, a look at memory and ports
every fifth second; of the time in which metrics are on."""
T = {10: 1.833, 20: 1.729, 40: 1.685}
"""One-sided 95 % of Student's t, by pairs."""
ACCEPT = "application/openmetrics-text; version=1.0.0"


class Daemon:
    """The other end: keeps what heartbeats say; every `scrape`-th one of rank 0 is followed by a scrape."""

    def __init__(self, scrape: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        self.metrics = Observer(CollectorRegistry())
        self.scrape, self.beats, self.scrapes = scrape, 0, 0
        self.last: dict[int, RankHeartbeat] = {}
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._listen, args=(line,), daemon=True).start()

    def _listen(self, line: socket.socket) -> None:
        with line, line.makefile("rb") as lines:
            who = json.loads(lines.readline())
            for number, text in enumerate(lines, 1):
                beat = from_wire(text, "rank")
                assert isinstance(beat, Beat)
                self.beats += 1
                report = RankHeartbeat(who["rank"], "here", who["pid"], beat.step, time.time(), beat.rows)
                self.metrics.report(0, report)
                self.last[report.rank] = report
                if who["rank"] == 0 and number % self.scrape == 0:
                    self.metrics.render(ACCEPT)
                    self.scrapes += 1


def ranks_rates(daemon: Daemon, pairs: int) -> list[dict[str, float]]:
    """Starts the ranks; what rank 0 printed of each pair."""
    deployment = deploy.load(CONFIG, REAL_LINK)
    fleet = Fleet(deployment, os.environ)
    program = (sys.executable, __file__, f"--pairs={pairs}", f"--port={daemon.port}")
    command = compose(deployment, fleet.site, fleet.shares[0], program)
    process = subprocess.Popen(command.argv, env={**os.environ, **command.env}, stdout=subprocess.PIPE, text=True)
    try:
        out, _ = process.communicate(timeout=1800)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode:
        raise SystemExit(f"the ranks ended with status {process.returncode}")
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def scrape_times(reports: dict[int, RankHeartbeat], ranks: int = 16, times: int = 30) -> tuple[int, list[float]]:
    """Lines of a scrape, and the seconds of each rendering, where `ranks` ranks say what these said last."""
    metrics = Observer(CollectorRegistry())
    for rank in range(ranks):
        heard = reports[min(rank, 1)]
        metrics.report(0, RankHeartbeat(rank, f"n{rank // 8}", rank, heard.step, time.time(), heard.rows))
    took = []
    for _ in range(times):
        began = time.perf_counter()
        body, _ = metrics.render(ACCEPT)
        took.append(time.perf_counter() - began)
    return body.count(b"\n"), took


@dataclass(slots=True)
class Switched(StepProgress):
    """Progress that keeps figures in half of the blocks: on, off, off, on, so that a drift falls on both alike."""

    block: int = BLOCK
    due: threading.Event = field(default_factory=threading.Event)
    next_beat: float = 0.0

    @property
    def on(self) -> bool:
        return self.step // self.block % 4 in (0, 3)

    def start(self, tokens: int) -> None:
        if self.on:
            StepProgress.start(self, tokens)
            # early enough in the block for what it costs to fall into it
            if self.total_seconds >= self.next_beat and self.step % self.block < self.block // 2:
                self.next_beat = self.total_seconds + BEAT_S
                self.due.set()
        else:
            self.step_tokens = tokens

    def finish(self) -> None:
        if self.on:
            StepProgress.finish(self)
        else:
            self.last_tokens, self.step_tokens, self.step = self.step_tokens, 0, self.step + 1


class Beats:
    """The heartbeat's thread, and now and then the look at memory and ports, whenever `due` is set."""

    def __init__(self, line: socket.socket, status: Status, due: threading.Event) -> None:
        self._line, self._status, self._due = line, status, due
        self._look = make_look(Sysfs(), True, None)
        self._health = status.health = HealthWatch(self._look)
        self._end = False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end = True
        self._due.set()
        self._thread.join()

    def _run(self) -> None:
        beats = 0
        while self._due.wait() and not self._end:
            self._due.clear()
            if beats % LOOK_EVERY == 0:
                self._health.figures = self._look()
            beats += 1
            self._line.sendall(to_wire(self._status.beat()) + b"\n")


def be_rank(port: int, pairs: int) -> None:
    """Rank 0 prints a pair's tokens and seconds."""
    me = identify()
    assert me is not None
    deployment = deploy.load(CONFIG, REAL_LINK)
    set_threads(deployment, me)
    from laddertron.engine.step.build import build

    with join_group(deployment, me) as communicator, socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(json.dumps({"rank": me.rank, "pid": os.getpid()}).encode() + b"\n")
        built = build(deployment, communicator, choose_device(deployment, me))
        progress = Switched()
        status = Status(progress=progress, communicator=communicator)
        with Beats(line, status, progress.due):
            if me.rank != 0:
                follow(built.runner, communicator.plans, progress)
                return
            scheduler = Scheduler(built.scheduler_limits)
            status.scheduler = scheduler.snapshot(time.time())
            engine = Engine(scheduler, built.runner, communicator.plans, progress)
            measure(engine, status, progress, pairs)
            engine.close()


def measure(engine: Engine, status: Status, progress: Switched, pairs: int) -> None:
    """Steps that are all decoding count; those with prompts in them, one in some two hundred, belong to neither
    side. `cpu`: seconds of processor time of this rank's threads. The first pair is for warming up."""
    number, snapshot_due, length = 0, 0.0, 4 * BLOCK * CYCLES
    begin = -(-progress.step // length) * length
    for pair in range(pairs + 1):
        seconds, cpu, tokens = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}, {True: 0, False: 0}
        end = begin + (pair + 1) * length
        while progress.step < end:
            if not engine.has_work:
                for _ in range(SEQUENCES):
                    params = SamplingParams(max_tokens=TOKENS, seed=number, temperature=0.0)
                    engine.add(Request(str(number), tuple(range(5, 5 + PROMPT)), params))
                    number += 1
            on, step = progress.on, progress.step
            began, used = time.perf_counter(), time.process_time()
            engine.step()
            if on and progress.total_seconds >= snapshot_due:
                status.latencies.add(engine.scheduler.take_ended())
                status.scheduler = engine.scheduler.snapshot(time.time())
                snapshot_due = progress.total_seconds + SNAPSHOT_S
            took, used = time.perf_counter() - began, time.process_time() - used
            if progress.step == step + 1 and progress.last_tokens == SEQUENCES:
                seconds[on] += took
                cpu[on] += used
                tokens[on] += SEQUENCES
        if pair:
            rates = {name: tokens[on] / seconds[on] for name, on in (("on", True), ("off", False))}
            rates["cpu"] = cpu[True] / tokens[True] * tokens[False] / cpu[False]
            print(json.dumps(rates), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=20, choices=T)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.port is not None:
        be_rank(wanted.port, wanted.pairs)
        return 0
    daemon = Daemon(SCRAPE_EVERY)
    try:
        rates = ranks_rates(daemon, wanted.pairs)
    finally:
        daemon.listener.close()
    ratios = [rate["on"] / rate["off"] for rate in rates]
    logs = [math.log(ratio) for ratio in ratios]
    mean, spread = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    off = statistics.median(rate["off"] for rate in rates)
    print(
        f"{len(ratios)} pairs, {daemon.beats} heartbeats, {daemon.scrapes} scrapes; {off:.0f} tokens/s without metrics"
    )
    print(f"on / off: mean {math.exp(mean):.4f}, median {statistics.median(ratios):.4f}")
    print(f"lower 95 % bound of the mean {math.exp(mean - T[len(ratios)] * spread):.4f}, wanted 0.99")
    print(f"rank 0's processor time, on / off: median {statistics.median(rate['cpu'] for rate in rates):.4f}")
    lines, took = scrape_times(daemon.last)
    print(
        f"a scrape of 16 ranks: {lines} lines, {statistics.median(took) * 1e3:.1f} ms (longest {max(took) * 1e3:.1f})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
