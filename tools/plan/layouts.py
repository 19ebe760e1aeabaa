"""Other layouts of the same model over the same devices: tensor parallelism across or inside nodes, replicas, fp8
weights, a pipeline. Each with its memory and its speed by batch; nothing is recommended here. Pure; no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from ...engine.step.memory import MemoryKeys
from ...models.config.model_config import ModelConfig
from ...models.config.parts import Wiring, make_wiring
from ...models.config.quantisation import BYTES
from ...models.config.shapes import WHOLE, Sharing, splits
from ...models.stages import RankShard, Stage, choose_layers, head_in_layers, make_stages
from ...topology.cost.cost import Shape, predict
from ...topology.cost.prices import reference
from .memory import Memory, StoredTypes, memory
from .roofline import ComputeRates, Links, Load, SimulatedGroup
from .step_simulator import StepTime


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices, all alike: `nodes` x `per_node`, memory of each, whether products can be fp8."""

    nodes: int
    per_node: int
    memory_bytes: int
    fp8: bool
    rates: Callable[[str], ComputeRates]
    """Rates of a rank whose weights are stored so."""
    links: Callable[[int, int], Links]
    """Links of a group on so many nodes x ranks a node."""
    shape: Callable[[int, int], Shape]
    gpu: bool = True

    @property
    def total(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True, slots=True)
class Work:
    """The requests that layouts are compared on, and what a GPU costs: tokens, dollars an hour."""

    prompt: int = 1024
    output: int = 512
    gpu_hour: float = 2.5
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    contexts: tuple[int, ...] = (1024, 4096, 16384, 65536, 131072)

    @property
    def context(self) -> float:
        """Positions that a decoding token attends to, on average."""
        return self.prompt + self.output / 2


@dataclass(frozen=True, slots=True)
class Speed:
    """A layout with `batch` sequences running in all. `step_s` is what one sequence waits for a token; `tokens_per_s`
    counts decoding alone, `output_per_s` with every request's prompt computed in between, `dollars` a million of those
    output tokens."""

    batch: int
    step_s: float
    tokens_per_s: float
    output_per_s: float
    dollars: float
    exposed_s: float


MOST_SEQUENCES = 512
"""Most sequences of one replica, even if its KV cache would hold more."""


@dataclass(frozen=True, slots=True)
class Depth:
    """Decoding at one context with all the sequences that have room, over all replicas; 0 of everything if none has."""

    context: int
    sequences: int
    step_s: float = 0.0
    dollars: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.sequences / self.step_s if self.sequences else 0.0


@dataclass(frozen=True, slots=True)
class Layout:
    """`replicas` groups of `tp` ranks in `stages`; `speeds` of the batches that fit."""

    tp: int
    replicas: int
    stages: int
    stored: StoredTypes
    wiring: Wiring
    memory: Memory
    speeds: tuple[Speed, ...]
    depths: tuple[Depth, ...]

    @property
    def gpus(self) -> int:
        return self.tp * self.replicas * self.stages

    @property
    def key(self) -> tuple[int, int, StoredTypes, str, Sharing]:
        """Identifies a layout among those of the same devices."""
        return self.tp, self.stages, self.stored, self.wiring.name, WHOLE

    @property
    def cheapest(self) -> Speed | None:
        return min(self.speeds, key=lambda s: s.dollars, default=None)

    @property
    def fastest(self) -> Speed | None:
        """With one sequence, or as few as were asked about."""
        return min(self.speeds, key=lambda s: s.step_s, default=None)


