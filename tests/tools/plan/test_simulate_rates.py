"""From shapes to seconds: what a rank reads, computes and sends, against arithmetic done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from laddertron.models.config.known_models import known
from laddertron.models.config.parts import make_wiring
from laddertron.tools.plan.roofline import (
    ComputeRates,
    Contention,
    Links,
    Load,
    SimulatedGroup,
    cpu_rates,
    emulated_links,
    gpu_rates,
    links,
)
from laddertron.tools.plan.step_simulator import Wire
from laddertron.topology.cost.cost import Shape, predict
from laddertron.topology.cost.prices import reference
from laddertron.topology.hardware.presets import preset
from laddertron.topology.link_cost import Emulation

QUIET = Links(lambda n: Wire(0.0), lambda n: "none", "")
SLOW_MEMORY = ComputeRates(1e30, 1.0, 1.0, 0.0, 0.0, "one byte a second")


def test_a_decode_step_reads_every_weight_once() -> None:
    """At a byte a second, one rank of one takes as many seconds as it has bytes of projections and head."""
    config = known("llama-3.1-8b")
    time = SimulatedGroup(config, 1, SLOW_MEMORY, QUIET).step(Load(decodes=1))
    norms = (2 * config.num_layers + 1) * config.hidden_size
    table = config.vocab_size * config.hidden_size
    assert time.total_s == pytest.approx(2 * (config.num_parameters - norms - table))


def test_fp8_halves_projections_and_leaves_the_head() -> None:
    """A byte a weight, two for what is not a projection."""
    config = known("llama-3.1-8b")
    whole = SimulatedGroup(config, 1, SLOW_MEMORY, QUIET).step(Load(decodes=1)).total_s
    half = SimulatedGroup(config, 1, SLOW_MEMORY, QUIET, weight_bytes=1.0).step(Load(decodes=1)).total_s
    head = 2 * config.vocab_size * config.hidden_size
    assert half - head == pytest.approx((whole - head) / 2)


def test_keys_and_values_are_read_for_each_sequence() -> None:
    """Two times layers times KV heads of the rank times head size times bytes, a position; a window bounds it."""
    config = known("llama-3.1-405b")
    group = SimulatedGroup(config, 16, SLOW_MEMORY, QUIET)
    more = group.step(Load(decodes=3, context=100.0)).total_s - group.step(Load(decodes=3)).total_s
    assert more == pytest.approx(3 * 100 * 2 * 126 * 1 * 128 * 2, rel=1e-6)
    windowed = replace(config, sliding_window=(64,) * 126)
    bounded = SimulatedGroup(windowed, 16, SLOW_MEMORY, QUIET).step(Load(decodes=3, context=100.0)).total_s
    assert bounded - group.step(Load(decodes=3)).total_s == pytest.approx(more * 0.64, rel=1e-6)


def test_prompts_cost_floating_point() -> None:
    """Two operations a weight and token, and attention's four a head element and position."""
    config = known("llama-3.1-8b")
    fast = ComputeRates(1.0, 1e30, 1e30, 0.0, 0.0, "one operation a second")
    time = SimulatedGroup(config, 1, fast, QUIET).step(Load(prompt=10, prompt_context=7.0))
    per_layer = config.hidden_size * 128 * (2 * 32 + 2 * 8) + 3 * config.hidden_size * config.ffn_size
    attention = 10 * 7 * 4 * 32 * 128
    assert time.total_s == pytest.approx(config.num_layers * (10 * 2 * per_layer + attention))


def test_chunks_of_a_prompt_add_up() -> None:
    """A long prompt takes its chunks' steps; only the last one asks for logits."""
    group = SimulatedGroup(known("llama-3.1-8b"), 1, SLOW_MEMORY, QUIET)
    chunks = [
        group.step(Load(prompt=400, prompt_context=200)),
        group.step(Load(prompt=400, prompt_context=600)),
        group.step(Load(prompt=200, prompt_context=900, prompts=1)),
    ]
    assert group.prefill(1000, 400).total_s == pytest.approx(sum(c.total_s for c in chunks))


