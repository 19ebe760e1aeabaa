"""Predicts an all-reduce: latency and bandwidth per link class -> seconds by strategy, size and layout. Linear: `terms`
counts calls, hops and bytes, each link class has a price for each. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, log2
from typing import Literal

from ..hardware.fabric import Fabric, LinkClass, counted
from ..link_cost import ONE_SHOT_BYTES, WHOLE_BYTES, LinkCost, in_two_shots
from ..placement.placement import Placement

Strategy = Literal["flat", "exchange", "doubling", "two_level", "one_shot", "pipeline", "p2p"]
"""flat: the backend's own; exchange: every rank sends to every other at once; doubling: recursive doubling between
nodes of one rank; two_level: reduce-scatter inside the node, all-reduce across (over NCCL and gloo by calls of theirs),
all-gather inside; one_shot: every GPU of a node reads the others' memory, whole messages or parts and then their sums,
and across nodes two_level with its two steps inside by that; pipeline: the fewest bytes, in chunks: reduce-scatter,
then all-gather, inside the node and between nodes alike; p2p: one message one way."""

Backend = Literal["nccl", "gloo", "native"]

_KERNEL_CALLS = 0.4
"""What a call of one_shot's kernel costs of a call of NCCL's: published one-shot all-reduces of 32 KiB over eight H100
take 8 to 10 us. Not measured here."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A group as the cost model sees it: `per_node` ranks on each of `nodes` nodes, the link class inside and between
    nodes (the slowest pair's), `rails` ports a node's ranks share, nominal bytes/s in one direction of one rank's link
    inside and of one port between (None: not known)."""

    nodes: int
    per_node: int
    intra: LinkClass = "shm"
    inter: LinkClass = "tcp"
    rails: int = 1
    intra_bytes_per_s: float | None = None
    inter_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.per_node < 1 or self.rails < 1:
            raise ValueError(f"nodes={self.nodes}, per_node={self.per_node}, rails={self.rails}: all must be 1 or more")

    @property
    def size(self) -> int:
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{counted(self.nodes, 'node')} x {counted(self.per_node, 'rank')}"


@dataclass(frozen=True, slots=True)
class Terms:
    """The parts of one all-reduce on one rank: dependent calls, message latencies in a row and bytes on the wire
    inside the node and between nodes."""

    calls: float
    intra_hops: float
    intra_bytes: float
    inter_hops: float
    inter_bytes: float


@dataclass(frozen=True, slots=True)
class Regime:
    """Prices under one wire protocol (low latency, or bulk), for messages of more than `above_bytes` and at most
    `up_to_bytes` (None: of any size). A link class of None was never priced."""

    overhead_s: float
    intra: LinkCost | None = None
    inter: LinkCost | None = None
    above_bytes: int = 0
    up_to_bytes: int | None = None

    def holds(self, nbytes: int) -> bool:
        return self.above_bytes < nbytes and (self.up_to_bytes is None or nbytes <= self.up_to_bytes)


@dataclass(frozen=True, slots=True)
class Costs:
    """Prices of one backend on one fabric. The library is assumed to use the cheapest regime that applies to a size;
    `strategies` has a strategy's own prices if one set does not fit all measurements."""

    backend: Backend
    regimes: tuple[Regime, ...]
    strategies: Mapping[str, tuple[Regime, ...]] = field(default_factory=dict)

    def of(self, strategy: Strategy) -> tuple[Regime, ...]:
        return self.strategies.get(strategy, self.regimes)


def possible(strategy: Strategy, shape: Shape) -> bool:
    """Whether the strategy exists on this layout: doubling needs 2, 4, 8, … nodes of one rank, two levels two, one_shot
    GPUs that read one another's memory."""
    if strategy == "doubling":
        return shape.nodes.bit_count() == 1 and shape.per_node == 1
    if strategy == "two_level":
        return shape.nodes > 1 and shape.per_node > 1
    if strategy == "one_shot":
        return shape.per_node > 1 and shape.intra == "nvlink"
    return True


def candidates(backend: Backend, shape: Shape, nbytes: int | None = None) -> tuple[Strategy, ...]:
    """The strategies that `backend` supports on this layout for messages of `nbytes` (None: of any size). NCCL and gloo
    choose among their own algorithms, of which NCCL's are hierarchical already. two_level is listed to be measured, and
    replaces them only for sizes at which a tuning file prefers it (`untuned`); one_shot also where it is cheaper."""
    if backend != "native":
        added: list[Strategy] = ["two_level"] if possible("two_level", shape) else []
        if backend == "nccl" and possible("one_shot", shape) and (nbytes is None or nbytes <= ONE_SHOT_BYTES):
            added.append("one_shot")
        return ("flat", *added)
    if nbytes is not None and nbytes > WHOLE_BYTES:
        return ("pipeline",)
    ours: tuple[Strategy, ...] = ("exchange", "two_level", "doubling", "pipeline")
    return tuple(s for s in ours if possible(s, shape))


def untuned(backend: Backend, shape: Shape, nbytes: int | None = None) -> tuple[Strategy, ...]:
    """The candidates for `collective: auto` without measurements: of a library its own, and one_shot."""
    listed = candidates(backend, shape, nbytes)
    return listed if backend == "native" else tuple(s for s in listed if s != "two_level")


def proven(backend: Backend, shape: Shape, nbytes: int | None = None) -> tuple[Strategy, ...]:
    """The strategies that predictions count on: `untuned` without one_shot, which never ran on a GPU."""
    return tuple(s for s in untuned(backend, shape, nbytes) if s != "one_shot")


def terms(backend: Backend, shape: Shape, strategy: Strategy, nbytes: int) -> Terms:
    """Calls, hops and bytes of an all-reduce of `nbytes`. Raises ValueError for an impossible strategy."""
    if not possible(strategy, shape):
        raise ValueError(f"{strategy} is not possible on {shape}")
    nodes, inside, size, volume = shape.nodes, shape.per_node, shape.size, float(nbytes)
    if size == 1:
        return Terms(0, 0, 0, 0, 0)
    share = max(1.0, inside / shape.rails)  # ranks of a node that send at once divide its ports
    if strategy == "p2p":
        return Terms(1, 0, 0, 1, volume) if nodes > 1 else Terms(1, 1, volume, 0, 0)
    if strategy == "flat":
        return _flat(backend, shape, volume)
    if strategy == "exchange":
        abroad = int(nodes > 1)
        return Terms(1, 1 - abroad, (inside - 1) * volume, abroad, (size - inside) * volume * share)
    if strategy == "doubling":
        rounds = int(log2(nodes))
        return Terms(1, 0, 0, rounds, rounds * volume)
    if strategy == "pipeline":
        hops, around = 2 * int(inside > 1), 2 * (inside - 1) / inside * volume
        # handed to the communication thread and back; two nodes exchange slices whole: as many bytes, one hop less
        return Terms(3, hops, around, min(2, nodes - 1), 2 * (nodes - 1) / nodes * volume / inside * share)
    part = volume / inside
    if strategy == "one_shot":  # a flag and the data after it; across nodes twice, before and after NCCL's all-reduce
        if nodes == 1 and in_two_shots(nbytes, inside):
            return Terms(2 * _KERNEL_CALLS, 4, 2 * (inside - 1) * part, 0, 0)
        if nodes == 1:
            return Terms(_KERNEL_CALLS, 2, (inside - 1) * volume, 0, 0)
        across = 2 * ceil(log2(nodes))
        volume_across = 2 * (nodes - 1) / nodes * part * share
        return Terms(1 + 2 * _KERNEL_CALLS, 4, 2 * (inside - 1) * part, across, volume_across)
    if backend == "nccl":  # its reduce-scatter and all-gather are rings, its all-reduce across a tree
        hops, across = 2 * (inside - 1), 2 * ceil(log2(nodes))
        return Terms(3, hops, 2 * (inside - 1) * part, across, 2 * (nodes - 1) / nodes * part * share)
    if backend == "gloo":  # rings as in _rendezvous_ring; its reduce-scatter is a whole all-reduce
        hops, across = 6 * (inside - 1), 4 * (nodes - 1)
        return Terms(3, hops, 3 * (inside - 1) * part, across, 2 * (nodes - 1) / nodes * part * share)
    return Terms(3, 2, 2 * (inside - 1) * part, 1, (nodes - 1) * part * share)


def sent_bytes(backend: Backend, shape: Shape, strategy: Strategy, nbytes: int) -> tuple[float, float]:
    """Bytes that a rank sends of an all-reduce, inside its node and between nodes: means over the ranks.
    `terms` prices the narrowest link: there ranks that share a port count one another's bytes, and a ring's whole
    volume passes the link between nodes, which one in `per_node` of its links is."""
    t = terms(backend, replace(shape, rails=max(shape.rails, shape.per_node)), strategy, nbytes)
    across = t.inter_bytes
    if strategy == "flat" and backend != "native":
        across /= shape.per_node
    return t.intra_bytes + t.inter_bytes - across, across


def _flat(backend: Backend, shape: Shape, payload: float) -> Terms:
    if backend == "nccl":
        # A tree between nodes hangs on a chain inside each; the volume of a ring passes the narrowest link.
        volume = 2 * (shape.size - 1) / shape.size * payload
        across = 2 * ceil(log2(shape.nodes))
        hops = 2 * (shape.per_node - 1)
        return Terms(1, hops, 0, across, volume) if shape.nodes > 1 else Terms(1, hops, volume, 0, 0)
    if backend == "gloo":
        return _rendezvous_ring(shape, payload)
    return terms(backend, shape, "exchange", int(payload))


def _rendezvous_ring(shape: Shape, message: float) -> Terms:
    """Terms of a ring whose steps wait for the receiver's consent. A chunk passes size - 1 links twice; as many links
    as there are nodes lead to another node."""
    steps = shape.size - 1
    across = min(shape.nodes, steps) if shape.nodes > 1 else 0
    volume = 2 * steps / shape.size * message
    narrow = (0.0, volume) if shape.nodes > 1 else (volume, 0.0)
    return Terms(1, 4 * (steps - across), narrow[0], 4 * across, narrow[1])


def price(regime: Regime, t: Terms) -> float | None:
    """Seconds of `t` under `regime`; None if it needs a link class without a price."""
    seconds = t.calls * regime.overhead_s
    for hops, volume, link in (
        (t.intra_hops, t.intra_bytes, regime.intra),
        (t.inter_hops, t.inter_bytes, regime.inter),
    ):
        if hops or volume:
            if link is None:
                return None
            seconds += hops * link.latency_s + volume / link.bytes_per_s
    return seconds


def predict(costs: Costs, shape: Shape, strategy: Strategy, nbytes: int) -> float:
    """Seconds of one all-reduce. Raises ValueError if the strategy is not possible or its links have no price."""
    seconds = _cheapest(costs, shape, strategy, nbytes)
    if seconds is None:
        raise ValueError(f"no price of {strategy} on {shape}: measure it first")
    return seconds


def choose(costs: Costs, shape: Shape, nbytes: int, allowed: Sequence[Strategy]) -> tuple[Strategy, float]:
    """The cheapest allowed strategy (the first of equals) and its seconds. Raises ValueError if there is none."""
    priced = [(s, _cheapest(costs, shape, s, nbytes)) for s in allowed if possible(s, shape)]
    with_price = [(s, seconds) for s, seconds in priced if seconds is not None]
    if not with_price:
        raise ValueError(f"none of {', '.join(allowed)} is possible and priced on {shape}")
    return min(with_price, key=lambda pair: pair[1])


def _cheapest(costs: Costs, shape: Shape, strategy: Strategy, nbytes: int) -> float | None:
    t = terms(costs.backend, shape, strategy, nbytes)
    regimes = [regime for regime in costs.of(strategy) if regime.holds(nbytes)]
    return min((p for regime in regimes if (p := price(regime, t)) is not None), default=None)


def shape_of(fabric: Fabric, placement: Placement, group: int = 0) -> Shape:
    """Group `group` as a Shape: link classes and nominal rates of its slowest pairs."""
    layout = placement.groups[group]
    by_name = {n.hostname: n for n in fabric.nodes}
    intra: LinkClass = "nvlink"
    rates: list[float] = []
    for ranks in layout.nodes:
        node = by_name[placement.seats[ranks[0]].hostname]
        devices = {d.index: d for d in node.devices}
        here = [devices[s.device] for r in ranks if (s := placement.seats[r]).device is not None]
        if not here:
            intra = "shm"
        elif not all(node.path(a.key, b.key).startswith("NV") for a in here for b in here if a.index < b.index):
            intra = "pcie" if intra != "shm" else intra
        rates += [d.nvlink_bandwidth for d in here if d.nvlink_bandwidth]
    seats = [placement.seats[r] for r in layout.ranks]
    ports = {(n.hostname, h.key): h for n in fabric.nodes for h in n.hcas}
    used = [ports[s.hostname, s.hca] for s in seats if s.hca is not None]
    rails = 1
    inter: LinkClass = "tcp"
    speeds: list[float] = []
    if len(used) == len(seats):
        inter = "ib" if all(h.link_layer == "InfiniBand" for h in used) else "roce"
        rails = min(len({placement.seats[r].hca for r in ranks}) for ranks in layout.nodes)
        speeds = [h.bytes_per_s for h in used]
    else:
        nics = {(n.hostname, c.name): c for n in fabric.nodes for c in n.nics}
        cards = [nics.get((s.hostname, s.interface)) for s in seats]
        speeds = [c.gbit_per_s * 1e9 / 8 for c in cards if c is not None and c.gbit_per_s]
    return Shape(
        nodes=len(layout.nodes),
        per_node=layout.per_node,
        intra=intra,
        inter=inter,
        rails=rails,
        intra_bytes_per_s=min(rates) if intra == "nvlink" and rates else None,
        inter_bytes_per_s=min(speeds) if speeds else None,
    )
