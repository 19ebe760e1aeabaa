"""Runs models/residual.py's wirings on a virtual clock, with one compute stream and one wire for the whole group, since
all ranks are alike. Pure; no torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from ...models.config.parts import Wiring, make_wiring
from ...models.residual import Scope, flow, interleave, plan_sub_blocks
from ...topology.comm.collectives import CollectiveOf


@dataclass(frozen=True, slots=True)
class Wire:
    """One all-reduce: `busy_s` it has the wire to itself (the next one queues), `latency_s` it then still travels
    (those of several overlap). While it has the wire, computing takes 1 + `slows` times as long: a collective's kernels
    take multiprocessors and memory bandwidth, its threads take cores."""

    busy_s: float
    latency_s: float = 0.0
    slows: float = 0.0

    def __post_init__(self) -> None:
        if min(self.busy_s, self.latency_s, self.slows) < 0:
            raise ValueError(f"{self}: all must be 0 or more")

    @property
    def seconds(self) -> float:
        return self.busy_s + self.latency_s


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step's parts on one rank. `attention_s` and `mlp_s` have one entry a layer; `all_reduce` is a
    sub-block's; `before` and `after` frame the layers (embedding, head and sampling; their collectives are always
    waited for); `start_s` is what setting off an all-reduce takes from computing."""

    attention_s: Sequence[float]
    mlp_s: Sequence[float]
    all_reduce: Wire
    after_s: float = 0.0
    before: Wire = Wire(0.0)
    after: Wire = Wire(0.0)
    start_s: float = 0.0
    shared_norm_saves_s: float = 0.0
    """Seconds that the parallel wiring saves in each layer: one norm and one launch."""
    mixed: tuple[bool, ...] = ()
    """The layers whose MLP is a mixture of experts."""
    beside_s: Sequence[float] = ()
    """Seconds of a shortcut's experts, one entry a layer."""
    node: Wire | None = None
    """A sum inside the node, where all but experts are added there; None: every sum is over the group."""

    @property
    def sub_block_s(self) -> float:
        """c of the law: the mean sub-block."""
        return (sum(self.attention_s) + sum(self.mlp_s) + sum(self.beside_s)) / (2 * len(self.mlp_s))


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step's times: `total_s` = compute_s + slowed_s + waited_s."""

    total_s: float
    compute_s: float
    slowed_s: float
    """Computing time added by contention."""
    waited_s: float
    """How long computation waited for an all-reduce."""
    flight_s: float
    """Sum over all-reduces of what each takes alone."""
    collectives: int

    @property
    def exposed_s(self) -> float:
        return self.waited_s + self.slowed_s

    @property
    def hidden_s(self) -> float:
        return max(0.0, self.flight_s - self.exposed_s)


def law(compute_s: float, all_reduce_s: float, delay: int = 1) -> float:
    """The best that delay-d (ladder: d = 1) can do against standard: (c + L) / max(c, (c + L) / (d + 1)), from
    sub-block and all-reduce."""
    total_s = compute_s + all_reduce_s
    return total_s / max(compute_s, total_s / (delay + 1)) if total_s else 1.0


class _InFlight:
    """An all-reduce on the clock; `arrives` is known once it has left the wire."""

    __slots__ = ("_clock", "arrives", "left", "wire")

    def __init__(self, clock: VirtualClock, wire: Wire) -> None:
        self._clock, self.wire = clock, wire
        self.left = wire.busy_s
        self.arrives: float | None = None

    def wait(self) -> _Residual:
        self._clock.wait(self)
        return _RESIDUAL


class _Residual:
    """The residual: on a virtual clock it has no value, only order."""

    __slots__ = ()

    def __add__(self, other: _Residual, /) -> _Residual:
        return self

    def __mul__(self, other: float, /) -> _Residual:
        return self

    def __truediv__(self, other: int, /) -> _Residual:
        return self


_RESIDUAL = _Residual()


