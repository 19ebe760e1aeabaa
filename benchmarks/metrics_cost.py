"""What metrics cost: decode tokens/s of two ranks with metrics and heartbeats over the rate without, in mixed pairs.

    python benchmarks/metrics_cost.py [--pairs 20] [--seconds 1.5]

On: step histograms, the watch on ports and memory, a heartbeat a second from each rank, sent over loopback to this
process, which keeps the series and renders a scrape every second. Off: none of that. The pairs run in one set of
ranks, the order within a pair changes from pair to pair.
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

from laddertron.engine import config as deploy
from laddertron.engine.daemon.job import RankReport
from laddertron.engine.engine import Engine, Progress, drain, follow
from laddertron.engine.histogram import STEP_SECONDS, STEP_TOKENS, Buckets
from laddertron.engine.metrics import Metrics
from laddertron.engine.request import Request, SamplingParams
from laddertron.engine.scheduler import Scheduler
from laddertron.launchers.fleet import Fleet
from laddertron.launchers.frames import dump
from laddertron.launchers.messages import to_wire
from laddertron.launchers.mpi import compose
from laddertron.launchers.rank import choose_device, join_group, set_threads
from laddertron.launchers.rank_health import HealthWatch, make_look
from laddertron.launchers.rank_status import Status
from laddertron.topology.identity import identify
from laddertron.topology.sysfs import Sysfs
from prometheus_client import CollectorRegistry

CONFIG = Path(__file__).resolve().parent.parent / "configs/demo.yaml"
T_19 = 1.729
"""One-sided 95 % of Student's t with 19 degrees of freedom."""


class _Nothing(Buckets):
    """Buckets that do not count."""

    def observe(self, value: float, times: int = 1) -> None: ...


@dataclass
class _Reporter:
    """Metrics on: the status that counts, and the thread that tells it."""

    line: socket.socket
    status: Status
    end: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Progress:
        self.status.health = HealthWatch(make_look(Sysfs(), True, None))
        self.status.health.start()
        self.thread = threading.Thread(target=self._beat)
        self.thread.start()
        return self.status.progress

    def __exit__(self, *_: object) -> None:
        self.end.set()
        self.thread.join()
        assert self.status.health is not None
        self.status.health.close()

    def _beat(self) -> None:
        while True:
            self.line.sendall(dump(to_wire(self.status.beat())) + b"\n")
            if self.end.wait(1.0):
                return


def be_rank(port: int, pairs: int, seconds: float) -> None:
    """One rank: blocks of decoding, with metrics and without; rank 0 prints a block's tokens a second."""
    me = identify()
    assert me is not None
    deployment = deploy.load(CONFIG, ("parallel.collective=auto", "parallel.emulated_delay=0s"))
    set_threads(deployment, me)
    from laddertron.engine.build import build

    with (
        join_group(deployment, me) as communicator,
        socket.create_connection(("127.0.0.1", port)) as line,
    ):
        line.sendall(json.dumps({"rank": me.rank}).encode() + b"\n")
        built = build(deployment, communicator, choose_device(deployment, me))
        tokens, scheduler = 64, Scheduler(built.scheduler_limits)
        for block in range(-1, 2 * pairs):
            on = (block % 2 == 0) == (block // 2 % 2 == 0)
            plain = Progress(durations=_Nothing(STEP_SECONDS), sizes=_Nothing(STEP_TOKENS))
            status = Status(communicator=communicator, scheduler=scheduler.snapshot(time.time()))
            reporter = _Reporter(line, status) if on else None
            progress = reporter.__enter__() if reporter else plain
            if me.rank == 0:
                engine = Engine(scheduler, built.runner, communicator.plans, progress)
                requests = max(8, tokens // 64)
                for number in range(requests):
                    params = SamplingParams(max_tokens=64, seed=number, temperature=0.0)
                    engine.add(Request(f"{block} {number}", tuple(range(5, 21)), params))
                began = time.perf_counter()
                drawn = sum(len(event.tokens) for event in drain(engine))
                took = time.perf_counter() - began
                engine.close()
                if block >= 0:
                    print(json.dumps({"on": on, "rate": drawn / took}), flush=True)
                tokens = round(drawn / took * seconds) if block < 0 else tokens
            else:
                follow(built.runner, communicator.plans, progress)
            if reporter is not None:
                reporter.__exit__()


class _Daemon:
    """The other end: keeps what heartbeats say and renders a scrape every second."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        self.metrics = Metrics(CollectorRegistry())
        self.beats = 0
        self._end = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()
        threading.Thread(target=self._scrape, daemon=True).start()

    def _accept(self) -> None:
        while not self._end.is_set():
            try:
                line, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._listen, args=(line,), daemon=True).start()

    def _listen(self, line: socket.socket) -> None:
        with line, line.makefile("rb") as lines:
            rank = int(json.loads(lines.readline())["rank"])
            for text in lines:
                beat = json.loads(text)
                self.beats += 1
                report = RankReport(rank, "here", 1, beat["step"], time.time(), beat["counters"], beat["gauges"])
                self.metrics.observe_report(report)

    def _scrape(self) -> None:
        while not self._end.wait(1.0):
            self.metrics.render("application/openmetrics-text")

    def close(self) -> None:
        self._end.set()
        self.listener.close()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.port is not None:
        be_rank(wanted.port, wanted.pairs, wanted.seconds)
        return 0
    daemon = _Daemon()
    deployment = deploy.load(CONFIG)
    fleet = Fleet(deployment, os.environ)
    words = ("--pairs", str(wanted.pairs), "--seconds", str(wanted.seconds), "--port", str(daemon.port))
    command = compose(deployment, fleet.site, fleet.shares[0], (sys.executable, __file__, *words))
    done = subprocess.run(
        command.argv, env={**os.environ, **command.env}, stdout=subprocess.PIPE, text=True, check=True, timeout=1800
    )
    daemon.close()
    rates = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    ratios = []
    for one, other in zip(rates[::2], rates[1::2], strict=True):
        on, off = (one, other) if one["on"] else (other, one)
        ratios.append(on["rate"] / off["rate"])
    logs = [math.log(ratio) for ratio in ratios]
    mean, spread = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    off_rate = statistics.median(rate["rate"] for rate in rates if not rate["on"])
    print(f"{len(ratios)} pairs, {daemon.beats} heartbeats, {off_rate:.0f} tokens/s without metrics (median)")
    print(f"on / off: mean {math.exp(mean):.4f}, median {statistics.median(ratios):.4f}")
    print(f"lower 95 % bound of the mean {math.exp(mean - T_19 * spread):.4f} (at 20 pairs), wanted 0.99")
    return 0


if __name__ == "__main__":
    sys.exit(main())
