"""Whether a model fits a fabric and how fast it will be, by arithmetic: `make_plan(Question) -> Plan`. Pure; no torch.

Everything is predicted from shapes, nominal rates and prices of links; `Plan.assumptions` says which. The tables are
engine/plan_memory.py's, engine/simulate_rates.py's and engine/plan_layouts.py's; launchers/ shows them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..models.config import ModelConfig
from ..models.config_parts import Wiring, make_wiring
from ..models.residual import collectives_per_step
from ..topology.cost import Backend, Costs, Shape, terms
from ..topology.emulated import Emulation
from ..topology.fabric import Fabric
from ..topology.mapping import Row, explain
from ..topology.placement import Placement
from .plan_layouts import Depth, Devices, Layout, Work, depth, group_of, layouts
from .plan_memory import Memory, MemoryKeys, Stored, memory
from .plan_words import recommend
from .simulate import StepTime, law
from .simulate_rates import Group, Links, Load, cpu_rates, emulated_links, gpu_rates, links


@dataclass(frozen=True, slots=True)
class Question:
    """What is planned. `fabric` is the part of it that is used; `shape` the group's links; `costs` of a tuning file, or
    None for untuned prices; `notes` what the asker had to assume."""

    name: str
    config: ModelConfig
    stored: Stored
    keys: MemoryKeys
    fabric: Fabric
    placement: Placement
    shape: Shape
    backend: Backend
    work: Work = field(default_factory=Work)
    costs: Costs | None = None
    costs_source: str = "untuned prices"
    emulated: Emulation | None = None
    overlap: bool = True
    threads: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prediction:
    """One wiring, one batch: the step on the virtual clock."""

    wiring: str
    batch: int
    context: float
    time: StepTime
    speedup: float
    """Over standard at the same batch."""
    fits: bool

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.time.total_s


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt alone."""

    wiring: str
    tokens: int
    time: StepTime

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.time.total_s


@dataclass(frozen=True, slots=True)
class Traffic:
    """One decode step of `batch` sequences on one rank: messages of the layers, their size, what a rank sends inside
    the node and between nodes, and one all-reduce's seconds beside a mean sub-block's (L and c of the law)."""

    wiring: str
    batch: int
    messages: int
    message_bytes: int
    strategy: str
    intra_bytes: float
    inter_bytes: float
    all_reduce_s: float
    sub_block_s: float

    @property
    def law(self) -> float:
        """The most that ladder can gain here."""
        return law(self.sub_block_s, self.all_reduce_s)


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer."""

    question: Question
    ranks: tuple[Row, ...]
    memory: Memory
    traffic: tuple[Traffic, ...]
    predictions: tuple[Prediction, ...]
    prefills: tuple[Prefill, ...]
    depths: tuple[Depth, ...]
    layouts: tuple[Layout, ...]
    recommendation: tuple[str, ...]
    assumptions: tuple[str, ...]

    @property
    def wirings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(p.wiring for p in self.predictions))


def make_plan(question: Question) -> Plan:
    """Answers the question; nothing is looked at besides it. Raises ValueError where the fabric does not say what its
    devices can do."""
    q = question
    size = q.placement.tensor_parallel_size
    devices = devices_of(q)
    room, group = memory_in(q), group_in(q)
    ways = wirings(q.config)
    predictions, prefills = _speeds(q, group, room, ways)
    contexts = [n for n in q.work.contexts if n <= q.config.max_position_embeddings]
    depths = tuple(depth(group, room, n, gpu_hour=q.work.gpu_hour) for n in contexts)
    found = layouts(q.config, size, q.stored, q.keys, devices, q.work) if devices.total > 1 and q.keys.gpu else ()
    return Plan(
        question=q,
        ranks=tuple(explain(q.placement)),
        memory=room,
        traffic=tuple(_traffic(q, group, wiring, batch) for wiring in ways.values() for batch in (1, 32)),
        predictions=predictions,
        prefills=prefills,
        depths=depths,
        layouts=found,
        recommendation=recommend(q.config, q.stored, room, q.placement, found, predictions),
        assumptions=_assumptions(q, group),
    )


def group_in(q: Question) -> Group:
    """The question's tensor-parallel group, ready to be asked for steps."""
    rates = devices_of(q).rates(q.stored.weights)
    size = q.placement.tensor_parallel_size
    group = group_of(q.config, size, q.stored, rates, _links(q, q.shape), q.keys.replicate_embedding)
    return group if q.overlap else replace(group, overlap=False)


def memory_in(q: Question) -> Memory:
    """One rank of that group."""
    return memory(q.config, q.placement.tensor_parallel_size, q.stored, q.keys, devices_of(q).memory_bytes)


