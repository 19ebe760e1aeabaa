"""A real Prometheus scrapes the real daemon: every expression finds series, and faults raise their alerts. Takes
minutes; needs Debian's prometheus."""

from __future__ import annotations

import http.server
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from laddertron.launchers.monitoring_demo import (
    Addresses,
    Traffic,
    ask,
    monitored,
    panel_queries,
    query,
    rule_selectors,
    send_batch,
    wait_until,
)
from laddertron.launchers.processes import descendants
from test_metrics import filled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: prometheus)"),
]
REAL_LINK = ("parallel.collective=auto", "parallel.emulated_delay=0s")
"""Over the emulated link every rank waits most of the time, a stopped one too: who is slow could not be told."""
WORKER = b"laddertron.launchers.worker"
CONDITIONS = (" > 0", " == 0", " == 1")
"""Panels of what should not be there are empty while it is not."""


class _Machine(http.server.BaseHTTPRequestHandler):
    """What a machine with GPUs and InfiniBand would export, as data: this one has neither."""

    def do_GET(self) -> None:
        body, kind = filled(2).render("*/*")
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None: ...


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Machine)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with monitored(tmp_path_factory.mktemp("live"), REAL_LINK, (f"127.0.0.1:{server.server_port}",)) as at:
            traffic = Traffic(at.daemon)
            try:
                yield at
            finally:
                traffic.close()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def firing(at: Addresses) -> set[str]:
    """Alerts about the daemon, not about the machine that is data."""
    alerts = ask(f"{at.prometheus}/api/v1/alerts")["data"]["alerts"]
    own = at.daemon.removeprefix("http://")
    return {
        alert["labels"]["alertname"]
        for alert in alerts
        if alert["state"] == "firing" and alert["labels"].get("instance", own) == own
    }


def ranks_of_the_daemon() -> list[int]:
    """Processes of this test's ranks, oldest first."""
    found = []
    for process in descendants(os.getpid()):
        with open(f"/proc/{process.pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
        # keeper and mpirun have the ranks' command among their words too
        if words[1:3] == [b"-m", WORKER]:
            found.append(process.pid)
    assert found
    return sorted(found)


def test_every_panel_and_every_rule_finds_its_series(live: Addresses) -> None:
    """A batch and interactive requests run. After a minute every expression has a series; what is empty by nature (a
    condition that does not hold) is valid and reads series that are there. All is quiet."""
    batch = send_batch(live.daemon, 2000)
    time.sleep(30)  # rates over a minute want some of it
    told = ask(f"{live.daemon}/v1/batches/{batch}")
    assert told["status"] in ("in_progress", "finalizing", "completed"), told
    empty = [(board, text) for board, text in panel_queries() if not query(live.prometheus, text)]
    for board, text in empty:
        assert any(text.rstrip().endswith(condition) for condition in CONDITIONS), (board, text)
        assert query(live.prometheus, text.rpartition(" ")[0].rpartition(" ")[0]), (board, text)
    assert not [(rule, text) for rule, text in rule_selectors() if not query(live.prometheus, text)]
    took = query(live.prometheus, "max(scrape_duration_seconds)")
    print(
        f"{len(panel_queries())} expressions, {len(empty)} conditions that do not hold; scrape {took[0]['value'][1]} s"
    )
    assert firing(live) == set()


def test_a_killed_rank_is_told_and_the_rest_is_quiet(live: Addresses) -> None:
    """SIGKILL of a rank: the relaunch is an alert of its own, by reason; nobody is woken, for it serves again."""
    os.kill(ranks_of_the_daemon()[0], signal.SIGKILL)
    wait_until("the alert", lambda: "LaddertronRestarts" in firing(live), 60)
    wait_until("the relaunch", lambda: ask(f"{live.daemon}/ready"), 120)
    increase = query(
        live.prometheus, 'increase(laddertron_engine_restarts_total{instance!="",reason="rank_lost"}[5m]) > 0'
    )
    assert increase, query(live.prometheus, "laddertron_engine_restarts_total > 0")
    assert firing(live) == {"LaddertronRestarts"}


def test_a_slow_rank_is_named(live: Addresses) -> None:
    """One rank runs a twentieth of the time. The straggler alert names it and no other; nobody is killed."""
    wait_until("ready", lambda: ask(f"{live.daemon}/ready"), 60)
    before = ranks_of_the_daemon()
    slow = before[-1]
    end = threading.Event()

    def hold_back() -> None:
        while not end.wait(0.002):
            os.kill(slow, signal.SIGSTOP)
            time.sleep(0.05)
            os.kill(slow, signal.SIGCONT)

    thread = threading.Thread(target=hold_back)
    thread.start()
    try:
        wait_until("the alert", lambda: "LaddertronStraggler" in firing(live), 120)
    finally:
        end.set()
        thread.join()
    named = {alert["metric"]["rank"] for alert in query(live.prometheus, 'ALERTS{alertname="LaddertronStraggler"}')}
    with open(f"/proc/{slow}/environ", "rb") as file:
        rank = dict(item.split(b"=", 1) for item in file.read().split(b"\0") if b"=" in item)[b"OMPI_COMM_WORLD_RANK"]
    assert named == {rank.decode()}
    assert ranks_of_the_daemon() == before
