"""Before a relaunch the GPUs' memory is seen to be free: with a driver of our own, and through `serve`'s jobs."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from job_tools import story
from laddertron.engine.config.load import read
from laddertron.launchers.job import device_memory
from laddertron.launchers.job.device_memory import DeviceMemory, nvml_look
from laddertron.launchers.job.fleet import replica_specs
from laddertron.launchers.job.replica import JobHooks, ReplicaSpec
from laddertron.topology.hardware.fabric import Device
from laddertron.topology.hardware.nvml import gpus
from waiting import FOR_EVER_S, HANG_S

GIB = 1 << 30


class NVMLError(Exception):
    pass


class Driver:
    """NVML as far as it is called here; `used` is bytes by GPU, `asked` counts the looks at them."""

    NVMLError = NVMLError

    def __init__(self, used: list[int]) -> None:
        self.used, self.asked, self.open = used, 0, 0
        self.freed_after = 0
        """Looks after which GPU 1 is as empty as at first."""

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.used)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid == "GPU-9":
            raise NVMLError("fell off the bus")
        return int(uuid.rpartition("-")[2])

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:0{handle}:00.0")

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        if handle == 1:
            self.asked += 1
            if self.freed_after and self.asked > self.freed_after:
                self.used[1] = GIB
        return SimpleNamespace(total=80 * GIB, used=self.used[handle])

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        raise NVMLError("Not Supported")

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.1"


def memory(driver: Driver, most_s: float = FOR_EVER_S) -> DeviceMemory:
    return DeviceMemory(nvml_look(driver, gpus(driver).devices), most_s)


def test_it_waits_until_the_driver_has_given_back_what_it_held() -> None:
    """What was in use before the first launch is another's, and no reason to wait."""
    driver = Driver([60 * GIB, GIB])
    free = memory(driver)
    asyncio.run(free.free())
    driver.used[1], driver.asked, driver.freed_after = 41 * GIB, 0, 3
    asyncio.run(free.free())
    assert driver.asked == 4
    assert driver.open == 0


def test_what_is_never_given_back_is_named() -> None:
    driver = Driver([0, GIB])
    free = memory(driver, 0.25)
    driver.used[1] = 41 * GIB
    with pytest.raises(RuntimeError, match=r"cuda:1 still holds 40.0 GiB after 0.25 s"):
        asyncio.run(free.free())


def test_a_device_that_does_not_answer_holds_nothing_up() -> None:
    driver = Driver([0, 0])
    gone = Device(index=9, name="x", memory_bytes=1, pci="0000:09:00.0", uuid="GPU-9")
    assert nvml_look(driver, [*gpus(driver).devices, gone])() == {"cuda:0": 0, "cuda:1": 0}


def test_what_was_never_seen_free_holds_nothing_up() -> None:
    """A driver that did not answer before the first launch: nobody knows what was another's then."""
    driver = Driver([60 * GIB, 70 * GIB])
    devices = gpus(driver).devices
    look = nvml_look(driver, devices)
    answers = iter([{}, look()])
    asyncio.run(DeviceMemory(lambda: next(answers), 0.0).free())


def test_the_loop_goes_on_while_the_driver_is_asked() -> None:
    """Starting the driver's library takes long on a machine of eight; other replicas' streams pass through the loop."""
    driver, turned = Driver([0, 0]), threading.Event()
    look = nvml_look(driver, gpus(driver).devices)
    first = look()

    def slow() -> Mapping[str, int]:
        assert turned.wait(HANG_S), "the loop stood still"
        return look()

    async def run() -> None:
        memory = DeviceMemory(lambda: first)
        memory.read_used = slow
        asyncio.get_running_loop().call_soon(turned.set)
        await memory.free()

    asyncio.run(run())


def specs(driver: Driver | None, monkeypatch: pytest.MonkeyPatch, *sets: str) -> list[ReplicaSpec]:
    monkeypatch.setattr(device_memory, "load_nvml", lambda: driver)
    loaded = read(str(Path(__file__).parents[3] / "configs" / "demo.yaml"), sets)
    return replica_specs(loaded.deployment, lambda replica, failure: None)


def test_serve_watches_the_gpus_that_its_ranks_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas on one host: each looks at its own devices. None on a CPU."""
    driver = Driver([0, 0, 0, 0])
    sets = ("parallel.replicas=2", "launch.hosts=[localhost:4]")
    free: list[Any] = [spec.hooks.devices_free for spec in specs(driver, monkeypatch, "engine.device=auto", *sets)]
    first, second = free
    driver.used = [0, 0, 70 * GIB, 0]
    asyncio.run(first())
    second.__self__.most_s = 0.0
    with pytest.raises(RuntimeError, match=r"cuda:2 still holds 70.0 GiB"):
        asyncio.run(second())
    for none in specs(driver, monkeypatch, "engine.device=cpu"), specs(None, monkeypatch, "engine.device=auto"):
        assert none[0].hooks.devices_free is None


def test_no_rank_is_launched_while_the_memory_is_held() -> None:
    """A rank is killed while the driver keeps its memory for three more looks: ready again only after the last."""
    driver = Driver([0, GIB])
    free = memory(driver)

    async def run() -> None:
        async with story(hooks=JobHooks(devices_free=free.free)) as s:
            await s.phase("ready")
            driver.used[1], driver.asked, driver.freed_after = 41 * GIB, 0, 3
            os.kill(await s.pid(0), signal.SIGKILL)
            await s.listener.until(lambda: s.job.state.phase == "ready" and s.job.state.restarts == 1)
            assert driver.asked == 4

    asyncio.run(run())
