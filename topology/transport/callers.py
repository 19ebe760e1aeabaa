"""Hears all who connect to a rank's sockets at once, so that silent strangers keep no rank of the group out."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterator

HELLO = struct.Struct("<4sIIII16s")  # magic, group's first rank, from, to, channel, nonce
MAGIC = b"LTM1"
PROOF = 32
HEARD_S = 10.0
"""Seconds for a caller's handshake."""
CALLERS = 1024
"""Callers that are heard at once: a further one replaces the oldest, which is most likely silent on purpose."""
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid


def proof(key: bytes, role: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, role + hello + nonce, "sha256")


def same_user(s: socket.socket) -> bool:
    """Whether this user or root connected to a unix socket; anybody may connect to one without a file."""
    if s.family != socket.AF_UNIX:
        return True
    _, uid, _ = _PEER.unpack(s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return uid in (os.geteuid(), 0)


class _Caller:
    def __init__(self, s: socket.socket) -> None:
        self.socket, self.until, self.data = s, time.monotonic() + HEARD_S, bytearray()
        self.nonce = secrets.token_bytes(16)


class Callers:
    """The callers of rank `me` (its place in the group whose first rank is `first`) at the listening `doors`."""

    def __init__(self, doors: tuple[socket.socket, ...], first: int, me: int, key: bytes) -> None:
        self._doors, self._first, self._me, self._key = doors, first, me, key
        self._callers: dict[socket.socket, _Caller] = {}
        self._selector = selectors.DefaultSelector()
        for door in doors:
            door.setblocking(False)
            self._selector.register(door, selectors.EVENT_READ)

    def accept(self, lines: set[tuple[int, int]], timeout_s: float) -> Iterator[tuple[tuple[int, int], socket.socket]]:
        """Waits up to `timeout_s` for events; yields (peer, channel) of `lines` and the socket that proved it."""
        soonest = min((one.until for one in self._callers.values()), default=time.monotonic() + timeout_s)
        for ready, _ in self._selector.select(max(0.0, min(timeout_s, soonest - time.monotonic()))):
            s = ready.fileobj
            assert isinstance(s, socket.socket)
            if s in self._doors:
                self._take_in(s)
            elif (caller := self._callers.get(s)) is not None and (line := self._hear(caller, lines)) is not None:
                self._forget(s)
                s.setblocking(True)
                yield line, s
        for caller in [one for one in self._callers.values() if one.until <= time.monotonic()]:
            self._dismiss(caller.socket)

    def close(self) -> None:
        for s in list(self._callers):
            self._dismiss(s)
        self._selector.close()

    def _take_in(self, door: socket.socket) -> None:
        with contextlib.suppress(OSError):  # none is left, or the caller has gone
            while True:
                s, _ = door.accept()
                if not same_user(s):
                    s.close()
                    continue
                s.setblocking(False)
                if len(self._callers) >= CALLERS:
                    self._dismiss(next(iter(self._callers)))
                self._callers[s] = _Caller(s)
                self._selector.register(s, selectors.EVENT_READ)

    def _hear(self, caller: _Caller, lines: set[tuple[int, int]]) -> tuple[int, int] | None:
        """Reads what has come; the line once the caller has proved that it knows the key."""
        goal = HELLO.size if len(caller.data) < HELLO.size else HELLO.size + PROOF
        try:
            part = caller.socket.recv(goal - len(caller.data))
            caller.data += part
            if part and len(caller.data) < goal:
                return None
            hello = bytes(caller.data[: HELLO.size])
            magic, group, peer, to, channel, _ = HELLO.unpack(hello)
            if (magic, group, to, (peer, channel) in lines) == (MAGIC, self._first, self._me, True) and part:
                if goal == HELLO.size:
                    caller.socket.send(caller.nonce + proof(self._key, b"answer", hello, caller.nonce))
                    return None
                expected = proof(self._key, b"caller", hello, caller.nonce)
                if hmac.compare_digest(bytes(caller.data[HELLO.size :]), expected):
                    return peer, channel
        except BlockingIOError:
            return None
        except (OSError, struct.error):
            pass
        self._dismiss(caller.socket)
        return None

    def _forget(self, s: socket.socket) -> None:
        self._selector.unregister(s)
        del self._callers[s]

    def _dismiss(self, s: socket.socket) -> None:
        self._forget(s)
        s.close()