def wirings(config: ModelConfig) -> Mapping[str, Wiring]:
    """Those to compare: standard, the retrofit of the last half, ladder, parallel, no communication, and the model's
    own."""
    layers = config.num_layers
    ways = {
        "standard": make_wiring("standard", layers),
        "hybrid": make_wiring("hybrid", layers, range(layers - layers // 2, layers)),
        "ladder": make_wiring("ladder", layers),
        "parallel": make_wiring("parallel", layers),
        "no-communication": make_wiring("none", layers),
    }
    return {**ways, config.wiring.name: config.wiring}


def devices_of(q: Question) -> Devices:
    """The fabric's devices as the layouts see them: the least of each kind sets the pace."""
    used = [n for n in q.fabric.nodes if any(n.hostname == s.hostname for s in q.placement.seats)]
    per_node = max(count for _, count in q.placement.hosts)
    if not q.keys.gpu:
        node = used[0]
        rates = cpu_rates(node, per_node, q.threads)
        return Devices(
            len(used), per_node, node.memory_bytes // per_node, False, lambda kind: rates,
            lambda nodes, each: _links(q, replace(q.shape, nodes=nodes, per_node=each)),
            lambda nodes, each: replace(q.shape, nodes=nodes, per_node=each),
        )  # fmt: skip
    gpus = [d for n in used for d in n.devices]
    slowest = min(gpus, key=lambda d: d.memory_bandwidth or 0.0)

    def shape(nodes: int, each: int) -> Shape:
        return replace(q.shape, nodes=nodes, per_node=each, rails=min(each, max(1, len(used[0].hcas))))

    return Devices(
        nodes=len(used),
        per_node=min(len(n.devices) for n in used),
        memory_bytes=min(d.memory_bytes for d in gpus),
        fp8=all(d.fp8_flops for d in gpus),
        rates=lambda kind: gpu_rates(slowest, kind),
        links=lambda nodes, each: _links(q, q.shape if (nodes, each) == _extent(q.shape) else shape(nodes, each)),
        shape=shape,
    )


def _extent(shape: Shape) -> tuple[int, int]:
    return shape.nodes, shape.per_node


def _links(q: Question, shape: Shape) -> Links:
    # Fitted prices hold for the layout that they were measured on.
    costs = q.costs if _extent(shape) == _extent(q.shape) else None
    under = links(q.backend, shape, costs, source=q.costs_source if costs else "untuned prices")
    return emulated_links(under, q.emulated) if q.emulated else under


def _speeds(
    q: Question, group: Group, room: Memory, ways: Mapping[str, Wiring]
) -> tuple[tuple[Prediction, ...], tuple[Prefill, ...]]:
    predictions = []
    for batch in q.work.batches:
        load = Load(decodes=batch, context=q.work.context)
        times = {name: group.step(load, wiring) for name, wiring in ways.items()}
        fits = batch <= room.sequences(q.work.prompt + q.work.output)
        for name, time in times.items():
            speedup = times["standard"].total_s / time.total_s
            predictions.append(Prediction(name, batch, q.work.context, time, speedup, fits))
    prompts = [n for n in dict.fromkeys((q.work.prompt, 8192)) if n <= q.config.max_position_embeddings]
    prefills = [
        Prefill(name, tokens, group.prefill(tokens, q.keys.max_num_batched_tokens, wiring))
        for tokens in prompts
        for name, wiring in ways.items()
    ]
    return tuple(predictions), tuple(prefills)


def _traffic(q: Question, group: Group, wiring: Wiring, batch: int) -> Traffic:
    load = Load(decodes=batch, context=q.work.context)
    cost, size = group.cost(load), group.message_bytes(load)
    messages = collectives_per_step(wiring) if group.size > 1 else 0
    strategy = group.links.strategy(size)
    intra = inter = 0.0
    if messages:
        # Flat and two-level are the same volume to NCCL's cost model, which counts the narrowest link alone.
        each = terms(q.backend, q.shape, strategy, size)  # type: ignore[arg-type]
        intra, inter = each.intra_bytes * messages, each.inter_bytes * messages
    return Traffic(
        wiring.name, batch, messages, size, strategy, intra, inter, cost.all_reduce.seconds, cost.sub_block_s
    )


def _assumptions(q: Question, group: Group) -> tuple[str, ...]:
    said = [
        f"computing: {group.rates.source}",
        f"collectives: {q.backend}, {group.links.source}",
        f"requests: {q.work.prompt} tokens of prompt, {q.work.output} of output; decoding attends to "
        f"{q.work.context:.0f} positions on average",
    ]
    if q.keys.gpu:
        said += [
            f"a GPU costs ${q.work.gpu_hour:g} an hour; all GPUs of a layout are paid for",
            "keys and values are read once (paged attention by FlashInfer); torch's attention is slower",
            "nothing here was measured on these machines: `laddertron preflight` measures the links, `bench` the rest",
        ]
    return (*said, *q.notes)
