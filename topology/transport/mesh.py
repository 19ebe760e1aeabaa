"""The sockets between a group's ranks: addresses by the bootstrap, HMAC authentication in both directions with a
per-launch secret. Unix sockets inside a node, TCP between nodes.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ..comm.bootstrap import Bootstrap
from ..hardware.ports import ANY_PORT, listen, receive, require_one_address
from ..placement.layout import GroupLayout
from ..placement.machines import boot_id
from .callers import HELLO, MAGIC, PROOF, Callers, proof

DATA, PLAN, STAGE, BACK = range(4)
"""Channels: a group's tensors, rank 0's plans; between neighbouring pipeline stages, and from the last to the first."""


class MeshError(RuntimeError):
    """Ranks did not find one another, or are not who they should be; the message names the rank and the fix."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """`data[r]`, `plan[r]`: the sockets to the group's r-th rank (None for the own; plan only to and from the first).
    `segment`: the fd of the memory that the node's ranks share. The taker of a socket or fd owns it."""

    data: tuple[socket.socket | None, ...]
    plan: tuple[socket.socket | None, ...]
    segment: int

    def close_data(self) -> None:
        """For who needs no more than the plan channel."""
        for s in self.data:
            if s is not None:
                s.close()
        with contextlib.suppress(OSError):
            os.close(self.segment)


Line = tuple[int, int]
"""A peer by its place in the group, and a channel."""
Cards = list[dict[str, Any]]
"""The descriptions that the group's ranks exchange."""


def connect_mesh(
    bootstrap: Bootstrap,
    layout: GroupLayout,
    address: str,
    segment_bytes: int,
    secret: bytes = b"",
    timeout_s: float = 60.0,
    plans: bool = True,
    ports: range = ANY_PORT,
) -> Mesh:
    """Connects this rank with every other of its group; `plans`: and with its first for plans. `address`: what this
    rank binds to, on one of `ports`, and the others reach it at (never a wildcard). Every rank of the job calls it at
    the same time. Raises MeshError."""
    me, size = layout.ranks.index(bootstrap.rank), layout.size
    deadline = time.monotonic() + timeout_s
    to_connect = [(r, DATA) for r in range(size) if r != me]
    if plans:
        to_connect += [(r, PLAN) for r in range(1, size)] if me == 0 else [(0, PLAN)]
    first = me // layout.per_node * layout.per_node
    near = range(first, first + layout.per_node)
    data = _meet(bootstrap, layout.nodes, near, to_connect, address, secret, deadline, ports)
    plan = tuple(data.get((r, PLAN)) for r in range(size))
    lines = tuple(data.get((r, DATA)) for r in range(size))
    segment = _share_segment(layout, me, lines, segment_bytes, deadline)
    _tune(data)
    return Mesh(lines, plan, segment)


def connect_lines(
    bootstrap: Bootstrap,
    ranks: tuple[int, ...],
    to_connect: list[Line],
    address: str,
    secret: bytes = b"",
    timeout_s: float = 60.0,
    ports: range = ANY_PORT,
) -> dict[Line, socket.socket]:
    """Connects this rank of `ranks` with those of `to_connect`, mutually; else as `connect_mesh`."""
    lines = _meet(bootstrap, (ranks,), None, to_connect, address, secret, time.monotonic() + timeout_s, ports)
    _tune(lines)
    return lines


def _tune(lines: dict[Line, socket.socket]) -> None:
    for (_, channel), s in lines.items():
        (_patient if channel == PLAN else _quick)(s)


def _quick(s: socket.socket) -> None:
    s.setblocking(False)
    if s.family != socket.AF_UNIX:
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, 6)


def _patient(s: socket.socket) -> None:
    _quick(s)
    # What a plan has in the kernel's queue is what an all-reduce may have to stand behind: keep it short.
    s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 128 << 10)
    if s.family != socket.AF_UNIX:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, 0)


def _meet(
    bootstrap: Bootstrap,
    nodes: tuple[tuple[int, ...], ...],
    near: Collection[int] | None,
    lines: list[Line],
    address: str,
    secret: bytes,
    deadline: float,
    ports: range,
) -> dict[Line, socket.socket]:
    """The sockets between the ranks of `nodes`. near: who is reached over a unix socket, as `nodes` has it; None:
    the ranks on this host."""
    ranks = tuple(rank for node in nodes for rank in node)
    try:
        require_one_address(address)
    except ValueError as error:
        raise MeshError(str(error)) from error
    with listen(address, ports) as tcp, socket.socket(socket.AF_UNIX) as unix:
        name = f"laddertron-{secrets.token_hex(16)}"
        unix.bind(f"\0{name}")
        unix.listen(512)
        card = {
            "address": address,
            "port": tcp.getsockname()[1],
            "unix": name,
            "host": host_token(),
            "hostname": socket.gethostname(),
            "secret": secrets.token_hex(32),
            "layout": [list(node) for node in nodes],
        }
        cards = [json.loads(c) for c in bootstrap.all_gather(json.dumps(card).encode())]
        group = [cards[r] for r in ranks]
        _verify(ranks, card["layout"], group)
        if near is None:
            near = [peer for peer, other in enumerate(group) if other["host"] == card["host"]]
        else:
            _verify_hosts(nodes, dict(zip(ranks, group, strict=True)))
        # Every rank's part of the key: a process that missed a round of the bootstrap cannot compute it.
        key = hashlib.blake2b(
            "".join(c["secret"] for c in group).encode(), key=hashlib.sha256(secret).digest(), digest_size=32
        ).digest()
        return _connect_all(ranks, lines, near, group, ranks.index(bootstrap.rank), tcp, unix, key, deadline)


