"""The native transport's promises when things go wrong: an error that names the rank, never a hang, never a wrong sum.

Ranks here are threads of one process over socket pairs: the C code sleeps without the GIL, so they are as concurrent as
processes, and a "dead" rank is one whose sockets are closed.
"""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from laddertron.topology.comm.collectives import (
    Blocking,
    Collective,
    CollectiveTimeout,
    CommunicationError,
    PeerLost,
    RanksDisagree,
)
from laddertron.topology.comm.emulated import Emulated
from laddertron.topology.comm.groups import CommOptions
from laddertron.topology.comm.ledger import Ledger, overlap_ratio
from laddertron.topology.link_cost import Emulation
from laddertron.topology.placement.layout import GroupLayout
from laddertron.topology.transport import transport as native
from laddertron.topology.transport.mesh import Mesh, MeshError, connect_mesh
from laddertron.topology.transport.transport import STRATEGIES, NativeCollective, NativeGather, Transport
from rank_pool import Rank, RankError
from waiting import FOR_EVER_S, HANG_S, until

Ranks = Callable[..., list[Any]]
SMALL, CHUNK = 16 << 10, 8 << 10
SO_TIMESTAMPING, RX_SOFTWARE, SOFTWARE = 37, 1 << 3, 1 << 4  # of Linux, which Python does not name


def _layout(size: int, per_node: int) -> GroupLayout:
    return GroupLayout(tuple(tuple(range(at, at + per_node)) for at in range(0, size, per_node)))


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        one = socket.create_connection(door.getsockname())
        return one, door.accept()[0]


@contextmanager
def _stamps() -> Iterator[bool]:
    """Whether the kernel says when something came; while the context lasts it goes on: it begins some time after the
    first socket has asked, and ends with the last one."""
    one, other = _tcp_pair()
    with one, other:
        other.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPING, RX_SOFTWARE | SOFTWARE)

        def stamped() -> bool:
            one.send(b"x")
            time.sleep(0.01)
            return bool(other.recvmsg(1, 512)[1])

        yield any(stamped() for _ in range(500))


