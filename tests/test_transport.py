"""The native transport's promises when things go wrong: an error that names the rank, never a hang, never a wrong sum.

Ranks here are threads of one process over socket pairs: the C code sleeps without the GIL, so they are as concurrent as
processes, and a "dead" rank is one whose sockets are closed.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from laddertron.topology import transport as native
from laddertron.topology.collectives import CollectiveTimeout, CommunicationError, PeerLost, RanksDisagree
from laddertron.topology.emulated import Emulated, Emulation
from laddertron.topology.groups import CommOptions
from laddertron.topology.layout import GroupLayout
from laddertron.topology.ledger import Ledger, overlap_ratio
from laddertron.topology.mesh import Mesh, MeshError, connect_mesh
from laddertron.topology.plans import FRAME_LIMIT, PlanChannel
from laddertron.topology.transport import STRATEGIES, NativeGather, Transport
from rank_pool import Rank, RankError

Ranks = Callable[..., list[Any]]
SMALL, CHUNK = 16 << 10, 8 << 10


def _layout(size: int, per_node: int) -> GroupLayout:
    return GroupLayout(tuple(tuple(range(at, at + per_node)) for at in range(0, size, per_node)))


@contextmanager
def _transports(size: int, per_node: int, timeout_s: float = 5.0, spin_us: float = 0.0) -> Iterator[list[Transport]]:
    layout = _layout(size, per_node)
    pairs = {(i, j): socket.socketpair() for i in range(size) for j in range(i + 1, size)}
    memory = [os.memfd_create("test") for _ in layout.nodes]
    for fd in memory:
        os.ftruncate(fd, native.segment_bytes(size, per_node, SMALL, CHUNK))
    made: list[Transport] = []
    for rank in range(size):
        lines = [None if r == rank else pairs[min(r, rank), max(r, rank)][0 if rank < r else 1] for r in range(size)]
        for line in lines:
            if line is not None:
                line.setblocking(False)
        mesh = Mesh(tuple(lines), (None,) * size, os.dup(memory[rank // per_node]), ("here",) * size)
        made.append(Transport(mesh, layout, rank, SMALL, CHUNK, spin_us, timeout_s, None))
    for fd in memory:
        os.close(fd)
    try:
        yield made
    finally:
        for one in made:
            one.close()


def _together(calls: list[Callable[[], Any]], timeout_s: float = 30.0) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(timeout_s) for future in [pool.submit(call) for call in calls]]


def _sum(one: Transport, x: torch.Tensor, strategy: str) -> torch.Tensor:
    one.wait(one.start(x, STRATEGIES[strategy]))
    return x


SHAPES = [(2, 2, "exchange"), (2, 1, "exchange"), (4, 2, "two_level"), (2, 2, "pipeline"), (4, 2, "pipeline")]
SHAPES += [(4, 1, "pipeline"), (4, 1, "doubling")]


@pytest.mark.parametrize(("size", "per_node", "strategy"), SHAPES)
def test_a_rank_that_never_comes_is_named_in_time(size: int, per_node: int, strategy: str) -> None:
    """All ranks but the last start. Each raises CollectiveTimeout after its time, naming a rank that it lacks and the
    collective; whoever lacks the sleeper directly names the sleeper."""
    with _transports(size, per_node, timeout_s=0.3) as made:
        for one in made:
            assert one.start(torch.ones(100), STRATEGIES["exchange"]) == 0
        for one in made:
            one.wait(0)

        def late(rank: int) -> CollectiveTimeout:
            with pytest.raises(CollectiveTimeout) as caught:
                _sum(made[rank], torch.ones(4000), strategy)
            return caught.value

        began = time.monotonic()
        errors = _together([lambda r=r: late(r) for r in range(size - 1)])  # type: ignore[misc]
        assert time.monotonic() - began < 2.0
        assert {e.seq for e in errors} == {1}
        assert any(e.peer == size - 1 for e in errors), errors
        assert all(e.peer != rank for rank, e in enumerate(errors))
        with pytest.raises(CollectiveTimeout):
            made[0].start(torch.ones(1), 0)  # broken groups stay broken


@pytest.mark.parametrize(("size", "per_node", "strategy"), SHAPES)
def test_a_rank_that_dies_is_noticed_at_once(size: int, per_node: int, strategy: str) -> None:
    """The last rank's sockets close while the others wait (long timeout): PeerLost well before it, naming that rank."""
    with _transports(size, per_node, timeout_s=60.0) as made:

        def bereft(rank: int) -> PeerLost:
            with pytest.raises(PeerLost) as caught:
                _sum(made[rank], torch.ones(4000), strategy)
            return caught.value

        began = time.monotonic()
        threading.Timer(0.1, made[-1].close).start()
        errors = _together([lambda r=r: bereft(r) for r in range(size - 1)])  # type: ignore[misc]
        assert time.monotonic() - began < 2.0
        assert any(e.peer == size - 1 for e in errors), errors


