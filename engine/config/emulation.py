"""The link that `parallel.emulated_*` describe, as the ranks lay it and as `plan` prices it. Pure; no torch."""

from __future__ import annotations

from ...topology.cost.emulated_fabric import emulation_of
from ...topology.link_cost import Emulation
from .schema import ParallelConfig


def emulated_link(keys: ParallelConfig) -> Emulation | None:
    """None unless `collective: emulated`. Raises ValueError for a fabric that is unknown or too small."""
    if keys.collective != "emulated":
        return None
    if keys.emulated_fabric is not None:
        return emulation_of(keys.emulated_fabric, keys.tensor_parallel_size, keys.emulated_multiprocessors)
    return Emulation(
        f"link {keys.emulated_delay * 1e3:g} ms",
        keys.emulated_delay,
        float(keys.emulated_bandwidth or "inf"),
        ranks=keys.tensor_parallel_size,
        multiprocessors=keys.emulated_multiprocessors,
    )
