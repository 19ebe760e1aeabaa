"""The emulation of a fabric by its name: prices of `preset("2x8xH100")` for a group laid over it. Pure; no torch."""

from __future__ import annotations

from ..hardware.presets import preset
from ..link_cost import Emulation, LinkCost
from ..placement.placement import place
from .cost import Backend, price, shape_of, terms, untuned
from .prices import reference

_SLOPE_BYTES = 1 << 20


def emulation_of(spec: str, ranks: int, multiprocessors: int = 0) -> Emulation:
    """All-reduces of a group of `ranks` on the fabric that `spec` names, at untuned prices: NCCL's between GPUs, the
    native transport's between CPUs. Raises ValueError for an unknown fabric, PlacementError for a group that cannot be
    laid over it."""
    fabric = preset(spec)
    shape = shape_of(fabric, place(fabric, ranks))
    backend: Backend = "nccl" if any(node.devices for node in fabric.nodes) else "native"
    costs = reference(backend, shape)
    lines = []
    for strategy in untuned(backend, shape):
        for regime in costs.of(strategy):
            # Prices are linear in the size: two of them are all.
            first, last = (price(regime, terms(backend, shape, strategy, size)) for size in (0, _SLOPE_BYTES))
            if first is not None and last is not None:
                lines.append(LinkCost(first, _SLOPE_BYTES / (last - first) if last > first else float("inf")))
    best, *others = lines
    return Emulation(f"{spec}, {ranks} ranks", best.latency_s, best.bytes_per_s, tuple(others), ranks, multiprocessors)
