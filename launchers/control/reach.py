"""Tests before MPI starts that ranks on different hosts can connect, both ways, with a small and a large message: a
firewall or lost large packets are named with ranks, hosts, port and direction, and not found by a hanging MPI. As a
program it tests the way to the owner of ranks that have not started (job/missing.py).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import sys
import threading
from collections.abc import Iterator, Sequence

from ...topology.hardware.ports import ANY_PORT, listen, receive

SMALL, LARGE = 64, 128 << 10
"""Bytes of the two messages; the large one takes several packets of any size."""
TIMEOUT_S = 20.0
ANSWERS = 512
"""Connections that are answered at once; further ones are closed."""
AGAIN_S = 0.05
"""Seconds after which a connection is accepted again if none could be."""
PEERS = 64
"""Other hosts that a rank tests at most: the next ones, so that all are tested by some rank."""


OPEN = "open the ports between the hosts (firewall; launch.port_range), or set launch.interface"


class Unreached(ConnectionError):
    """Rank `rank` cannot be reached from this one."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank = rank


def peers_of(rank: int, hosts: Sequence[str]) -> list[int]:
    """The ranks that this one tests: on each other host the one at the same place among its ranks, or the last."""
    ranks: dict[str, list[int]] = {}
    for at, host in enumerate(hosts):
        ranks.setdefault(host, []).append(at)
    names = list(ranks)
    own, place = names.index(hosts[rank]), ranks[hosts[rank]].index(rank)
    others = [names[(own + step) % len(names)] for step in range(1, len(names))]
    return [ranks[name][min(place, len(ranks[name]) - 1)] for name in others[:PEERS]]


@contextlib.contextmanager
def listening(address: str, secret: bytes, ports: range = ANY_PORT) -> Iterator[str]:
    """Answers the tests of other ranks inside the block; its place as `address port`. Raises OSError."""
    with listen(address, ports) as door:
        over = threading.Event()
        thread = threading.Thread(target=_answer_all, args=(door, secret, over), name="reach", daemon=True)
        thread.start()
        try:
            yield f"{address} {door.getsockname()[1]}"
        finally:
            over.set()
            door.shutdown(socket.SHUT_RDWR)
            thread.join()


def _answer_all(door: socket.socket, secret: bytes, over: threading.Event) -> None:
    free = threading.Semaphore(ANSWERS)
    while not over.is_set():
        try:
            connection, _ = door.accept()
        except OSError:  # the door was closed, the caller has gone, or no descriptor is free for a moment
            over.wait(AGAIN_S)
            continue
        if free.acquire(blocking=False):
            threading.Thread(target=_answer, args=(connection, secret, free), daemon=True).start()
        else:
            connection.close()


def _answer(connection: socket.socket, secret: bytes, free: threading.Semaphore) -> None:
    with contextlib.ExitStack() as stack:
        stack.callback(free.release)
        stack.enter_context(connection)
        stack.enter_context(contextlib.suppress(OSError))
        connection.settimeout(TIMEOUT_S)
        if hmac.compare_digest(receive(connection, SMALL), _message(secret, SMALL)):
            connection.sendall(_message(secret, SMALL))
            receive(connection, LARGE)
            connection.sendall(b"+")  # small: the direction of a large message that is lost can be told
            connection.sendall(_message(secret, LARGE))


def reach(rank: int, host: str, here: str, place: str, secret: bytes, timeout_s: float = TIMEOUT_S) -> None:
    """Tests the way from `here` to rank `rank` on `host`, which listens at `place`, and back. Raises Unreached."""
    address, _, port = place.rpartition(" ")
    way = f"from {here} to {host}"
    doing, fix = way, OPEN
    try:
        with socket.create_connection((address, int(port)), timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(_message(secret, SMALL))
            receive(connection, SMALL)
            fix = "small messages pass: large packets are lost, set the interfaces' MTU to that of the path"
            doing = f"a message of {LARGE >> 10} KiB {way}"
            connection.sendall(_message(secret, LARGE))
            receive(connection, 1)
            doing = f"a message of {LARGE >> 10} KiB from {host} to {here}"
            receive(connection, LARGE)
    except OSError as error:
        raise Unreached(rank, f"cannot be reached at {address} port {port}, {doing}: {error}: {fix}") from None


def _message(secret: bytes, size: int) -> bytes:
    return hmac.digest(secret, b"reach", "sha256") * (size // 32)


def main() -> None:
    """Tests the way to the owner that the order on standard input names, and prints the fault, if any, as JSON."""
    order, here, fault = json.loads(sys.stdin.readline()), socket.gethostname(), ""
    address, _, port = order["control"].rpartition(":")
    way = f"from {here} to {order['host']}"
    try:
        if address:
            fault = f"the control channel cannot be reached at {address} port {port}, {way}"
            with socket.create_connection((address.strip("[]"), int(port)), order["timeout_s"]) as connection:
                connection.settimeout(order["timeout_s"])
                receive(connection, 1)  # the owner speaks first
        reach(0, order["host"], here, order["place"], bytes.fromhex(order["secret"]), order["timeout_s"])
        fault = ""
    except Unreached as error:
        fault = f"{order['host']} {error}"
    except OSError as error:
        fault = f"{fault}: {error}: {OPEN}"
    print(json.dumps({"fault": fault}))


if __name__ == "__main__":
    main()
