"""The cost model against numbers that are known, the fit against data whose truth is known, and the tuning file."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laddertron.topology.cost.cost import (
    Backend,
    Costs,
    Regime,
    Shape,
    Strategy,
    candidates,
    choose,
    possible,
    predict,
    proven,
    shape_of,
    terms,
    untuned,
)
from laddertron.topology.cost.fit import TOLERANCE, Point, fit
from laddertron.topology.cost.prices import reference
from laddertron.topology.cost.tuning import (
    Choice,
    Chooser,
    Tuning,
    TuningError,
    choices,
    chooser,
    make,
    refuse_other_fabric,
)
from laddertron.topology.cost.tuning import load as load_tuning
from laddertron.topology.hardware.fabric import Fabric, load
from laddertron.topology.hardware.presets import GPU_MODELS, gpu_node, preset
from laddertron.topology.json_codec import ReadError
from laddertron.topology.link_cost import WHOLE_BYTES, LinkCost, in_two_shots
from laddertron.topology.placement.placement import place
from laddertron.topology.placement.world import World

KIB, US = 1 << 10, 1e-6
STRATEGIES: tuple[Strategy, ...] = ("flat", "exchange", "doubling", "two_level", "pipeline")
FIXTURES = Path(__file__).parents[2] / "fixtures/fabrics"
NVLINK8 = Shape(1, 8, "nvlink", intra_bytes_per_s=450e9)
TWO_BY_8 = Shape(2, 8, "nvlink", "ib", 8, 450e9, 50e9)
HOST8 = Shape(1, 8, "pcie")

# Seconds of one flat NCCL all-reduce on H100, from published tokens/s: (standard - no-communication) a step, over the
# number of all-reduces in one. (shape, KiB, us)
PUBLISHED = [
    (NVLINK8, 16, 23.9), (NVLINK8, 64, 26.1), (NVLINK8, 256, 28.2), (NVLINK8, 1024, 43.8),
    (TWO_BY_8, 32, 47.6), (TWO_BY_8, 128, 55.1), (TWO_BY_8, 256, 76.9), (TWO_BY_8, 512, 84.7),
    (HOST8, 16, 63.6), (HOST8, 64, 72.8), (HOST8, 256, 91.6), (HOST8, 1024, 112.0),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "kib", "us"), PUBLISHED)
def test_untuned_prices_agree_with_published_speeds(shape: Shape, kib: int, us: float) -> None:
    """Every published point within a quarter."""
    assert predict(reference("nccl", shape), shape, "flat", kib * KIB) == pytest.approx(us * US, rel=0.25)


@pytest.mark.parametrize(
    ("backend", "strategy", "shape", "ms"),
    [
        ("gloo", "flat", Shape(2, 1), 4.6),
        ("gloo", "flat", Shape(4, 1), 13.9),
        ("native", "exchange", Shape(2, 1), 1.1),
        ("native", "two_level", Shape(2, 2), 1.1),
        ("native", "exchange", Shape(4, 1), 1.1),
        ("native", "doubling", Shape(4, 1), 2.1),
    ],
)
def test_a_link_of_one_millisecond(backend: Backend, strategy: Strategy, shape: Shape, ms: float) -> None:
    """16 KiB over CPU hosts 1 ms apart: gloo's ring takes four delays on two ranks and twelve on four, a direct
    exchange one, recursive doubling one a round, two levels as much as their outer one."""
    costs = reference(backend, shape)
    (regime,) = costs.regimes
    assert regime.inter is not None
    far = replace(regime.inter, latency_s=regime.inter.latency_s + 1e-3)
    costs = replace(costs, regimes=(replace(regime, inter=far),))
    assert predict(costs, shape, strategy, 16 * KIB) == pytest.approx(ms * 1e-3, rel=0.2)


def test_terms_by_hand() -> None:
    """32 KiB over 2 nodes x 4 with 2 ports a node, counted on paper."""
    shape = Shape(2, 4, "nvlink", "ib", rails=2)
    b = 32 * KIB

    def counts(strategy: Strategy) -> tuple[float, ...]:
        t = terms("native", shape, strategy, b)
        return (t.calls, t.intra_hops, t.intra_bytes / b, t.inter_hops, t.inter_bytes / b)

    assert counts("exchange") == (1, 0, 3, 1, 4 * 2)  # four ranks share two ports
    assert counts("two_level") == (3, 2, 1.5, 1, 0.25 * 2)
    assert counts("pipeline") == (3, 2, 1.5, 1, 0.25 * 2)
    ring = terms("gloo", shape, "flat", b)  # 7 links of 8, twice, each after a consent; 2 lead to the other node
    assert (ring.intra_hops, ring.intra_bytes, ring.inter_hops, ring.inter_bytes / b) == (20, 0, 8, 1.75)
    lone = terms("native", Shape(4, 1), "doubling", b)
    assert (lone.calls, lone.intra_hops, lone.inter_hops, lone.inter_bytes / b) == (1, 0, 2, 2)


@pytest.mark.parametrize(("nodes", "hops", "volume"), [(1, 0, 0.0), (2, 1, 1.0), (4, 2, 1.5), (16, 2, 1.875)])
def test_no_strategy_sends_fewer_bytes_than_the_pipeline(nodes: int, hops: int, volume: float) -> None:
    """Over N nodes of one rank each byte leaves a rank 2 (N - 1) / N times, in two hops however many nodes (two
    exchange halves in one); an exchange N - 1 times the whole."""
    shape = Shape(nodes, 1)
    found = terms("native", shape, "pipeline", 1 << 20)
    assert (found.inter_hops, found.inter_bytes / (1 << 20)) == (hops, volume)
    others = [terms("native", shape, s, 1 << 20) for s in STRATEGIES if possible(s, shape)]
    assert all(found.inter_bytes <= other.inter_bytes for other in others)


def test_what_is_possible() -> None:
    assert not possible("doubling", Shape(3, 8))
    assert not possible("two_level", Shape(1, 8))
    assert not possible("two_level", Shape(2, 1))
    with pytest.raises(ValueError, match="doubling is not possible on 3 nodes x 2 ranks"):
        terms("native", Shape(3, 2), "doubling", 1)
    assert predict(reference("native", Shape(1, 1)), Shape(1, 1), "flat", KIB) == 0


def test_only_what_the_backend_has_is_a_candidate() -> None:
    assert candidates("nccl", TWO_BY_8) == candidates("nccl", TWO_BY_8, 4 << 20) == ("flat", "two_level", "one_shot")
    assert candidates("nccl", TWO_BY_8, (4 << 20) + 1) == ("flat", "two_level")
    assert candidates("nccl", NVLINK8) == ("flat", "one_shot")
    assert candidates("nccl", HOST8) == candidates("nccl", replace(TWO_BY_8, per_node=1)) == ("flat",)
    assert candidates("gloo", Shape(2, 2)) == ("flat", "two_level")
    assert candidates("gloo", Shape(4, 1)) == candidates("nccl", Shape(1, 8)) == ("flat",)
    assert candidates("native", Shape(4, 1)) == ("exchange", "doubling", "pipeline")
    assert candidates("native", Shape(2, 2)) == ("exchange", "two_level", "pipeline")
    assert candidates("native", Shape(1, 4)) == ("exchange", "pipeline")
    assert candidates("native", Shape(3, 1)) == ("exchange", "pipeline")
    assert candidates("native", Shape(4, 1), WHOLE_BYTES) == ("exchange", "doubling", "pipeline")
    assert candidates("native", Shape(4, 1), WHOLE_BYTES + 1) == ("pipeline",)
    assert untuned("nccl", TWO_BY_8, 8 << 20) == untuned("gloo", TWO_BY_8) == ("flat",)
    assert untuned("nccl", TWO_BY_8, KIB) == untuned("nccl", NVLINK8, KIB) == ("flat", "one_shot")
    assert proven("nccl", TWO_BY_8, KIB) == proven("gloo", TWO_BY_8) == ("flat",)
    assert proven("native", Shape(2, 2), KIB) == untuned("native", Shape(2, 2), KIB)
    assert untuned("native", Shape(2, 2), 4 * KIB) == candidates("native", Shape(2, 2), 4 * KIB)


def test_one_shot_is_priced_as_published_and_chosen_up_to_its_size() -> None:
    """8 to 10 us for 32 KiB over eight H100; a third of NCCL's hops. Across nodes NCCL's call stays, and its hops. A
    large message of eight ranks takes two calls and is read once or twice; a larger one is NCCL's, and where GPUs do
    not read one another every one is."""
    costs = reference("nccl", NVLINK8)
    assert predict(costs, NVLINK8, "one_shot", 32 * KIB) == pytest.approx(9 * US, rel=0.15)
    inside, across = (terms("nccl", shape, "one_shot", 32 * KIB) for shape in (NVLINK8, TWO_BY_8))
    assert (inside.intra_hops, inside.intra_bytes, inside.inter_hops) == (2, 7 * 32 * KIB, 0)
    two_level = terms("nccl", TWO_BY_8, "two_level", 32 * KIB)
    assert (across.inter_hops, across.inter_bytes) == (two_level.inter_hops, two_level.inter_bytes)
    assert (across.intra_hops, across.intra_bytes) == (4, two_level.intra_bytes)
    assert across.calls < two_level.calls
    for shape in (NVLINK8, TWO_BY_8, replace(NVLINK8, per_node=2)):
        found = chooser(None, PAIR, shape, "nccl")[0]
        assert [found.strategy(n) for n in (KIB, 32 * KIB, 1 << 18, 8 << 20)] == ["one_shot"] * 3 + ["flat"], shape
    two_shots = terms("nccl", NVLINK8, "one_shot", 1 << 20)
    assert (two_shots.intra_hops, two_shots.intra_bytes) == (4, 14 / 8 * (1 << 20))
    assert two_shots.calls == 2 * inside.calls
    assert chooser(None, PAIR, NVLINK8, "nccl")[0].strategy(1 << 21) == "one_shot"
    assert chooser(None, PAIR, HOST8, "nccl")[0].strategy(KIB) == "flat"


def test_two_shots_begin_where_reading_less_outweighs_another_kernel() -> None:
    """Never with two ranks, which read one message either way; with more ranks at smaller messages."""
    least = [next(n for n in range(1 << 10, 4 << 20, 1 << 10) if in_two_shots(n, ranks)) for ranks in (4, 8, 16)]
    assert least == [683 * KIB, 196 * KIB, 79 * KIB]
    assert not in_two_shots(1 << 40, 2)


def test_the_choice_follows_the_size() -> None:
    """Over TCP, small messages go in one exchange, larger ones in two levels, the largest in the pipeline; flat is kept
    where it is cheapest."""
    shape = Shape(2, 4)
    costs = reference("native", shape)
    assert choose(costs, shape, KIB, candidates("native", shape, KIB))[0] == "exchange"
    assert choose(costs, shape, 16 * KIB, candidates("native", shape, 16 * KIB))[0] == "two_level"
    assert choose(costs, shape, 8 << 20, candidates("native", shape, 8 << 20))[0] == "pipeline"
    assert choose(costs, shape, 8 << 20, ("flat",))[0] == "flat"
    assert choose(reference("nccl", TWO_BY_8), TWO_BY_8, 32 * KIB, ("flat", "two_level"))[0] == "flat"
    with pytest.raises(ValueError, match="none of two_level is possible"):
        choose(costs, Shape(1, 4), KIB, ("two_level",))


@settings(max_examples=80, deadline=None, print_blob=True)
@given(
    nodes=st.integers(1, 8),
    per_node=st.integers(1, 8),
    nbytes=st.integers(1, 1 << 24),
    backend=st.sampled_from(["nccl", "gloo", "native"]),
)
def test_more_bytes_never_cost_less(nodes: int, per_node: int, nbytes: int, backend: Backend) -> None:
    shape = Shape(nodes, per_node, "nvlink", "ib", per_node)
    costs = reference(backend, shape)
    for strategy in STRATEGIES:
        if possible(strategy, shape):
            assert 0 <= predict(costs, shape, strategy, nbytes) <= predict(costs, shape, strategy, 2 * nbytes)


def test_shapes_of_placements() -> None:
    pair = load(FIXTURES / "dgx-h100-pair.json")
    assert shape_of(pair, place(pair, World(16))) == TWO_BY_8
    assert shape_of(pair, place(pair, World(8, replicas=2)), 1) == replace(TWO_BY_8, nodes=1)
    box = load(FIXTURES / "pcie-box.json")
    assert shape_of(box, place(box, World(4))) == Shape(1, 4, "pcie", "roce", 1, None, 12.5e9)
    cpus = preset("2x4xcpu")
    assert shape_of(cpus, place(cpus, World(2))) == Shape(2, 1, "shm", "tcp", 1, None, 1.25e9)
    bare = Fabric(tuple(gpu_node(f"node{i}", i, GPU_MODELS["H100"], 8, hcas=0) for i in range(2)))
    assert shape_of(bare, place(bare, World(16))) == Shape(2, 8, "nvlink", "tcp", 1, 450e9, 12.5e9)


TRUTH = Costs("native", (Regime(5 * US, LinkCost(2 * US, 5e9), LinkCost(1e-3, 1.2e8)),))
SIZES = tuple(4 * KIB << i for i in range(10))


def sweep(costs: Costs, shapes: Sequence[Shape], noise: float, seed: int) -> list[Point]:
    rng = random.Random(seed)
    return [
        Point(s, n, predict(costs, shape, s, n) * (1 + rng.uniform(-noise, noise)), shape)
        for shape in shapes
        for s in STRATEGIES
        if possible(s, shape)
        for n in SIZES
    ]


def test_the_fit_finds_the_truth_through_noise(run_seed: int) -> None:
    """Points made from known prices with 5 % noise give the prices back within 15 %, and every point within 25 %."""
    found = fit(sweep(TRUTH, [Shape(2, 1), Shape(2, 2), Shape(4, 1)], 0.05, run_seed), "native")
    (regime,), (truth,) = found.costs.regimes, TRUTH.regimes
    assert found.worst < TOLERANCE, found.report()
    assert regime.inter is not None
    assert truth.inter is not None
    assert regime.inter.latency_s == pytest.approx(truth.inter.latency_s, rel=0.15)
    assert regime.inter.bytes_per_s == pytest.approx(truth.inter.bytes_per_s, rel=0.15)


def test_the_fit_withstands_an_outlier() -> None:
    """One point ten times too slow: the others are still explained, and the report names it."""
    points = sweep(TRUTH, [Shape(2, 1), Shape(2, 2)], 0.02, 0)
    points[7] = replace(points[7], seconds=points[7].seconds * 10)
    found = fit(points, "native")
    assert [r.point for r in found.outliers] == [points[7]], found.report()
    assert f"{points[7].strategy} of {points[7].nbytes} bytes: measured" in found.report()


def test_two_protocols_are_two_regimes() -> None:
    """Small messages fast but narrow, large ones slow to start but wide: one line cannot say both."""
    both = Costs("nccl", (Regime(2 * US, None, LinkCost(5 * US, 5e8)), Regime(20 * US, None, LinkCost(100 * US, 5e9))))
    found = fit(sweep(both, [Shape(2, 1)], 0.03, 1), "nccl")
    assert len(found.costs.regimes) == 2 or found.costs.strategies
    assert found.worst < TOLERANCE, found.report()


# Medians measured between two ranks over loopback sockets; at 128 KiB the transport changes its protocol.
MEASURED_US = {4: 57, 16: 49, 32: 51, 64: 82, 128: 80, 256: 271, 512: 427, 1024: 786, 4096: 4318, 8192: 9007}


def test_a_jump_between_protocols_is_followed() -> None:
    """Real medians with a jump of a factor of three: every point within a quarter, and beyond the last size as well."""
    points = [Point("exchange", k * KIB, us * US, Shape(2, 1)) for k, us in MEASURED_US.items()]
    found = fit(points, "native")
    assert found.worst < TOLERANCE, found.report()
    assert 2 <= len(found.costs.of("exchange")) <= 3
    assert predict(found.costs, Shape(2, 1), "exchange", 16 << 20) == pytest.approx(18e-3, rel=0.25)


def test_strategies_may_differ_beyond_one_set_of_prices() -> None:
    """If exchange turns out three times as dear as the shared prices say, it gets prices of its own."""
    points = [
        replace(p, seconds=p.seconds * 3) if p.strategy == "exchange" else p
        for p in sweep(TRUTH, [Shape(4, 1)], 0.02, 2)
    ]
    found = fit(points, "native")
    assert "exchange" in found.costs.strategies
    assert found.worst < TOLERANCE, found.report()


def test_prices_are_never_negative() -> None:
    """Times that fall with size would ask for negative bandwidth: they get none."""
    points = [Point("exchange", n, (200 - i * 10) * US, Shape(2, 1)) for i, n in enumerate(SIZES)]
    for regime in fit(points, "native").costs.regimes:
        assert regime.overhead_s >= 0
        assert regime.inter is not None
        assert regime.inter.latency_s >= 0
        assert regime.inter.bytes_per_s > 0


def test_a_fit_needs_points() -> None:
    with pytest.raises(ValueError, match="at least two sizes"):
        fit([Point("flat", KIB, US, Shape(2, 1))], "gloo")
    with pytest.raises(ValueError, match="must be more than 0"):
        Point("flat", KIB, 0.0, Shape(2, 1))


def test_choices_come_from_what_was_measured() -> None:
    """exchange wins small, two_level large; the border lies between the sizes; 2 % faster is no reason to change."""
    shape = Shape(2, 2)
    times: dict[Strategy, list[float]] = {"exchange": [10, 20, 100, 400], "two_level": [30, 19.6, 50, 100]}
    points = [
        Point(s, n * KIB, t * US, shape) for s, row in times.items() for n, t in zip((1, 4, 16, 64), row, strict=True)
    ]
    assert choices(points) == (Choice(8 * KIB, "exchange"), Choice(None, "two_level"))


PAIR = load(FIXTURES / "dgx-h100-pair.json")


def test_large_messages_are_picked_from_what_was_measured() -> None:
    """Over four nodes the exchange wins until the bytes outweigh the second hop, where the sweep found it; above what
    the exchange can take nothing else is asked about."""
    shape = Shape(4, 1)
    costs = Costs("native", (Regime(20 * US, None, LinkCost(100 * US, 1e9)),))
    points = [
        Point(s, n, predict(costs, shape, s, n), shape)
        for n in (32 * KIB, 64 * KIB, 128 * KIB, 1 << 20, 8 << 20)
        for s in candidates("native", shape, n)
    ]
    cpus = preset("4x1xcpu")
    tuning = make(cpus, shape, fit(points, "native"), {})
    found = Chooser(shape, tuning.costs, tuning.choices, "measured")
    assert [found.strategy(n) for n in (32 * KIB, 128 * KIB, 1 << 20, 64 << 20)] == ["exchange"] + ["pipeline"] * 3


def _points() -> list[Point]:
    """As published, and two levels that are worse for small messages and better for large ones."""
    points = [Point("flat", k * KIB, us * US, TWO_BY_8) for shape, k, us in PUBLISHED if shape == TWO_BY_8]
    return points + [
        replace(p, strategy="two_level", seconds=p.seconds * (1.2 if p.nbytes < 100 * KIB else 0.7)) for p in points
    ]


def tuned(tmp_path: Path) -> tuple[Path, Tuning]:
    tuning = make(PAIR, TWO_BY_8, fit(_points(), "nccl"), {"nccl": "2.27.3"})
    tuning.save(tmp_path / "tuning.json")
    return tmp_path / "tuning.json", tuning


def test_a_tuning_file_says_itself_again(tmp_path: Path) -> None:
    path, tuning = tuned(tmp_path)
    assert load_tuning(path) == tuning


def test_the_engine_uses_its_tuning_file(tmp_path: Path) -> None:
    path, _ = tuned(tmp_path)
    found, warnings = chooser(path, PAIR, TWO_BY_8, "nccl", {"nccl": "2.27.3"})
    assert (found.source, warnings) == ("measured", ())
    assert [found.strategy(n * KIB) for n in (1, 32, 128, 9999)] == ["flat", "flat", "two_level", "two_level"]
    assert predict(found.costs, TWO_BY_8, "flat", 32 * KIB) == pytest.approx(47.6e-6, rel=0.25)


def test_another_fabric_is_refused_by_what_differs(tmp_path: Path) -> None:
    """A pair with slower ports, three nodes, another backend, other links: named, and untuned prices are used."""
    path, tuning = tuned(tmp_path)
    slow = Fabric(tuple(replace(n, hcas=tuple(replace(h, gbit_per_s=200.0) for h in n.hcas)) for n in PAIR.nodes))
    with pytest.raises(TuningError, match=r"hcas: .*8 x InfiniBand 400 Gb/s there, .*InfiniBand 200 Gb/s here"):
        refuse_other_fabric(tuning, slow, TWO_BY_8, "nccl")
    with pytest.raises(TuningError, match="backend: nccl there, gloo here"):
        refuse_other_fabric(tuning, PAIR, TWO_BY_8, "gloo")
    with pytest.raises(TuningError, match="links: nvlink and ib there, nvlink and tcp here"):
        refuse_other_fabric(tuning, PAIR, replace(TWO_BY_8, inter="tcp"), "nccl")
    with pytest.raises(TuningError, match="nodes: 2 there, 1 here"):
        refuse_other_fabric(tuning, Fabric(PAIR.nodes[:1]), TWO_BY_8, "nccl")
    found, (warning,) = chooser(path, slow, TWO_BY_8, "nccl")
    assert found.source == "untuned"
    assert "hcas: " in warning
    assert "laddertron preflight" in warning


def test_the_same_machines_in_another_allocation_are_not_refused(tmp_path: Path) -> None:
    path, _ = tuned(tmp_path)
    other = Fabric(tuple(replace(n, hostname=f"dgx-{i + 40}") for i, n in enumerate(PAIR.nodes)))
    assert chooser(path, other, TWO_BY_8, "nccl", {"nccl": "2.27.3"})[1] == ()


def test_fallbacks_warn(tmp_path: Path) -> None:
    """No file, a file that is gone, a broken one, other library versions, another layout: each says so."""
    path, _ = tuned(tmp_path)
    assert "untuned prices" in chooser(None, PAIR, TWO_BY_8, "nccl")[1][0]
    assert "No such file" in chooser(tmp_path / "gone.json", PAIR, TWO_BY_8, "nccl")[1][0]
    (tmp_path / "broken.json").write_text("{")
    assert "not JSON" in chooser(tmp_path / "broken.json", PAIR, TWO_BY_8, "nccl")[1][0]
    found, (warning,) = chooser(path, PAIR, TWO_BY_8, "nccl", {"nccl": "2.28.0"})
    assert found.source == "measured"
    assert "measured with nccl 2.27.3, here is 2.28.0" in warning
    narrow = replace(TWO_BY_8, per_node=4)
    found, (warning,) = chooser(path, PAIR, narrow, "nccl")
    assert found.source == "fitted"
    assert "measured on 2 nodes x 8 ranks, prices carried over to 2 nodes x 4 ranks" in warning


def test_a_librarys_own_is_replaced_only_by_what_was_measured(tmp_path: Path) -> None:
    """NCCL by untuned prices is flat, though these say of 64 MiB that two levels were cheaper; so it is by a file in
    which nothing else was measured, on this layout or another. Where two levels were, prices carry them over."""
    big, narrow = 64 << 20, replace(TWO_BY_8, per_node=4)
    slow = replace(TWO_BY_8, rails=1)  # one port a node: what crosses it counts
    assert choose(reference("nccl", slow), slow, big, candidates("nccl", slow, big))[0] == "two_level"
    assert chooser(None, PAIR, slow, "nccl")[0].strategy(big) == "flat"
    path, tuning = tuned(tmp_path)
    alone = make(PAIR, TWO_BY_8, fit([p for p in _points() if p.strategy == "flat"], "nccl"), tuning.versions)
    alone.save(tmp_path / "alone.json")
    for shape in (TWO_BY_8, narrow):
        assert chooser(tmp_path / "alone.json", PAIR, shape, "nccl")[0].strategy(big) == "flat"
        assert chooser(path, PAIR, shape, "nccl")[0].strategy(big) == "two_level"
        assert "one_shot" not in {chooser(path, PAIR, shape, "nccl")[0].strategy(1 << power) for power in range(8, 27)}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("backend", "tcp", "backend: expected '.*nccl"),
        ("choices", [{"up_to_bytes": 4, "strategy": "flat"}], "sizes must rise and the last be null"),
        ("choices", [{"up_to_bytes": None, "strategy": "fast"}], r"choices\[0\].strategy: expected 'flat'"),
        ("versions", {"nccl": 2}, "versions.nccl: expected a string"),
        ("shape", {"nodes": 0, "per_node": 1}, "shape: nodes=0"),
        ("pickle", "x", "pickle: unknown key"),
    ],
)
def test_a_tuning_file_is_read_strictly(tmp_path: Path, key: str, value: object, message: str) -> None:
    path, _ = tuned(tmp_path)
    data = json.loads(path.read_text())
    data[key] = value
    path.write_text(json.dumps(data))
    with pytest.raises(ReadError, match=message):
        load_tuning(path)
