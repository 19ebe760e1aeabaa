"""The plan channel: frames arrive whole and in order, and send never blocks."""

from __future__ import annotations

import os
import socket
import threading

import pytest
from laddertron.topology.comm.collectives import (
    CollectiveTimeout,
    CommunicationError,
    PeerLost,
)
from laddertron.topology.comm.lines import FRAME_LIMIT, PlanChannel
from waiting import HANG_S


def _plan_pair() -> tuple[PlanChannel, PlanChannel]:
    a, b = socket.socketpair()
    a.setblocking(False)
    b.setblocking(False)
    return PlanChannel(0, (None, a)), PlanChannel(1, (b, None))


def test_plans_arrive_whole_and_in_order_and_send_never_blocks() -> None:
    """Rank 0 sends 8 MB, far beyond what a socket takes, while nobody reads: it returns; the other side then gets every
    frame in order."""
    sender, receiver = _plan_pair()
    frames = [b"a", os.urandom(8 << 20), b"", b"c" * 1000]

    def send_all() -> None:
        for frame in frames:
            sender.send(frame)

    sending = threading.Thread(target=send_all, daemon=True)
    sending.start()
    sending.join(HANG_S)
    assert not sending.is_alive()
    assert [receiver.receive(HANG_S) for _ in frames] == frames
    with pytest.raises(ValueError, match="at most"):
        sender.send(bytes(FRAME_LIMIT + 1))
    with pytest.raises(CollectiveTimeout):
        receiver.receive(0.05)
    sender.close()
    with pytest.raises(PeerLost, match="rank 0 is gone"):
        receiver.receive(HANG_S)
    receiver.close()


def test_closing_the_plan_channel_wakes_its_reader() -> None:
    sender, receiver = _plan_pair()
    threading.Timer(0.1, receiver.close).start()
    with pytest.raises(CommunicationError, match="closed"):
        receiver.receive(HANG_S)
    sender.close()