def layouts(
    config: ModelConfig, own: int, stored: StoredTypes, keys: MemoryKeys, devices: Devices, work: Work
) -> tuple[Layout, ...]:
    """The layouts to show for these devices; `own`: the requested tensor-parallel size. Groups of whole nodes and more
    are always listed, without a pipeline; all others if they fit; parts of a node or pipelines if they are the cheapest
    of their weights and wiring at some batch or context."""
    variants = {name: make_wiring(name, config.num_layers) for name in ("standard", "ladder")}
    if config.lanes is not None or config.wiring.name == "shortcut":  # whose weights fit no other wiring
        variants = {config.wiring.name: config.wiring}
    elif config.wiring.name not in variants and not config.wiring.desync_every:
        variants[config.wiring.name] = config.wiring
    narrower = devices.fp8 and not stored.quantised and config.lanes is None
    forms = (stored, replace(stored, weights=stored.form.title.lower())) if narrower else (stored,)
    total, node = devices.total, devices.per_node
    sizes = {total, own, node} | {node // n for n in (2, 4, 8, 16) if node % n == 0}
    candidates: list[Layout] = []

    def add(tp: int, stages: int, how: StoredTypes, wiring: Wiring) -> None:
        if splits(config, tp) and total % (tp * stages) == 0:
            candidates.append(_layout(replace(config, wiring=wiring), tp, stages, how, keys, devices, work))

    for size in sorted(sizes, reverse=True):
        for stages in (n for n in (1, 2, 4, 8, 16) if n <= min(total // size, config.num_layers)):
            for form in forms:
                for wiring in variants.values():
                    add(size, stages, form, wiring)
    best: dict[tuple[StoredTypes, str, int], tuple[float, int]] = {}
    for i, x in enumerate(candidates):
        offers = [(s.batch, s.dollars) for s in x.speeds] + [(-d.context, d.dollars) for d in x.depths if d.sequences]
        for given, dollars in offers:
            key = x.stored, x.wiring.name, given
            best[key] = min(best.get(key, (inf, i)), (dollars, i))
    cheapest = {i for _, i in best.values()}
    return tuple(x for i, x in enumerate(candidates) if i in cheapest or (x.tp in (own, node, total) and x.stages == 1))


def batches_over(batches: Sequence[int], nodes: int) -> list[int]:
    """The batches, and so many larger ones that a node of many has as much to do as one of few."""
    sizes = list(batches)
    while sizes[-1] < MOST_SEQUENCES // 2 * nodes:
        sizes.append(2 * sizes[-1])
    return sizes


def _layout(
    config: ModelConfig, tp: int, stages: int, stored: StoredTypes, keys: MemoryKeys, devices: Devices, work: Work
) -> Layout:
    nodes = max(1, ceil(tp / devices.per_node))
    replicas = max(1, devices.total // (tp * stages))
    room = memory(config, tp, stored, keys, devices.memory_bytes, stages)
    rates, links = devices.rates(stored.multiplied), devices.links(nodes, tp // nodes)
    group = group_of(fullest_stage(config, stages), tp, stored, rates, links, keys.replicate_embedding)
    speeds, depths = [], []
    if room.kv_bytes > 0:
        crossing = hop(config, devices, stored, tp, stages)
        prompt_s = group.prefill(work.prompt, keys.max_num_batched_tokens).total_s
        for batch in batches_over(work.batches, devices.nodes):
            per_replica = ceil(batch / replicas)
            if per_replica > room.sequences(work.prompt + work.output):
                continue
            # A replica's sequences run in as many batches as there are stages. A token has passed all stages before its
            # sequence's next one starts; in steady state every stage is busy with one of the batches.
            rows = ceil(per_replica / stages)
            step = group.step(Load(decodes=rows, context=work.context))
            cycle = stages * (step.total_s + crossing(rows))
            # Prompts take turns with decoding; in a pipeline, their chunks fill the stages one after another.
            output = batch / (cycle + per_replica * prompt_s / work.output)
            dollars = tp * stages * replicas * work.gpu_hour / 3600 / output * 1e6
            speeds.append(Speed(batch, cycle, batch / cycle, output, dollars, stages * step.exposed_s))
        for context in work.contexts:
            if context <= config.max_position_embeddings:
                depths.append(depth(group, room, context, stages, replicas, crossing, work.gpu_hour))
    return Layout(tp, replicas, stages, stored, config.wiring, room, tuple(speeds), tuple(depths))


def depth(
    group: SimulatedGroup,
    room: Memory,
    context: int,
    stages: int,
    replicas: int,
    hop: Callable[[int], float],
    gpu_hour: float,
) -> Depth:
    """As many sequences as have room (MOST_SEQUENCES a replica and stage at most), each `context` positions long."""
    per_replica = min(room.sequences(context), MOST_SEQUENCES * stages)
    if per_replica < 1:
        return Depth(context, 0)
    rows = ceil(per_replica / stages)
    cycle = stages * (group.step(Load(decodes=rows, context=float(context))).total_s + hop(rows))
    gpus = group.size * stages * replicas
    return Depth(
        context, per_replica * replicas, cycle, gpus * gpu_hour / 3600 / (per_replica * replicas / cycle) * 1e6
    )


def group_of(
    stage: Stage,
    tp: int,
    stored: StoredTypes,
    rates: ComputeRates,
    links: Links,
    replicate_embedding: bool = False,
    sharing: Sharing = WHOLE,
    node_links: Links | None = None,
) -> SimulatedGroup:
    """A group that computes a stage, with its numbers in memory as `stored` says."""
    wide = stored.kept()[stage.first_layer : stage.first_layer + stage.config.num_layers]
    expert_bytes = None
    if stored.quantised and stage.config.experts is not None:
        shard = RankShard(stage.config, tp, 0, None, *sharing)
        elements = 3 * stage.config.hidden_size * len(shard.expert_ids) * len(shard.expert_ffn)
        expert_bytes = stored.expert_bytes(shard) / elements
    return SimulatedGroup(
        stage.config, tp, rates, links, stored.element_bytes, BYTES[stored.kv], BYTES[stored.values],
        replicate_embedding, wide=wide, expert_bytes=expert_bytes, sharing=sharing, node_links=node_links,
    )  # fmt: skip


def fullest_stage(config: ModelConfig, stages: int, layers: Sequence[int] = ()) -> Stage:
    """The stage that sets a pipeline's pace: the one with most layers that wait for their
    all-reduces, and among those alike with most layers. Its head is counted, too, though only the last stage has one:
    what the split gives that one less in layers. `layers`: as configured."""
    parts = make_stages(config, choose_layers(config, stages, layers))

    def pace(part: Stage) -> tuple[int, float]:
        head = head_in_layers(config) if part.last else 0.0
        return part.config.wiring.kinds.count("standard"), part.config.num_layers + head

    return max(parts, key=pace)


def hop(config: ModelConfig, devices: Devices, stored: StoredTypes, tp: int, stages: int) -> Callable[[int], float]:
    """Seconds that so many rows take from one stage to the next: each rank sends its share of the residual and the node
    gathers it; of lanes it sends its own copies whole, and the sums that are pending."""
    if stages == 1:
        return lambda rows: 0.0
    shape, share = devices.shape(2, 1), 1.0
    if (lanes := config.lanes) is not None:
        share = lanes.count * (1 + max(part.pending for part in make_stages(config, choose_layers(config, stages))))

    def seconds(rows: int) -> float:
        size = max(1, int(share * rows * config.hidden_size * BYTES[stored.values] / tp))
        if not devices.gpu:  # two ranks' all-reduce is one message each way at once
            return devices.links(2, 1).wire(size).seconds
        return predict(reference("nccl", shape), shape, "p2p", size)

    return seconds


def by_cost(candidates: Sequence[Layout]) -> list[Layout]:
    """The layouts that can run, the cheapest a token first."""
    return sorted((x for x in candidates if x.cheapest), key=lambda x: x.cheapest.dollars if x.cheapest else 0.0)


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
