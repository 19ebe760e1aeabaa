"""Checks what CUDA needs on a host (GPU, driver, torch's CUDA, nvcc, compilers, Python.h, libcuda); each fault has its
fix. Imports no torch and does not initialise CUDA.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from .fabric import counted
from .sysfs import Sysfs

OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""The first driver branch that runs programs of each major release of CUDA."""
_GPU_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers; NVIDIA's bridges and sound devices are others


class CudaUnusable(ValueError):
    """A GPU is requested or present but cannot be used; the message has the cause and its fix."""


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """The facts of one host. Empty strings: missing."""

    gpus: int = 0
    """NVIDIA GPUs, whether the driver works or not."""
    driver: str = ""
    """The version of the loaded kernel module."""
    device_nodes: bool = False
    """Whether this process may open /dev/nvidiactl."""
    libcuda: bool = False
    torch_cuda: str | None = None
    """The CUDA release that torch is built with, empty for a CPU build; None: torch is not installed."""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES."""
    nvcc: str = ""
    nvcc_cuda: str = ""
    """The CUDA release of nvcc, if its folder tells it."""
    cc: str = ""
    cxx: str = ""
    python_h: bool = False

    @property
    def hidden(self) -> bool:
        return self.visible is not None and self.visible.strip() in ("", "-1", "NoDevFiles")


def look(
    fs: Sysfs | None = None,
    environ: Mapping[str, str] = os.environ,
    which: Callable[[str], str | None] = shutil.which,
    load: Callable[[str], object] = ctypes.CDLL,
    torch: Any = None,
) -> CudaFacts:
    """Collects this host's facts. torch: the package's spec; None: find_spec's."""
    fs = fs or Sysfs()
    toolkit = Path(environ.get("CUDA_HOME", "/usr/local/cuda"))
    nvcc = which("nvcc") or (str(toolkit / "bin/nvcc") if (toolkit / "bin/nvcc").exists() else "")
    pci = "sys/bus/pci/devices"
    on_bus = [
        name
        for name in fs.names(pci)
        if fs.text(f"{pci}/{name}/vendor") == "0x10de" and fs.text(f"{pci}/{name}/class")[:6] in _GPU_CLASSES
    ]
    loaded = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", fs.text("proc/driver/nvidia/version"))
    try:
        load("libcuda.so.1")
        libcuda = True
    except OSError:
        libcuda = False
    return CudaFacts(
        gpus=max(len(on_bus), len(fs.names("proc/driver/nvidia/gpus"))),
        driver=loaded[1] if loaded else "",
        device_nodes=os.access(fs.root / "dev/nvidiactl", os.R_OK | os.W_OK),
        libcuda=libcuda,
        torch_cuda=_torch_cuda(torch or find_spec("torch")),
        visible=environ.get("CUDA_VISIBLE_DEVICES"),
        nvcc=nvcc,
        nvcc_cuda=_nvcc_cuda(nvcc),
        cc=which(environ["CC"]) or "" if environ.get("CC") else which("gcc") or which("clang") or "",
        cxx=which(environ.get("CXX") or "c++") or "",
        python_h=(Path(sysconfig.get_path("include")) / "Python.h").exists(),
    )


