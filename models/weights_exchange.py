"""Loads with other nodes: this rank reads its share of what several nodes want, and the ranks of its rail send one
another the rest, as the bytes are stored, round by round in one order.

While one round travels, the next ones are read by other threads. A rank that fails tells the ranks that wait for it
why, so that each of them ends with the same file and tensor. Called by models/weights_load.py.
"""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from types import TracebackType

import torch
from torch import Tensor

from ..topology.collectives import CommunicationError, RanksDisagree
from ..topology.point_to_point import PointToPoint, Transfer
from .checkpoint import DTYPES, CheckpointError, Stored
from .readers import Reader, copy_bits
from .refusal import Refusal
from .weights_fill import check_fits, widening
from .weights_plan import Fill
from .weights_shared import ROUND_BYTES, Division, Part, Round, Sharing, Spread

HEAD_BYTES = 2048
TELL_S = 10.0
"""How long a rank that fails waits for those who should hear of it."""
_HEADS, _BODIES = 1, 2
_HEAD = struct.Struct("<QBI")  # which round between these two ranks, what it is, bytes of text behind
_ROUND, _REFUSED, _FAILED = range(3)


@dataclass(frozen=True, slots=True)
class Exchange:
    """With whom this rank loads, and what pays to be read once. `pays` is the same function on every rank."""

    link: PointToPoint
    spread: Spread
    pays: Callable[[Sharing], bool]


class ToldError(CheckpointError):
    """Another rank cannot load; the message is its own."""


@dataclass(slots=True, eq=False)
class Leg:
    """A round on its way through a rank: read, sent, received, placed."""

    round: Round
    strips: list[Tensor] = field(default_factory=list)
    into: list[Tensor] = field(default_factory=list)
    heads: list[Tensor] = field(default_factory=list)
    coming: list[tuple[Part, Transfer, Transfer | None]] = field(default_factory=list)
    going: list[Transfer] = field(default_factory=list)
    lent: list[Tensor] = field(default_factory=list)