@pytest.mark.parametrize(("size", "per_node"), [(2, 2), (2, 1)])
def test_ranks_in_different_collectives_are_told_so(size: int, per_node: int) -> None:
    """Rank 0 reduces 100 elements, rank 1 only 99: both raise RanksDisagree instead of adding up nonsense."""
    with _transports(size, per_node) as made:

        def differ(rank: int) -> None:
            with pytest.raises(RanksDisagree, match="size, dtype or kind differ"):
                _sum(made[rank], torch.ones(100 - rank), "exchange")

        _together([lambda r=r: differ(r) for r in range(size)])  # type: ignore[misc]


def test_bytes_that_are_no_frame_are_refused() -> None:
    """A peer writes rubbish on its socket: the reader raises, and reads nothing into memory."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    memory = os.memfd_create("test")
    os.ftruncate(memory, native.segment_bytes(2, 1, SMALL, CHUNK))
    mesh = Mesh((None, ours), (None, None), memory, ("a", "b"))
    one = Transport(mesh, _layout(2, 1), 0, SMALL, CHUNK, 0.0, 5.0, None)
    theirs.sendall(b"\xff" * 64)
    with pytest.raises(RanksDisagree, match="no frame"):
        _sum(one, torch.ones(4), "exchange")
    one.close()
    theirs.close()


def test_close_wakes_a_waiter_and_always_returns() -> None:
    """Rank 0 waits for a rank that never comes; another thread closes: the waiter raises, both return at once."""
    with _transports(2, 2, timeout_s=60.0) as made:
        began = time.monotonic()
        threading.Timer(0.1, made[0].close).start()
        with pytest.raises(CommunicationError, match="closed"):
            _sum(made[0], torch.ones(4), "exchange")
        made[0].close()
        assert time.monotonic() - began < 2.0
        with pytest.raises(CommunicationError, match="closed"):
            made[0].start(torch.ones(4), 0)


def test_too_large_a_message_breaks_nothing() -> None:
    """A whole message above `small` is refused before anything is sent; the group goes on."""
    with _transports(2, 2) as made:
        with pytest.raises(ValueError, match=f"{SMALL} bytes at most"):
            made[0].start(torch.ones(SMALL), STRATEGIES["exchange"])
        assert all(x[0] == 2 for x in _together([lambda m=m: _sum(m, torch.ones(8), "exchange") for m in made]))  # type: ignore[misc]


@pytest.mark.parametrize(("size", "per_node"), [(2, 2), (3, 3), (3, 1), (4, 2), (4, 1), (6, 2)])
@pytest.mark.parametrize("seed", [1, 2])
def test_random_programs_agree_with_plain_sums(size: int, per_node: int, seed: int) -> None:
    """Every rank runs the same random program (sizes, dtypes, strategies, gathers, up to six in flight, waits in any
    order) at its own pace; every result equals the sum in the group's fixed order, bit for bit."""
    print(f"seed {seed}")
    rng = random.Random(seed)
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

    with _transports(size, per_node, timeout_s=20.0, spin_us=5.0 if seed == 2 else 0.0) as made:

        def run(rank: int) -> None:
            pace = random.Random(rank * 1000 + seed)
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
                if len(flying) == 6:  # two more than travel at once: start itself takes the oldest in
                    flying.sort(key=lambda pair: pair[0])
                    for _ in range(3):
                        flying.pop(0)[1]()
            for _, check in flying:
                check()

        _together([lambda r=r: run(r) for r in range(size)], 60.0)  # type: ignore[misc]


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
                meeting.barrier.wait(10)
                cards = list(meeting.cards)
                meeting.barrier.wait(10)
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
            connect_mesh(meeting.seat(rank), _layout(2, 1), "127.0.0.1", 4096, b"secret%d" % rank, timeout_s=0.6)
        return str(caught.value)

    words = _together([lambda: join(0), lambda: join(1)])
    assert "did not connect in time" in words[0]
    assert "without the launch's secret" in words[1]


def test_the_mesh_survives_callers_that_talk_rubbish() -> None:
    """Somebody else connects to rank 0's port first and writes noise: shown out, the ranks still meet."""
    meeting, stop = _Meeting(2), threading.Event()

    def disturb() -> None:
        while not stop.is_set() and not meeting.cards[0]:
            time.sleep(0.001)
        import json

        port = json.loads(meeting.cards[0])["port"]
        with socket.create_connection(("127.0.0.1", port)) as s, ExitStack():
            s.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" * 4)

    def join(rank: int) -> None:
        if rank:
            time.sleep(0.05)
        connect_mesh(meeting.seat(rank), _layout(2, 1), "127.0.0.1", 4096, timeout_s=10).close()

    thread = threading.Thread(target=disturb)
    thread.start()
    _together([lambda: join(0), lambda: join(1)])
    stop.set()
    thread.join()


def test_wildcard_addresses_are_refused() -> None:
    with pytest.raises(MeshError, match="every interface"):
        connect_mesh(_Meeting(1).seat(0), _layout(1, 1), "0.0.0.0", 4096)  # noqa: S104


