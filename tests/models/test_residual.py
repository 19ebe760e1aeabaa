"""The wirings' order of events and their sums on a recorder; the real model's products on a recording collective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import checkpoints
import engine_cases
import pytest
from laddertron.models import residual
from laddertron.models.config.model_config import Wiring, WiringKind
from rank_pool import Rank

L = 3


def all_of(kind: WiringKind) -> tuple[WiringKind, ...]:
    return (kind,) * L


untyped_flow: Any = residual.flow
"""Streams and recorders below have the part of its protocols that they need."""
LADDER, STANDARD, PARALLEL = all_of("ladder"), all_of("standard"), all_of("parallel")


@dataclass(frozen=True)
class Stream:
    """A residual as the set of what was added to it."""

    parts: frozenset[str]

    def __add__(self, other: Stream) -> Stream:
        assert not self.parts & other.parts, "added twice"
        return Stream(self.parts | other.parts)

    def __truediv__(self, other: int) -> Stream:
        return self


@dataclass
class Recorder:
    """Sub-blocks and collective at once: what was computed from what, started and awaited, in order."""

    log: list[str] = field(default_factory=list)
    read: dict[str, frozenset[str]] = field(default_factory=dict)
    in_flight: int = 0
    most: int = 0

    def _compute(self, name: str, stream: Stream) -> Stream:
        self.log.append(f"compute {name}")
        self.read[name] = stream.parts
        return Stream(frozenset({name}))

    def attention(self, layer: int, residual: Stream) -> Stream:
        return self._compute(f"A{layer}", residual)

    def mlp(self, layer: int, residual: Stream) -> Stream:
        return self._compute(f"M{layer}", residual)

    def shortcut(self, layer: int, residual: Stream) -> Stream:
        return self._compute(f"E{layer}", residual)

    def attention_and_mlp(self, layer: int, residual: Stream) -> Stream:
        return self._compute(f"P{layer}", residual)

    def start(self, x: Stream, *_: object) -> Arrival:
        self.log.append(f"start {'+'.join(sorted(x.parts))}")
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        return Arrival(self, x)


@dataclass
class Arrival:
    recorder: Recorder
    x: Stream

    def wait(self) -> Stream:
        self.recorder.log.append(f"wait {'+'.join(sorted(self.x.parts))}")
        self.recorder.in_flight -= 1
        return self.x


def run(embedded: Any, wiring: Wiring, blocks: Any, all_reduce: Any, size: int) -> Any:
    """The whole model's way, as one stream."""
    flow = residual.flow(embedded, residual.plan_sub_blocks(wiring), blocks, {"group": all_reduce}, size)
    ((end, pending),) = residual.interleave([flow])
    assert pending == ()
    return end


def play(*kinds: WiringKind, every: int = 0) -> tuple[Recorder, Stream]:
    recorder = Recorder()
    out = run(Stream(frozenset("e")), Wiring(kinds, every), recorder, recorder, 1)
    return recorder, out


class Accounts:
    """An all-reduce that notes under whose name each sub-block's output set off."""

    def __init__(self, recorder: Recorder, log: list[tuple[str, str]], at_once: list[str] | None = None) -> None:
        self._recorder, self._log, self._at_once = recorder, log, at_once

    def start(self, x: Stream, layer: str = "", at_once: bool = False, /) -> Arrival:
        self._log.append((layer, "+".join(sorted(x.parts))))
        if at_once and self._at_once is not None:
            self._at_once += sorted(x.parts)
        return self._recorder.start(x)


@pytest.mark.parametrize(
    ("kinds", "every", "want"),
    [
        (("standard", "ladder"), 0, ["standard attention", "standard mlp", "ladder attention", "ladder mlp"]),
        (("parallel", "parallel"), 0, ["parallel", "parallel"]),
        (("ladder", "ladder"), 2, ["desync-2 mlp", "desync-2 mlp"]),
        (("ladder", "ladder"), 3, ["desync-3 attention", "desync-3 mlp"]),
        (("none", "none"), 0, []),
    ],
)
def test_each_all_reduce_is_accounted_to_its_layer(kinds: tuple[WiringKind, ...], every: int, want: list[str]) -> None:
    recorder, log = Recorder(), list[tuple[str, str]]()
    run(Stream(frozenset("e")), Wiring(kinds, every), recorder, Accounts(recorder, log), 1)
    assert [layer for layer, _ in log] == want
    if not every and kinds[0] != "parallel":
        assert [parts for _, parts in log] == ["A0", "M0", "A1", "M1"][: len(want)]


def sees(*parts: str) -> frozenset[str]:
    return frozenset(("e", *parts))