@pytest.mark.parametrize(
    "load", [Load(5, 70.0), Load(prompt=9, prompt_context=40.0, prompts=1), Load(3, 7.0, 9, 4.5, 2)]
)
def test_halves_hold_what_the_whole_does(load: Load) -> None:
    """Tokens, and the positions attended to, of decodes and of prompts; what ends ends in the later half."""
    halves = load.halves()
    assert abs(halves[0].tokens - halves[1].tokens) <= 1
    for name in ("decodes", "prompt", "prompts", "tokens", "rows"):
        assert sum(getattr(half, name) for half in halves) == getattr(load, name)
    assert sum(h.prompt * h.prompt_context for h in halves) == pytest.approx(load.prompt * load.prompt_context)
    assert all(half.context == load.context for half in halves)
    assert halves[0].prompt_context <= halves[1].prompt_context


def test_a_group_splits_where_it_is_quicker() -> None:
    """Prompts bound by products nearly halve what they wait for; decodes bound by weights stay whole, and so do
    wirings that overlap by themselves."""
    wires = Links(lambda n: Wire(0.0, 1e-3), lambda n: "flat", "")
    rates = ComputeRates(1e14, 1e12, 1e12, 0.0, 0.0, "")
    config = known("llama-3.1-8b")
    whole = SimulatedGroup(config, 2, rates, wires, replicate_embedding=True)
    split = replace(whole, split=True)
    prompt, decodes = Load(prompt=2048, prompt_context=1024.0), Load(8, 100.0)
    assert split.step(prompt).total_s < 0.9 * whole.step(prompt).total_s
    assert split.step(decodes) == whole.step(decodes)
    ladder = make_wiring("ladder", config.num_layers)
    assert split.step(prompt, ladder) == whole.step(prompt, ladder)
    assert split.step(Load(1, 100.0)) == whole.step(Load(1, 100.0))


def test_an_embedding_on_every_rank_saves_its_all_reduce() -> None:
    """Sharded, one more message is waited for before the layers."""
    config = known("llama-3.1-8b")
    wires = Links(lambda n: Wire(1.0), lambda n: "flat", "")
    sharded = SimulatedGroup(config, 2, SLOW_MEMORY, wires).step(Load(decodes=1))
    whole = SimulatedGroup(config, 2, SLOW_MEMORY, wires, replicate_embedding=True).step(Load(decodes=1))
    assert sharded.collectives - whole.collectives == 1
    assert sharded.total_s - whole.total_s == pytest.approx(1.0)


def test_prices_are_those_of_the_cost_model() -> None:
    """A link's wire is what topology/cost/cost.py predicts, contention a mix of waiting and moving."""
    shape = Shape(2, 8, "nvlink", "ib", 8, 450e9, 50e9)
    found = links("nccl", shape, contention=Contention(0.2, 0.8))
    for nbytes in (1, 1 << 15, 1 << 22):
        seconds = predict(reference("nccl", shape), shape, "flat", nbytes)
        wire = found.wire(nbytes)
        assert wire.busy_s == pytest.approx(seconds)
        assert 0.2 <= wire.slows <= 0.8
    assert found.wire(1).slows == pytest.approx(0.2)
    assert links("nccl", Shape(1, 1)).wire(1 << 20).seconds == 0.0


def test_an_emulated_link_only_adds_latency_and_a_narrower_wire() -> None:
    """The wire is the slower of the two, the delay comes on top and overlaps."""
    under = links("native", Shape(1, 2, "shm", "tcp"))
    found = emulated_links(under, Emulation("link", 0.001, 1e6)).wire(100_000)
    assert found.latency_s == 0.001
    assert found.busy_s == pytest.approx(max(0.1, under.wire(100_000).busy_s))


def test_devices_without_figures_are_refused_by_name() -> None:
    """A fabric file may not know a GPU's rates: guessing them would be lying."""
    device = replace(preset("1x1xH100").nodes[0].devices[0], bf16_flops=None)
    with pytest.raises(ValueError, match="NVIDIA H100 80GB HBM3: bf16_flops"):
        gpu_rates(device)
    with pytest.raises(ValueError, match="more than 0"):
        ComputeRates(0.0, 1.0, 1.0, 0.0, 0.0, "")


def test_cores_are_shared_among_a_hosts_ranks() -> None:
    """Two ranks of a 16-core host compute half as fast as one; threads bound them."""
    node = preset("1x16xcpu").nodes[0]
    assert cpu_rates(node, 2).flops == pytest.approx(cpu_rates(node, 1).flops / 2)
    assert cpu_rates(node, 2, threads=1).flops == pytest.approx(cpu_rates(node, 1).flops / 16)
