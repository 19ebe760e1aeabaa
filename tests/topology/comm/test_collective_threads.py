"""The thread that makes a library's calls: their order, their failures, its end."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from laddertron.topology.comm import two_level
from waiting import FOR_EVER_S, HANG_S, until


def test_calls_are_made_in_their_order_and_one_that_fails_fails_the_rest() -> None:
    """Gloo's words reach the waiter; those behind it are not made, as the others' groups would be in other calls."""
    aside, made = two_level.SerialExecutor(), list[str]()

    def fail() -> None:
        raise RuntimeError("Connection closed by peer")

    calls = [aside.submit(lambda: made.append("first")), aside.submit(fail), aside.submit(lambda: made.append("third"))]
    calls[0].wait(timedelta(seconds=HANG_S))
    for call in calls[1:]:
        with pytest.raises(RuntimeError, match="closed by peer"):
            call.wait(timedelta(seconds=HANG_S))
    assert made == ["first"]
    two_level.end_all(aside)
    two_level.end_all(aside)


def test_a_message_goes_on_while_another_is_under_way() -> None:
    """Two messages, and nobody waits: the second crosses while the first does. What came back first is not gathered
    before it: the node's ranks must agree on the order."""
    crossing, arrived, made = threading.Semaphore(0), [threading.Event(), threading.Event()], list[str]()

    class Held:
        """A work that is over when it is told so."""

        def __init__(self, over: threading.Event | None = None) -> None:
            self._over = over

        def wait(self) -> None:
            assert self._over is None or self._over.wait(HANG_S)

    class Levels:
        def parts(self, x: int) -> tuple[int, int]:
            return x, x

        def scatter(self, whole: int, part: int, async_op: bool) -> Held:
            made.append(f"scatter {whole}")
            return Held()

        def cross(self, part: int, async_op: bool) -> Held:
            crossing.release()
            return Held(arrived[part])

        def collect(self, whole: int, part: int) -> None:
            made.append(f"collect {whole}")

    levels: Any = Levels()
    relay = two_level.Relay(levels)
    calls = [relay.start(x) for x in cast("list[torch.Tensor]", [0, 1])]
    assert crossing.acquire(timeout=HANG_S)
    assert crossing.acquire(timeout=HANG_S), "the second waits for the first"
    arrived[1].set()
    with pytest.raises(RuntimeError, match="timed out"):
        calls[1].wait(timedelta(seconds=0.05))
    assert made == ["scatter 0", "scatter 1"]
    arrived[0].set()
    calls[1].wait(timedelta(seconds=HANG_S))
    assert made[2:] == ["collect 0", "collect 1"]
    relay.close()


def test_closing_ends_the_thread_and_a_hanging_call_does_not_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_level, "_JOIN_S", 0.05)
    over = threading.Event()
    idle, hanging = two_level.SerialExecutor(), two_level.SerialExecutor()
    idle.submit(lambda: None).wait(timedelta(seconds=HANG_S))
    thread = idle.thread
    assert thread is not None
    two_level.end_all(idle)
    thread.join(HANG_S)
    assert not thread.is_alive()
    call = hanging.submit(lambda: (over.wait(HANG_S), None)[1])
    with pytest.raises(RuntimeError, match="timed out after"):
        call.wait(timedelta(seconds=0.01))
    two_level.end_all(hanging)
    over.set()
    two_level.end_all(two_level.SerialExecutor())


def test_a_relay_closes_both_its_threads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both hang: whoever gave up has an error to report, and waits for them together, not one after the other."""
    monkeypatch.setattr(two_level, "_JOIN_S", FOR_EVER_S)
    over, ended = threading.Event(), threading.Event()
    levels: Any = SimpleNamespace()
    relay = two_level.Relay(levels)
    for aside in (relay.across, relay.back):
        aside.submit(lambda: (over.wait(HANG_S), None)[1])

    def close() -> None:
        relay.close()
        ended.set()

    closing = threading.Thread(target=close)
    closing.start()
    until(lambda: relay.back.thread is None, "the second is not told to end while the first hangs")
    assert not ended.is_set()
    over.set()
    assert ended.wait(HANG_S)
    closing.join()
