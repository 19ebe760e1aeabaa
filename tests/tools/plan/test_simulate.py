"""The step simulator: the wirings of models/residual.py on a virtual clock, against closed forms and laws."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from laddertron.models.config.parts import Wiring, make_wiring
from laddertron.models.residual import collectives_per_step
from laddertron.tools.plan.step_simulator import StepCost, StepTime, VirtualClock, Wire, law, simulate_step

LAYERS = 20
N = 2 * LAYERS


def cost(c: float, wire: Wire, layers: int = LAYERS, **more: float) -> StepCost:
    """Sub-blocks that all take c."""
    return StepCost([c] * layers, [c] * layers, wire, **more)  # type: ignore[arg-type]


def step(c: float, wire: Wire, kind: str, overlap: bool = True) -> StepTime:
    return simulate_step(cost(c, wire), make_wiring(kind, LAYERS), 2, overlap)


def test_standard_waits_for_every_all_reduce() -> None:
    """n sub-blocks cost n (c + L), all of L is waited for, nothing is hidden."""
    time = step(3.0, Wire(2.0), "standard")
    assert time.total_s == pytest.approx(N * 5.0)
    assert time.waited_s == pytest.approx(N * 2.0)
    assert time.hidden_s == pytest.approx(0.0)
    assert time.collectives == N


def test_ladder_hides_all_but_the_last_where_computing_is_longer() -> None:
    """With L < c a ladder step is n c + L: the last all-reduce has nothing to hide behind."""
    time = step(3.0, Wire(2.0), "ladder")
    assert time.total_s == pytest.approx(N * 3.0 + 2.0)
    assert time.hidden_s == pytest.approx((N - 1) * 2.0)


def test_one_wire_bounds_a_ladder_that_communicates_more_than_it_computes() -> None:
    """With L > c and one message on the wire at a time, the wire is never idle after the first sub-block: c + n L."""
    time = step(1.0, Wire(3.0), "ladder")
    assert time.total_s == pytest.approx(1.0 + N * 3.0)


@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0, 1.5, 3.0])
def test_pure_latency_follows_the_law(ratio: float) -> None:
    """Latencies overlap: the speed-up is (c + L) / max(c, (c + L) / 2), but for the two ends of the step."""
    many = 400
    wire = Wire(0.0, latency_s=ratio)
    times = [simulate_step(cost(1.0, wire, many), make_wiring(kind, many), 2) for kind in ("standard", "ladder")]
    assert times[0].total_s / times[1].total_s == pytest.approx(law(1.0, ratio), rel=0.01)


@pytest.mark.parametrize("delay", [2, 3, 7])
@pytest.mark.parametrize("ratio", [0.5, 1.5, 3.0, 9.0])
def test_delays_follow_the_law(ratio: float, delay: int) -> None:
    """With an output read d sub-blocks later a sub-block takes max(c, (c + L) / (d + 1))."""
    many, wire = 400, Wire(0.0, latency_s=ratio)
    times = [simulate_step(cost(1.0, wire, many), make_wiring(k, many), 2) for k in ("standard", f"delay-{delay}")]
    assert times[0].total_s / times[1].total_s == pytest.approx(law(1.0, ratio, delay), rel=0.03)


def test_the_law_has_its_corners() -> None:
    """Nothing to hide: 1; L = c: 2, and never more; delay-d: d + 1."""
    assert law(1.0, 2.0, 2) == law(1.0, 50.0, 2) == 3.0
    assert law(1.0, 0.0) == 1.0
    assert law(1.0, 1.0) == law(1.0, 50.0) == 2.0
    assert law(0.0, 0.0) == 1.0


def test_contention_slows_what_computes_beside_the_wire() -> None:
    """While a message of L moves, L / (1 + s) of computing gets done: each costs L - L / (1 + s) more."""
    time = step(5.0, Wire(2.0, slows=0.25), "ladder")
    assert time.slowed_s == pytest.approx((N - 1) * (2.0 - 2.0 / 1.25))
    assert time.total_s == pytest.approx(N * 5.0 + time.slowed_s + 2.0)


def test_contention_leaves_standard_alone() -> None:
    """Nobody computes beside an all-reduce that is waited for."""
    assert step(5.0, Wire(2.0, slows=0.9), "standard").total_s == pytest.approx(N * 7.0)


def test_without_overlap_every_wiring_pays_in_full() -> None:
    """A blocking ladder is as slow as standard, to the last digit of the closed form."""
    assert step(3.0, Wire(2.0), "ladder", overlap=False).total_s == pytest.approx(N * 5.0)


def test_parallel_has_half_the_messages() -> None:
    """One all-reduce a layer, and what its shared norm saves."""
    shared = replace(cost(3.0, Wire(2.0)), shared_norm_saves_s=0.5)
    time = simulate_step(shared, make_wiring("parallel", LAYERS), 2)
    assert time.total_s == pytest.approx(LAYERS * (6.0 - 0.5 + 2.0))
    assert time.collectives == LAYERS


@pytest.mark.parametrize(("half", "half_wire"), [(1.5, 1.0), (1.5, 1.6), (2.4, 2.0), (3.0, 2.5)])
def test_two_streams_follow_their_law(half: float, half_wire: float) -> None:
    """A sub-block takes max(2 c_half, c_half + L_half), but for the ends: they pay where L > 2 c_half - c. Where
    nothing of an all-reduce is latency, its wire must be free as well: max(…, 2 L_half)."""
    many = 400
    halves = [cost(half, Wire(0.0, half_wire), many)] * 2
    time = simulate_step(cost(3.0, Wire(0.0, 2.0), many), make_wiring("standard", many), 2, halves=halves)
    assert time.total_s == pytest.approx(2 * many * max(2 * half, half + half_wire), rel=0.01)
    assert time.collectives == 4 * many


def test_two_streams_frame_their_layers_once() -> None:
    """Both embed, both all-reduces of that travel at once; the head is computed for all rows together."""
    whole = replace(cost(3.0, Wire(0.0, 2.0)), before=Wire(0.0, 0.7), after_s=4.0, after=Wire(0.0, 0.25))
    half = replace(cost(1.5, Wire(0.0, 1.0)), before=Wire(0.0, 0.5), after_s=99.0, after=Wire(99.0))
    time = simulate_step(whole, make_wiring("standard", LAYERS), 2, halves=(half, half))
    assert time.total_s == pytest.approx(0.5 + N * 3.0 + 1.0 + 4.25)


def test_the_ends_are_always_waited_for() -> None:
    """Embedding and head with their collectives frame the layers, whatever the wiring."""
    framed = replace(cost(3.0, Wire(2.0)), before=Wire(0.5), after_s=4.0, after=Wire(0.0, 0.25))
    plain = step(3.0, Wire(2.0), "ladder").total_s
    assert simulate_step(framed, make_wiring("ladder", LAYERS), 2).total_s == pytest.approx(plain + 4.75)


def test_a_group_of_one_and_no_communication_only_compute() -> None:
    """No message is sent, not even at the ends."""
    framed = replace(cost(3.0, Wire(2.0)), before=Wire(9.0), after=Wire(9.0))
    for time in (
        simulate_step(framed, make_wiring("ladder", LAYERS), 1),
        simulate_step(framed, make_wiring("none", LAYERS), 8),
    ):
        assert time.total_s == pytest.approx(N * 3.0)
        assert time.collectives == 0


@pytest.mark.parametrize(
    "wiring",
    [
        make_wiring("hybrid", LAYERS, range(10, LAYERS)),
        make_wiring("desync", LAYERS, every=4, tensor_parallel_size=2),
        make_wiring("desync", LAYERS, every=3, tensor_parallel_size=2),
        make_wiring("desync", LAYERS, every=2 * LAYERS + 1, tensor_parallel_size=2),
    ],
    ids=lambda w: w.name,
)
def test_messages_are_those_of_the_wiring(wiring: Wiring) -> None:
    """The clock counts what models/residual.py says of itself: the same code runs here."""
    time = simulate_step(cost(3.0, Wire(2.0)), wiring, 2)
    assert time.collectives == collectives_per_step(wiring)


def test_hybrid_lies_between_standard_and_ladder() -> None:
    """Half of the layers laddered hides about half."""
    half = simulate_step(cost(3.0, Wire(2.0)), make_wiring("hybrid", LAYERS, range(10, LAYERS)), 2)
    assert half.hidden_s == pytest.approx(LAYERS * 2.0, abs=2.0)


def test_random_steps_keep_their_books(run_seed: int) -> None:
    """For any costs: total = computing + slowed + waited, no wiring beats no communication, and without contention
    ladder never loses to standard."""
    rng = random.Random(run_seed)
    for _ in range(60):
        layers = rng.randint(1, 12)
        wire = Wire(rng.uniform(0, 3), rng.choice([0.0, rng.uniform(0, 3)]), rng.choice([0.0, rng.uniform(0, 2)]))
        costs = StepCost(
            [rng.uniform(0, 3) for _ in range(layers)], [rng.uniform(0, 3) for _ in range(layers)], wire,
            after_s=rng.uniform(0, 1), start_s=rng.choice([0.0, 0.1]),
        )  # fmt: skip
        times = {k: simulate_step(costs, make_wiring(k, layers), 2) for k in ("standard", "ladder", "parallel", "none")}
        for kind, time in times.items():
            said = f"{kind} of {costs}"
            assert time.total_s == pytest.approx(time.compute_s + time.slowed_s + time.waited_s), said
            assert time.total_s >= times["none"].total_s - 1e-9, said
        if wire.slows == 0.0:
            assert times["ladder"].total_s <= times["standard"].total_s + 1e-9, f"{costs}"


def test_a_message_that_waits_for_the_wire_arrives_later() -> None:
    """Two messages set off together: the second leaves when the first is through, and their latencies overlap."""
    clock = VirtualClock()
    first, second = clock.send(Wire(2.0, 5.0)), clock.send(Wire(2.0, 5.0))
    first.wait()
    assert clock.now == pytest.approx(7.0)
    second.wait()
    assert clock.now == pytest.approx(9.0)
    second.wait()
    assert clock.now == pytest.approx(9.0)


def test_what_cannot_be_is_refused() -> None:
    """Negative times."""
    with pytest.raises(ValueError, match="0 or more"):
        Wire(-1.0)
