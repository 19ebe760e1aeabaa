"""Pools whose threads run before anything is short."""

from __future__ import annotations

import threading

import pytest
from laddertron.engine.daemon.threads import started_threads
from waiting import HANG_S


def test_a_started_pool_needs_no_further_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread can be started after its own: it does its work, as many at a time as it has threads."""
    with started_threads(3, "reader") as pool:
        monkeypatch.setattr(threading.Thread, "start", _none)
        together = threading.Barrier(3)
        numbers = [pool.submit(together.wait, HANG_S) for _ in range(3)]
        assert {number.result(HANG_S) for number in numbers} == {0, 1, 2}


def test_a_pool_that_cannot_start_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    before, left, start = threading.active_count(), [2], threading.Thread.start

    def third(thread: threading.Thread) -> None:
        if not left[0]:
            _none(thread)
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", third)
    with pytest.raises(OSError, match="reader: can't start new thread"):
        started_threads(3, "reader")
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("reader")]:
        thread.join(HANG_S)
    assert threading.active_count() == before


def _none(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
