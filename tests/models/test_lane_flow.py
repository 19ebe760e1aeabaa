"""The wiring of lanes on a recorder: what each sub-block reads, which sub-block is the first to read a sum, how many
sums are in flight; the same on stages, and its time on the virtual clock."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from laddertron.models import residual
from laddertron.models.config.lanes import Lanes
from laddertron.models.config.model_config import Wiring, WiringKind, make_wiring
from laddertron.tools.plan.step_simulator import StepCost, Wire, law, simulate_step

LAYERS = 9


@dataclass(frozen=True)
class Stream:
    """A residual as the factor of each thing that was added to it: "A3" an own output, "SA3" its sum over all lanes."""

    factors: dict[str, float]

    def __add__(self, other: Stream) -> Stream:
        names = [*self.factors, *(name for name in other.factors if name not in self.factors)]
        both = {name: self.factors.get(name, 0.0) + other.factors.get(name, 0.0) for name in names}
        return Stream({name: factor for name, factor in both.items() if factor})

    def __mul__(self, other: float) -> Stream:
        return Stream({name: factor * other for name, factor in self.factors.items()})

    def __sub__(self, other: Stream) -> Stream:
        return self + other * -1.0

    def __truediv__(self, other: int) -> Stream:
        return self * (1 / other)


@dataclass
class Recorder:
    first_layer: int = 0
    log: list[str] = field(default_factory=list)
    read: dict[str, dict[str, float]] = field(default_factory=dict)
    at_once: set[str] = field(default_factory=set)
    in_flight: int = 0
    most: int = 0

    def _compute(self, name: str, stream: Stream) -> Stream:
        self.log.append(f"compute {name}")
        self.read[name] = stream.factors
        return Stream({name: 1.0})

    def attention(self, layer: int, residual: Stream) -> Stream:
        return self._compute(f"A{self.first_layer + layer}", residual)

    def mlp(self, layer: int, residual: Stream) -> Stream:
        return self._compute(f"M{self.first_layer + layer}", residual)

    def shortcut(self, layer: int, residual: Stream) -> Stream:
        raise AssertionError("lanes have two sub-blocks")

    def attention_and_mlp(self, layer: int, residual: Stream) -> Stream:
        raise AssertionError("lanes have two sub-blocks")

    def sum_of_lanes(self, own: Stream) -> Stream:
        return Stream({f"S{name}": factor for name, factor in own.factors.items()})

    def of_others(self, total: Stream, output: Stream) -> Stream:
        return total - output

    def start(self, x: Stream, layer: str = "", at_once: bool = False, /) -> Arrival:
        (name,) = x.factors
        assert layer == ("lane attention" if name[1] == "A" else "lane mlp")
        self.log.append(f"start {name}")
        if at_once:
            self.at_once.add(name)
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        return Arrival(self, x)


@dataclass
class Arrival:
    recorder: Recorder
    x: Stream
    there: bool = False

    def wait(self) -> Stream:
        (name,) = self.x.factors
        if not self.there:  # waiting twice for one message is no second message
            self.recorder.log.append(f"wait {name}")
            self.recorder.in_flight -= 1
            self.there = True
        return self.x


def wiring_of(lanes: Lanes) -> Wiring:
    kind: WiringKind = "lanes"
    return Wiring((kind,) * lanes.layers, lanes=lanes)


def play(lanes: Lanes) -> tuple[Recorder, Stream]:
    recorder = Recorder()
    plan = residual.plan_sub_blocks(wiring_of(lanes))
    flow = residual.flow(Stream({"e": 1.0}), plan, recorder, {"group": recorder}, alone=True)
    end, pending = residual.interleave([flow])[0]
    assert pending == ()
    return recorder, end


def order(layers: int = LAYERS) -> Iterator[tuple[int, str]]:
    return ((layer, kind) for layer in range(layers) for kind in "AM")


def added(lanes: Lanes, layer: int, kind: str) -> Stream:
    """What a sub-block's end adds to a lane: the published rule, written down independently of the code under test."""
    own, exchanged = Stream({f"{kind}{layer}": 1.0}), lanes.attention if kind == "A" else lanes.mlp
    if layer < lanes.delay and lanes.early:
        return Stream({f"S{kind}{layer}": 1.0})
    if layer >= lanes.delay and exchanged:
        earlier = layer - lanes.delay
        return own + Stream({f"S{kind}{earlier}": 1.0}) - Stream({f"{kind}{earlier}": 1.0})
    return own * math.sqrt(lanes.count)


CASES = [
    Lanes(8, delay, LAYERS, early, attention, mlp)
    for delay in (1, 2, 3)
    for early in (True, False)
    for attention, mlp in ((True, True), (True, False), (False, True), (False, False))
]


