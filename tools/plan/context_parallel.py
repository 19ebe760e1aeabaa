"""Decode context parallelism of latent attention: the price of dividing the latents' positions over a group's ranks,
each of which then attends with all heads to its part. Priced, and not built. Pure; no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from .roofline import Load, SimulatedGroup

BATCH, CONTEXT = 64, 2048


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """A decode step of `batch` sequences of `context` positions: what reading a part of the latents saves, and what
    gathering absorbed queries and reducing partial outputs costs. pays_from: the context, a power of two, from which it
    gains at this batch; None: at none that the model has."""

    batch: int
    context: int
    saves_s: float
    costs_s: float
    pays_from: int | None


def price_context_parallel(group: SimulatedGroup, batch: int = BATCH, context: int = CONTEXT) -> ContextParallel | None:
    """None if ranks do not hold the same latents."""
    config = group.config
    if config.latent is None or group.size == 1:
        return None
    costs = config.num_layers * _exchange(group, batch)
    most, pays = config.max_position_embeddings, 1024
    while pays <= most and _saves(group, batch, pays) <= costs:
        pays *= 2
    return ContextParallel(batch, context, _saves(group, batch, context), costs, pays if pays <= most else None)


def _saves(group: SimulatedGroup, batch: int, context: int) -> float:
    """Each rank reads its part of the latents; it computes as much as with its share of the heads."""
    alone_s, shared_s = (
        group.attend_s(Load(decodes=batch, context=context), read_share=n) for n in (1.0, 1.0 / group.size)
    )
    return group.config.num_layers * (alone_s - shared_s)


def _exchange(group: SimulatedGroup, batch: int) -> float:
    """A layer's all-gather of absorbed queries [batch, H, R + r] and reduce-scatter of outputs [batch, H, R] with a
    maximum and a sum of weights in fp32: each is half of an all-reduce's transfer, and as many round trips."""
    latent, heads = group.config.latent, batch * group.config.num_heads
    assert latent is not None
    sizes = heads * latent.width * group.value_bytes, heads * (latent.rank * group.value_bytes + 8)
    wires = [group.links.wire(int(size)) for size in sizes]
    return sum(wire.busy_s / 2 + wire.latency_s for wire in wires)
