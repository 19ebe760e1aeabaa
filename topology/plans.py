"""The channel on which rank 0 tells the others what the next step is: frames of bytes, in order, on sockets of their
own so that no all-reduce stands behind one. Knows nothing of what the bytes mean.
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

from .collectives import CollectiveTimeout, CommunicationError, PeerLost

FRAME_LIMIT = 64 << 20
_LENGTH = struct.Struct("<I")


class PlanChannel:
    """`sockets[r]`: the non-blocking socket to the group's r-th rank (rank 0: to all others; others: to rank 0). Owns
    them. One thread sends or receives; `close` may come from any."""

    def __init__(self, rank: int, sockets: tuple[socket.socket | None, ...]) -> None:
        self._rank = rank
        self._peers = {r: s for r, s in enumerate(sockets) if s is not None}
        self._unsent: dict[int, deque[memoryview]] = {r: deque() for r in self._peers}
        self._lock = threading.Lock()
        self._lost: int | None = None
        self._closing = False
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._flusher: threading.Thread | None = None
        self._received = 0

    def send(self, frame: bytes) -> None:
        """Rank 0: sends a frame to every other rank and returns at once; what a socket does not take now goes on in
        the background. Raises PeerLost if a rank is gone, ValueError above FRAME_LIMIT."""
        if self._rank:
            raise ValueError(f"rank {self._rank} cannot send plans: only rank 0 does, the others receive")
        if len(frame) > FRAME_LIMIT:
            raise ValueError(f"a plan of {len(frame)} bytes: at most {FRAME_LIMIT} go into one frame")
        head = _LENGTH.pack(len(frame))
        backlog = False
        with self._lock:
            self._check()
            for rank, peer in self._peers.items():
                queue = self._unsent[rank]
                gone = 0
                if not queue:
                    try:
                        gone = peer.sendmsg([head, frame], [], socket.MSG_NOSIGNAL)
                    except BlockingIOError:
                        pass
                    except OSError:
                        self._lost = rank
                        self._check()
                if gone < len(head) + len(frame):
                    queue.append(memoryview(head + frame)[gone:])
                    backlog = True
            if backlog and self._flusher is None:
                self._flusher = threading.Thread(target=self._flush, name="laddertron-plans", daemon=True)
                self._flusher.start()
        if backlog:
            os.eventfd_write(self._bell, 1)

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The others: the next frame; sleeps until it is there. Raises PeerLost when rank 0 is gone,
        CollectiveTimeout after timeout_s (None: waits for ever), CommunicationError once closed."""
        if not self._rank:
            raise ValueError("rank 0 sends plans, it does not receive them")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        length = _LENGTH.unpack(self._take(_LENGTH.size, deadline))[0]
        if length > FRAME_LIMIT:
            raise CommunicationError(f"rank 0 announced a plan of {length} bytes, at most {FRAME_LIMIT} are allowed")
        frame = self._take(length, deadline)
        self._received += 1
        return bytes(frame)

    def close(self) -> None:
        """Sends what is left for at most a second, then ends; a `receive` of another thread raises. Idempotent."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._bell, 1)
        if self._flusher is not None:
            self._flusher.join()
        with self._lock:
            for peer in self._peers.values():
                with contextlib.suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)
                peer.close()
        os.close(self._bell)

    def _check(self) -> None:
        if self._closing:
            raise CommunicationError("the plan channel is closed")
        if self._lost is not None:
            raise PeerLost(f"plan channel: the group's rank {self._lost} is gone", self._lost, -1)

    def _take(self, count: int, deadline: float | None) -> bytearray:
        peer = self._peers[0]
        got = bytearray(count)
        view, at = memoryview(got), 0
        poll = select.poll()
        while at < count:
            try:
                n = peer.recv_into(view[at:])
            except BlockingIOError:
                self._check()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise CollectiveTimeout(f"plan {self._received}: nothing from rank 0", 0, self._received) from None
                poll.register(peer, select.POLLIN)
                poll.register(self._bell, select.POLLIN)
                poll.poll(None if left is None else left * 1e3)
                continue
            except OSError:
                n = 0
            if not n:
                self._check()
                raise PeerLost(f"plan {self._received}: rank 0 is gone (its connection ended)", 0, self._received)
            at += n
        return got

    def _flush(self) -> None:
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        watched: set[int] = set()
        by_fd = {s.fileno(): r for r, s in self._peers.items()}
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
                wanted = {fd for fd, rank in by_fd.items() if self._unsent[rank]}
            for fd in wanted - watched:
                poll.register(fd, select.POLLOUT)
            for fd in watched - wanted:
                poll.unregister(fd)
            watched = wanted

    def _push(self, rank: int) -> None:
        with self._lock:
            queue = self._unsent[rank]
            try:
                while queue:
                    n = self._peers[rank].send(queue[0], socket.MSG_NOSIGNAL)
                    queue[0] = queue[0][n:]
                    if not queue[0]:
                        queue.popleft()
            except BlockingIOError:
                pass
            except OSError:
                self._lost = rank
                for q in self._unsent.values():
                    q.clear()
