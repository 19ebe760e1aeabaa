"""Who reads what where several nodes load from one filesystem: rows that more than one node wants are divided, every
node reads its share, and sends the others what they want of it. Pure.

Ranks send to the ranks of the same place on other nodes (a rail) alone: within a node the page cache does it. Every
rank works out the plans of all, and comes to the same division without a word. models/weights_exchange.py obeys it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from math import prod

from .checkpoint import DTYPES, Stored
from .shard import Shard
from .weights_plan import Fill, plan_fills, scale_of

ROUND_BYTES = 4 << 20
"""What a rank sends at once, to all others together."""

_Key = tuple[int, str, int, str, int, int]
"""Place on the node, parameter, its row, tensor, its row, rows: what the holders of the same rows have in common."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A group's `nodes` x `per_node` ranks, node after node, as topology's GroupLayout counts them."""

    nodes: int
    per_node: int

    def node(self, rank: int) -> int:
        return rank // self.per_node

    def ranks(self, node: int) -> range:
        return range(node * self.per_node, (node + 1) * self.per_node)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows [first, first + count) of a fill: `node` reads them in this round, and wants `columns` from `column` on
    (None: all) of those that others read."""

    node: int
    first: int
    count: int
    column: int
    columns: int | None


@dataclass(frozen=True, slots=True)
class Round:
    """One exchange of one fill. This rank reads the rows of `mine`, for itself and for `others`, and gets its own
    columns of the rows that those read."""

    fill: Fill
    mine: Part
    others: tuple[Part, ...]

    def piece(self, part: Part) -> Fill:
        """The rows of a part, in this rank's columns and parameter."""
        f = self.fill
        return Fill(
            f.parameter, f.row + part.first, part.count, f.tensor, f.source_row + part.first, f.source_col, f.columns
        )

    @property
    def parameter(self) -> str:
        return self.fill.parameter

    @property
    def tensor(self) -> str | None:
        return self.fill.tensor

    @property
    def count(self) -> int:
        """Rows of the parameter that are there once the round is over."""
        return self.mine.count + sum(part.count for part in self.others)


@dataclass(frozen=True, slots=True)
class Sharing:
    """What dividing a fill means for a node: bytes that it need not read, bytes that it is sent instead, messages one
    behind the other. `columns`: each holder wants columns of its own."""

    spared: float
    received: float
    messages: int
    columns: bool


@dataclass(frozen=True, slots=True)
class Division:
    """What a group reads once. `plans[r]`: rank r's fills; `divided`: those that several nodes hold and that are read
    in shares, by rank."""

    spread: Spread
    plans: tuple[tuple[Fill, ...], ...]
    divided: Mapping[_Key, Mapping[int, Fill]]

    def holders(self, fill: Fill, rank: int) -> Mapping[int, Fill] | None:
        """Among whom a fill of this rank is divided: ranks, ascending, with their own fills. None: it is not."""
        return self.divided.get(_key(fill, rank, self.spread))

    def rounds(self, fill: Fill, rank: int, tensors: Mapping[str, Stored]) -> Iterator[Round]:
        """Of a divided fill; every holder has as many, and in each of them the same parts."""
        held = self.divided[_key(fill, rank, self.spread)]
        step = _step(fill, len(held), tensors)
        shares = {holder: share(fill.count, i, len(held)) for i, holder in enumerate(held)}
        for at in range(0, max(end - begin for begin, end in shares.values()), step):
            parts = {}
            for holder, other in held.items():
                first, end = shares[holder][0] + at, shares[holder][1]
                count = max(0, min(step, end - first))
                parts[holder] = Part(self.spread.node(holder), first, count, other.source_col, other.columns)
            yield Round(fill, parts[rank], tuple(part for holder, part in parts.items() if holder != rank))

    def reads(self, node: int, tensors: Mapping[str, Stored]) -> list[tuple[str, int, int]]:
        """What a node's ranks read: file name and bytes [begin, end), in whole rows, as storage gives them."""
        found: set[tuple[str, int, int]] = set()
        for rank in self.spread.ranks(node):
            for fill in self.plans[rank]:
                if fill.tensor is None:
                    continue
                stored, scale = tensors[fill.tensor], tensors.get(scale_of(fill.tensor))
                if fill.parameter.endswith("_scale"):
                    found.add((stored.file.name, stored.begin, stored.end))
                    continue
                if stored.dtype == "F8_E4M3" and scale is not None:
                    found.add((scale.file.name, scale.begin, scale.end))
                held = self.holders(fill, rank)
                first, end = (0, fill.count) if held is None else share(fill.count, list(held).index(rank), len(held))
                begin, width = stored.begin, _width(stored)
                found.add(
                    (
                        stored.file.name,
                        begin + (fill.source_row + first) * width,
                        begin + (fill.source_row + end) * width,
                    )
                )
        return sorted(found)


