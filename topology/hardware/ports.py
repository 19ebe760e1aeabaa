"""Listening sockets on a port of a given range, for hosts between which a firewall lets only that range through, and
the reading of messages of known length from those that connect.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket

ANY_PORT = range(1)
"""Port 0: the kernel chooses."""
LAST_PORT = 65535


def port_range(text: str) -> range:
    """The ports of `40000-40100`, both ends included."""
    low, _, high = text.partition("-")
    return range(int(low), int(high) + 1)


def require_one_address(address: str) -> None:
    """Raises ValueError for an address that means every interface of the host. A name is not resolved."""
    every = not address
    with contextlib.suppress(ValueError):  # a name
        every = every or ipaddress.ip_address(address).is_unspecified
    if every:
        raise ValueError(
            f"address {address!r} would listen on every interface: name one address of this host, such as 127.0.0.1 or "
            "10.0.0.5"
        )


def listen(address: str, ports: range = ANY_PORT, backlog: int = 512) -> socket.socket:
    """A TCP socket that listens at `address` on the first free one of the ports. Raises OSError, which names host and
    range if none is free, and ValueError for an address that means every interface."""
    require_one_address(address)
    family, kind, protocol, _, (host, _, *scope) = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    require_one_address(str(host))
    # NOTE: first a port that no socket has: with reuse two processes could bind it, and the later one not listen.
    for reuse in (False, True):
        for port in ports:
            door = socket.socket(family, kind, protocol)
            try:
                door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                door.bind((host, port, *scope))
                door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, True)  # for the next launch on this port
                door.listen(backlog)
                return door
            except OSError as error:
                door.close()
                if error.errno != errno.EADDRINUSE:
                    where = f"{socket.gethostname()} cannot listen at {address}, port {port}"
                    raise OSError(error.errno, f"{where}: {error.strerror}") from error
    raise OSError(
        errno.EADDRINUSE,
        f"{socket.gethostname()}: no port of launch.port_range={ports[0]}-{ports[-1]} is free at {address}: enlarge "
        "it, or end what listens there",
    )


def receive(connection: socket.socket, count: int) -> bytes:
    """The next `count` bytes. Raises OSError, also if the connection ends before."""
    data = bytearray()
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the other end closed the connection")
        data += part
    return bytes(data)
