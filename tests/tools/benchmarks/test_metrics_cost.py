"""What tools/benchmarks/metrics_cost.py compares: the switch between metrics and none, and the heartbeats' other
end."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from laddertron.engine.step.engine import StepProgress
from laddertron.launchers.control.messages import to_wire
from laddertron.launchers.rank.rank_status import Status
from waiting import until

BENCHMARKS = Path(__file__).resolve().parents[3] / "tools" / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import metrics_cost

    return metrics_cost


def test_the_switch_turns_with_the_steps(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On, off, off, on by the number of the step alone, so all ranks turn it together; only steps that are on leave
    figures; heartbeats fall due once a second of them, in the first half of a block."""
    now = [100.0]
    monkeypatch.setattr("laddertron.engine.step.engine.time.monotonic", lambda: now[0])
    progress, on, beats = bench.Switched(block=4), [], []
    for step in range(16):
        on.append(progress.on)
        progress.start(8)
        if progress.due.is_set():
            beats.append(step)
            progress.due.clear()
        now[0] += 0.3
        progress.finish()
        assert (progress.step, progress.last_tokens) == (step + 1, 8)
    assert on == [True] * 4 + [False] * 8 + [True] * 4
    assert beats == [0, 12]
    assert sum(progress.durations.counts) == sum(progress.sizes.counts) == 8
    assert progress.total_seconds == pytest.approx(8 * 0.3)


def test_the_other_end_keeps_series_and_scrapes(bench: Any) -> None:
    """Two heartbeats of rank 0 and one of rank 1, a scrape after every second of rank 0's; then 16 ranks' scrape."""
    daemon, progress = bench.Daemon(2), StepProgress()
    progress.start(8)
    progress.finish()
    try:
        for rank, beats in ((1, 1), (0, 2)):
            with socket.create_connection(("127.0.0.1", daemon.port)) as line:
                line.sendall(json.dumps({"rank": rank, "pid": 1}).encode() + b"\n")
                for _ in range(beats):
                    line.sendall(to_wire(Status(progress=progress).beat()) + b"\n")
        until(lambda: daemon.scrapes >= 1 and set(daemon.last) == {0, 1})  # its threads tell nobody
    finally:
        daemon.listener.close()
    assert (daemon.beats, daemon.scrapes) == (3, 1)
    lines, took = bench.scrape_times(daemon.last, 16, 3)
    assert len(took) == 3
    assert lines > 16 * 20, "each rank has a histogram of its steps"