def host_token() -> str:
    """Equal for two processes that can share a unix socket: one kernel, one network namespace."""
    return f"{boot_id()}/{os.stat('/proc/self/ns/net').st_ino}"


def _verify(ranks: tuple[int, ...], layout: list[list[int]], group: Cards) -> None:
    for rank, card in zip(ranks, group, strict=True):
        if card["layout"] != layout:
            raise MeshError(
                f"rank {rank} on {card['hostname']} was given another layout, {card['layout']}: start every rank "
                "with the same configuration"
            )


def _verify_hosts(nodes: tuple[tuple[int, ...], ...], cards: dict[int, dict[str, Any]]) -> None:
    for node in nodes:
        for rank in node[1:]:
            if cards[rank]["host"] != cards[node[0]]["host"]:
                raise MeshError(
                    f"ranks {node[0]} and {rank} should share a node but run on {cards[node[0]]['hostname']} and "
                    f"{cards[rank]['hostname']}: map {len(node)} ranks to each node in order (Open MPI: "
                    f"--map-by ppr:{len(node)}:node; Slurm: --ntasks-per-node={len(node)} --distribution=block)"
                )


def _connect_all(
    ranks: tuple[int, ...],
    lines: list[Line],
    near: Collection[int],
    group: Cards,
    me: int,
    tcp: socket.socket,
    unix: socket.socket,
    key: bytes,
    deadline: float,
) -> dict[Line, socket.socket]:
    """Connects to lower ranks, then accepts higher ones; rank 0 only accepts, so this cannot deadlock."""
    done: dict[Line, socket.socket] = {}
    pending = {line for line in lines if line[0] > me}
    try:
        for peer, channel in [line for line in lines if line[0] < me]:
            done[peer, channel] = _call(group[peer], peer in near, ranks[0], me, peer, channel, key, deadline)
        with contextlib.closing(Callers((tcp, unix), ranks[0], me, key)) as callers:
            while pending:
                left = deadline - time.monotonic()
                if left <= 0:
                    late = ", ".join(f"{ranks[r]} on {group[r]['hostname']}" for r in sorted({r for r, _ in pending}))
                    place = f"{group[me]['address']} port {group[me]['port']}"
                    raise MeshError(
                        f"rank {late} did not connect in time to {group[me]['hostname']} at {place}: are they running, "
                        "is the address reachable from there?"
                    )
                for line, s in callers.accept(pending, left):
                    done[line] = s
                    pending.discard(line)
    except BaseException:
        for s in done.values():
            s.close()
        raise
    return done


def _call(
    card: dict[str, Any], near: bool, first: int, me: int, peer: int, channel: int, key: bytes, deadline: float
) -> socket.socket:
    family = socket.AF_UNIX if near else socket.AF_INET6 if ":" in card["address"] else socket.AF_INET
    s = socket.socket(family)
    try:
        s.settimeout(max(0.01, deadline - time.monotonic()))
        s.connect(f"\0{card['unix']}" if near else (card["address"], int(card["port"])))
        hello = HELLO.pack(MAGIC, first, me, peer, channel, secrets.token_bytes(16))
        s.sendall(hello)
        answer = receive(s, 16 + PROOF)
        if not hmac.compare_digest(answer[16:], proof(key, b"answer", hello, answer[:16])):
            raise MeshError(f"{card['hostname']} answered for rank {peer} without the launch's secret: refused")
        s.sendall(proof(key, b"caller", hello, answer[:16]))
        return s
    except OSError as error:
        s.close()
        raise MeshError(f"rank {peer} at {card['address']}:{card['port']} ({card['hostname']}): {error}") from error
    except BaseException:
        s.close()
        raise


def _share_segment(
    layout: GroupLayout, me: int, lines: tuple[socket.socket | None, ...], size: int, deadline: float
) -> int:
    """The node's first rank creates and passes anonymous shared memory: no name remains, no /dev/shm limit."""
    per_node = layout.per_node
    first = me // per_node * per_node
    if me == first:
        segment = os.memfd_create("laddertron", os.MFD_CLOEXEC)
        os.ftruncate(segment, size)
        for peer in range(first + 1, first + per_node):
            line = lines[peer]
            assert line is not None
            socket.send_fds(line, [b"s"], [segment])
        return segment
    line = lines[first]
    assert line is not None
    line.settimeout(max(0.01, deadline - time.monotonic()))
    try:
        message, fds, _, _ = socket.recv_fds(line, 1, 1)
    except OSError as error:
        raise MeshError(f"rank {layout.ranks[first]} did not share its memory: {error}") from error
    if message != b"s" or len(fds) != 1 or os.fstat(fds[0]).st_size != size:
        raise MeshError(f"rank {layout.ranks[first]} shared memory of another size: are all ranks of one version?")
    return fds[0]
