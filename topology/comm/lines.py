"""Sockets to a few peers: ordered frames of bytes, non-blocking sends (a background thread sends what the socket does
not take at once), blocking receives.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from .collectives import CollectiveTimeout, CommunicationError, PeerLost

_STAMPS, _RX_SOFTWARE, _TIMES = 37, 1 << 3 | 1 << 4, struct.Struct("<6q")  # SO_TIMESTAMPING and its flags


class Lines:
    """`sockets[n]`: the non-blocking socket of line n, owned by this object. `gone(n)`: the message for a lost peer.
    One thread sends and receives; any thread may call `close`."""

    def __init__(self, sockets: Mapping[int, socket.socket], gone: Callable[[int], str], name: str) -> None:
        self._sockets, self._gone, self._name = dict(sockets), gone, name
        self._unsent: dict[int, deque[memoryview]] = {n: deque() for n in sockets}
        self._lock = threading.Lock()
        self._lost: int | None = None
        self._closing = False
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._flusher: threading.Thread | None = None

    @property
    def leave_the_host(self) -> bool:
        """Whether a peer is on another host."""
        return any(s.family != socket.AF_UNIX for s in self._sockets.values())

    def send(self, line: int, *parts: bytes | memoryview) -> None:
        """Sends all parts in order and returns at once; their memory is read until it is sent. Raises PeerLost."""
        with self._lock:
            self._check()
            queue, left = self._unsent[line], [memoryview(part) for part in parts]
            if not queue:
                left = self._sent_now(line, left)
            if not left:
                return
            queue.extend(left)
            if self._flusher is None:
                self._flusher = threading.Thread(target=self._flush, name=f"laddertron-{self._name}", daemon=True)
                self._flusher.start()
            os.eventfd_write(self._bell, 1)  # under the lock: after `close` the number may be another file's

    def _sent_now(self, line: int, left: list[memoryview]) -> list[memoryview]:
        try:
            gone = self._sockets[line].sendmsg(left, [], socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return left
        except OSError:
            self._lost = line
            self._check()
        while left and gone >= len(left[0]):
            gone -= len(left.pop(0))
        return [left[0][gone:], *left[1:]] if left else []

    def receive(self, line: int, into: memoryview, deadline: float | None, what: str) -> float:
        """Waits until `into` is filled. Returns the time (monotonic seconds) at which the kernel received the last
        byte, or now if the kernel does not report it. deadline: monotonic seconds. Raises PeerLost, CollectiveTimeout
        after the deadline (with `what` in the message), CommunicationError once closed."""
        peer, at, heard = self._sockets[line], 0, time.monotonic()
        while at < len(into):
            try:
                n, stamps, _, _ = peer.recvmsg_into([into[at:]], 128)
            except BlockingIOError:
                self._sleep(line, deadline, what)
                continue
            except OSError:
                n, stamps = 0, []
            if not n:
                self._check()
                raise PeerLost(f"{what}: {self._gone(line)}", line, -1)
            at += n
            heard = _heard(stamps)
        return heard

    def ready(self, line: int) -> bool:
        """Whether a read would not block: data is available, or the peer closed the connection."""
        poll = select.poll()
        poll.register(self._sockets[line], select.POLLIN)
        return bool(poll.poll(0))

    def _sleep(self, line: int, deadline: float | None, what: str) -> None:
        self._check()
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise CollectiveTimeout(f"{what} did not come in time", line, -1)
        poll = select.poll()
        poll.register(self._sockets[line], select.POLLIN)
        poll.register(self._bell, select.POLLIN)
        poll.poll(None if left is None else left * 1e3)

    def close(self) -> None:
        """Sends the rest for at most a second, then closes; a `receive` in another thread raises. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            os.eventfd_write(self._bell, 1)
        if self._flusher is not None:
            self._flusher.join()
        with self._lock:
            for peer in self._sockets.values():
                with contextlib.suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)
                peer.close()
        os.close(self._bell)

    def _check(self) -> None:
        if self._closing:
            raise CommunicationError(f"the {self._name} channel is closed")
        if self._lost is not None:
            raise PeerLost(f"{self._name} channel: {self._gone(self._lost)}", self._lost, -1)

    def _flush(self) -> None:
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        watched: set[int] = set()
        by_fd = {s.fileno(): n for n, s in self._sockets.items()}
        until: float | None = None
        while True:
            if self._closing and until is None:
                until = time.monotonic() + 1.0
            if until is not None and (time.monotonic() > until or not any(self._unsent.values())):
                return
            for fd, event in poll.poll(50 if until is not None else None):
                if fd == self._bell:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._bell)
                elif event:
                    self._push(by_fd[fd])
            with self._lock:
                writable = {fd for fd, line in by_fd.items() if self._unsent[line]}
            for fd in writable - watched:
                poll.register(fd, select.POLLOUT)
            for fd in watched - writable:
                poll.unregister(fd)
            watched = writable

    def _push(self, line: int) -> None:
        with self._lock:
            queue = self._unsent[line]
            try:
                while queue:
                    n = self._sockets[line].send(queue[0], socket.MSG_NOSIGNAL)
                    queue[0] = queue[0][n:]
                    if not queue[0]:
                        queue.popleft()
            except BlockingIOError:
                pass
            except OSError:
                self._lost = line
                for q in self._unsent.values():
                    q.clear()


