"""The device that a rank takes, and what it says of a GPU that cannot be used, over frozen facts and file trees."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from laddertron.engine.config.schema import LaunchConfig
from laddertron.launchers.cli.__main__ import group, main
from laddertron.launchers.cli.commands import check, topo
from laddertron.launchers.rank import rank
from laddertron.models import attention_choice, ops_choice
from laddertron.models.ops_choice import WeightsError, make_ops
from laddertron.topology.hardware.cuda_stack import (
    OLDEST_DRIVERS,
    CudaFacts,
    CudaUnusable,
    DeviceChoice,
    choose,
    cuda_fault,
    look,
    oldest_driver,
    stack_faults,
    triton_fault,
)
from laddertron.topology.hardware.sysfs import Sysfs

ROOT = Path(__file__).resolve().parents[3]
WORKS = CudaFacts(
    gpus=8, driver="580.95.05", device_nodes=True, libcuda=True, torch_cuda="13.0", nvcc="/usr/local/cuda/bin/nvcc",
    nvcc_cuda="13.0.1", cc="/usr/bin/gcc", cxx="/usr/bin/c++", python_h=True,
)  # fmt: skip
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"driver": "570.86.15"}, r"driver 570\.86\.15 is too old for CUDA 13\.0 of torch: install driver 580 or newer"),
    ({"driver": "", "device_nodes": False, "libcuda": False}, "no NVIDIA driver is loaded: install driver 580"),
    ({"device_nodes": False, "libcuda": False}, r"/dev/nvidiactl cannot be opened: .*--gpus all"),
    ({"libcuda": False}, r"libcuda\.so\.1 is not found: install the driver's libraries"),
    ({}, "CUDA does not start .no word of it.: run nvidia-smi"),
]


@pytest.mark.parametrize(("change", "words"), BROKEN)
@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_gpu_that_cannot_be_used_is_never_passed_over(wanted: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(CudaUnusable, match=words) as caught:
        choose(wanted, replace(WORKS, **change), False, "no word of it")
    assert f"engine.device={wanted}: " in str(caught.value)
    assert "or use device: cpu" in str(caught.value)
    assert choose("cpu", replace(WORKS, **change), False) == DeviceChoice("cpu")


def test_what_can_be_used_is_taken() -> None:
    """Also where a compatibility package makes an old driver do."""
    for facts in (WORKS, replace(WORKS, driver="570.86.15"), CudaFacts()):
        assert [choose(wanted, facts, True).device for wanted in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]


@pytest.mark.parametrize(
    "facts",
    [replace(WORKS, gpus=0, driver=""), replace(WORKS, visible=""), replace(WORKS, visible="-1"), CudaFacts()],
)
def test_without_a_gpu_auto_takes_the_cpu(facts: CudaFacts) -> None:
    assert choose("auto", facts, False) == DeviceChoice("cpu")
    with pytest.raises(CudaUnusable, match=r"no NVIDIA GPU|hides every GPU|not installed"):
        choose("cuda", facts, False)


def test_a_cpu_build_beside_a_gpu_is_warned_of() -> None:
    facts = replace(WORKS, torch_cuda="")
    found = choose("auto", facts, False)
    assert found.device == "cpu"
    assert "8 NVIDIA GPUs, but torch is a CPU build: make env ACCEL=cuda" in found.warning
    with pytest.raises(CudaUnusable, match=r"engine\.device=cuda: torch is a CPU build"):
        choose("cuda", facts, False)


def test_each_lack_is_listed_with_its_fix() -> None:
    assert stack_faults(WORKS) == ()
    assert stack_faults(CudaFacts()) == ()
    lacks = replace(WORKS, driver="550.1", nvcc="", nvcc_cuda="", cc="", cxx="")
    found = stack_faults(lacks)
    assert [re.search(r"install [\w+' -]+", fault)[0] for fault in found] == [  # type: ignore[index]
        "install driver 580 or newer", "install gcc on every host", "install CUDA's toolkit or flashinfer-jit-cache",
        "install g++",
    ]  # fmt: skip
    (other,) = stack_faults(replace(WORKS, nvcc_cuda="12.8.1"))
    assert "nvcc is of CUDA 12.8.1, torch of 13.0" in other
    assert "python3-dev" in (triton_fault(replace(WORKS, python_h=False)) or "")
    assert {oldest_driver(f"{major}.4") for major in OLDEST_DRIVERS} == {450, 525, 580}
    assert oldest_driver("99.0") == 0
    assert cuda_fault(replace(WORKS, torch_cuda="99.0")) is None


def test_facts_are_read(tmp_path: Path) -> None:
    """A GPU with its sound device and an adapter of another maker; a driver's version line; torch's, nvcc's files."""

    def write(path: str, text: str = "") -> Path:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        return tmp_path / path

    for name, vendor, kind in (("0", "0x10de", "0x030200"), ("1", "0x10de", "0x040300"), ("2", "0x15b3", "0x020000")):
        write(f"sys/bus/pci/devices/{name}/vendor", f"{vendor}\n")
        write(f"sys/bus/pci/devices/{name}/class", f"{kind}\n")
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
    write("proc/driver/nvidia/version", line + "GCC version:  gcc version 12.2.0\n")
    write("dev/nvidiactl")
    nvcc = write("cuda/bin/nvcc")
    write("cuda/version.json", '{"cuda": {"name": "CUDA SDK", "version": "12.8.1"}}')
    torch = SimpleNamespace(origin=str(write("torch/__init__.py")))
    write("torch/version.py", "debug = False\ncuda: Optional[str] = '13.0'\nhip = None\n")

    def absent(name: str) -> None:
        raise OSError(name)

    def which(name: str) -> str | None:
        return {"g++-13": "/usr/bin/g++-13"}.get(name)

    environ = {"CUDA_HOME": str(tmp_path / "cuda"), "CXX": "g++-13", "CUDA_VISIBLE_DEVICES": "0"}
    facts = look(Sysfs(tmp_path), environ, which, absent, torch)
    assert replace(facts, python_h=False) == CudaFacts(
        gpus=1, driver="570.86.15", device_nodes=True, torch_cuda="13.0", visible="0", nvcc=str(nvcc),
        nvcc_cuda="12.8.1", cxx="/usr/bin/g++-13",
    )  # fmt: skip
    write("torch/version.py", "cuda: Optional[str] = None\n")
    assert look(Sysfs(tmp_path / "no"), {}, which, lambda _: None, torch).torch_cuda == ""


