"""Predicts whether a model fits a fabric and how fast it is: `make_plan(Question) -> CapacityEstimate`, from shapes,
nominal rates and link prices, listed in `CapacityEstimate.assumptions`. Pure; no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from ...engine.schedule.step_planner import LEAST_CHUNK
from ...engine.step.memory import MemoryKeys
from ...models.config.known_models import half_ladder
from ...models.config.model_config import ModelConfig
from ...models.config.parts import Wiring, make_wiring
from ...models.config.shapes import WHOLE, Sharing
from ...models.residual import collectives_per_step
from ...models.stages import Stage
from ...topology.cost.cost import Backend, Costs, Shape, candidates, predict, sent_bytes
from ...topology.cost.prices import reference
from ...topology.hardware.fabric import Fabric
from ...topology.link_cost import Emulation
from ...topology.placement.mapping import explain
from ...topology.placement.placement import Placement
from .advice import recommend
from .context_parallel import ContextParallel, price_context_parallel
from .layouts import (
    Depth,
    Devices,
    Layout,
    Prediction,
    Work,
    depth,
    fullest_stage,
    group_of,
    hop,
    layouts,
)
from .memory import Memory, StoredTypes, memory
from .mixtures import MixtureLayout, messages_of, mixture_layouts
from .roofline import Links, Load, SimulatedGroup, cpu_rates, emulated_links, gpu_rates, links
from .step_simulator import StepTime, law


@dataclass(frozen=True, slots=True)
class Question:
    """The input of a plan. `fabric` is the part of it that is used; `shape` the group's links; `costs` of a tuning
    file, or None for untuned prices; `notes` what the asker had to assume."""

    name: str
    config: ModelConfig
    stored: StoredTypes
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
    split: bool = True
    """Steps of wirings that wait may be computed in two streams (`parallel.split_steps`)."""
    threads: int | None = None
    notes: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    """Layers of each stage, where they were configured."""
    sharing: Sharing = WHOLE

    @property
    def key(self) -> tuple[int, int, StoredTypes, str, Sharing]:
        """The same as the Layout's that is asked about."""
        p = self.placement
        return p.world.tp, p.world.stages, self.stored, self.config.wiring.name, self.sharing


@dataclass(frozen=True, slots=True)
class Prefill:
    wiring: str
    tokens: int
    time: StepTime

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.time.total_s


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """One decode step of `batch` sequences on one rank: messages of the layers, their size, what a rank sends inside
    the node and between nodes, and one all-reduce's seconds and a mean sub-block's (L and c of the law)."""

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
class CapacityEstimate:
    question: Question
    ranks: tuple[dict[str, Any], ...]
    memory: Memory
    traffic: tuple[StepTraffic, ...]
    predictions: tuple[Prediction, ...]
    prefills: tuple[Prefill, ...]
    depths: tuple[Depth, ...]
    layouts: tuple[Layout, ...]
    assumptions: tuple[str, ...]
    mixtures: tuple[MixtureLayout, ...] = ()
    context_parallel: ContextParallel | None = None

    @property
    def recommendation(self) -> tuple[str, ...]:
        return recommend(self)

    @property
    def wirings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(p.wiring for p in self.predictions))


def make_plan(question: Question) -> CapacityEstimate:
    """Answers the question. Raises ValueError where the fabric does not give its devices' rates."""
    q = question
    size = q.placement.world.tp
    devices = devices_of(q)
    room, group = memory_in(q), group_in(q)
    variants = wirings(part_of(q))
    contexts = [n for n in q.work.contexts if n <= q.config.max_position_embeddings]
    crossing = hop(q.config, devices, q.stored, size, q.placement.world.stages)
    depths = tuple(depth(group, room, n, q.placement.world.stages, 1, crossing, q.work.gpu_hour) for n in contexts)
    predictions, prefills = _speeds(q, group, room, crossing)
    candidates = layouts(q.config, size, q.stored, q.keys, devices, q.work) if devices.total > 1 and q.keys.gpu else ()
    return CapacityEstimate(
        question=q,
        ranks=explain(q.placement),
        memory=room,
        traffic=tuple(_traffic(q, group, wiring, batch) for wiring in variants.values() for batch in (1, 32)),
        predictions=predictions,
        prefills=prefills,
        depths=depths,
        layouts=candidates,
        assumptions=_assumptions(q, group),
        mixtures=mixture_layouts(q.config, q.stored, q.keys, devices, q.work, q.backend),
        context_parallel=price_context_parallel(group),
    )


