"""A rank's transfers between pipeline stages over sockets: hidden rows to the same rank of the next stage (`Boundary`),
sampled ids back to the first stage, and the minimum of a number over all stages. nccl_boundary.py transfers rows on
GPUs. Each rank sends its share of a message and the receiving group gathers, so each byte crosses nodes once.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .collectives import Boundary, Gather, Later, Pending, RanksDisagree
from .ledger import Ledger
from .lines import Lines

NEXT, PREVIOUS, RING = range(3)
"""The connections of a rank: to its peers in the next and previous stages, and between the last and first stages."""
_HEAD = struct.Struct("<4sIQQq")  # magic, dtype, number, bytes of the whole, wall clock at sending [ns]
_MAGIC = b"LTS1"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LENGTH = struct.Struct("<I")


class Pipeline:
    """Stage `stage` of `stages`; `peers[line]` are global ranks. For one thread; `close` may be called from any."""

    def __init__(self, stage: int, stages: int, peers: Sequence[int], lines: Lines, ledger: Ledger) -> None:
        self.stage, self.stages = stage, stages
        self.boundary: Boundary
        self.lines, self._ledger, self.peers = lines, ledger, peers
        self.timeout_s = 60.0
        self.close = lines.close

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    def set_timeout(self, seconds: float) -> None:
        """Sets the timeout of receives from a step's timeout: a message may arrive after the steps of all stages."""
        self.timeout_s = seconds * 2 * self.stages

    def send_back(self, payload: bytes, line: int = RING) -> None:
        """Sends a payload from the last stage to this rank's peer in the first."""
        self.lines.send(line, _LENGTH.pack(len(payload)) + payload)

    def arrived(self) -> bool:
        """On the first stage: true if `receive_back` can read without blocking."""
        return self.lines.ready(RING)

    def receive_back(self, line: int = RING) -> bytes:
        """Receives the next payload from the last stage. Raises like `take`."""
        head, what = bytearray(_LENGTH.size), "what the last stage drew" if line == RING else "what it found"
        self.take(line, memoryview(head), what)
        body = bytearray(_LENGTH.unpack(head)[0])
        self.take(line, memoryview(body), what)
        return bytes(body)

    def collect(self, payload: bytes) -> list[bytes]:
        """Gathers every stage's payload on the first stage; returns [] on the others. Every rank calls it, between
        steps."""
        if self.first:
            return [payload, *(self.receive_back() for _ in range(self.stages - 1))]
        for earlier in (*(self.receive_back(PREVIOUS) for _ in range(self.stage - 1)), payload):
            self.send_back(earlier, RING if self.last else NEXT)
        return []

    def take(self, line: int, into: memoryview, what: str) -> float:
        """Lines.receive; meanwhile the ledger's `waiting` names `what`. Raises PeerLost or CollectiveTimeout, which
        name the stage."""
        stage = {NEXT: self.stage + 1, PREVIOUS: self.stage - 1}.get(line, self.stages - 1 if self.first else 0)
        name = f"{what} from stage {stage} (rank {self.peers[line]})"
        self._ledger.waiting = name
        heard = self.lines.receive(line, into, time.monotonic() + self.timeout_s, name)
        self._ledger.waiting = ""
        return heard

    def least(self, value: int) -> int:
        """The minimum of the stages' values over this rank's rail. Every rank calls it."""

        def take(line: int) -> int:
            data = bytearray(8)
            self.take(line, memoryview(data), "a number to agree on")
            return int.from_bytes(data, "little")

        def tell(line: int, number: int) -> None:
            self.lines.send(line, number.to_bytes(8, "little"))

        if self.first:
            tell(NEXT, value)
            value = take(RING)
        else:
            value = min(value, take(PREVIOUS))
            tell(RING if self.last else NEXT, value)
            value = take(PREVIOUS)
        if not self.last:
            tell(NEXT, value)
        return value


class SocketBoundary:
    """The Boundary of rank `index` in a group of `size`, for rows in host memory; `gathers`: the group's."""

    def __init__(
        self, pipeline: Pipeline, lines: Lines, gathers: Gather, index: int, size: int, ledger: Ledger, link: str
    ) -> None:
        self._pipeline, self.lines, self._gathers = pipeline, lines, gathers
        self._index, self._size, self._ledger, self._link = index, size, ledger, link
        self._sent = self._asked = self._received = 0
        self._due: dict[int, tuple[tuple[int, int], torch.dtype, bool]] = {}
        self._early: dict[int, Tensor] = {}

    def send(self, x: Tensor, own: bool = False) -> None:
        data = x.contiguous().view(-1).view(torch.uint8).numpy()
        first, end = self._share(len(data), own)
        head = _HEAD.pack(_MAGIC, _DTYPES.index(x.dtype), self._sent, len(data), time.time_ns())
        self._sent += 1
        self.lines.send(NEXT, head, data[first:end].data)

    def receive(self, shape: tuple[int, int], dtype: torch.dtype, count: int, own: bool = False) -> list[Pending]:
        first, self._asked = self._asked, self._asked + count
        numbers = range(first, self._asked)
        self._due |= dict.fromkeys(numbers, (shape, dtype, own))
        return [Later(partial(self.take, number)) for number in numbers]

    def _share(self, total: int, own: bool) -> tuple[int, int]:
        if own:
            return 0, total
        size = -(-total // self._size)
        return min(total, self._index * size), min(total, (self._index + 1) * size)

    def take(self, number: int) -> Tensor:
        """Receives message `number`; earlier messages that were not taken yet are kept."""
        while self._received <= number:
            self._early[self._received] = self._next(*self._due[self._received])
            del self._due[self._received]
            self._received += 1
        return self._early.pop(number)

    def _next(self, shape: tuple[int, int], dtype: torch.dtype, own: bool) -> Tensor:
        asked, head = time.monotonic(), bytearray(_HEAD.size)
        self._pipeline.take(PREVIOUS, memoryview(head), "hidden rows")
        magic, kind, number, total, sent_ns = _HEAD.unpack(head)
        expected = shape[0] * shape[1] * dtype.itemsize
        if (magic, kind, number, total) != (_MAGIC, _DTYPES.index(dtype), self._received, expected):
            raise RanksDisagree(
                f"hidden rows {self._received} of {expected} bytes, {dtype}, were due from the stage before, number "
                f"{number} of {total} bytes came: ranks run different programs",
                -1,
                self._received,
            )
        first, end = self._share(total, own)
        size = total if own else -(-total // self._size)
        share = np.empty(size, np.uint8)
        heard = self._pipeline.take(PREVIOUS, share.data[: end - first], "hidden rows")
        self._account(asked, sent_ns, heard, total)
        gathered: NDArray[np.uint8] = share
        if self._size > 1 and not own:
            gathered = self._gathers.start(share).wait().reshape(-1)
        return torch.from_numpy(gathered)[:total].view(dtype).view(shape)

    def _account(self, asked: float, sent_ns: int, heard: float, size: int) -> None:
        """Adds a message to the ledger: in flight from when the peer sent it (by the nodes' wall clocks) until this
        host's kernel had it. Waiting before it was sent counts as stage_wait, not as time on the link."""
        now = time.monotonic()
        sent = min(now, now - (time.time_ns() - sent_ns) * 1e-9)
        self._ledger.started += 1
        self._ledger.add("boundary", "send", self._link, size, sent, heard, max(asked, sent), now=now)
        if sent > asked:
            self._ledger.add("stage_wait", "idle", self._link, 0, asked, sent, asked, now=sent)
