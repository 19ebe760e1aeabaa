"""Clocks that jump delete nothing: retention and expiry wait until it is known which time is right."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from daemon_tools import deployment, line, served, submit, wait_batch
from laddertron.engine.daemon.store.clock import JUMP_SECONDS, TRUST_SECONDS, TrustedClock
from laddertron.engine.daemon.store.store import StoreOptions
from laddertron.engine.metrics.observer import Observer
from tiny_text import write_folder
from waiting import until

DAY = 86400.0


@dataclass
class Times:
    """Both clocks of a host."""

    wall: float = 1e9
    monotonic: float = 50.0

    def go(self, seconds: float) -> None:
        self.wall += seconds
        self.monotonic += seconds

    def clock(self, seen: float | None = 1e9) -> TrustedClock:
        return TrustedClock(seen, lambda: self.wall, lambda: self.monotonic)


@pytest.mark.parametrize("days", [40.0, -40.0])
def test_a_jump_pauses_until_it_is_set_back(days: float, caplog: pytest.LogCaptureFixture) -> None:
    times = Times()
    clock = times.clock()
    times.go(600.0)
    assert clock.now() == times.wall
    times.wall += days * DAY
    times.go(60.0)
    with caplog.at_level(logging.WARNING):
        assert clock.now() == 1e9 + 660.0
    assert clock.jump == days * DAY
    assert len(caplog.records) == 1
    assert clock.stamp() == max(times.wall, clock.now())
    times.wall -= days * DAY
    assert (clock.now(), clock.jump) == (times.wall, 0.0)


def test_a_clock_that_stays_is_trusted_after_a_day(caplog: pytest.LogCaptureFixture) -> None:
    """The daemon was off for a weekend; another jump meanwhile begins the day anew."""
    times = Times(wall=1e9 + 2.5 * DAY)
    clock = times.clock()
    assert clock.paused
    times.go(TRUST_SECONDS / 2)
    times.wall += 3 * JUMP_SECONDS
    assert clock.now() < times.wall
    times.go(TRUST_SECONDS - 1.0)
    assert clock.now() < times.wall
    times.go(1.0)
    assert clock.now() == times.wall
    assert clock.jump == 0.0


def test_a_daemon_that_is_off_each_night_trusts_its_clock_each_day() -> None:
    """A start after a gap pauses for as long as the gap, a day at most: nothing lags behind for ever."""
    times, seen = Times(wall=1e9 + 7200.0), 1e9
    for _ in range(30):
        clock = times.clock(seen)
        assert clock.paused
        times.go(7200.0)
        assert (clock.now(), clock.jump) == (times.wall, 0.0)
        times.go(20 * 3600.0)
        seen = clock.now()
        times.wall += 7200.0
    times.wall += 7200.0  # a jump amid the day waits as before
    assert clock.paused
    times.go(20 * 3600.0)
    assert clock.paused


def test_small_corrections_and_a_new_store_are_trusted() -> None:
    times = Times()
    clock = times.clock(seen=None)
    for step in (3000.0, -3000.0, 3500.0):
        times.wall += step
        assert clock.now() == times.wall
        times.go(10.0)
    assert not clock.paused


class Jumps(Observer):
    """Keeps the last jump that was reported."""

    jump = 0.0

    def clock(self, jump: float) -> None:
        self.jump = jump


def test_a_start_with_the_clock_ahead_deletes_nothing(tmp_path: Path) -> None:
    """40 days ahead with a retention of 30, and an open batch with a window of an hour; then the clock is set back, and
    what is really old goes."""
    folder, offset, observer = write_folder(tmp_path / "tiny"), 0.0, Jumps()
    config = deployment(tmp_path, retention=30 * DAY)
    store = StoreOptions(wall=lambda: time.time() + offset)
    with served(config, folder, store=store) as daemon:
        client = daemon.client()
        done = wait_batch(client, submit(client, line("a")).id)
        daemon.on_loop(daemon.jobs[0].hold)
        running = submit(client, line("b"), completion_window="1h")
        until(lambda: client.batches.retrieve(running.id).status == "in_progress")
    offset = 40 * DAY
    with served(config, folder, store=store, observer=observer) as daemon:
        client = daemon.client()
        assert wait_batch(client, running.id).status == "completed"
        until(lambda: observer.jump > 39 * DAY)
        assert client.files.content(done.output_file_id).read()
        assert len(client.files.list().data) == 4
    config = replace(config, daemon=replace(config.daemon, retention=1.0))
    offset = 60.0  # rows carry whole seconds, and all of this may take less than one
    with served(config, folder, store=store) as daemon:
        until(lambda: not [batch for batch in daemon.client().batches.list().data if batch.id == done.id])