def group_in(q: Question) -> SimulatedGroup:
    """The question's tensor-parallel group, ready to be asked for steps; of a pipeline, its slowest stage's."""
    rates = devices_of(q).rates(q.stored.multiplied)
    size = q.placement.world.tp
    inside = devices_of(q).links(1, q.sharing.per_node) if q.sharing.per_node else None
    replicated = q.keys.replicate_embedding
    group = group_of(_part(q), size, q.stored, rates, _links(q, q.shape), replicated, q.sharing, inside)
    return group if q.overlap else replace(group, overlap=False)


def steps_in(q: Question, group: SimulatedGroup, load: Load) -> Mapping[str, StepTime]:
    """The step by every wiring; and standard in two streams where that is quicker, if the question allows it."""
    times = {name: group.step(load, wiring) for name, wiring in wirings(part_of(q)).items()}
    for name, wiring, cut in split_variants(q, group):
        times[name] = cut.step(load, wiring)
    return times


def split_variants(q: Question, group: SimulatedGroup) -> tuple[tuple[str, Wiring, SimulatedGroup], ...]:
    """`standard, split`, where there is something to hide: its wiring, and the group that may split."""
    if not q.split or not q.overlap or group.size == 1:
        return ()
    return (("standard, split", wirings(part_of(q))["standard"], replace(group, split=True)),)


def memory_in(q: Question) -> Memory:
    p = q.placement
    have = devices_of(q).memory_bytes
    return memory(q.config, p.world.tp, q.stored, q.keys, have, p.world.stages, q.sharing)


def part_of(q: Question) -> ModelConfig:
    """The config that the group computes: the model's, or in a pipeline its slowest stage's."""
    return _part(q).config


def _part(q: Question) -> Stage:
    return fullest_stage(q.config, q.placement.world.stages, q.layers)


def _times(time: StepTime, factor: float, hop_s: float) -> StepTime:
    """`factor` stages one after another, each as slow as `time` and a crossing of `hop_s`."""
    if factor == 1:
        return time
    return StepTime(
        factor * (time.total_s + hop_s),
        factor * time.compute_s,
        factor * time.slowed_s,
        factor * (time.waited_s + hop_s),
        factor * (time.flight_s + hop_s),
        round(factor * (time.collectives + (hop_s > 0))),
    )


def _prefill(q: Question, group: SimulatedGroup, tokens: int, wiring: Wiring) -> StepTime:
    """One prompt alone: in a pipeline, cut so that its chunks fill the stages (engine/schedule/step_planner.py)."""
    stages, chunk = q.placement.world.stages, q.keys.max_num_batched_tokens
    if stages > 1:
        chunk = min(chunk, max(LEAST_CHUNK, ceil(tokens / (2 * stages))))
    chunks = ceil(tokens / chunk)
    return _times(group.prefill(tokens, chunk, wiring), (chunks + stages - 1) / chunks, 0.0)


def wirings(config: ModelConfig) -> Mapping[str, Wiring]:
    """To compare: standard, the last half laddered, ladder, parallel, no communication, and the model's own."""
    layers = config.num_layers
    variants = {
        "standard": make_wiring("standard", layers),
        "hybrid": half_ladder(config),
        "ladder": make_wiring("ladder", layers),
        "parallel": make_wiring("parallel", layers),
        "no-communication": make_wiring("none", layers),
    }
    return {**variants, config.wiring.name: config.wiring}


def devices_of(q: Question) -> Devices:
    """The fabric's devices as the layouts see them: the least of each kind sets the pace."""
    used = [n for n in q.fabric.nodes if any(n.hostname == s.hostname for s in q.placement.seats)]

    def shape(nodes: int, per_node: int) -> Shape:
        if (nodes, per_node) == (q.shape.nodes, q.shape.per_node):
            return q.shape
        return replace(q.shape, nodes=nodes, per_node=per_node, rails=min(per_node, max(1, len(used[0].hcas))))

    def linked(nodes: int, per_node: int) -> Links:
        return _links(q, shape(nodes, per_node))

    if not q.keys.gpu:
        node, per_node = used[0], max(count for _, count in q.placement.hosts)
        rates = cpu_rates(node, per_node, q.threads)
        room = node.memory_bytes // per_node
        return Devices(len(used), per_node, room, False, lambda kind: rates, linked, shape, gpu=False)
    gpus = [d for n in used for d in n.devices]
    slowest = min(gpus, key=lambda d: d.memory_bandwidth or 0.0)
    return Devices(
        nodes=len(used),
        per_node=min(len(n.devices) for n in used),
        memory_bytes=min(d.memory_bytes for d in gpus),
        fp8=all(d.fp8_flops for d in gpus),
        rates=lambda kind: gpu_rates(slowest, kind),
        links=linked,
        shape=shape,
    )


