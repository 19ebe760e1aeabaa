"""A rank's compute, memory traffic and messages in a step, in seconds at its device's rates: a roofline with four
calibrated shares. `ComputeRates.source` says which rates are assumed. Pure; no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from math import comb

from ...models.config.model_config import ModelConfig
from ...models.config.parts import Wiring
from ...models.config.shapes import WHOLE, Sharing
from ...models.stages import RankShard
from ...models.weights.slices import SHARED
from ...topology.cost.cost import Backend, Costs, Shape, choose, predict, proven
from ...topology.cost.prices import reference
from ...topology.hardware.fabric import Device, LinkClass, Node, counted
from ...topology.link_cost import Emulation
from .step_simulator import StepCost, StepTime, Wire, simulate_step

WEIGHT_SHARE = 0.76
KV_SHARE = 0.70
FLOPS_SHARE = 0.55
CALL_ONE_S, CALL_MANY_S = 7e-6, 18e-6
"""Fitted to published single-token rates of 70B and 405B on H100 (docs/plans/validation.md has the errors), but for
KV_SHARE and FLOPS_SHARE, which are assumptions: shares of the nominal memory bandwidth that weights and KV are read at,
of the dense FLOP/s in large products, and what a sub-block costs beyond its bytes with one row and with more."""

ATTENTION_CALLS = 0.65
"""Attention's share of what a layer costs beyond its bytes: it launches about twice as many kernels as the MLP."""


_simulated = lru_cache(4096)(simulate_step)
"""A plan asks for most steps more than once: layouts share them."""


@dataclass(frozen=True, slots=True)
class Contention:
    """How much slower a collective makes concurrent computation: while it waits for latencies, while bytes move."""

    waiting: float
    moving: float

    def of(self, idle_s: float, whole_s: float) -> float:
        """The slowdown by a collective of `whole_s`, `idle_s` of which are latency."""
        if whole_s <= 0:
            return 0.0
        share = min(1.0, idle_s / whole_s)
        return share * self.waiting + (1.0 - share) * self.moving


NCCL_CONTENTION: dict[LinkClass, Contention] = {
    "nvlink": Contention(0.24, 0.98),
    "pcie": Contention(0.05, 1.86),
    "shm": Contention(0.05, 1.86),
    "ib": Contention(0.25, 0.75),
    "roce": Contention(0.25, 0.75),
    "tcp": Contention(0.25, 0.75),
}
"""By the slowest link; fitted as above (roce and tcp: taken from their neighbours)."""

CPU_CONTENTION = Contention(0.0, 0.3)

CPU_FLOPS_PER_CORE, CPU_BYTES_PER_CORE, CPU_BYTES_PER_NODE = 40e9, 12e9, 200e9
CPU_CALL_S = 100e-6
"""A CPU core, coarsely: measure and give your own where it matters."""


@dataclass(frozen=True, slots=True)
class ComputeRates:
    """A rank's reached FLOP/s, bytes/s of weights and KV, and each sub-block's overhead for one row and more."""

    flops: float
    weight_bytes_per_s: float
    kv_bytes_per_s: float
    call_one_s: float
    call_many_s: float
    source: str
    value_flops: float | None = None
    """FLOP/s where neither factor is fp8; None: `flops`."""

    def __post_init__(self) -> None:
        if min(self.flops, self.weight_bytes_per_s, self.kv_bytes_per_s) <= 0:
            raise ValueError(f"rates must be more than 0, got {self}")


def gpu_rates(device: Device, weight_dtype: str = "bfloat16") -> ComputeRates:
    """The rates of a rank with a GPU to itself. Raises ValueError where the fabric does not say what the device can
    do."""
    flops = device.fp8_flops if weight_dtype == "fp8" and device.fp8_flops else device.bf16_flops
    if not flops or not device.memory_bandwidth:
        raise ValueError(f"{device.name}: bf16_flops and memory_bandwidth are not known: write them into the fabric")
    return ComputeRates(
        flops * FLOPS_SHARE,
        device.memory_bandwidth * WEIGHT_SHARE,
        device.memory_bandwidth * KV_SHARE,
        CALL_ONE_S,
        CALL_MANY_S,
        f"{device.name}: nominal rates x shares fitted to published H100 runs",
        device.bf16_flops * FLOPS_SHARE if device.bf16_flops else None,
    )