def test_ladder_reads_everything_but_its_predecessor() -> None:
    """A_l sees e + A up to l-1 + M up to l-2, M_l sees e + A up to l-1 + M up to l-1; layer 0 sees e alone twice."""
    recorder, out = play(*LADDER)
    assert recorder.read == {
        "A0": sees(),
        "M0": sees(),
        "A1": sees("A0"),
        "M1": sees("A0", "M0"),
        "A2": sees("A0", "M0", "A1"),
        "M2": sees("A0", "M0", "A1", "M1"),
    }
    assert out.parts == sees("A0", "M0", "A1", "M1", "A2", "M2")


def test_ladder_computes_the_next_sub_block_before_it_waits() -> None:
    """Sub-block k + 1 is computed and its all-reduce set off before anyone waits for k's; two travel at most."""
    recorder, _ = play(*LADDER)
    order = [f"{block}{layer}" for layer in range(L) for block in "AM"]
    for current, following in pairwise(order):
        waited = recorder.log.index(f"wait {current}")
        assert recorder.log.index(f"compute {following}") < waited
        assert recorder.log.index(f"start {following}") < waited
    assert recorder.most == 2


@pytest.mark.parametrize("delay", [2, 3, 5])
def test_delay_reads_everything_but_the_last_d_outputs(delay: int) -> None:
    """Sub-block i reads e and the outputs of all before i - d; d + 1 all-reduces travel, as long as there are more
    sub-blocks; the end is complete."""
    recorder = Recorder()
    wiring = Wiring(all_of("delay"), delay=delay)
    out = run(Stream(frozenset("e")), wiring, recorder, recorder, 1)
    order = [f"{block}{layer}" for layer in range(L) for block in "AM"]
    assert recorder.read == {name: sees(*order[: max(0, i - delay)]) for i, name in enumerate(order)}
    assert recorder.most == delay + 1
    assert out.parts == sees(*order)
    assert wiring.name == f"delay-{delay}"


def test_standard_waits_at_once() -> None:
    """Every sub-block reads the complete stream, one all-reduce travels at a time."""
    recorder, out = play(*STANDARD)
    assert recorder.log[:6] == ["compute A0", "start A0", "wait A0", "compute M0", "start M0", "wait M0"]
    assert recorder.read["M1"] == sees("A0", "M0", "A1")
    assert recorder.most == 1
    assert len(out.parts) == 1 + 2 * L


def test_parallel_has_one_all_reduce_a_layer() -> None:
    recorder, out = play(*PARALLEL)
    assert [line for line in recorder.log if line.startswith("start")] == ["start P0", "start P1", "start P2"]
    assert recorder.read["P2"] == sees("P0", "P1")
    assert out.parts == sees("P0", "P1", "P2")


def test_hybrid_boundaries() -> None:
    """standard -> ladder: the first ladder attention misses the last standard MLP, which is still in flight; ladder ->
    standard: the standard layer waits for both."""
    recorder, _ = play("standard", "ladder", "standard")
    assert recorder.read == {
        "A0": sees(),
        "M0": sees("A0"),
        "A1": sees("A0"),
        "M1": sees("A0", "M0"),
        "A2": sees("A0", "M0", "A1", "M1"),
        "M2": sees("A0", "M0", "A1", "M1", "A2"),
    }
    assert recorder.log.index("compute A1") < recorder.log.index("wait M0")


@pytest.mark.parametrize(("every", "starts"), [(2, 3), (3, 2), (4, 2), (5, 2), (6, 1)])
def test_desync_reduces_every_nth_and_at_the_end(every: int, starts: int) -> None:
    """Six sub-blocks: a reduce after every n-th and after the last."""
    recorder = Recorder()
    wiring = Wiring(all_of("desync"), every)
    run(Stream(frozenset("e")), wiring, recorder, recorder, 1)
    assert sum(line.startswith("start") for line in recorder.log) == starts
    assert residual.collectives_per_step(wiring) == starts


class Twice:
    """Two ranks that are alike: each sub-block's partial sum is 1 on either, an all-reduce doubles."""

    def attention(self, layer: int, residual: float) -> float:
        return 1.0

    mlp = attention_and_mlp = attention

    def start(self, x: float, *_: object) -> Twice:
        self.x = x
        return self

    def wait(self) -> float:
        return 2 * self.x


@pytest.mark.parametrize(("every", "total"), [(1, 22), (2, 19), (3, 18), (4, 18), (5, 18), (6, 17), (7, 17)])
def test_desync_loses_no_part_of_the_last_sub_block(every: int, total: int) -> None:
    """A reducing sub-block adds both ranks' partial sums (2), one between reduces its own alone (1); the last of the
    six always reduces, also where n does not divide six."""
    assert run(10.0, Wiring(all_of("desync"), every), Twice(), Twice(), 2) == total


def test_no_communication_starts_nothing() -> None:
    recorder, out = play(*all_of("none"))
    assert not any(line.startswith(("start", "wait")) for line in recorder.log)
    assert len(out.parts) == 1 + 2 * L


