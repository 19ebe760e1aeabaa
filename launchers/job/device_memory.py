"""Waits until the memory of a replica's GPUs on this host is free before a relaunch: the driver frees a killed
process's memory late. GPUs of other hosts are only checked when the ranks load.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ...engine.config.schema import Deployment
from ...engine.step.memory import GPU_CONTEXT, NCCL_BUFFERS
from ...topology.hardware.discover import select
from ...topology.hardware.fabric import Device
from ...topology.hardware.nvml import gpus, load_nvml

SLACK_BYTES = 1 << 30  # allowed variation of other users' memory; a shard of weights is larger
_LOOK_AGAIN_S = 0.1

Look = Callable[[], Mapping[str, int]]
"""Returns the bytes in use now, by device."""


class DeviceMemory:
    """Make it before the first launch: a device is free if it is as free as then. Devices that do not answer then are
    not checked. `before`: the bytes in use then, by device, for a launch that is made while another one runs."""

    def __init__(
        self, look: Look, most_s: float = 30.0, slack: int = SLACK_BYTES, before: dict[str, int] | None = None
    ) -> None:
        self.read_used, self.most_s, self._slack = look, most_s, slack
        self._before = {} if before is None else before
        for name, used in look().items():
            self._before.setdefault(name, used)

    async def free(self) -> None:
        """Waits until the memory is free. After `most_s` seconds raises RuntimeError, which names devices and bytes."""
        deadline = time.monotonic() + self.most_s
        while busy := await asyncio.to_thread(self._held):  # starting the driver's library may take a second
            if time.monotonic() >= deadline:
                raise RuntimeError(
                    f"{', '.join(busy)} after {self.most_s:g} s, with all ranks gone: another process has it, or the "
                    "driver keeps it (nvidia-smi shows which)"
                )
            await asyncio.sleep(_LOOK_AGAIN_S)  # the driver has no event for it

    def _held(self) -> list[str]:
        more = {name: used - self._before[name] for name, used in self.read_used().items() if name in self._before}
        return [f"{name} still holds {extra / 2**30:.1f} GiB" for name, extra in more.items() if extra > self._slack]


def nvml_look(nvml: Any, devices: Collection[Device]) -> Look:
    """Makes a Look at these GPUs of this host, by `nvml` (pynvml). It leaves out devices that do not answer."""

    def look() -> dict[str, int]:
        used_bytes = {}
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return {}
        try:
            for device in devices:
                try:
                    handle = nvml.nvmlDeviceGetHandleByUUID(device.uuid)
                    used_bytes[f"cuda:{device.index}"] = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
                except nvml.NVMLError:
                    continue
        finally:
            nvml.nvmlShutdown()
        return used_bytes

    return look


def device_memory(
    deployment: Deployment, indices: Collection[int], in_use: dict[str, int] | None
) -> DeviceMemory | None:
    """The memory of this host's GPUs with the indices `indices`; None if no rank uses one. in_use: DeviceMemory's
    `before`."""
    nvml = None if deployment.engine.device == "cpu" else load_nvml()
    if nvml is None:
        return None
    visible = select(gpus(nvml), os.environ.get("CUDA_VISIBLE_DEVICES")).devices
    used = [device for device in visible if device.index in indices]
    slack = SLACK_BYTES + GPU_CONTEXT + NCCL_BUFFERS  # the latter two: of a standby's ranks
    return DeviceMemory(nvml_look(nvml, used), slack=slack, before=in_use) if used else None
