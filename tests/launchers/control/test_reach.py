"""The test of the network between ranks before MPI starts: what is lost, in which direction, at which port."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from laddertron.launchers.control.messages import Beat, Failure
from laddertron.launchers.control.reach import LARGE, SMALL, Unreached, listening, peers_of, reach
from laddertron.launchers.job.detect import Evidence
from laddertron.launchers.job.options import JobTimeouts
from laddertron.launchers.job.rank_board import RankBoard
from laddertron.topology.placement.world import World
from test_detect import hello, ready_board

SECRET = b"s" * 32


def test_each_host_is_tested_by_every_other() -> None:
    hosts = ("n0", "n0", "n1", "n1", "n2")
    assert [peers_of(rank, hosts) for rank in range(5)] == [[2, 4], [3, 4], [4, 0], [4, 1], [0, 2]]


@contextlib.contextmanager
def relay(place: str, there: int, back: int) -> Iterator[str]:
    """A way to `place` that loses what comes after so many bytes in each direction, as a path with a small MTU does."""
    address, _, port = place.partition(" ")
    ends: list[socket.socket] = []

    def carry(source: socket.socket, target: socket.socket, limit: int) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(min(limit, 4096) or 4096):
                if limit > 0:
                    target.sendall(data)
                    limit -= len(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            near, far = door.accept()[0], socket.create_connection((address, int(port)))
            ends.extend((near, far))
            for source, target, limit in ((near, far, there), (far, near, back)):
                threading.Thread(target=carry, args=(source, target, limit), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as door:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1 {door.getsockname()[1]}"
        finally:
            door.shutdown(socket.SHUT_RDWR)
            thread.join()
            for end in ends:
                end.close()


@pytest.mark.parametrize(
    ("there", "back", "says"),
    [
        (0, 0, "from n0 to n1: timed out: open the ports"),
        (SMALL, LARGE, "a message of 128 KiB from n0 to n1: timed out: small messages pass"),
        (SMALL + LARGE, SMALL + 1, "a message of 128 KiB from n1 to n0: timed out: small messages pass"),
    ],
)
def test_what_is_lost_is_named_with_its_direction(there: int, back: int, says: str) -> None:
    with listening("127.0.0.1", SECRET) as place, relay(place, there, back) as way:
        reach(1, "n1", "n0", place, SECRET)
        with pytest.raises(Unreached) as lost:
            reach(1, "n1", "n0", way, SECRET, timeout_s=0.5)
        assert lost.value.rank == 1
        assert f"cannot be reached at 127.0.0.1 port {way.split()[1]}, {says}" in str(lost.value)


def test_a_reset_and_a_stranger() -> None:
    closed = pytest.raises(Unreached, match="from n0 to n1: the other end closed the connection")
    with listening("127.0.0.1", SECRET) as place, closed:
        reach(1, "n1", "n0", place, b"another" * 4)
    with pytest.raises(Unreached, match="Connection refused"):
        reach(1, "n1", "n0", place, SECRET)


@pytest.mark.parametrize("fault", [errno.ECONNABORTED, errno.EMFILE, errno.EHOSTUNREACH])
def test_a_connection_that_cannot_be_accepted_ends_no_test(monkeypatch: pytest.MonkeyPatch, fault: int) -> None:
    """Else the others would blame this host's firewall."""
    accept, failed = socket.socket.accept, list[int]()

    def failing(door: socket.socket) -> Any:
        if not failed:
            failed.append(fault)
            raise OSError(fault, os.strerror(fault))
        return accept(door)

    monkeypatch.setattr(socket.socket, "accept", failing)
    with listening("127.0.0.1", SECRET) as place:
        reach(1, "n1", "n0", place, SECRET, timeout_s=5.0)
    assert failed == [fault]
    assert all(thread.name != "reach" for thread in threading.enumerate())


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_the_host_that_most_cannot_reach_is_named_whoever_is_first(order: tuple[int, ...]) -> None:
    """Nothing passes from and to n1; rank 1 reports the others, which report it."""
    board = RankBoard(World(3), JobTimeouts(), 0.0)
    for rank in range(3):
        board.heard(rank, hello(rank), 1.0)
    for rank in order:
        peer = 1 if rank != 1 else 0
        board.heard(rank, Failure("cannot be reached", unreached=peer), 2.0)
    failure = board.judge(1, (), {})
    assert (failure.culprit.rank, failure.culprit.node) == (1, "node-1")
    assert failure.reason.startswith("rank 1 (node node-1, pid 101): cannot be reached")


def test_the_way_is_named_where_data_of_a_healthy_rank_do_not_come() -> None:
    """A rank that gave up waiting blames neither itself nor the other, if they are on two hosts and both are well; a
    rank that died meanwhile is the cause."""
    board = RankBoard(World(2), JobTimeouts(), 0.0)
    for rank in range(2):
        board.heard(rank, hello(rank), 1.0)
    board.heard(1, Failure("CollectiveTimeout: collective 7", consequence=True, unreached=0), 2.0)
    failure = board.judge(None, (), {})
    assert (failure.kind, failure.culprit.rank, failure.culprit.node) == ("consequence", None, None)
    assert failure.reason.startswith("nothing arrives from rank 0 (node node-0, pid 100) at rank 1 (node node-1, pid")
    board.gone(0, "")
    assert board.judge(None, (), {}).culprit.rank == 0


@pytest.mark.parametrize(("waiting", "blamed"), [("collective 6", None), ("", 1)])
def test_a_rank_that_waits_for_what_was_sent_is_not_the_one_to_blame(waiting: str, blamed: int | None) -> None:
    """The other one is further and waits as well: what it sent is lost. A rank that is late because it computes is the
    cause."""
    board = ready_board(2)
    board.heard(0, Beat(step=3, collective=7, busy_s=400.0, waiting="collective 7", step_tokens=1), 11.0)
    board.heard(1, Beat(step=3, collective=6, busy_s=400.0, waiting=waiting, step_tokens=1), 11.0)
    (evidence,) = board.look(11.1)
    assert isinstance(evidence, Evidence)
    assert (evidence.kind, evidence.rank) == ("stalled", blamed)
    assert evidence.text.startswith("nothing arrives at rank 1 (node node-1, pid 101) from node-0") == bool(waiting)