def test_two_streams_can_be_interleaved() -> None:
    """`flow` yields after every start, so that two halves of a batch may take turns through the same layers."""
    recorders = Recorder(), Recorder()
    plan = residual.plan_sub_blocks(Wiring(STANDARD))
    flows = [untyped_flow(Stream(frozenset("e")), plan, r, {"group": r}) for r in recorders]
    for _ in range(2 * L):
        for flow in flows:
            next(flow)
    assert recorders[0].log == recorders[1].log
    assert recorders[0].log[-1] == "start M2"


def order_of_products(rank: Rank, folder: str) -> list[str]:
    """On a rank: the real model's products, starts and waits in one forward pass of one token."""
    log: list[str] = []
    built = engine_cases.build_on(rank, engine_cases.deployment(folder, rank.size))
    model = built.runner.model
    inner = model.all_reduce

    class Pending:
        def __init__(self, pending: Any, number: int) -> None:
            self.pending, self.number = pending, number

        def wait(self) -> Any:
            log.append(f"wait {self.number}")
            return self.pending.wait()

    class Recording:
        count = 0

        def start(self, x: Any, *_: object) -> Pending:
            log.append(f"start {self.count}")
            pending = Pending(inner.start(x), self.count)
            self.count += 1
            return pending

    def noted(name: str, product: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(x: Any) -> Any:
            log.append(f"product {name}")
            return product(x)

        return call

    model.all_reduce = Recording()
    for index, layer in model.layer_products.items():
        for name in ("qkv", "o", "mlp"):
            object.__setattr__(layer, name, noted(f"{name}{index}", getattr(layer, name)))
    engine_cases.forward_all(built, [[7]])
    return log


def test_the_real_model_issues_products_before_the_wait(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Two ranks, ladder weights: collective 0 is the embedding's, 1 + k the k-th sub-block's. The next sub-block's
    products stand in the log before the wait for k's."""
    folder = checkpoints.save(tmp_path, "ladder")
    for log in ranks(2, "test_residual:order_of_products", {"folder": str(folder)}):
        products = [("qkv", "o"), ("mlp",)]
        sub_blocks = [[f"product {name}{layer}" for name in pair] for layer in range(3) for pair in products]
        for k, following in enumerate(sub_blocks[1:]):
            wait = log.index(f"wait {k + 1}")
            assert all(log.index(product) < wait for product in following), f"sub-block {k + 1} waits for {k}"
            assert log.index(f"start {k + 2}") < wait


@pytest.mark.parametrize(("alone", "want"), [(True, ["A0", "A2", "M2"]), (False, [])])
def test_a_collective_is_told_what_is_waited_for_at_once(alone: bool, want: list[str]) -> None:
    """Of a hybrid the sums that the next sub-block reads, where no other stream computes meanwhile: not M0's, behind
    which the first ladder attention computes, nor any that starts while another is in flight."""
    recorder, log, at_once = Recorder(), list[tuple[str, str]](), list[str]()
    plan = residual.plan_sub_blocks(Wiring(("standard", "ladder", "standard")))
    accounts = Accounts(recorder, log, at_once)
    flow = untyped_flow(Stream(frozenset("e")), plan, recorder, {"group": accounts}, alone=alone)
    assert len(list(flow)) == 6
    assert [parts for _, parts in log] == ["A0", "M0", "A1", "M1", "A2", "M2"]
    assert at_once == want


def test_a_shortcuts_sum_has_a_scope_and_a_lag_of_its_own() -> None:
    """The experts of every other layer read what its MLP reads. Their sum is over all ranks and joins behind the next
    layer, three sub-blocks later; those of the dense path stay inside the node, are read at once and overtake it."""
    plan = residual.plan_sub_blocks(Wiring(("shortcut", "standard") * 2), dense="node")
    assert [block.lag for block in plan.sub_blocks] == [0, 3, 0, 0, 0] * 2
    assert [b.account for b in plan.sub_blocks[:3]] == ["shortcut attention", "shortcut experts", "shortcut mlp"]
    blocks, node, group = Recorder(), Recorder(), Recorder()
    flow = untyped_flow(Stream(frozenset("e")), plan, blocks, {"node": node, "group": group})
    ((end, pending),) = residual.interleave([flow])
    assert [line for line in group.log if line.startswith("start")] == ["start E0", "start E2"]
    assert blocks.read["E0"] == blocks.read["M0"] == sees("A0")
    assert blocks.read["M1"] == sees("A0", "M0", "A1")
    assert blocks.read["A2"] == sees("A0", "M0", "A1", "M1", "E0")
    assert (node.most, group.most, pending) == (1, 1, ())
    assert len(end.parts) == 1 + 10