@pytest.mark.parametrize("lanes", CASES, ids=lambda x: f"d{x.delay}-{x.early:d}{x.attention:d}{x.mlp:d}")
def test_every_sub_block_reads_what_the_published_rule_says(lanes: Lanes) -> None:
    recorder, end = play(lanes)
    want = Stream({"e": 1.0})
    for layer, kind in order():
        assert recorder.read[f"{kind}{layer}"] == pytest.approx(want.factors)
        want = want + added(lanes, layer, kind)
    assert end.factors == pytest.approx(want.factors)


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_the_first_reader_of_a_sum_comes_2d_sub_blocks_after_it_was_sent(delay: int) -> None:
    """A sum of layer i is waited for once A(i + d) is computed, and M(i + d) is the first to read it (of an MLP's:
    A(i + d + 1)). Between start and wait 2d sub-blocks are computed; 2d + 1 sums are in flight; the last d layers send
    none."""
    lanes = Lanes(8, delay, LAYERS, early=False)
    recorder, _ = play(lanes)
    names = [f"{kind}{layer}" for layer, kind in order()]
    for at, name in enumerate(names):
        if at // 2 + delay >= LAYERS:
            assert f"start S{name}" not in recorder.log
            continue
        started, waited = recorder.log.index(f"start S{name}"), recorder.log.index(f"wait S{name}")
        between = [line for line in recorder.log[started:waited] if line.startswith("compute")]
        assert between == [f"compute {later}" for later in names[at + 1 : at + 1 + 2 * delay]]
        readers = [reader for reader, factors in recorder.read.items() if f"S{name}" in factors]
        assert readers[:1] == names[at + 2 * delay + 1 : at + 2 * delay + 2]
    assert recorder.most == 2 * delay + 1
    assert residual.collectives_per_step(wiring_of(lanes)) == 2 * (LAYERS - delay)


def test_an_early_sum_is_one_message_that_is_added_twice() -> None:
    """With use_early_comm the first d layers wait for their sums; layer i + d reads the same message."""
    lanes = Lanes(8, 2, LAYERS)
    recorder, _ = play(lanes)
    starts = [line for line in recorder.log if line.startswith("start")]
    assert len(starts) == len(set(starts)) == 2 * (LAYERS - 2) == residual.collectives_per_step(wiring_of(lanes))
    assert recorder.at_once == {"SA0"}
    assert recorder.read["M0"] == {"e": 1.0, "SA0": 1.0}
    assert recorder.read["M2"]["SA0"] == 2.0
    assert recorder.read["M2"]["A0"] == -1.0


def test_early_layers_sum_where_nothing_else_does() -> None:
    lanes = Lanes(8, 2, LAYERS, attention=False, mlp=False)
    recorder, _ = play(lanes)
    assert [line for line in recorder.log if line.startswith("start")] == [
        f"start S{k}{i}" for i in (0, 1) for k in "AM"
    ]


@pytest.mark.parametrize("begin", range(1, LAYERS))
@pytest.mark.parametrize("lanes", CASES[::3], ids=lambda x: f"d{x.delay}-{x.early:d}{x.attention:d}{x.mlp:d}")
def test_stages_read_what_one_group_reads(lanes: Lanes, begin: int) -> None:
    """The residual and the pending sums cross to the stage behind, also of a stage shorter than the delay."""
    whole, end = play(lanes)
    plans = []
    for first, last in ((0, begin), (begin, LAYERS)):
        kind: WiringKind = "lanes"
        plans.append(residual.plan_sub_blocks(Wiring((kind,) * (last - first), lanes=replace(lanes, first=first))))
    recorders = Recorder(), Recorder(first_layer=begin)
    flow = residual.flow(Stream({"e": 1.0}), plans[0], recorders[0], {"group": recorders[0]})
    stream, pending = residual.interleave([flow])[0]
    assert len(pending) == residual.pending_at(wiring_of(lanes), begin)
    flow = residual.flow(stream, plans[1], recorders[1], {"group": recorders[1]}, pending=pending)
    assert residual.interleave([flow])[0][0].factors == pytest.approx(end.factors)
    read = {**recorders[0].read, **recorders[1].read}
    for name, factors in whole.read.items():
        assert read[name] == pytest.approx(factors)


@pytest.mark.parametrize("delay", [1, 2, 3])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.5, 4.5, 9.0])
def test_the_virtual_clock_keeps_the_law(delay: int, ratio: float) -> None:
    """A sub-block takes max(c, (c + L) / (2d + 1)), where L is latency alone; early layers that wait are left out."""
    layers, c = 200, 1e-3
    lanes = Lanes(8, delay, layers, early=False)
    cost = StepCost([c] * layers, [c] * layers, Wire(0.0, ratio * c))
    standard = simulate_step(cost, make_wiring("standard", layers), 8).total_s
    total = simulate_step(cost, wiring_of(lanes), 8).total_s
    assert standard / total == pytest.approx(law(c, ratio * c, 2 * delay), rel=0.05)