class Swap:
    """One load's exchanges on one rank. A context manager: left with an error, it tells the others."""

    def __init__(
        self,
        exchange: Exchange,
        tensors: Mapping[str, Stored],
        division: Division,
        rank: int,
        parameters: Mapping[str, Tensor],
    ) -> None:
        self._link, self._tensors, self._division, self._rank = exchange.link, tensors, division, rank
        self._parameters = parameters
        self._next: Counter[int] = Counter()
        self._left: Counter[int] = Counter()
        self._free: list[Tensor] = []
        self._reader = Reader()
        self.sent = self.received = 0

    def __enter__(self) -> Swap:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._reader:
            if isinstance(error, Exception) and not isinstance(error, ToldError | CommunicationError):
                self._tell(error)

    @property
    def taken(self) -> int:
        return self._reader.taken

    def legs(self, fill: Fill) -> list[Leg] | None:
        """The rounds of a fill that is read in shares; None for one that is this rank's alone."""
        if self._division.holders(fill, self._rank) is None:
            return None
        legs = [Leg(round_) for round_ in self._division.rounds(fill, self._rank, self._tensors)]
        for leg in legs:
            self._left.update(part.node for part in leg.round.others)
        return legs

    def read(self, reader: Reader, leg: Leg) -> None:
        """This rank's rows of the round: its own columns into place, the others' into a buffer. Of any thread."""
        mine = leg.round.piece(leg.round.mine)
        if not mine.count:
            leg.strips = [torch.empty(0) for _ in leg.round.others]
            return
        stored, target = self._stored(leg), self._target(mine)
        check_fits(stored, mine, target)
        spans = [self._span(stored, part) for part in (leg.round.mine, *leg.round.others)]
        own, *theirs = reader.columns(stored, mine.source_row, mine.count, spans)
        sizes = [(mine.count, n) for _, n in spans[1:]]
        leg.strips = self._lend(leg, sizes, DTYPES[stored.dtype])
        for strip, source in zip(leg.strips, theirs, strict=True):
            copy_bits(strip, source)
        reader.put(own, target, widening(reader, self._tensors, mine, target))

    def exchanged(self, pieces: Iterator[Fill | Leg]) -> Iterator[Fill | Leg]:
        """Every piece once all of its rows are in place: those of this rank alone at once, a leg while the next one
        travels. Raises ToldError, PeerLost, CollectiveTimeout or RanksDisagree."""
        travelling: Leg | None = None
        for piece in pieces:
            if isinstance(piece, Leg):
                self._start(piece)
            if travelling is not None:
                self._finish(travelling)
                yield travelling
                travelling = None
            if isinstance(piece, Leg):
                travelling = piece
            else:
                yield piece
        if travelling is not None:
            self._finish(travelling)
            yield travelling

    def _start(self, leg: Leg) -> None:
        stored, link = self._stored(leg), self._link
        parts = leg.round.others
        columns = self._span(stored, leg.round.mine)[1]
        leg.into = self._lend(leg, [(part.count, columns) for part in parts], DTYPES[stored.dtype])
        for part, strip, into in zip(parts, leg.strips, leg.into, strict=True):
            head = torch.empty(HEAD_BYTES, dtype=torch.uint8)
            leg.heads.append(head)
            body = link.receive(part.node, _flat(into), _BODIES) if part.count else None
            leg.coming.append((part, link.receive(part.node, head, _HEADS), body))
            leg.heads.append(self._head(part.node, _ROUND, ""))
            leg.going.append(link.send(part.node, leg.heads[-1], _HEADS))
            self._next[part.node] += 1
            self._left[part.node] -= 1
            if leg.round.mine.count:
                leg.going.append(link.send(part.node, _flat(strip), _BODIES))
                self.sent += strip.nbytes

    def _finish(self, leg: Leg) -> None:
        for i, (part, head, _) in enumerate(leg.coming):
            head.wait()
            self._check(part.node, leg.heads[2 * i], leg.heads[2 * i + 1])
        for (part, _, body), into in zip(leg.coming, leg.into, strict=True):
            if body is None:
                continue
            body.wait()
            self.received += into.nbytes
            fill = leg.round.piece(part)
            target = self._target(fill)
            self._reader.put(into, target, widening(self._reader, self._tensors, fill, target))
        for transfer in leg.going:
            transfer.wait()
        self._free += leg.lent
        leg.strips, leg.into, leg.heads, leg.lent, leg.coming, leg.going = [], [], [], [], [], []

    def _check(self, peer: int, theirs: Tensor, ours: Tensor) -> None:
        """Raises what the peer says instead of its rows."""
        data, expected = bytes(theirs.numpy()), _HEAD.unpack_from(bytes(ours.numpy()))[0]
        number, kind, length = _HEAD.unpack_from(data)
        name = self._link.name(peer)
        if number != expected or kind not in (_ROUND, _REFUSED, _FAILED):
            raise RanksDisagree(f"{name} sends round {number} of the weights where {expected} is due", peer, number)
        text = data[_HEAD.size : _HEAD.size + length].decode(errors="replace")
        if kind == _REFUSED:
            raise ToldError(f"{name}: {text}")
        if kind == _FAILED:
            raise CommunicationError(f"{name} failed while it loaded weights: {text}")

    def _head(self, peer: int, kind: int, text: str) -> Tensor:
        said = text.encode()[: HEAD_BYTES - _HEAD.size]
        data = _HEAD.pack(self._next[peer], kind, len(said)) + said
        return torch.frombuffer(bytearray(data.ljust(HEAD_BYTES, b"\0")), dtype=torch.uint8)

    def _tell(self, error: Exception) -> None:
        """In place of the next round, to everyone who still waits for one."""
        kind, text = (_REFUSED, str(error)) if isinstance(error, Refusal) else (_FAILED, repr(error))
        until = time.monotonic() + TELL_S
        told: list[tuple[Tensor, Transfer]] = []
        for peer in [peer for peer, left in self._left.items() if left > 0]:
            head = self._head(peer, kind, text)
            try:
                told.append((head, self._link.send(peer, head, _HEADS)))
            except CommunicationError:
                continue  # it is gone itself
        for _, transfer in told:
            try:
                transfer.wait(until - time.monotonic())
            except CommunicationError:
                continue

    def _lend(self, leg: Leg, sizes: list[tuple[int, int]], dtype: torch.dtype) -> list[Tensor]:
        """Tensors [n, c] one behind the other in a buffer that comes back with the leg: fresh memory costs more than
        what is copied into it."""
        total = sum(prod(size) for size in sizes) * dtype.itemsize
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = torch.empty(0, dtype=torch.uint8)
        if buffer.numel() < total:
            buffer = torch.empty(max(total, ROUND_BYTES), dtype=torch.uint8)
        leg.lent.append(buffer)
        values, parts, at = buffer[:total].view(dtype), [], 0
        for size in sizes:
            parts.append(values[at : at + prod(size)].view(size))
            at += prod(size)
        return parts

    def _stored(self, leg: Leg) -> Stored:
        assert leg.round.fill.tensor is not None
        return self._tensors[leg.round.fill.tensor]

    def _target(self, fill: Fill) -> Tensor:
        return self._parameters[fill.parameter].detach()[fill.row : fill.row + fill.count]

    @staticmethod
    def _span(stored: Stored, part: Part) -> tuple[int, int]:
        return (part.column, part.columns) if part.columns is not None else (0, prod(stored.shape[1:]))


def _flat(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
