"""Fabrics by name: `preset("2x8xH100")`, from the vendors' public figures; and the table of dense FLOP/s, memory and
NVLink bandwidth by device name, which no driver reports.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from .fabric import Device, Fabric, Hca, Link, Nic, Node, NumaNode

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One kind of GPU. Memory as the driver reports it; `memory_bandwidth` and `nvlink_bandwidth` (one direction, all
    links) in bytes/s; FLOP/s dense; `nvlinks` is 0 where GPUs meet over PCIe alone."""

    name: str
    memory_mib: int
    memory_bandwidth: float
    bf16_flops: float
    fp8_flops: float | None
    nvlinks: int
    nvlink_bandwidth: float | None
    multiprocessors: int
    hca_gbit_per_s: float

    def device(self, index: int, pci: str, numa: int) -> Device:
        return Device(
            index=index,
            name=self.name,
            memory_bytes=self.memory_mib * MIB,
            pci=pci,
            numa=numa,
            **self.figures,
        )

    @property
    def figures(self) -> dict[str, Any]:
        names = ("memory_bandwidth", "nvlink_bandwidth", "bf16_flops", "fp8_flops", "multiprocessors")
        return {name: getattr(self, name) for name in names}


GPU_MODELS: dict[str, GpuModel] = {
    "A100-40GB": GpuModel("NVIDIA A100-SXM4-40GB", 40960, 1.555e12, 312e12, None, 12, 300e9, 108, 200),
    "A100": GpuModel("NVIDIA A100-SXM4-80GB", 81920, 2.039e12, 312e12, None, 12, 300e9, 108, 200),
    "H100": GpuModel("NVIDIA H100 80GB HBM3", 81559, 3.35e12, 989.4e12, 1978.9e12, 18, 450e9, 132, 400),
    "H100-PCIe": GpuModel("NVIDIA H100 PCIe", 81559, 2.0e12, 756e12, 1513e12, 0, None, 114, 200),
    "H200": GpuModel("NVIDIA H200", 143771, 4.8e12, 989.4e12, 1978.9e12, 18, 450e9, 132, 400),
    "B200": GpuModel("NVIDIA B200", 183359, 8.0e12, 2250e12, 4500e12, 18, 900e9, 148, 400),
    "L40S": GpuModel("NVIDIA L40S", 46068, 0.864e12, 362e12, 733e12, 0, None, 142, 200),
}
GPU_BY_NAME = {model.name: model for model in GPU_MODELS.values()}

_SPEC = re.compile(r"(?:(?P<nodes>[1-9][0-9]{0,3})x)?(?P<each>[1-9][0-9]{0,2})x(?P<model>[A-Za-z0-9-]+)")


def preset(spec: str) -> Fabric:
    """`NODESxGPUSxMODEL` or `GPUSxMODEL`: 2x8xH100, 8xA100; `NODESxCORESxcpu`: 2x16xcpu. Raises ValueError naming what
    is known. Hosts are called node0, node1, …; there is one HCA a GPU where GPUs have NVLink, else one a NUMA node."""
    match = _SPEC.fullmatch(spec)
    models = {name.lower(): name for name in (*GPU_MODELS, "cpu")}
    if match is None or match["model"].lower() not in models:
        raise ValueError(
            f"fabric {spec!r}: expected NODESxGPUSxMODEL such as 2x8xH100; MODEL is one of {', '.join(models.values())}"
        )
    nodes, per_node, model = int(match["nodes"] or 1), int(match["each"]), models[match["model"].lower()]
    if model == "cpu":
        return Fabric(tuple(_cpu_node(i, per_node) for i in range(nodes)), spec)
    if per_node > 16:
        raise ValueError(f"fabric {spec!r}: a node has at most 16 GPUs, got {per_node}")
    return Fabric(tuple(gpu_node(f"node{i}", i, GPU_MODELS[model], per_node) for i in range(nodes)), spec)


def gpu_node(
    hostname: str,
    number: int,
    model: GpuModel,
    gpus: int,
    hcas: int | None = None,
    link_layer: Literal["InfiniBand", "Ethernet"] = "InfiniBand",
) -> Node:
    """One host of two sockets, GPUs and HCAs dealt evenly over them. `hcas` 0 is a host without RDMA; None: one a GPU
    where GPUs have NVLink, else one a socket that has GPUs."""
    sockets = 2 if gpus > 1 else 1
    numa = tuple(NumaNode(i, f"{i * 56}-{i * 56 + 55}", memory_bytes=1 << 40) for i in range(sockets))
    devices = tuple(model.device(i, f"0000:{0x10 + 8 * i:02x}:00.0", i * sockets // gpus) for i in range(gpus))
    count = hcas if hcas is not None else gpus if model.nvlinks else sockets
    ports = tuple(
        Hca(
            f"mlx5_{i}",
            link_layer,
            model.hca_gbit_per_s,
            pci=f"0000:{0x11 + 8 * i:02x}:00.0",
            numa=i * sockets // count,
            interface=f"ib{i}" if link_layer == "InfiniBand" else f"rdma{i}",
        )
        for i in range(count)
    )
    paired = count == gpus and model.nvlinks > 0
    links = [
        Link(a.key, b.key, f"NV{model.nvlinks}" if model.nvlinks else "NODE" if a.numa == b.numa else "SYS")
        for a in devices
        for b in devices
        if a.index < b.index
    ]
    for device in devices:
        for i, hca in enumerate(ports):
            near = paired and i == device.index
            links.append(Link(device.key, hca.key, "PXB" if near else "NODE" if hca.numa == device.numa else "SYS"))
    return Node(
        hostname,
        numa,
        sockets << 40,
        devices=devices,
        hcas=ports,
        nics=(_nic(number, 100.0),),
        links=tuple(links),
        nvswitch=model.nvlinks > 0 and gpus > 2,
    )


def _cpu_node(number: int, cores: int) -> Node:
    numa = (NumaNode(0, f"0-{cores - 1}", memory_bytes=cores << 32),)
    return Node(f"node{number}", numa, cores << 32, nics=(_nic(number, 10.0),))


def _nic(number: int, gbit_per_s: float) -> Nic:
    return Nic("eth0", (f"10.0.{number // 250}.{number % 250 + 1}/16",), gbit_per_s, numa=0)