def stamped(line: socket.socket) -> None:
    """Enables the kernel's receive timestamps; a unix socket has none."""
    with contextlib.suppress(OSError):
        line.setsockopt(socket.SOL_SOCKET, _STAMPS, _RX_SOFTWARE)


def _heard(stamps: list[tuple[int, int, bytes]]) -> float:
    """Arrival time of received bytes from their timestamps, monotonic seconds; now if there are none."""
    for level, kind, data in stamps:
        if level == socket.SOL_SOCKET and kind == _STAMPS and len(data) >= _TIMES.size:
            seconds, nanoseconds, *_ = _TIMES.unpack_from(data)
            if seconds:
                # The kernel uses the wall clock, which may be set: use only the age of the stamp.
                age = (time.time_ns() - int(seconds) * 10**9 - int(nanoseconds)) * 1e-9
                return time.monotonic() - max(0.0, age)
    return time.monotonic()


FRAME_LIMIT = 64 << 20
_LENGTH = struct.Struct("<I")


class PlanChannel:
    """Sends plans from rank 0 to the others. `sockets[r]`: the non-blocking socket to the r-th rank (rank 0 has all
    others, the others have rank 0), owned by this object. One thread sends or receives; any thread may call `close`."""

    def __init__(self, rank: int, sockets: tuple[socket.socket | None, ...]) -> None:
        self._rank = rank
        self._peers = tuple(r for r, s in enumerate(sockets) if s is not None)
        gone = (lambda r: f"the group's rank {r} is gone") if not rank else lambda r: "rank 0 is gone"
        self._lines = Lines({r: s for r, s in enumerate(sockets) if s is not None}, gone, "plan")
        self._received = 0
        self.close = self._lines.close

    def send(self, frame: bytes) -> None:
        """On rank 0: sends a frame to every other rank and returns at once; the rest is sent in the background. Raises
        PeerLost if a rank is gone, ValueError above FRAME_LIMIT."""
        if self._rank:
            raise ValueError(f"rank {self._rank} cannot send plans: only rank 0 does, the others receive")
        if len(frame) > FRAME_LIMIT:
            raise ValueError(f"a plan of {len(frame)} bytes: at most {FRAME_LIMIT} go into one frame")
        head = _LENGTH.pack(len(frame))
        for peer in self._peers:
            self._lines.send(peer, head, frame)

    def receive(self, timeout_s: float | None = None) -> bytes:
        """On the other ranks: waits for the next frame. Raises PeerLost if rank 0 is gone, CollectiveTimeout after
        timeout_s (None: no limit), CommunicationError once closed."""
        if not self._rank:
            raise ValueError("rank 0 sends plans, it does not receive them")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        what, head = f"plan {self._received}", bytearray(_LENGTH.size)
        self._lines.receive(0, memoryview(head), deadline, what)
        length = _LENGTH.unpack(head)[0]
        if length > FRAME_LIMIT:
            raise CommunicationError(f"rank 0 announced a plan of {length} bytes, at most {FRAME_LIMIT} are allowed")
        frame = bytearray(length)
        self._lines.receive(0, memoryview(frame), deadline, what)
        self._received += 1
        return bytes(frame)
