"""How many bytes of a checkpoint more than one node reads, and whether sending them would be quicker. Pure; no torch.

Ranks of a node share its page cache, so a node reads a byte once whatever its ranks hold. Across nodes two things are
read again: rows that ranks of several nodes hold (norms; key/value heads beyond their number), and of column slices the
other nodes' columns, since storage gives whole rows. models/weights_shared.py divides what pays to be sent.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod

from .config import ModelConfig
from .shard import Shard
from .weights_plan import expected_shapes, plan_fills


@dataclass(frozen=True, slots=True)
class Reading:
    """Of one group's nodes together, in bytes: what they want, each byte once, and what is read again: `replicated` in
    `tensors` pieces, `columns` of other nodes."""

    wanted: int
    replicated: int
    tensors: int
    columns: int


def reading(
    config: ModelConfig, size: int, nodes: int, itemsize: int = 2, replicate_embedding: bool = False
) -> Reading:
    """`size` ranks on `nodes` nodes, equally many on each, neighbours together, each node for itself. Raises ValueError
    if they do not divide."""
    if nodes < 1 or size % nodes:
        raise ValueError(f"{size} ranks do not spread evenly over {nodes} nodes: use a divisor of {size}")
    rows: dict[str, list[set[tuple[int, int]]]] = defaultdict(lambda: [set() for _ in range(nodes)])
    sliced: set[str] = set()
    for rank in range(size):
        for fill in plan_fills(Shard(config, size, rank), replicate_embedding):
            if fill.tensor is not None:
                rows[fill.tensor][rank * nodes // size].add((fill.source_row, fill.source_row + fill.count))
                if fill.columns is not None:
                    sliced.add(fill.tensor)
    wanted = replicated = tensors = columns = 0
    for name, shape in expected_shapes(config).items():
        width = itemsize * prod(shape[1:])
        each = [_length(spans) for spans in rows[name]]
        once = _length({span for spans in rows[name] for span in spans})
        again = (sum(each) - once) * width
        wanted += once * width
        if name in sliced:
            columns += again
        elif again:
            replicated, tensors = replicated + again, tensors + 1
    return Reading(wanted, replicated, tensors, columns)


def _length(spans: set[tuple[int, int]]) -> int:
    """Of the union."""
    total = end = 0
    for first, last in sorted(spans):
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total


@dataclass(frozen=True, slots=True)
class Rates:
    """One node's: what storage gives it while all nodes read, what it takes in from the others, and how long a message
    of no length travels."""

    storage_bytes_per_s: float
    link_bytes_per_s: float
    latency_s: float

    def saved_s(self, spared: float, received: float, messages: int) -> float:
        """Seconds that a node saves (below 0: loses) by not reading `spared` bytes and being sent `received` of them,
        those that its ranks want, in `messages` one behind the other."""
        return spared / self.storage_bytes_per_s - received / self.link_bytes_per_s - messages * self.latency_s