def _torch_cuda(spec: Any) -> str | None:
    """The CUDA release of torch, read from torch/version.py because importing torch takes seconds."""
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=\n]*= *['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else ""


def _nvcc_cuda(nvcc: str) -> str:
    try:
        text = (Path(nvcc).resolve().parents[1] / "version.json").read_text(encoding="utf-8") if nvcc else ""
    except OSError:
        return ""
    match = re.search(r'"cuda"\s*:\s*\{[^}]*"version"\s*:\s*"([\d.]+)"', text)
    return match[1] if match else ""


def oldest_driver(cuda: str) -> int:
    """The first driver branch that runs programs of this CUDA release; 0 where it is not known."""
    return OLDEST_DRIVERS.get(int(cuda.partition(".")[0] or 0), 0)


def cuda_fault(facts: CudaFacts) -> str | None:
    """The first known cause that prevents torch from using the GPUs, with its fix; None if there is none. Pure."""
    f = facts
    needed = oldest_driver(f.torch_cuda or "")
    newest = f"{needed} or newer" if needed else "that torch's CUDA needs"
    share = "podman --device nvidia.com/gpu=all, docker --gpus all, apptainer --nv"
    if f.hidden:
        return f"CUDA_VISIBLE_DEVICES={f.visible!r} hides every GPU: unset it"
    if f.torch_cuda is None:
        return "torch is not installed: make env ACCEL=cuda"
    if not f.torch_cuda:
        return "torch is a CPU build: make env ACCEL=cuda"
    if not f.gpus and not f.driver:
        return "this host has no NVIDIA GPU"
    if not f.driver:
        return f"no NVIDIA driver is loaded: install driver {newest}"
    if not f.device_nodes:
        return f"/dev/nvidiactl cannot be opened: give this container or job its GPUs ({share})"
    if not f.libcuda:
        return f"libcuda.so.1 is not found: install the driver's libraries, or pass them to this container ({share})"
    if int(f.driver.partition(".")[0]) < needed:
        return (
            f"driver {f.driver} is too old for CUDA {f.torch_cuda} of torch: install driver {newest}, "
            "or a torch built with an older CUDA (make env ACCEL=cuda LOCK=no TORCH_INDEX=URL)"
        )
    return None


def triton_fault(facts: CudaFacts) -> str | None:
    """The reason why Triton cannot compile kernels, with the fix, or None. Pure."""
    if not facts.cc:
        return "Triton finds no C compiler (CC, gcc or clang): install gcc on every host"
    if not facts.python_h:
        return "Triton finds no Python.h: install Python's headers (Debian: python3-dev) on every host"
    return None


@cache
def triton_missing() -> str | None:
    """The reason why this process has no Triton that can compile kernels, with the fix, or None."""
    if find_spec("triton") is None:
        return "Triton is not installed: make env ACCEL=cuda"
    return triton_fault(look())


def stack_faults(facts: CudaFacts) -> tuple[str, ...]:
    """All faults of a host with a GPU, for `topo` and `check`; empty without a GPU. Pure."""
    f = facts
    if not f.gpus:
        return ()
    faults = [cuda_fault(f), triton_fault(f)]
    if not f.nvcc:
        faults.append("no nvcc: FlashInfer can compile no kernel; install CUDA's toolkit or flashinfer-jit-cache")
    elif f.torch_cuda and f.nvcc_cuda and f.nvcc_cuda.partition(".")[0] != f.torch_cuda.partition(".")[0]:
        faults.append(
            f"nvcc is of CUDA {f.nvcc_cuda}, torch of {f.torch_cuda}: install the toolkit of torch's release, and name "
            "its folder with CUDA_HOME"
        )
    if not f.cxx:
        faults.append("no C++ compiler (CXX or c++): FlashInfer can compile no kernel; install g++")
    return tuple(fault for fault in faults if fault)


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    device: Literal["cpu", "cuda"]
    warning: str = ""


def choose(requested: str, facts: CudaFacts, usable: bool, error: str = "") -> DeviceChoice:
    """Resolves `engine.device`. usable: whether torch can use a GPU; error: torch's message if it cannot. With a GPU in
    the host, auto selects the CPU only with a warning or if GPUs are hidden. Pure. Raises CudaUnusable."""
    if requested == "cpu":
        return DeviceChoice("cpu")
    if usable:
        return DeviceChoice("cuda")
    unknown = f"CUDA does not start{f' ({error})' if error else ''}: run nvidia-smi, and read the kernel's log"
    fault = cuda_fault(facts) or unknown
    if requested == "cuda":
        raise CudaUnusable(f"engine.device=cuda: {fault}, or use device: cpu")
    if not facts.gpus or facts.hidden:
        return DeviceChoice("cpu")
    there = f"this host has {counted(facts.gpus, 'NVIDIA GPU')}"
    if facts.torch_cuda == "":
        return DeviceChoice("cpu", f"engine.device=auto takes the CPU: {there}, but {fault}")
    raise CudaUnusable(f"engine.device=auto: {there}, but {fault}; or use device: cpu")