def share(count: int, part: int, parts: int) -> tuple[int, int]:
    """The part-th of `parts` runs of `count` rows that differ by one row at most."""
    return count * part // parts, count * (part + 1) // parts


def divide(
    shard: Shard,
    spread: Spread,
    tensors: Mapping[str, Stored],
    pays: Callable[[Sharing], bool],
    replicate_embedding: bool = False,
    kept: Set[str] = frozenset(),
) -> Division:
    """The division that every rank of the group comes to; `pays` must be the same function of its argument on all."""
    plans = tuple(
        tuple(plan_fills(Shard(shard.config, shard.size, rank), replicate_embedding, kept))
        for rank in range(shard.size)
    )
    held: dict[_Key, dict[int, Fill]] = defaultdict(dict)
    beside: dict[tuple[str, int, int], Counter[int]] = defaultdict(Counter)
    for rank, fills in enumerate(plans):
        for fill in fills:
            # A scale is small, and whoever widens rows needs it whole.
            if fill.tensor is not None and not fill.parameter.endswith("_scale"):
                held[_key(fill, rank, spread)][rank] = fill
                beside[fill.tensor, fill.source_row, fill.count][spread.node(rank)] += 1
    divided = {}
    for key, holders in held.items():
        fill = next(iter(holders.values()))
        if len(holders) > 1 and fill.tensor is not None:
            wanting = max(beside[fill.tensor, fill.source_row, fill.count].values())
            if pays(_sharing(fill, len(holders), wanting, tensors)):
                divided[key] = holders
    return Division(spread, plans, divided)


def _sharing(fill: Fill, holders: int, wanting: int, tensors: Mapping[str, Stored]) -> Sharing:
    """`wanting`: ranks of a node that want (columns of) these rows, each from its own rail."""
    assert fill.tensor is not None
    stored, theirs = tensors[fill.tensor], 1.0 - 1.0 / holders
    longest = -(-fill.count // holders)
    return Sharing(
        spared=fill.count * _width(stored) * theirs,
        received=fill.count * _strip(fill, stored) * theirs * wanting,
        messages=-(-longest // _step(fill, holders, tensors)),
        columns=fill.columns is not None,
    )


def _key(fill: Fill, rank: int, spread: Spread) -> _Key:
    return rank % spread.per_node, fill.parameter, fill.row, fill.tensor or "", fill.source_row, fill.count


def _step(fill: Fill, holders: int, tensors: Mapping[str, Stored]) -> int:
    """Rows that a holder reads in a round."""
    assert fill.tensor is not None
    return max(1, ROUND_BYTES // max(1, _strip(fill, tensors[fill.tensor]) * (holders - 1)))


def _width(stored: Stored) -> int:
    """Bytes of a row."""
    return DTYPES[stored.dtype].itemsize * prod(stored.shape[1:])


def _strip(fill: Fill, stored: Stored) -> int:
    """Bytes of a row in a fill's columns."""
    return _width(stored) if fill.columns is None else DTYPES[stored.dtype].itemsize * fill.columns


def blocks_of(division: Division, rank: int, tensors: Mapping[str, Stored]) -> Callable[[str, int, int], list[int]]:
    """Which blocks of a file, given its name, how many it has and their size, this rank verifies: every node those that
    its ranks read a byte of, and the first node also those that nobody reads; a node's ranks in turn."""
    me = division.spread.node(rank)
    reads = [division.reads(node, tensors) for node in range(division.spread.nodes)]

    def of(name: str, count: int, block: int) -> list[int]:
        touched = [{i for _, begin, end in _in(name, spans) for i in _blocks(begin, end, block)} for spans in reads]
        mine = touched[me]
        if me == 0:
            mine |= set(range(count)).difference(*touched)
        return sorted(mine)[rank % division.spread.per_node :: division.spread.per_node]

    return of


def _in(name: str, spans: list[tuple[str, int, int]]) -> Iterator[tuple[str, int, int]]:
    return (span for span in spans if span[0] == name)


def _blocks(begin: int, end: int, block: int) -> range:
    return range(begin // block, -(-end // block)) if end > begin else range(0)
