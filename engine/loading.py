"""Whether the nodes of a group read a checkpoint once between them, agreed over the group, and the load itself.

What storage and the links between the nodes give is not assumed but tried for a moment. Called by engine/build.py.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..models.llama import LlamaModel
from ..models.refusal import Refusal
from ..models.weights import Source
from ..models.weights_exchange import Exchange
from ..models.weights_load import Progress
from ..models.weights_once import Rates
from ..models.weights_shared import Sharing, Spread
from ..topology import filesystem
from ..topology.filesystem import SEEN_BYTES, Seen, why_not_shared
from ..topology.groups import Communicator
from ..topology.point_to_point import PointToPoint, across_nodes
from ..topology.sysfs import Sysfs
from .config_schema import Deployment

if TYPE_CHECKING:
    from numpy.typing import NDArray

TURNS = 3
"""How often each rank tries its link; the best counts."""
_Say = Callable[[str], None]


class SharingError(Refusal, ValueError):
    """`model.shared_filesystem: true` where the nodes do not see the same files."""


def load_weights(
    model: LlamaModel,
    source: Source,
    deployment: Deployment,
    communicator: Communicator,
    progress: Progress | None,
    say: _Say,
) -> None:
    """Fills the model and says what that took. All ranks of the group call it at once. Raises CheckpointError,
    SharingError or CommunicationError. Until they are all through, collectives wait as long as a load may take: a
    node's storage may be slow, and a rank that ends is noticed at once."""
    communicator.set_timeout(deployment.daemon.load_timeout)
    exchange = choose_exchange(source, deployment, communicator, say)
    per_node, began = communicator.layout.per_node, time.monotonic()
    # A node that reads for itself verifies all of it between its ranks.
    loaded = model.load(source, progress, (communicator.rank % per_node, per_node), exchange)
    took = time.monotonic() - began
    mine = np.array([loaded.read, loaded.sent, loaded.received], np.int64)
    read, sent, _ = (int(v) for v in _numbers(communicator, mine).sum(0))
    nodes = len(communicator.layout.nodes)
    if deployment.parallel.collective_timeout is not None:  # else Patience will, by measured steps
        communicator.set_timeout(deployment.parallel.collective_timeout)
    words = f"weights: {communicator.size} ranks on {nodes} node{'s' * (nodes > 1)} read {read / 1e9:.2f} GB"
    if exchange is not None:
        words += f" and sent one another {sent / 1e9:.2f} GB"
    say(f"{words} in {took:.1f} s")


def choose_exchange(source: Source, deployment: Deployment, communicator: Communicator, say: _Say) -> Exchange | None:
    """None where every node reads for itself: one node, per-rank files, files that are not shared, links slower than
    storage. All ranks call it at once."""
    layout, wanted = communicator.layout, deployment.model.shared_filesystem
    if len(layout.nodes) < 2 or wanted is False:
        return None
    own = source.sharded_over > 0
    files = {stored.file for stored in source.tensors.values()}
    seen = filesystem.look(files, Sysfs())
    digest = hashlib.blake2b(source.digest.encode(), digest_size=16).digest()
    told = seen.pack() + digest + bytes([own])
    every = [row.tobytes() for row in communicator.gather(np.frombuffer(told, np.uint8))]
    spread = Spread(len(layout.nodes), layout.per_node)
    link = across_nodes(communicator, deployment.daemon.load_timeout)
    if any(row[-1] for row in every) or link is None:
        return None
    differs = next((rank for rank, row in enumerate(every) if row[SEEN_BYTES:] != every[0][SEEN_BYTES:]), None)
    if wanted is True and differs is not None:
        raise SharingError(
            f"model.shared_filesystem=true, but rank {layout.ranks[differs]} sees other files in {source.folder} than "
            f"rank {layout.ranks[0]}: mount the same folder on every node, or use auto or false"
        )
    if wanted == "auto":
        why = why_not_shared([Seen.unpack(every[spread.ranks(node)[0]]) for node in range(spread.nodes)])
        if differs is not None:
            why = "the nodes have different files"
        if why is not None:
            say(f"weights: every node reads for itself: {why}")
            return None
    rates = measure(source, communicator, link, spread)
    say(
        f"weights: storage gives a node {_rate(rates.storage_bytes_per_s)}, the other nodes "
        f"{_rate(rates.link_bytes_per_s)}"
    )
    return Exchange(link, spread, decide(rates, always_columns=wanted is True))


def decide(rates: Rates, always_columns: bool) -> Callable[[Sharing], bool]:
    """What is read once: whatever comes sooner that way; columns always where they are to spare the storage."""

    def pays(sharing: Sharing) -> bool:
        if always_columns and sharing.columns:
            return True
        return rates.saved_s(sharing.spared, sharing.received, sharing.messages) > 0

    return pays


def measure(source: Source, communicator: Communicator, link: PointToPoint, spread: Spread) -> Rates:
    """The slowest node's rates while all do the same: each rank reads some MB that nobody may have read before, then
    sends some round its rail. Agreed on over the group."""
    size = trial_bytes(source)
    read = _read_rate(source, 2 * size)
    one = torch.empty(1, dtype=torch.uint8)
    buffers = torch.empty(2, size, dtype=torch.uint8)
    link.shift(buffers[0], buffers[1])
    latency = min(link.shift(one, one.clone()) for _ in range(TURNS))
    sent = size / max(min(link.shift(buffers[0], buffers[1]) for _ in range(TURNS)) - latency, 1e-6)
    every = _numbers(communicator, np.array([read, sent, -latency]))
    storage, links, slowest = (float(v) for v in every.min(0))
    return Rates(storage * spread.per_node, links * spread.per_node, -slowest)


def trial_bytes(source: Source) -> int:
    """What a rank sends in one trial of its link: a thousandth of the checkpoint, 64 KiB to 4 MiB."""
    return min(max(sum(t.end - t.begin for t in source.tensors.values()) // 1000, 64 << 10), 4 << 20)


def _read_rate(source: Source, size: int) -> float:
    """Bytes a second of one large read somewhere in the largest tensor: anywhere, or it would be in the page cache from
    the last start."""
    stored = max(source.tensors.values(), key=lambda t: t.end - t.begin)
    buffer = bytearray(min(size, stored.end - stored.begin))
    at = random.SystemRandom().randrange(stored.begin, stored.end - len(buffer) + 1)
    number = os.open(stored.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        began = time.perf_counter()
        count = os.preadv(number, [buffer], at)
        return max(count, 1) / max(time.perf_counter() - began, 1e-6)
    finally:
        os.close(number)


def _numbers(communicator: Communicator, mine: NDArray[Any]) -> NDArray[Any]:
    """[n] of every rank: [size, n]."""
    return np.ascontiguousarray(communicator.gather(mine.view(np.uint8))).view(mine.dtype)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2g} GB/s"
