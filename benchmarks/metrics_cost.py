"""What metrics cost: decode tokens/s of two ranks with metrics and heartbeats over the rate without, in mixed pairs.

    python benchmarks/metrics_cost.py [--pairs 20] [--cycles 32] [--block 32] [--scrape 5]

On: counters and histograms of steps, rank 0's snapshots, the look at memory and ports, a heartbeat a second from each
rank over loopback to this process, which keeps the series and renders a scrape every `--scrape` heartbeats. Off: none
of that. Both go on in the same ranks, in turns of `--block` steps (metrics_rank.py). At the end: a scrape of 16 ranks.
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

from laddertron.engine.config import load as deploy
from laddertron.engine.job import RankHeartbeat
from laddertron.engine.metrics.observer import MetricsObserver
from laddertron.launchers.compose.mpi import compose
from laddertron.launchers.control.messages import Beat, from_wire
from laddertron.launchers.job.fleet import Fleet
from metrics_rank import CONFIG, REAL_LINK, be_rank
from prometheus_client import CollectorRegistry

T = {10: 1.833, 20: 1.729, 40: 1.685}
"""One-sided 95 % of Student's t, by pairs."""
ACCEPT = "application/openmetrics-text; version=1.0.0"


class Daemon:
    """The other end: keeps what heartbeats say; every `scrape`-th one of rank 0 is followed by a scrape."""

    def __init__(self, scrape: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        self.metrics = MetricsObserver(CollectorRegistry())
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


def ranks_rates(daemon: Daemon, wanted: argparse.Namespace) -> list[dict[str, float]]:
    """Starts the ranks; what rank 0 printed of each pair."""
    deployment = deploy.load(CONFIG, REAL_LINK)
    fleet = Fleet(deployment, os.environ)
    words = [f"--{name}={getattr(wanted, name)}" for name in ("pairs", "cycles", "block", "scrape")]
    command = compose(
        deployment, fleet.site, fleet.shares[0], (sys.executable, __file__, *words, f"--port={daemon.port}")
    )
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
    metrics = MetricsObserver(CollectorRegistry())
    for rank in range(ranks):
        told = reports[min(rank, 1)]
        metrics.report(0, RankHeartbeat(rank, f"n{rank // 8}", rank, told.step, time.time(), told.rows))
    took = []
    for _ in range(times):
        began = time.perf_counter()
        body, _ = metrics.render(ACCEPT)
        took.append(time.perf_counter() - began)
    return body.count(b"\n"), took


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=20, choices=T)
    parser.add_argument("--cycles", type=int, default=32, help="turns of on, off, off, on in a pair")
    parser.add_argument("--block", type=int, default=32, help="steps of a turn's quarter")
    parser.add_argument("--scrape", type=int, default=5, help="heartbeats (seconds) between two scrapes")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.port is not None:
        be_rank(wanted.port, wanted.pairs, wanted.cycles, wanted.block)
        return 0
    daemon = Daemon(wanted.scrape)
    try:
        rates = ranks_rates(daemon, wanted)
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