def _links(q: Question, shape: Shape) -> Links:
    # Fitted prices hold for the layout that they were measured on.
    costs = q.costs if shape is q.shape else None
    under = links(q.backend, shape, costs, source=q.costs_source if costs else "untuned prices")
    return emulated_links(under, q.emulated) if q.emulated else under


def _speeds(
    q: Question, group: SimulatedGroup, room: Memory, crossing: Callable[[int], float]
) -> tuple[tuple[Prediction, ...], tuple[Prefill, ...]]:
    predictions, stages = [], q.placement.world.stages
    for batch in q.work.batches:
        rows = ceil(batch / stages)  # in as many micro-batches as there are stages
        times = {
            name: _times(time, stages, crossing(rows))
            for name, time in steps_in(q, group, Load(decodes=rows, context=q.work.context)).items()
        }
        fits = batch <= room.sequences(q.work.prompt + q.work.output)
        for name, time in times.items():
            speedup = times["standard"].total_s / time.total_s
            predictions.append(Prediction(name, batch, q.work.context, time, speedup, fits))
    prompts = [n for n in dict.fromkeys((q.work.prompt, 8192)) if n <= q.config.max_position_embeddings]
    variants = [(name, wiring, group) for name, wiring in wirings(part_of(q)).items()]
    prefills = [
        Prefill(name, tokens, _prefill(q, variant_group, tokens, wiring))
        for tokens in prompts
        for name, wiring, variant_group in (*variants, *split_variants(q, group))
    ]
    return tuple(predictions), tuple(prefills)


def _traffic(q: Question, group: SimulatedGroup, wiring: Wiring, batch: int) -> StepTraffic:
    load = Load(decodes=batch, context=q.work.context)
    cost, size = group.cost(load), group.message_bytes(load)
    messages = collectives_per_step(wiring) if group.size > 1 else 0
    strategy = group.links.strategy(size)
    intra = inter = 0.0
    if messages:
        crossing = messages
        if q.sharing.per_node:
            crossing = messages_of(group.config, wiring, q.sharing)
            shape = devices_of(q).shape(1, q.sharing.per_node)
            how = devices_of(q).links(1, q.sharing.per_node).strategy(size)
            intra = (messages - crossing) * sent_bytes(q.backend, shape, how, size)[0]  # type: ignore[arg-type]
        inside, between = sent_bytes(q.backend, q.shape, strategy, size)  # type: ignore[arg-type]
        intra, inter = intra + inside * crossing, between * crossing
    return StepTraffic(
        wiring.name, batch, messages, size, strategy, intra, inter, cost.all_reduce.seconds, cost.sub_block_s
    )


def _one_shot(q: Question, group: SimulatedGroup) -> str:
    """What a small all-reduce would take by one_shot, on which no prediction counts."""
    size = group.message_bytes(Load(decodes=1))
    if "one_shot" not in candidates(q.backend, q.shape, size):
        return ""
    seconds = predict(reference(q.backend, q.shape), q.shape, "one_shot", size)
    return (
        f"; one_shot, which never ran on a GPU and is not counted on, would take {seconds * 1e6:.0f} us for "
        f"{size >> 10} KiB, and these {group.links.wire(size).seconds * 1e6:.0f} us"
    )


def _assumptions(q: Question, group: SimulatedGroup) -> tuple[str, ...]:
    sentences = [
        f"computing: {group.rates.source}",
        f"collectives: {q.backend}, {group.links.source}{_one_shot(q, group)}",
        f"requests: {q.work.prompt} tokens of prompt, {q.work.output} of output; decoding attends to "
        f"{q.work.context:.0f} positions on average",
    ]
    if q.keys.gpu:
        sentences += [
            f"a GPU costs ${q.work.gpu_hour:g} an hour; all GPUs of a layout are paid for",
            "keys and values are read once (paged attention by FlashInfer); torch's attention is slower",
            "nothing here was measured on these machines: `laddertron preflight` measures the links, `bench` the rest",
        ]
    return (*sentences, *q.notes)
