"""Strangers at a rank's sockets: hundreds that say nothing or nonsense keep no rank of the group out."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
import time

import pytest
from laddertron.topology.transport import callers as module
from laddertron.topology.transport.callers import HELLO, MAGIC, PROOF, Callers, proof, same_user
from waiting import HANG_S

KEY = b"k" * 32
LINE = (3, 0)


def call(place: tuple[str, int], key: bytes = KEY) -> socket.socket:
    """Rank 3's handshake with rank 1; the connection."""
    s = socket.create_connection(place)
    s.settimeout(HANG_S)
    hello = HELLO.pack(MAGIC, 0, 3, 1, 0, secrets.token_bytes(16))
    s.sendall(hello[:5])
    s.sendall(hello[5:])
    answer = b""
    while len(answer) < 16 + PROOF and (part := s.recv(16 + PROOF - len(answer))):
        answer += part
    s.sendall(proof(key, b"caller", hello, answer[:16]))
    return s


def test_four_hundred_strangers_keep_no_rank_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be heard for an hour each."""
    monkeypatch.setattr(module, "HEARD_S", 3600.0)
    with socket.create_server(("127.0.0.1", 0), backlog=512) as door:
        place = door.getsockname()
        strangers = [socket.create_connection(place) for _ in range(400)]
        for at, stranger in enumerate(strangers):
            stranger.sendall((b"", b"LTM1", secrets.token_bytes(HELLO.size))[at % 3])
        callers, made = Callers((door,), 0, 1, KEY), list[socket.socket]()
        threads = [threading.Thread(target=lambda key=key: made.append(call(place, key))) for key in (b"x" * 32, KEY)]
        for thread in threads:
            thread.start()
        lines: list[tuple[tuple[int, int], socket.socket]] = []
        deadline = time.monotonic() + HANG_S
        while not lines and time.monotonic() < deadline:
            lines += list(callers.accept({LINE}, 1.0))
        for thread in threads:
            thread.join()
        assert [line for line, _ in lines] == [LINE]
        callers.close()
        for s in (*strangers, *made, *(s for _, s in lines)):
            s.close()


@pytest.mark.parametrize(("uid", "taken"), [(os.geteuid(), True), (0, True), (4711, False)])
def test_another_user_is_refused_at_a_socket_without_a_file(uid: int, taken: bool) -> None:
    class Peer(socket.socket):
        def getsockopt(self, *option: object) -> bytes:  # type: ignore[override]
            assert option[:2] == (socket.SOL_SOCKET, socket.SO_PEERCRED)
            return struct.pack("3i", 1, uid, uid)

    with Peer(socket.AF_UNIX) as near:
        assert same_user(near) == taken
    with socket.socket() as tcp:
        assert same_user(tcp)
