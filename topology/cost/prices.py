"""Prices of fabrics without measurements, the cost model's defaults. NCCL's come from published end-to-end speeds on
H100 (flat all-reduce of 32 to 512 KiB over 2 x 8 in 48 to 85 us, of 16 KiB to 1 MiB over 8 in 24 to 44 us, without peer
access in 64 to 112 us); the rest from small measurements on CPUs.
"""

from __future__ import annotations

from ..hardware.fabric import LinkClass
from ..hardware.presets import preset
from ..link_cost import Emulation, LinkCost
from ..placement.placement import place
from ..placement.world import World
from .cost import Backend, Costs, Regime, Shape, price, proven, shape_of, terms

_US = 1e-6

_OVERHEAD: dict[Backend, float] = {"nccl": 10 * _US, "gloo": 20 * _US, "native": 8 * _US}

_LATENCY_US: dict[Backend, dict[LinkClass, float]] = {
    "nccl": {"nvlink": 1.0, "pcie": 4.1, "shm": 4.1, "ib": 10.9, "roce": 12.0, "tcp": 45.0},
    "gloo": {"nvlink": 12.0, "pcie": 12.0, "shm": 12.0, "ib": 30.0, "roce": 30.0, "tcp": 30.0},
    "native": {"nvlink": 3.0, "pcie": 3.0, "shm": 3.0, "ib": 30.0, "roce": 30.0, "tcp": 30.0},
}

_NOMINAL: dict[LinkClass, float] = {
    "nvlink": 450e9, "pcie": 64e9, "shm": 4e9, "ib": 50e9, "roce": 50e9, "tcp": 1.25e9,
}  # fmt: skip

# Of the nominal rate, what messages get by NCCL's low-latency protocol and in bulk; TCP: 957 of 1000 Mbit/s measured.
_SMALL_SHARE: dict[LinkClass, float] = {"nvlink": 0.21, "pcie": 0.6, "shm": 1.0, "ib": 0.45, "roce": 0.45, "tcp": 0.9}
_BULK_SHARE: dict[LinkClass, float] = {"nvlink": 0.82, "pcie": 0.6, "shm": 1.0, "ib": 0.9, "roce": 0.85, "tcp": 0.95}
_BULK_LATENCY: dict[LinkClass, float] = {"nvlink": 3.4, "pcie": 2.0, "shm": 2.0, "ib": 1.3, "roce": 1.3, "tcp": 1.0}


def reference(backend: Backend, shape: Shape) -> Costs:
    """Untuned prices for the links of `shape`, scaled by their nominal rates where those are known."""
    regime = _regime(backend, shape)
    if backend != "nccl":
        return Costs(backend, (regime,))
    bulk, all_ports = (_regime(backend, shape, bulk=True, ports=ports) for ports in (1, shape.rails))
    # NCCL's own all-reduce opens rings over all ports of a node once messages are large.
    return Costs(backend, (regime, bulk), {"flat": (regime, all_ports)})


def _regime(backend: Backend, shape: Shape, bulk: bool = False, ports: int = 1) -> Regime:
    """`bulk`: NCCL's for large messages; `ports`: of a node, taken at once."""
    share = _SMALL_SHARE if backend == "nccl" and not bulk else _BULK_SHARE

    def link(kind: LinkClass, measured: float | None, ports: int) -> LinkCost:
        latency = _LATENCY_US[backend][kind] * (_BULK_LATENCY[kind] if bulk else 1.0) * _US
        return LinkCost(latency, (measured or _NOMINAL[kind]) * share[kind] * ports)

    inside = link(shape.intra, shape.intra_bytes_per_s, 1)
    return Regime(_OVERHEAD[backend], inside, link(shape.inter, shape.inter_bytes_per_s, ports))


_SLOPE_BYTES = 1 << 20


def emulation_of(spec: str, ranks: int) -> Emulation:
    """All-reduces of a group of `ranks` on the fabric that `spec` names, at untuned prices: NCCL's between GPUs, the
    native transport's between CPUs. Raises ValueError for an unknown fabric, PlacementError for a group that cannot be
    laid over it."""
    fabric = preset(spec)
    shape = shape_of(fabric, place(fabric, World(ranks)))
    backend: Backend = "nccl" if any(node.devices for node in fabric.nodes) else "native"
    costs = reference(backend, shape)
    lines = []
    for strategy in proven(backend, shape):
        for regime in costs.of(strategy):
            # Prices are linear in the size: two of them are all.
            first, last = (price(regime, terms(backend, shape, strategy, size)) for size in (0, _SLOPE_BYTES))
            if first is not None and last is not None:
                lines.append(LinkCost(first, _SLOPE_BYTES / (last - first) if last > first else float("inf")))
    best, *others = lines
    return Emulation(f"{spec}, {ranks} ranks", best.latency_s, best.bytes_per_s, tuple(others))
