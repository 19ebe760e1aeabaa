"""The channel on which rank 0 tells the others what the next step is: frames of bytes, in order, on sockets of their
own so that no all-reduce stands behind one. Knows nothing of what the bytes mean.
"""

from __future__ import annotations

import socket
import struct
import time

from .collectives import CommunicationError
from .lines import Lines

FRAME_LIMIT = 64 << 20
_LENGTH = struct.Struct("<I")


class PlanChannel:
    """`sockets[r]`: the non-blocking socket to the group's r-th rank (rank 0: to all others; others: to rank 0). Owns
    them. One thread sends or receives; `close` may come from any."""

    def __init__(self, rank: int, sockets: tuple[socket.socket | None, ...]) -> None:
        self._rank = rank
        self._peers = tuple(r for r, s in enumerate(sockets) if s is not None)
        gone = (lambda r: f"the group's rank {r} is gone") if not rank else lambda r: "rank 0 is gone"
        self._lines = Lines({r: s for r, s in enumerate(sockets) if s is not None}, gone, "plan")
        self._received = 0
        self.close = self._lines.close

    def send(self, frame: bytes) -> None:
        """Rank 0: sends a frame to every other rank and returns at once; what a socket does not take now goes on in
        the background. Raises PeerLost if a rank is gone, ValueError above FRAME_LIMIT."""
        if self._rank:
            raise ValueError(f"rank {self._rank} cannot send plans: only rank 0 does, the others receive")
        if len(frame) > FRAME_LIMIT:
            raise ValueError(f"a plan of {len(frame)} bytes: at most {FRAME_LIMIT} go into one frame")
        head = _LENGTH.pack(len(frame))
        for peer in self._peers:
            self._lines.send(peer, head, frame)

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The others: the next frame; sleeps until it is there. Raises PeerLost when rank 0 is gone,
        CollectiveTimeout after timeout_s (None: waits for ever), CommunicationError once closed."""
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