def _rank(device: str) -> tuple[Any, Any]:
    return SimpleNamespace(engine=SimpleNamespace(device=device)), SimpleNamespace(node="n7", local_rank=0)


def test_a_rank_names_its_host_and_the_cause(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(rank, "look", lambda: replace(WORKS, driver="570.86.15"))
    for device in ("auto", "cuda"):
        with pytest.raises(rank.DeviceError, match=rf"n7: engine\.device={device}: .*driver 570\.86\.15 is too old"):
            rank.choose_device(*_rank(device))
    assert rank.choose_device(*_rank("cpu")).type == "cpu"
    monkeypatch.setattr(rank, "look", lambda: replace(WORKS, torch_cuda=""))
    with caplog.at_level(logging.WARNING):
        assert rank.choose_device(*_rank("auto")).type == "cpu"
    assert "n7: engine.device=auto takes the CPU: this host has 8 NVIDIA GPUs" in caplog.text


def test_a_rank_without_a_compiler_computes_by_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Triton is installed and could compile nothing: said at start, in place of an end in warm-up; what cannot do
    without it is refused."""
    import sys

    import torch

    fault = triton_fault(replace(WORKS, cc=""))
    for module in (ops_choice, attention_choice):
        monkeypatch.setattr(module, "triton_missing", lambda: fault)
    package = "laddertron.models.cuda"
    monkeypatch.setitem(sys.modules, f"{package}.ops", SimpleNamespace(TritonOps=None, RowOps=None))
    monkeypatch.setattr(f"{package}.ops", sys.modules[f"{package}.ops"], raising=False)
    cuda = torch.device("cuda")
    with caplog.at_level(logging.WARNING):
        assert type(make_ops(cuda, torch.bfloat16)).__name__ == "TorchOps"
    assert "torch's operators are used, which are slower: Triton finds no C compiler" in caplog.text
    with pytest.raises(WeightsError, match="needs Triton: Triton finds no C compiler"):
        make_ops(cuda, torch.bfloat16, deterministic=True)
    cache: Any = None
    assert attention_choice.kernel_store(cache) is None


def test_topo_and_check_list_what_this_host_lacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    old = replace(WORKS, driver="570.86.15", cxx="")
    for module in (topo, check):
        monkeypatch.setattr(module, "look", lambda: old)
    assert group is not None
    assert main(["topo"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "note: driver 570.86.15 is too old for CUDA 13.0" in said
    assert "note: no C++ compiler" in said
    deployment: Any = SimpleNamespace(engine=SimpleNamespace(device="auto"), launch=LaunchConfig())
    assert check.stack_warnings(deployment) == stack_faults(old)
    deployment.engine.device = "cpu"
    assert check.stack_warnings(deployment) == ()


def test_the_docs_image_is_of_torchs_cuda() -> None:
    """The locks exclude torch's own CUDA packages, whose names carry its major release."""
    (major,) = set(re.findall(r"nvidia-nccl-cu(\d+)", (ROOT / "launchers/locks/cuda-py312.txt").read_text()))
    for page in ("docs/containers.md", "Containerfile"):
        images = re.findall(r"cuda:(\d+)\.[\d.]+-devel", (ROOT / page).read_text())
        assert images == [major], page
