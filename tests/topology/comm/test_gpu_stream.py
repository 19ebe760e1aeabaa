"""The accounts of collectives on a GPU's own stream, with events that need no GPU."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
from laddertron.topology.comm import gpu_stream
from laddertron.topology.comm.ledger import Ledger
from waiting import HANG_S


class Event:
    """Long past; each who asks waits a moment for a second who does."""

    def __init__(self, meet: threading.Barrier | None = None) -> None:
        self._meet = meet

    def query(self) -> bool:
        if self._meet is not None:
            with contextlib.suppress(threading.BrokenBarrierError):  # broken: the other is kept out, as it should be
                self._meet.wait(0.3)
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1000.0


def test_two_threads_may_settle_the_accounts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stepping thread and the heartbeat's both find the last timing settled: it is counted once, and neither falls
    over what the other took."""
    monkeypatch.setattr(gpu_stream, "_STREAM", lambda priority: None)
    collective = gpu_stream.StreamCollective(lambda x: None, Ledger(), "nccl", "node")
    collective.timings.append((("nccl", ""), 8, Event(), Event(), Event(threading.Barrier(2))))
    faults: list[BaseException] = []

    def settle() -> Any:
        try:
            return collective.settle()
        except BaseException as fault:
            faults.append(fault)

    readers = [threading.Thread(target=settle) for _ in range(2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(HANG_S)
    assert not faults
    (entry,) = collective.entries()
    assert (entry.count, entry.bytes) == (1, 8)