@contextmanager
def _transports(
    size: int,
    per_node: int,
    timeout_s: float = HANG_S,
    spin_us: float = 0.0,
    connect: Callable[[], tuple[socket.socket, socket.socket]] = socket.socketpair,
) -> Iterator[list[Transport]]:
    layout = _layout(size, per_node)
    pairs = {(i, j): connect() for i in range(size) for j in range(i + 1, size)}
    memory = [os.memfd_create("test") for _ in layout.nodes]
    for fd in memory:
        os.ftruncate(fd, native.segment_bytes(size, per_node, SMALL, CHUNK))
    made: list[Transport] = []
    for rank in range(size):
        lines = [None if r == rank else pairs[min(r, rank), max(r, rank)][0 if rank < r else 1] for r in range(size)]
        for line in lines:
            if line is not None:
                line.setblocking(False)
        mesh = Mesh(tuple(lines), (None,) * size, os.dup(memory[rank // per_node]))
        made.append(Transport(mesh, layout, rank, SMALL, CHUNK, spin_us, timeout_s))
    for fd in memory:
        os.close(fd)
    try:
        yield made
    finally:
        for one in made:
            one.close()


def _together(calls: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(2 * HANG_S) for future in [pool.submit(call) for call in calls]]


def _sum(one: Transport, x: torch.Tensor, strategy: str) -> torch.Tensor:
    one.wait(one.start(x, STRATEGIES[strategy]))
    return x


SHAPES = [(2, 2, "exchange"), (2, 1, "exchange"), (4, 2, "two_level"), (2, 2, "pipeline"), (4, 2, "pipeline")]
SHAPES += [(4, 1, "pipeline"), (4, 1, "doubling")]


@pytest.mark.parametrize(("size", "per_node", "strategy"), SHAPES)
def test_a_rank_that_never_comes_is_named_in_time(size: int, per_node: int, strategy: str) -> None:
    """All ranks but the last start. Each raises CollectiveTimeout after its time, naming a rank that it lacks and the
    collective; whoever lacks the sleeper directly names the sleeper."""
    with _transports(size, per_node) as made:
        for one in made:
            assert one.start(torch.ones(100), STRATEGIES["exchange"]) == 0
        for one in made:
            one.wait(0)
            one.set_timeout(0.3)
        together = threading.Barrier(size - 1)

        def late(rank: int) -> CollectiveTimeout:
            seq = made[rank].start(torch.ones(4000), STRATEGIES[strategy])
            together.wait(HANG_S)  # nobody lacks one that only came late
            with pytest.raises(CollectiveTimeout) as caught:
                made[rank].wait(seq)
            return caught.value

        began = time.monotonic()
        errors = _together([lambda r=r: late(r) for r in range(size - 1)])  # type: ignore[misc]
        assert time.monotonic() - began >= 0.3
        assert {e.seq for e in errors} == {1}
        assert any(e.peer == size - 1 for e in errors), errors
        assert all(e.peer != rank for rank, e in enumerate(errors))
        with pytest.raises(CollectiveTimeout):
            made[0].start(torch.ones(1), 0)  # broken groups stay broken


@pytest.mark.parametrize(("size", "per_node", "strategy"), SHAPES)
def test_a_rank_that_dies_is_noticed_at_once(size: int, per_node: int, strategy: str) -> None:
    """The last rank's sockets close while the others wait: PeerLost long before their time is over, naming that
    rank."""
    with _transports(size, per_node, timeout_s=FOR_EVER_S) as made:

        def bereft(rank: int) -> PeerLost:
            with pytest.raises(PeerLost) as caught:
                _sum(made[rank], torch.ones(4000), strategy)
            return caught.value

        threading.Timer(0.1, made[-1].close).start()
        errors = _together([lambda r=r: bereft(r) for r in range(size - 1)])  # type: ignore[misc]
        assert any(e.peer == size - 1 for e in errors), errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "per_node", "strategy"),
    [(2, 2, "exchange"), (2, 1, "exchange"), (4, 2, "exchange"), (4, 2, "two_level"), (2, 1, "doubling")],
)
def test_ranks_in_different_collectives_are_told_so(
    size: int, per_node: int, strategy: str, dtype: torch.dtype
) -> None:
    """The ranks of the last node (alone on one: the last rank) reduce fewer elements, or as many bytes of another type:
    all ranks raise RanksDisagree instead of adding up nonsense."""
    odd = range(size - per_node if size > per_node else size - 1, size)
    other = torch.ones(99) if dtype == torch.float32 else torch.ones(200, dtype=dtype)
    with _transports(size, per_node) as made:

        def differ(rank: int) -> None:
            with pytest.raises(RanksDisagree, match="size, dtype or kind differ"):
                _sum(made[rank], other.clone() if rank in odd else torch.ones(100), strategy)

        _together([lambda r=r: differ(r) for r in range(size)])  # type: ignore[misc]


@pytest.mark.parametrize("last", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rank_apart_from_its_own_node_is_seen_on_every_node(last: int, dtype: torch.dtype) -> None:
    """Rank 3 is in another collective than its neighbour and the other node, whoever of its node comes last and would
    add up: all four are told, before anyone has a sum of it."""
    xs = [torch.ones(100)] * 3 + [torch.ones(99) if dtype == torch.float32 else torch.ones(200, dtype=dtype)]
    with _transports(4, 2) as made:
        first = 5 - last
        seqs = {rank: made[rank].start(xs[rank].clone(), STRATEGIES["two_level"]) for rank in (first, last, 0, 1)}

        def differ(rank: int) -> None:
            with pytest.raises(RanksDisagree, match="size, dtype or kind differ"):
                made[rank].wait(seqs[rank])

        _together([lambda r=r: differ(r) for r in range(4)])  # type: ignore[misc]


def test_over_four_nodes_nobody_adds_up_what_differs() -> None:
    """Recursive doubling: the odd rank's partner sees it at once; those who would have had the sum from the two of them
    are told that these are gone."""
    both = threading.Barrier(2)
    with _transports(4, 1) as made:

        def differ(rank: int) -> BaseException:
            with pytest.raises(CommunicationError) as caught:
                _sum(made[rank], torch.ones(64 if rank == 3 else 128), "doubling")
            if rank >= 2:
                both.wait(HANG_S)
            made[rank].close()
            return caught.value

        errors = _together([lambda r=r: differ(r) for r in range(4)])  # type: ignore[misc]
        assert all(isinstance(errors[rank], RanksDisagree) for rank in (2, 3)), errors
        assert all(isinstance(errors[rank], PeerLost) for rank in (0, 1)), errors


def test_bytes_that_are_no_frame_are_refused() -> None:
    """A peer writes rubbish on its socket: the reader raises, and reads nothing into memory."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    memory = os.memfd_create("test")
    os.ftruncate(memory, native.segment_bytes(2, 1, SMALL, CHUNK))
    mesh = Mesh((None, ours), (None, None), memory)
    one = Transport(mesh, _layout(2, 1), 0, SMALL, CHUNK, 0.0, 5.0)
    theirs.sendall(b"\xff" * 64)
    with pytest.raises(RanksDisagree, match="no frame"):
        _sum(one, torch.ones(4), "exchange")
    one.close()
    theirs.close()


def test_close_wakes_a_waiter_and_always_returns() -> None:
    """Rank 0 waits for a rank that never comes; another thread closes: the waiter raises, both return at once."""
    with _transports(2, 2, timeout_s=FOR_EVER_S) as made:
        threading.Timer(0.1, made[0].close).start()
        with pytest.raises(CommunicationError, match="closed"):
            _together([lambda: _sum(made[0], torch.ones(4), "exchange")])
        made[0].close()
        with pytest.raises(CommunicationError, match="closed"):
            made[0].start(torch.ones(4), 0)


def test_too_large_a_message_breaks_nothing() -> None:
    """A whole message above `small` is refused before anything is sent; the group goes on."""
    with _transports(2, 2) as made:
        with pytest.raises(ValueError, match=f"{SMALL} bytes at most"):
            made[0].start(torch.ones(SMALL), STRATEGIES["exchange"])
        assert all(x[0] == 2 for x in _together([lambda m=m: _sum(m, torch.ones(8), "exchange") for m in made]))  # type: ignore[misc]


@pytest.mark.parametrize(("size", "per_node"), [(2, 2), (3, 3), (3, 1), (4, 2), (4, 1), (6, 2)])
@pytest.mark.parametrize("spin_us", [0.0, 5.0])
def test_random_programs_agree_with_plain_sums(size: int, per_node: int, spin_us: float, run_seed: int) -> None:
    """Every rank runs the same random program (sizes, dtypes, strategies, gathers, up to ten in flight, waits in any
    order) at its own pace; every result equals the sum in the group's fixed order, bit for bit."""
    rng = random.Random(run_seed)
    program = []
    strategies = ["exchange", "two_level", "pipeline"] + (["doubling"] if per_node == 1 and size == 4 else [])
    for _ in range(60):
        strategy = rng.choice([*strategies, "gather"])
        most = 60_000 if strategy == "pipeline" else SMALL // 4
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
        program.append((strategy, dtype, rng.choice([1, 7, rng.randint(1, most)]), rng.randrange(1 << 30)))
    order = [rng.random() for _ in program]

    def parts(dtype: torch.dtype, count: int, key: int) -> list[torch.Tensor]:
        g = torch.Generator().manual_seed(key)
        return [torch.randn(count, generator=g).to(dtype) for _ in range(size)]

    def fixed_order(strategy: str, xs: list[torch.Tensor]) -> torch.Tensor:
        def add(some: list[torch.Tensor]) -> torch.Tensor:
            total = some[0].float()
            for x in some[1:]:
                total = total + x.float()
            return total.to(xs[0].dtype)

        if strategy == "doubling":
            while len(xs) > 1:
                xs = [add(xs[i : i + 2]) for i in range(0, len(xs), 2)]
            return xs[0]
        if strategy == "exchange" or (per_node == 1 or per_node == size):
            return add(xs)
        return add([add(xs[i : i + per_node]) for i in range(0, size, per_node)])

    with _transports(size, per_node, spin_us=spin_us) as made:

        def run(rank: int) -> None:
            pace = random.Random(f"{run_seed} {rank}")
            gather = NativeGather(made[rank], size)
            flying: list[tuple[float, Callable[[], None]]] = []
            for (strategy, dtype, count, key), place in zip(program, order, strict=True):
                xs = parts(dtype, count, key)
                if strategy == "gather":
                    pending = gather.start(xs[rank].view(torch.uint8).numpy())

                    def gathered(pending: Any = pending, xs: Any = xs) -> None:
                        assert (pending.wait() == torch.stack(xs).view(torch.uint8).view(size, -1).numpy()).all()

                    check: Callable[[], None] = gathered
                else:
                    x = xs[rank].clone()
                    seq = made[rank].start(x, STRATEGIES[strategy])

                    def summed(seq: int = seq, x: Any = x, xs: Any = xs, strategy: str = strategy) -> None:
                        made[rank].wait(seq)
                        assert torch.equal(x, fixed_order(strategy, xs)), (strategy, len(x), x.dtype)

                    check = summed
                flying.append((place, check))
                if pace.random() < 0.2:
                    time.sleep(pace.random() * 0.002)
                if len(flying) == 10:  # two more than travel at once: start itself takes the oldest in
                    flying.sort(key=lambda pair: pair[0])
                    for _ in range(5):
                        flying.pop(0)[1]()
            for _, check in flying:
                check()

        _together([lambda r=r: run(r) for r in range(size)])  # type: ignore[misc]


# ---- the mesh ----


class _Meeting:
    """A bootstrap for threads."""

    def __init__(self, size: int) -> None:
        self.barrier, self.cards = threading.Barrier(size), [b""] * size

    def seat(self, rank: int) -> Any:
        meeting = self

        class Seat:
            size = len(meeting.cards)

            def all_gather(self, payload: bytes) -> list[bytes]:
                meeting.cards[rank] = payload
                meeting.barrier.wait(HANG_S)
                cards = list(meeting.cards)
                meeting.barrier.wait(HANG_S)
                return cards

            def close(self) -> None:
                pass

        seat = Seat()
        seat.rank = rank  # type: ignore[attr-defined]
        return seat


def test_a_stranger_without_the_secret_gets_no_connection() -> None:
    """Rank 1 was started with another secret: it is refused, and both sides say so instead of hanging."""
    meeting = _Meeting(2)

    def join(rank: int) -> str:
        with pytest.raises(MeshError) as caught:
            connect_mesh(meeting.seat(rank), _layout(2, 1), "127.0.0.1", 4096, b"secret%d" % rank, timeout_s=4.0)
        return str(caught.value)

    words = _together([lambda: join(0), lambda: join(1)])
    assert "did not connect in time" in words[0]
    assert "without the launch's secret" in words[1]


def test_the_mesh_survives_callers_that_talk_rubbish() -> None:
    """Somebody else connects to rank 0's port first and writes noise: shown out, the ranks still meet."""
    meeting = _Meeting(2)

    def disturb_and_join() -> None:
        until(lambda: meeting.cards[0])
        with socket.create_connection(("127.0.0.1", json.loads(meeting.cards[0])["port"])) as s:
            s.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 4)
        join(1)

    def join(rank: int) -> None:
        connect_mesh(meeting.seat(rank), _layout(2, 1), "127.0.0.1", 4096, timeout_s=HANG_S).close_data()

    _together([lambda: join(0), disturb_and_join])


def test_wildcard_addresses_are_refused() -> None:
    with pytest.raises(MeshError, match="every interface"):
        connect_mesh(_Meeting(1).seat(0), _layout(1, 1), "0.0.0.0", 4096)  # noqa: S104


# ---- emulation and accounts ----


class _Instant:
    def start(self, x: torch.Tensor, *_: object) -> Any:
        class Done:
            def wait(self) -> torch.Tensor:
                return x

        return Done()


class _Clock:
    """In place of the module `time`: it goes on only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def _two_messages(clock: Any) -> tuple[float, float, Ledger]:
    """Seconds until each of two messages of 10 kB at 1 MB/s and 5 ms has come, of which 10 ms were worked."""
    ledger = Ledger()
    fabric = Emulated(_Instant(), Emulation("two nodes", 5e-3, 1e6), ledger)
    x = torch.ones(2500)
    began = clock.monotonic()
    first, second = fabric.start(x), fabric.start(x)
    clock.sleep(0.010)
    first.wait()
    one = clock.monotonic() - began
    second.wait()
    return one, clock.monotonic() - began, ledger


def test_accounts_stand_under_the_layer_that_was_named() -> None:
    """Of the transport, of a link emulated over it, and of both without overlap; a sixteenth name is nobody's."""
    with _transports(1, 1) as (one,):
        native, ledger = NativeCollective(one, lambda size: "exchange"), Ledger()
        emulated = Emulated(native, Emulation("two nodes", 0.0), ledger)
        collectives: list[Collective] = [native, Blocking(native), emulated]
        for number, collective in enumerate(collectives):
            for layer in ("ladder attention", "ladder mlp", "ladder attention"):
                x = torch.ones(3 + number)
                assert collective.start(x, layer).wait() is x
        for number in range(20):
            native.start(torch.ones(1), f"layer {number}").wait()
        counts = {entry.layer: entry.count for entry in one.entries("node")}
        (first, second) = sorted(ledger.entries(), key=lambda entry: entry.layer)
    assert (first.layer, first.count, second.layer, second.count) == ("ladder attention", 2, "ladder mlp", 1)
    assert (counts["ladder attention"], counts["ladder mlp"]) == (4, 2)
    known = [f"layer {number}" for number in range(20) if f"layer {number}" in counts]
    assert counts[""] == 3 + 20 - len(known), "what the emulated link carried, and the names beyond the fifteenth"
    assert len(counts) == 1 + 15


def test_an_emulated_fabric_takes_its_time_and_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of one stands for a larger one. Two messages: 15 ms the first, 25 ms the second, as they share the wire
    while their latencies overlap; work done meanwhile is hidden, and the accounts say "emulated"."""
    clock = _Clock()
    for module in ("emulated", "ledger"):
        monkeypatch.setattr(f"laddertron.topology.comm.{module}.time", clock)
    one, two, ledger = _two_messages(clock)
    assert one == pytest.approx(0.015)
    assert two == pytest.approx(0.025)
    (entry,) = ledger.entries()
    assert entry.link == "emulated two nodes"
    assert entry.count == 2
    assert overlap_ratio(entry.hidden_s, entry.waited_s) == pytest.approx(1 - 15 / 40), (
        "40 ms in flight, of them 5 + 10 waited for"
    )


def test_no_emulated_message_comes_early() -> None:
    """By the real clock."""
    one, two, _ = _two_messages(time)
    assert one >= 0.015
    assert two >= 0.025


def test_what_came_long_ago_was_not_in_flight_since() -> None:
    """Over a wire the kernel has a peer's part long before it is asked for: the time between is nobody's flight."""
    with _stamps() as stamps, _transports(2, 1, connect=_tcp_pair) as (one, other):
        seq = one.start(torch.ones(100), STRATEGIES["exchange"])
        _sum(other, torch.ones(100), "exchange")
        sent = time.monotonic()
        time.sleep(0.2)  # computes
        asked = time.monotonic()
        one.wait(seq)
        ended = time.monotonic()
        (entry,), (record,) = one.entries("net"), one.records()
    assert asked - sent >= 0.2
    if not stamps:
        assert entry.in_flight_s >= 0.2, "then it counts as come when it was asked for"
        return
    # loopback hands over while it sends; 1 ms for the kernel's clock, which is another
    flight = sent - record.start_s + ended - asked + 1e-3
    assert entry.in_flight_s < flight, "what was computed after it had come is not counted"


@pytest.mark.parametrize("hidden", [True, False])
def test_hidden_and_exposed_seconds_of_the_native_transport(hidden: bool) -> None:
    """Rank 1 comes late. Rank 0 asks when it is there: the time until then was hidden. Asking at once: exposed."""
    with _transports(2, 2) as (one, other):
        there, asking = threading.Event(), threading.Event()

        def late() -> None:
            assert hidden or asking.wait(HANG_S)
            time.sleep(0.2)
            _sum(other, torch.ones(100), "exchange")
            there.set()

        began = time.monotonic()
        seq = one.start(torch.ones(100), STRATEGIES["exchange"])
        coming = threading.Thread(target=late)
        coming.start()
        if hidden:
            assert there.wait(HANG_S)
        asking.set()
        asked = time.monotonic()
        one.wait(seq)
        ended = time.monotonic()
        coming.join()
        (entry,) = one.entries("node")
        assert entry.waited_s <= ended - asked
        assert entry.in_flight_s <= ended - began
        # 200 ms; what is left of them should the machine have taken the processor away in between
        assert (entry.in_flight_s - entry.waited_s if hidden else entry.waited_s) >= 0.02
        (record,) = one.records()
        assert (record.op, record.strategy, record.bytes, record.seq) == ("all_reduce", "exchange", 400, 0)


# ---- real processes ----


def case_killed(rank: Rank) -> None:
    options = CommOptions(process_groups=False, timeout_s=FOR_EVER_S)
    comm = rank.connect(None, options)
    x = torch.ones(4096)
    for _ in range(10):
        comm.all_reduce.start(x).wait()
    if rank.rank == 2:
        os.kill(os.getpid(), 9)
    comm.all_reduce.start(x).wait()


def test_a_killed_process_is_named_by_the_others(ranks: Ranks) -> None:
    """SIGKILL of rank 2 of 4 between two all-reduces: the others raise PeerLost naming it, long before the timeout (the
    pool gives them ten seconds)."""
    with pytest.raises(RankError) as caught:
        ranks(4, "test_transport:case_killed")
    words = str(caught.value)
    assert "rank 2 of 4, test_transport:case_killed ---\nthe rank's process ended" in words
    assert words.count("rank 2 is gone") >= 3


def test_gathers_of_any_length() -> None:
    """Longer than one slot: cut into pieces and put together again."""
    with _transports(3, 3) as made:
        payload = np.random.default_rng(5).integers(0, 256, (3, 3 * SMALL + 17), dtype=np.uint8)
        for got in _together([lambda r=r: NativeGather(made[r], 3).start(payload[r]).wait() for r in range(3)]):  # type: ignore[misc]
            assert (got == payload).all()


@pytest.mark.parametrize(("size", "per_node"), [(2, 2), (4, 2), (3, 1)])
def test_doubling_gives_way_where_it_cannot_be(size: int, per_node: int) -> None:
    """It knows 2, 4, 8, … nodes of one rank each; a table that says it elsewhere gets the same sum another way."""
    with _transports(size, per_node) as made:
        xs = _together([lambda r=r: _sum(made[r], torch.full((100,), float(r + 1)), "doubling") for r in range(size)])  # type: ignore[misc]
        assert all(bool(x.eq(sum(range(size + 1))).all()) for x in xs)
        assert [e.strategy for one in made for e in one.entries("net")] == ["exchange"] * size