class VirtualClock:
    """A compute stream and a wire, which slows computing down while it is busy."""

    def __init__(self) -> None:
        self._queue: deque[_InFlight] = deque()
        self.now = self.compute_s = self.slowed_s = self.waited_s = self.flight_s = 0.0
        self.collectives = 0

    def compute(self, seconds: float) -> None:
        self.compute_s += seconds
        while seconds > 0.0:
            if not self._queue:
                self.now += seconds
                return
            head = self._queue[0]
            slow = 1.0 + head.wire.slows
            if seconds * slow < head.left:
                head.left -= seconds * slow
                self.now += seconds * slow
                self.slowed_s += seconds * (slow - 1.0)
                return
            self.now += head.left
            self.slowed_s += head.left - head.left / slow
            seconds -= head.left / slow
            self._leave()

    def send(self, wire: Wire, apart: bool = False) -> _InFlight:
        """An all-reduce sets off, behind those that have the wire. apart: on links of its own."""
        flight = _InFlight(self, wire)
        self.flight_s += wire.seconds
        self.collectives += 1
        if apart:
            flight.arrives = self.now + wire.seconds
        else:
            self._queue.append(flight)
        return flight

    def wait(self, flight: _InFlight) -> None:
        began = self.now
        while flight.arrives is None:
            self.now += self._queue[0].left
            self._leave()
        self._idle(flight.arrives)
        self.waited_s += self.now - began

    def _leave(self) -> None:
        head = self._queue.popleft()
        head.arrives = self.now + head.wire.latency_s

    def _idle(self, until: float) -> None:
        while self._queue and self.now + self._queue[0].left <= until:
            self.now += self._queue[0].left
            self._leave()
        if until > self.now:
            if self._queue:
                self._queue[0].left -= until - self.now
            self.now = until

    def time(self) -> StepTime:
        return StepTime(self.now, self.compute_s, self.slowed_s, self.waited_s, self.flight_s, self.collectives)


class _Timed:
    """Sub-blocks and all-reduces as models/residual.py wants them, on a clock."""

    def __init__(self, clock: VirtualClock, cost: StepCost, overlap: bool) -> None:
        self._clock, self._cost, self._overlap = clock, cost, overlap

    def attention(self, layer: int, residual: _Residual) -> _Residual:
        self._clock.compute(self._cost.attention_s[layer])
        return residual

    def mlp(self, layer: int, residual: _Residual) -> _Residual:
        self._clock.compute(self._cost.mlp_s[layer])
        return residual

    def shortcut(self, layer: int, residual: _Residual) -> _Residual:
        self._clock.compute(self._cost.beside_s[layer])
        return residual

    def attention_and_mlp(self, layer: int, residual: _Residual) -> _Residual:
        both = self._cost.attention_s[layer] + self._cost.mlp_s[layer]
        self._clock.compute(max(0.0, both - self._cost.shared_norm_saves_s))
        return residual

    def sum_of_lanes(self, output: _Residual) -> _Residual:
        return output

    def of_others(self, total: _Residual, output: _Residual) -> _Residual:
        return total

    def start(self, x: _Residual, *_: object) -> _InFlight:
        return self.send(self._cost.all_reduce)

    def send(self, wire: Wire, apart: bool = False) -> _InFlight:
        self._clock.compute(self._cost.start_s)
        flight = self._clock.send(wire, apart)
        if not self._overlap:
            flight.wait()
        return flight


class _NodeSums:
    """Sums inside the node: they do not queue behind those that cross nodes."""

    def __init__(self, blocks: _Timed, wire: Wire) -> None:
        self._blocks, self._wire = blocks, wire

    def start(self, x: _Residual, *_: object) -> _InFlight:
        return self._blocks.send(self._wire, apart=True)


def simulate_step(
    cost: StepCost, wiring: Wiring, size: int, overlap: bool = True, halves: Sequence[StepCost] = ()
) -> StepTime:
    """One step of a group of `size` ranks. `overlap` False: every all-reduce is waited for where it starts. A group of
    one, or wiring none, has no all-reduces at all. halves: of a step in two streams, each one's parts up to the last
    layer; what comes after is the whole's."""
    silent = size == 1 or wiring.name == "no-communication"
    clock = VirtualClock()
    if silent:
        wiring = make_wiring("none", len(wiring.kinds))

    def stream(part: StepCost) -> Generator[None, None, _Residual]:
        if part.beside_s and "shortcut" not in wiring.kinds:  # experts and MLP in one sum
            part = replace(part, mlp_s=[a + b for a, b in zip(part.mlp_s, part.beside_s, strict=True)])
        embedding = None if silent or not part.before.seconds else clock.send(part.before)
        yield
        if embedding is not None:
            embedding.wait()
        blocks = _Timed(clock, part, overlap)
        sums: dict[Scope, CollectiveOf[_Residual]] = {"group": blocks}
        if part.node is not None:
            sums["node"] = _NodeSums(blocks, part.node)
        dense: Scope = "group" if part.node is None else "node"
        end, _ = yield from flow(_RESIDUAL, plan_sub_blocks(wiring, mixed=part.mixed, dense=dense), blocks, sums, size)
        return end

    interleave([stream(part) for part in halves or (cost,)])
    clock.compute(cost.after_s)
    if not silent and cost.after.seconds:
        clock.wait(clock.send(cost.after))
    return clock.time()