# ---- plans ----


def _plan_pair() -> tuple[PlanChannel, PlanChannel]:
    a, b = socket.socketpair()
    a.setblocking(False)
    b.setblocking(False)
    return PlanChannel(0, (None, a)), PlanChannel(1, (b, None))


def test_plans_arrive_whole_and_in_order_and_send_never_blocks() -> None:
    """Rank 0 sends 8 MB while nobody reads: it returns at once; the other side then gets every frame in order."""
    sender, receiver = _plan_pair()
    frames = [b"a", os.urandom(8 << 20), b"", b"c" * 1000]
    began = time.monotonic()
    for frame in frames:
        sender.send(frame)
    assert time.monotonic() - began < 0.5
    assert [receiver.receive(10) for _ in frames] == frames
    with pytest.raises(ValueError, match="at most"):
        sender.send(bytes(FRAME_LIMIT + 1))
    with pytest.raises(CollectiveTimeout):
        receiver.receive(0.05)
    sender.close()
    with pytest.raises(PeerLost, match="rank 0 is gone"):
        receiver.receive(10)
    receiver.close()


def test_closing_the_plan_channel_wakes_its_reader() -> None:
    sender, receiver = _plan_pair()
    threading.Timer(0.1, receiver.close).start()
    with pytest.raises(CommunicationError, match="closed"):
        receiver.receive(10)
    sender.close()


# ---- emulation and accounts ----


class _Instant:
    def start(self, x: torch.Tensor) -> Any:
        class Done:
            def wait(self) -> torch.Tensor:
                return x

        return Done()


def test_an_emulated_fabric_takes_its_time_and_says_what_it_is() -> None:
    """A group of one stands for a larger one. Two messages of 10 kB at 1 MB/s and 5 ms: 15 ms the first, 25 ms the
    second, as they share the wire; work done meanwhile is hidden, and the accounts say "emulated"."""
    ledger = Ledger()
    fabric = Emulated(_Instant(), Emulation("two nodes", 5e-3, 1e6), ledger)
    x = torch.ones(2500)
    began = time.monotonic()
    first, second = fabric.start(x), fabric.start(x)
    time.sleep(0.010)
    first.wait()
    one = time.monotonic() - began
    second.wait()
    two = time.monotonic() - began
    assert one >= 0.015
    assert two >= 0.025
    assert two < 0.060, "the second's latency overlaps the first's"
    (entry,) = ledger.entries()
    assert entry.link == "emulated two nodes"
    assert entry.count == 2
    # 40 ms in flight, of them 15 ms (5 + 10) waited; a busy machine oversleeps, and then more is hidden.
    assert 0.3 < overlap_ratio([entry]) < 1.0


def test_hidden_and_exposed_seconds_of_the_native_transport() -> None:
    """Rank 1 comes 20 ms late. Rank 0 computes 40 ms before it asks: nothing exposed. Asking at once: 20 ms are."""
    for busy, exposed in ((0.04, 0.0), (0.0, 0.02)):
        with _transports(2, 2) as made:

            def early(busy: float = busy, one: Transport = made[0]) -> None:
                seq = one.start(torch.ones(100), 0)
                time.sleep(busy)
                one.wait(seq)

            def late(one: Transport = made[1]) -> None:
                time.sleep(0.02)
                _sum(one, torch.ones(100), "exchange")

            _together([early, late])
            (entry,) = made[0].entries(lambda name: "node")
            assert entry.in_flight_s >= 0.018
            assert abs(entry.waited_s - exposed) < 0.012
            (record,) = made[0].records()
            assert (record.op, record.strategy, record.bytes, record.seq) == ("all_reduce", "exchange", 400, 0)


# ---- real processes ----


def case_killed(rank: Rank) -> None:
    options = CommOptions(process_groups=False, timeout_s=60.0)
    comm = rank.connect(None, options)
    x = torch.ones(4096)
    for _ in range(10):
        comm.all_reduce.start(x).wait()
    if rank.rank == 2:
        os.kill(os.getpid(), 9)
    comm.all_reduce.start(x).wait()


def test_a_killed_process_is_named_by_the_others(ranks: Ranks) -> None:
    """SIGKILL of rank 2 of 4 between two all-reduces: the others raise PeerLost naming it, long before the timeout."""
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(4, "test_transport:case_killed")
    words = str(caught.value)
    assert "rank 2 of 4, test_transport:case_killed ---\nthe rank's process ended" in words
    assert words.count("rank 2 is gone") >= 3
    assert time.monotonic() - began < 20.0


def test_gathers_of_any_length() -> None:
    """Longer than one slot: cut into pieces and put together again."""
    with _transports(3, 3) as made:
        payload = np.random.default_rng(5).integers(0, 256, (3, 3 * SMALL + 17), dtype=np.uint8)
        for got in _together([lambda r=r: NativeGather(made[r], 3).start(payload[r]).wait() for r in range(3)]):  # type: ignore[misc]
            assert (got == payload).all()
