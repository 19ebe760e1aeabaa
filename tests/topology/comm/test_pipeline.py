"""What passes between stages: rows in order and in any shape, what is lost or misplaced, in words; accounts."""

from __future__ import annotations

import os
import socket
import threading
import time

import numpy as np
import pytest
import torch
from laddertron.topology.comm.collectives import CollectiveTimeout, CommunicationError, PeerLost, RanksDisagree
from laddertron.topology.comm.ledger import Ledger
from laddertron.topology.comm.lines import Lines
from laddertron.topology.comm.pipeline import NEXT, PREVIOUS, RING, Pipeline, SocketBoundary
from waiting import HANG_S


class _Alone:
    """The gathers of a group of one."""

    def start(self, payload: np.ndarray) -> None:
        raise AssertionError("one rank has nobody to gather from")


def _pair() -> tuple[tuple[Pipeline, SocketBoundary, Ledger], ...]:
    """Two stages of one rank each, in one process."""
    rows, back = socket.socketpair(), socket.socketpair()
    made = []
    for stage, line in ((0, NEXT), (1, PREVIOUS)):
        sockets = {line: rows[stage], RING: back[stage]}
        for s in sockets.values():
            s.setblocking(False)
        ledger = Ledger()
        lines = Lines(sockets, lambda n: "it is gone", "stage")
        pipeline = Pipeline(stage, 2, (1, 0, 1 - stage), lines, ledger)
        pipeline.set_timeout(HANG_S / 4)
        made.append((pipeline, SocketBoundary(pipeline, lines, _Alone(), 0, 1, ledger, "node"), ledger))  # type: ignore[arg-type]
    return tuple(made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_arrive_in_order_whoever_asks_first(dtype: torch.dtype) -> None:
    """Two messages of one step and two of the next, of another shape, large ones far beyond a socket's buffer: each
    Pending gives its own, also where a later one is waited for first. Sending never blocks."""
    (_, sender, _), (pipeline, receiver, ledger) = _pair()
    sent = [torch.randn(shape).to(dtype) for shape in ((3, 8), (3, 8), (4096, 512), (4096, 512))]
    for x in sent:
        sender.send(x)
    first, second = receiver.receive((3, 8), dtype, 2)
    third, fourth = receiver.receive((4096, 512), dtype, 2)
    assert torch.equal(third.wait(), sent[2])
    assert torch.equal(first.wait(), sent[0])
    assert torch.equal(fourth.wait(), sent[3])
    assert torch.equal(second.wait(), sent[1])
    assert second.wait() is second.wait()
    (entry,) = [e for e in ledger.entries() if e.op == "boundary"]
    assert (entry.count, entry.bytes) == (4, sum(x.nbytes for x in sent))
    pipeline.close()
    sender.lines.close()


def test_a_channel_rings_its_bell_only_while_it_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a `close` in another thread, the bell's number may be a file's, which a ring would write to."""
    (_, sender, _), (pipeline, _, _) = _pair()
    lines, ring, under_lock = sender.lines, os.eventfd_write, list[bool]()

    def recorded(bell: int, value: int) -> None:
        under_lock.append(lines._lock.locked())
        ring(bell, value)

    monkeypatch.setattr(os, "eventfd_write", recorded)
    lines.send(NEXT, bytes(64 << 20))
    lines.close()
    lines.close()
    assert under_lock == [True, True]
    pipeline.close()
    with pytest.raises(CommunicationError, match="closed"):
        lines.send(NEXT, b"late")


def test_idling_for_a_stage_is_not_waiting_for_the_link() -> None:
    """Nothing was sent for 50 ms: that is a wait for the stage, beside which the message's own is short."""
    (first, sender, _), (second, receiver, ledger) = _pair()
    (pending,) = receiver.receive((1, 4), torch.float32, 1)
    threading.Timer(0.05, sender.send, (torch.ones(1, 4),)).start()
    assert pending.wait().sum() == 4
    found = {e.op: e for e in ledger.entries()}
    assert found["stage_wait"].waited_s > 0.04
    assert found["boundary"].waited_s < found["stage_wait"].waited_s
    assert ledger.waiting == ""
    first.close()
    second.close()


def test_other_rows_than_were_due_are_refused() -> None:
    (first, sender, _), (second, receiver, _) = _pair()
    sender.send(torch.ones(2, 4))
    (pending,) = receiver.receive((1, 4), torch.float32, 1)
    with pytest.raises(RanksDisagree, match=r"0 of 16 bytes, torch\.float32, were due .* of 32 bytes came"):
        pending.wait()
    first.close()
    second.close()


def test_a_stage_that_is_late_or_gone_is_named() -> None:
    """With what was waited for, and its place stands in the ledger for whoever asks meanwhile."""
    (first, _, _), (second, receiver, ledger) = _pair()
    second.timeout_s = 0.05
    (pending,) = receiver.receive((1, 4), torch.float32, 1)
    with pytest.raises(CollectiveTimeout, match=r"hidden rows from stage 0 \(rank 0\) did not come in time"):
        pending.wait()
    assert ledger.waiting == "hidden rows from stage 0 (rank 0)"
    first.close()
    with pytest.raises(PeerLost, match=r"hidden rows from stage 0 \(rank 0\): it is gone"):
        pending.wait()
    second.close()


def test_what_was_drawn_comes_back_and_the_least_is_agreed_on() -> None:
    (first, _, _), (second, _, _) = _pair()
    assert not first.arrived()
    second.send_back(b"ids")
    deadline = time.monotonic() + HANG_S
    while not first.arrived():
        assert time.monotonic() < deadline
    assert first.receive_back() == b"ids"
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(second.least(7)))
    thread.start()
    assert first.least(9) == 7
    thread.join(HANG_S)
    assert found == [7]
    first.close()
    second.close()


def test_what_each_stage_found_comes_to_the_first_in_order() -> None:
    """Four stages, payloads of all sizes: from hand to hand to the last, and from there to the first."""
    back, links = socket.socketpair(), [socket.socketpair() for _ in range(3)]
    found: dict[int, list[bytes]] = {}
    payloads = [b"", b"a", b"bc" * 200_000, b"d"]

    def be(stage: int) -> None:
        sockets = {PREVIOUS: links[stage - 1][1]} if stage else {RING: back[0]}
        sockets |= {NEXT: links[stage][0]} if stage < 3 else {RING: back[1]}
        for s in sockets.values():
            s.setblocking(False)
        pipeline = Pipeline(stage, 4, (stage + 1, stage - 1, 3 - stage), Lines(sockets, str, "stage"), Ledger())
        pipeline.set_timeout(HANG_S / 8)
        found[stage] = pipeline.collect(payloads[stage])
        done.wait()
        pipeline.close()

    done = threading.Barrier(4, timeout=HANG_S)  # who leaves early takes its lines along
    threads = [threading.Thread(target=be, args=(stage,)) for stage in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert found == {0: payloads, 1: [], 2: [], 3: []}
