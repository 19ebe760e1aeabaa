"""This host's GPUs and their NVLink connections by NVML; none without `pynvml` or a driver."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

from .fabric import Device
from .presets import GPU_BY_NAME


@dataclass(frozen=True, slots=True)
class Gpus:
    """Devices in PCI order; NVLinks between two of them by their indices; whether the links lead to NVSwitches."""

    devices: tuple[Device, ...] = ()
    nvlinks: tuple[tuple[int, int, int], ...] = ()
    nvswitch: bool = False
    driver: str = ""
    note: str = ""


def load_nvml() -> Any | None:
    """The `pynvml` module, or None if it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def gpus(nvml: Any | None) -> Gpus:
    """Reads the host's GPUs. Never raises: errors of the driver are in `note`."""
    if nvml is None:
        return Gpus(note="pynvml is not installed: GPUs are not looked for (pip install nvidia-ml-py)")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Gpus(note=f"NVML does not answer: {error}")
    try:
        return _read(nvml)
    except nvml.NVMLError as error:
        return Gpus(note=f"NVML failed: {error}")
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Any) -> Gpus:
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    buses = [pci_name(nvml.nvmlDeviceGetPciInfo(handle).busId) for handle in handles]
    order = sorted(range(len(handles)), key=lambda i: buses[i])
    handles, buses = [handles[i] for i in order], [buses[i] for i in order]
    devices, links, to_switch = [], Counter[tuple[int, int]](), Counter[int]()
    for index, (handle, bus) in enumerate(zip(handles, buses, strict=True)):
        name = _text(nvml.nvmlDeviceGetName(handle))
        devices.append(
            Device(
                index=index,
                name=name,
                memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
                pci=bus,
                uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
                **(GPU_BY_NAME[name].figures if name in GPU_BY_NAME else {}),
            )
        )
        for remote in _remotes(nvml, handle):
            if remote in buses:
                links[index, buses.index(remote)] += 1
            else:
                to_switch[index] += 1
    pairs = [(a, b, count) for (a, b), count in sorted(links.items()) if a < b]
    on_switch = sorted(to_switch)
    pairs += [(a, b, min(to_switch[a], to_switch[b])) for a in on_switch for b in on_switch if a < b]
    return Gpus(tuple(devices), tuple(pairs), bool(to_switch), _text(nvml.nvmlSystemGetDriverVersion()))


def _remotes(nvml: Any, handle: Any) -> list[str]:
    """PCI names at the far ends of the device's active NVLinks: of GPUs, or of switches."""
    remotes = []
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                remotes.append(pci_name(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId))
        except nvml.NVMLError:  # this GPU has fewer links, or none
            break
    return remotes


def pci_name(bus_id: str | bytes) -> str:
    """NVML's `00000000:1B:00.0` as sysfs writes it: `0000:1b:00.0`."""
    domain, _, rest = _text(bus_id).lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
