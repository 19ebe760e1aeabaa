"""Layouts of a mixture of experts over the same devices: flat, spread, pipelines of both, and one node. Pure; no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ...engine.step.memory import MemoryKeys
from ...models.config.model_config import ModelConfig
from ...models.config.parts import Wiring
from ...models.config.shapes import ShapeError, Sharing, check_shapes, share
from ...models.residual import plan_sub_blocks
from ...topology.cost.cost import Backend, sent_bytes
from .layouts import Devices, Work, fullest_stage, group_of, hop
from .memory import Memory, StoredTypes, memory
from .roofline import Load, SimulatedGroup

BATCHES = (1, 8, 32, 128)


@dataclass(frozen=True, slots=True)
class MixtureLayout:
    """One layout. messages, sent: what a decode step sends between nodes, and the bytes of it that a rank sends at each
    of BATCHES. step_s: a sequence's time for a token at each of BATCHES, None without room."""

    name: str
    keys: str
    memory: Memory | None = None
    messages: int = 0
    sent: tuple[float, ...] = ()
    step_s: tuple[float | None, ...] = ()
    refused: str = ""
    built: bool = True
    """Whether the engine computes it on these devices."""


def messages_of(config: ModelConfig, wiring: Wiring, sharing: Sharing) -> int:
    """All-reduces of the layers in one step that are over the whole group, not inside a node."""
    mixed = () if config.experts is None else config.experts.layers
    blocks = plan_sub_blocks(wiring, mixed=mixed, dense="node" if sharing.per_node else "group").sub_blocks
    return sum(block.scope == "group" for block in blocks)


def mixture_layouts(
    config: ModelConfig, stored: StoredTypes, keys: MemoryKeys, devices: Devices, work: Work, backend: Backend
) -> tuple[MixtureLayout, ...]:
    """All layouts, those refused with the reason; none of a dense model or of one device."""
    if config.experts is None or devices.total < 2:
        return ()
    n, per_node = devices.nodes, devices.per_node
    forms = [("flat", n, 1, "tensor", "whole")]
    if n > 1:
        forms.append(("spread", n, 1, "spread", "node"))
        if config.experts.count < devices.total:
            forms.append(("tensor, node", n, 1, "tensor", "node"))
        if n <= config.num_layers:
            forms.append(("pp", 1, n, "tensor", "whole"))
            forms.append(("pp x spread", 1, n, "spread", "whole"))
        forms.append(("one node", 1, 1, "tensor", "whole"))
    forms.append(("one node, spread" if n > 1 else "spread", 1, 1, "spread", "whole"))
    priced = []
    for name, nodes, stages, layout, dense in forms:
        title = f"tp {nodes * per_node}{f' x pp {stages}' if stages > 1 else ''}, {layout}, {dense}"
        try:
            sharing = share(config, layout, dense, nodes, per_node)
            check_shapes(config, nodes * per_node, sharing)
        except ShapeError as error:
            priced.append(MixtureLayout(name, title, refused=str(error)))
            continue
        priced.append(_priced(name, title, config, stored, keys, devices, work, backend, (nodes, stages), sharing))
    return tuple(priced)


def _priced(
    name: str, title: str, config: ModelConfig, stored: StoredTypes, keys: MemoryKeys, devices: Devices, work: Work,
    backend: Backend, form: tuple[int, int], sharing: Sharing,
) -> MixtureLayout:  # fmt: skip
    (nodes, stages), per_node = form, devices.per_node
    tp = nodes * per_node
    room = memory(config, tp, stored, keys, devices.memory_bytes, stages, sharing)
    group = _group(config, stored, keys, devices, nodes, stages, sharing)
    crossing = hop(config, devices, stored, tp, stages)
    times, sent = list[float | None](), list[float]()
    crosses = messages_of(config, config.wiring, sharing) if nodes > 1 else stages - 1
    for batch in BATCHES:
        load = Load(decodes=ceil(batch / stages), context=work.context)
        fits = room.sequences(work.prompt + work.output) >= batch
        times.append(stages * (group.step(load).total_s + crossing(load.tokens)) if fits else None)
        size = group.message_bytes(load)
        if nodes > 1:
            strategy = group.links.strategy(size)
            across = sent_bytes(backend, devices.shape(nodes, per_node), strategy, size)[1]  # type: ignore[arg-type]
            sent.append(crosses * across)
        else:
            sent.append(crosses * stages * size / tp)  # as many micro-batches as stages
    built = backend == "native" or not sharing.per_node
    return MixtureLayout(name, title, room, crosses, tuple(sent), tuple(times), built=built)


def _group(
    config: ModelConfig, stored: StoredTypes, keys: MemoryKeys, devices: Devices, nodes: int, stages: int,
    sharing: Sharing,
) -> SimulatedGroup:  # fmt: skip
    per_node = devices.per_node
    inside = devices.links(1, per_node) if sharing.per_node else None
    rates, links = devices.rates(stored.multiplied), devices.links(nodes, per_node)
    stage = fullest_stage(config, stages)
    return group_of(stage, nodes * per_node, stored, rates, links, keys.replicate_embedding, sharing, inside)


def best_of(candidates: tuple[MixtureLayout, ...], index: int) -> MixtureLayout | None:
    """The quickest that is built at BATCHES[index]."""
    offers = [
        (time, i) for i, x in enumerate(candidates) if x.built and x.step_s and (time := x.step_s[index]) is not None
    ]
    return candidates[min(offers)[1]] if offers else None


def mixture_words(candidates: tuple[MixtureLayout, ...]) -> list[str]:
    """Whether the model fits on one node, and the fastest layout at each batch."""
    sentences = []
    fitting = [x for x in candidates if x.name.startswith("one node") and x.memory is not None and x.memory.fits]
    if fitting:
        x = fitting[0]
        sentences.append(
            f"It fits on one node: {x.keys}; use the other nodes for replicas, without traffic between nodes."
        )
    quick = [(batch, best_of(candidates, i)) for i, batch in enumerate(BATCHES)]
    words = [
        f"{x.name} at batch {batch} ({1e3 * (x.step_s[i] or 0.0):.1f} ms)" for i, (batch, x) in enumerate(quick) if x
    ]
    return [*sentences, f"Fastest of these layouts: {', '.join(words)}."] if words else sentences