def cpu_rates(node: Node, ranks_on_node: int, threads: int | None = None) -> ComputeRates:
    """The rates of a rank that has `threads` cores (None: its share of the node's)."""
    cores = min(threads or max(1, len(node.cores) // ranks_on_node), len(node.cores))
    stream = min(cores * CPU_BYTES_PER_CORE, CPU_BYTES_PER_NODE / ranks_on_node)
    return ComputeRates(
        cores * CPU_FLOPS_PER_CORE, stream, stream, CPU_CALL_S, CPU_CALL_S,
        f"{counted(cores, 'CPU core')} a rank at coarse rates: measure before you rely on them",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """One step's computation: `decodes` sequences with one token each that attend to `context` positions, and
    `prompt` tokens of prompts, each attending to `prompt_context` on average; `prompts` of them end here."""

    decodes: int = 0
    context: float = 0.0
    prompt: int = 0
    prompt_context: float = 0.0
    prompts: int = 0

    @property
    def tokens(self) -> int:
        return self.decodes + self.prompt

    @property
    def rows(self) -> int:
        return self.decodes + self.prompts

    def halves(self) -> tuple[Load, Load]:
        """The loads of a step's two streams of equal tokens, decodes first; of one token itself and nothing."""
        first = self.tokens // 2
        decodes, prompt = min(first, self.decodes), max(0, first - self.decodes)
        later = self.prompt - prompt
        return (
            Load(decodes, self.context, prompt, self.prompt_context - later / 2),
            Load(self.decodes - decodes, self.context, later, self.prompt_context + prompt / 2, self.prompts),
        )


@dataclass(frozen=True, slots=True)
class Links:
    """The cost of a group's collectives: `wire(bytes)` an all-reduce by `strategy(bytes)`."""

    wire: Callable[[int], Wire]
    strategy: Callable[[int], str]
    source: str


def links(
    backend: Backend,
    shape: Shape,
    costs: Costs | None = None,
    contention: Contention | None = None,
    source: str = "untuned prices",
) -> Links:
    """Collectives at `costs` (None: untuned), the cheapest strategy per size; of a library only its own."""
    prices = costs or reference(backend, shape)
    slowest = shape.intra if shape.nodes == 1 else shape.inter
    slows = contention or (NCCL_CONTENTION[slowest] if backend == "nccl" else CPU_CONTENTION)

    def wire(nbytes: int) -> Wire:
        if shape.size == 1:
            return Wire(0.0)
        strategy, seconds = choose(prices, shape, nbytes, proven(backend, shape, nbytes))
        return Wire(seconds, slows=slows.of(predict(prices, shape, strategy, 1), seconds))

    def strategy(nbytes: int) -> str:
        return choose(prices, shape, nbytes, proven(backend, shape, nbytes))[0] if shape.size > 1 else "none"

    return Links(wire, strategy, source)


def emulated_links(under: Links, emulation: Emulation) -> Links:
    """`under` does the arithmetic, and every result is held back."""

    def wire(nbytes: int) -> Wire:
        real = under.wire(nbytes)
        latency_s, held_s = emulation.parts(nbytes)
        return Wire(max(real.busy_s, held_s), latency_s, real.slows)

    return replace(under, wire=wire, source=emulation.label)


def distinct_experts(count: int, chosen: float, rows: int) -> float:
    """How many of `count` experts at least one of `rows` rows is expected to choose, if every choice is as likely."""
    return count * (1.0 - (1.0 - chosen / count) ** rows)


def most_on_a_rank(experts: int, share: float, ranks: int) -> float:
    """The experts read by the busiest of `ranks`: the expected maximum of binomials (`experts`, `share`)."""
    below, expected = 0.0, 0.0
    for count in range(experts):
        below += comb(experts, count) * share**count * (1.0 - share) ** (experts - count)
        expected += 1.0 - min(1.0, below) ** ranks
    return expected


@dataclass(frozen=True, slots=True)
class SimulatedGroup:
    """One tensor-parallel group that computes steps. `replicate_embedding` and `replicate_head`: whole tables on every
    rank. `kv_reads`: how often an attention reads a key or value (1 for paged attention). `overlap` False: every
    all-reduce is waited for where it starts."""

    config: ModelConfig
    size: int
    rates: ComputeRates
    links: Links
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    value_bytes: float = 2.0
    replicate_embedding: bool = False
    replicate_head: bool = False
    kv_reads: float = 1.0
    overlap: bool = True
    wide: tuple[tuple[str, ...], ...] = ()
    """The products of each layer whose weights take `value_bytes` each; empty: none."""
    split: bool = False
    """A step may be computed in two streams, and is where that is quicker."""
    expert_bytes: float | None = None
    """An element's of quantised experts, which are widened to be multiplied; None: `weight_bytes`."""
    sharing: Sharing = WHOLE
    node_links: Links | None = None
    """Links of the ranks that `sharing` cuts the dense path over."""

    @property
    def shard(self) -> RankShard:
        return RankShard(self.config, self.size, 0, None, *self.sharing)

    def message_bytes(self, load: Load) -> int:
        """Bytes of one sub-block's all-reduce."""
        return int(load.tokens * self.config.hidden_size * self.value_bytes)

    def cost(self, load: Load) -> StepCost:
        c, shard, r = self.config, self.shard, self.rates
        call = r.call_one_s if load.tokens == 1 else r.call_many_s
        windows = c.sliding_window or (None,) * c.num_layers
        attend = {window: self.attend_s(load, window) for window in set(windows)}
        calls = 2 * call * ATTENTION_CALLS, 2 * call * (1 - ATTENTION_CALLS)
        wide_products = self.wide or ((),) * c.num_layers
        times = {wide: self._products(load.tokens, wide) for wide in set(wide_products)}
        mixed = c.experts.layers if c.experts is not None else ()
        experts_s = self._experts(load.tokens)
        vocabulary = c.vocab_size if self.replicate_head else shard.padded_vocab // self.size
        inputs = c.hidden_size * (c.lanes.count if c.lanes is not None and c.lanes.head == "lane" else 1)
        head = self._product(inputs * vocabulary, load.rows, True) if load.rows else 0.0
        message = self.message_bytes(load)
        apart = not self.replicate_embedding and self.size > 1
        node = None
        if self.node_links is not None and self.sharing.per_node:
            node = self.node_links.wire(message)
        return StepCost(
            attention_s=tuple(
                times[wide][0] + calls[0] + attend[window] for wide, window in zip(wide_products, windows, strict=True)
            ),
            mlp_s=tuple(
                calls[1] + (times[wide][1] if c.has_mlp(i) else experts_s) for i, wide in enumerate(wide_products)
            ),
            beside_s=tuple(experts_s if is_mixture else 0.0 for is_mixture in mixed)
            if c.experts and c.experts.beside
            else (),
            mixed=mixed,
            node=node,
            all_reduce=self.links.wire(message),
            after_s=head + (r.call_one_s if load.rows else 0.0),
            before=(node or self.links.wire(message)) if apart else Wire(0.0),
            after=self._after(load) if self.size > 1 and load.rows else Wire(0.0),
            shared_norm_saves_s=0.25 * call,
        )

    def _after(self, load: Load) -> Wire:
        """A rank's candidates, at most a few hundred bytes a row; before them what the head reads of other lanes."""
        drawn, lanes = self.links.wire(max(1, 64 * load.rows)), self.config.lanes
        if lanes is None or lanes.head == "vocab_parallel":
            return drawn
        values_per_row = self.config.hidden_size * (lanes.count if lanes.head == "lane" else 1)
        rows = self.links.wire(int(load.rows * values_per_row * self.value_bytes))
        return Wire(rows.busy_s + drawn.busy_s, rows.latency_s + drawn.latency_s, drawn.slows)

    def _products(self, rows: int, wide: tuple[str, ...]) -> tuple[float, float]:
        """Seconds of a layer's attention projections and of its MLP, with these products wide."""
        c, shard = self.config, self.shard
        attention, wide = shard.attention_elements, (*wide, "kv_b")
        mlp = {"gate_up": 2 * c.hidden_size * shard.ffn_size, "down": c.hidden_size * shard.ffn_size}

        def seconds(weights: dict[str, int]) -> float:
            widely = sum(n for product, n in weights.items() if product in wide)
            return self._product(sum(weights.values()) - widely, rows) + self._product(widely, rows, True)

        return seconds(attention), seconds(mlp)

    def _experts(self, rows: int) -> float:
        """Seconds of a layer's router, shared and chosen experts on the rank with most of them."""
        e, shard, d = self.config.experts, self.shard, self.config.hidden_size
        if e is None:
            return 0.0
        one = 3 * d * len(shard.expert_ffn)
        chosen = e.chosen * e.count / e.routed  # the rest return their input
        read = distinct_experts(e.count, chosen, rows)
        if self.sharing.spread:
            read = most_on_a_rank(len(shard.expert_ids), read / e.count, self.size)
        flops_needed = rows * chosen * 3.0 * d * e.ffn_size / self.size
        quantised = self.expert_bytes is not None
        value_bytes = self.weight_bytes if self.expert_bytes is None else self.expert_bytes
        flops = self._value_flops if quantised else self.rates.flops
        experts = max(2 * flops_needed / flops, read * one * value_bytes / self.rates.weight_bytes_per_s)
        return (
            experts
            + self._product(3 * d * len(shard.shared_ffn), rows, any(SHARED in layer for layer in self.wide))
            + self._product(e.routed * d, rows, True)
        )

    def _product(self, weights: float, rows: int, wide: bool = False) -> float:
        flops, weight_bytes = (self._value_flops, self.value_bytes) if wide else (self.rates.flops, self.weight_bytes)
        return max(2.0 * rows * weights / flops, weights * weight_bytes / self.rates.weight_bytes_per_s)

    @property
    def _value_flops(self) -> float:
        return self.rates.value_flops or self.rates.flops

    def attend_s(self, load: Load, window: int | None = None, read_share: float = 1.0) -> float:
        """Seconds of a layer's attention, without its products. read_share: of keys and values that a rank reads."""
        c, shard = self.config, self.shard
        index = None if c.latent is None else c.latent.index
        most = window if index is None else index.topk
        seen = min(load.context, most) if most else load.context
        prompt_seen = min(load.prompt_context, most) if most else load.prompt_context
        per_position = shard.kv_elements * self.kv_bytes * self.kv_reads * read_share
        read = load.decodes * seen * per_position / self.rates.kv_bytes_per_s
        scores = 2 * c.head_dim if c.latent is None else c.latent.width + c.latent.rank
        flops = 2.0 * shard.num_heads * scores
        decode = max(read, load.decodes * seen * flops / self._value_flops)
        total = decode + load.prompt * prompt_seen * flops / self._value_flops
        if index is None or max(load.context, load.prompt_context) <= index.topk:
            return total
        # every rank scores all positions, in the layers that choose
        share, flops = sum(index.full) / c.num_layers, 2.0 * index.heads * index.dim
        read = load.decodes * load.context * index.dim * self.kv_bytes / self.rates.kv_bytes_per_s
        decode = max(read, load.decodes * load.context * flops / self._value_flops)
        return total + share * (decode + load.prompt * load.prompt_context * flops / self._value_flops)

    def step(self, load: Load, wiring: Wiring | None = None) -> StepTime:
        """The step on the virtual clock, wired as the model is or as `wiring`."""
        wiring, cost = wiring or self.config.wiring, self.cost(load)
        unsplit = _simulated(cost, wiring, self.size, self.overlap)
        if not self.split or load.tokens < 2 or not wiring.waits or not self.overlap:
            return unsplit
        halves = tuple(self.cost(half) for half in load.halves())
        return min(unsplit, _simulated(cost, wiring, self.size, True, halves), key=lambda time: time.total_s)

    def prefill(self, prompt: int, chunk: int, wiring: Wiring | None = None) -> StepTime:
        """One prompt of `prompt` tokens, alone, in chunks of at most `chunk`: the sum of its steps."""
        times, start = [], 0
        while start < prompt:
            count = min(chunk, prompt - start)
            ends = int(start + count == prompt)
            times.append(self.step(Load(prompt=count, prompt_context=start + count / 2, prompts=ends), wiring))
            start += count
        return StepTime(*map(sum, zip(*map(astuple, times), strict=True)))
