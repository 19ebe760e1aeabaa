"""Stand-ins over one FakeGpu for torch.cuda, the CUDA driver below Triton, and FlashInfer's compiled modules. The rest
is real: torch's and Megatron-core's Python, Triton's compiler with ptxas, FlashInfer's wrappers."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import stream_order
import torch
from fake_gpu import DEVICE, FakeGpu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

CUDA: Any = torch.cuda
_TENSOR: Any = torch.Tensor
_C: Any = torch._C


def install(total: int = 85_520_809_984, capability: tuple[int, int] = (9, 0)) -> FakeGpu:
    """A FakeGpu behind torch.cuda; by default an H100 of 80 GB. Nothing of laddertron may be imported before."""
    gpu = FakeGpu(total, capability)
    _C._ensureCUDADeviceGuardSet()  # of no GPU, torch's own guard does nothing
    name, multiprocessors = "NVIDIA H100 80GB HBM3", 132

    class Event(stream_order.Event):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(gpu.order)

        def wait(self, stream: Any = None) -> None:
            (stream or gpu.order.current).wait_event(self)

        def query(self) -> bool:
            gpu.host_saw(self.clock)
            return True

        def synchronize(self) -> None:
            gpu.host_waits("Event.synchronize", self.clock)

    class Stream(stream_order.Stream):
        cuda_stream = 0

        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(gpu.order)

        def synchronize(self) -> None:
            gpu.host_waits("Stream.synchronize", self.clock)

    class Graph:
        captured: Any

        def replay(self) -> None:
            gpu.replay(self.captured)

    @contextlib.contextmanager
    def graph(into: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
        with gpu.capture(stream) as into.captured:
            yield

    def synchronize(*_: Any) -> None:
        for stream in gpu.order.streams:
            gpu.host_saw(stream.clock)
        gpu.note("wait", "torch.cuda.synchronize", refused=True)

    properties = SimpleNamespace(
        name=name, total_memory=total, multi_processor_count=multiprocessors, major=capability[0], minor=capability[1],
        uuid="0", L2_cache_size=50 << 20, shared_memory_per_multiprocessor=233472,
        shared_memory_per_block_optin=232448,
    )  # fmt: skip
    for key, value in {
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda *_: None,
        "device": lambda *_: contextlib.nullcontext(),
        "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: name,
        "empty_cache": lambda: None,
        "mem_get_info": lambda *_: (gpu.free(), total),
        "Event": Event,
        "Stream": Stream,
        "stream": gpu.order.on,
        "current_stream": lambda *_: gpu.order.current,
        "synchronize": synchronize,
        "is_current_stream_capturing": lambda: gpu.capturing,
        "CUDAGraph": Graph,
        "graph": graph,
        "graph_pool_handle": lambda: None,
    }.items():
        setattr(CUDA, key, value)
    _TENSOR.pin_memory = lambda x, *_: x if gpu.is_pinned(x) else gpu.pin(x.clone())
    _TENSOR.record_stream = lambda x, stream: gpu.order.record_stream(x, stream)
    # Blocks begin at multiples of 512 bytes; Triton specialises on what an offset leaves of that.
    fakes: Any = FakeTensor
    fakes.data_ptr = lambda x: (x.untyped_storage()._cdata << 9) + x.storage_offset() * x.element_size()
    return gpu


# ---- Triton: compiles with ptxas, launches nothing ----


def spilled(cubin: bytes) -> int:
    """Bytes a thread of stack and spilled registers."""
    tool = next(Path(sys.prefix).glob("lib/python3*/site-packages/triton/backends/nvidia/bin/cuobjdump"))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    match = re.search(r"STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", output)
    if match is None:
        raise ValueError(f"cuobjdump does not report resources: {output[:200]!r}")
    return int(match[1]) + int(match[2])


def written(ttir: str) -> set[int]:
    """The places of the pointers among a kernel's parameters that it stores to, by its Triton IR."""
    signature = re.search(r"tt\.func public @\w+\((.*?)\) attributes", ttir, re.DOTALL)
    names = re.findall(r"(%\w+): ", signature[1]) if signature else []
    origin, stored_to = {name: name for name in names}, set()
    made = r"(%[\w#]+) = tt\.(?:addptr|splat|broadcast|bitcast|expand_dims) (%[\w#]+)"
    for name, source, stored in re.findall(rf"{made}|tt\.(?:store|atomic_\w+) (%[\w#]+)", ttir):
        if stored in origin:  # else a pointer that was read from memory
            stored_to.add(names.index(origin[stored]))
        elif source in origin:  # regions that follow one another have the same names
            origin[name] = origin[source]
    return stored_to


def compiled(source: Any, options: dict[str, Any], capability: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


class FakeDriver:
    """Triton's driver for the FakeGpu. `sources`: each specialisation that a call site asked for, with its options."""

    def __init__(self, gpu: FakeGpu) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver

        self._gpu, self.utils = gpu, self
        self._target = GPUTarget("cuda", gpu.capability[0] * 10 + gpu.capability[1], 32)
        self.sources: list[tuple[Any, dict[str, Any]]] = []
        driver.set_active(self)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        names = ("num_warps", "num_ctas", "num_stages", "maxnreg", "enable_fp_fusion")
        self.sources.append((source, {name: getattr(metadata, name) for name in names}))
        if self._gpu.capturing:
            self._gpu.forbidden.append(f"the compilation of {metadata.name} in a capture")
        kinds = list(source.signature.values())
        stores = written(compiled(*self.sources[-1], self._target.arch).asm["ttir"])

        def launch(x: int, y: int, z: int, stream: Any, function: Any, packed: Any, *rest: Any) -> None:
            arguments = rest[-len(kinds) :]
            # Parameters of the compiled function are those that are no constants.
            passed = [a for a, kind in zip(arguments, kinds, strict=True) if kind != "constexpr"]
            # What `hold` reads it moves and discards: an all-reduce may change it meanwhile.
            tensors = [a for a in passed if isinstance(a, Tensor) and metadata.name != "hold"]
            if metadata.name == "exchange":  # one_shot's
                self._gpu.note("collective", "one_shot")
                shapes = tuple((tuple(x.shape), str(x.dtype)) for x in tensors)
                self._gpu.collectives.append(("one_shot", (x, *shapes)))
            else:
                self._gpu.note("launch", f"triton {metadata.name}")
            self._gpu.access(metadata.name, tensors, [passed[place] for place in stores])

        return launch

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return 1, 1, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "max_num_regs": 65536, "multiprocessor_count": 132, "warpSize": 32}

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return DEVICE


# ---- FlashInfer: its wrappers over modules that are not compiled ----


class _Module:
    """A compiled module: `plan` on the host, `run` on the device."""

    workspace_size = None

    def __init__(self, gpu: FakeGpu, name: str) -> None:
        self._gpu, self._name = gpu, name

    def plan(self, *arguments: Any) -> list[int]:
        if self._gpu.capturing:
            self._gpu.forbidden.append(f"{self._name}.plan in a capture")
        for x in arguments[3:]:
            if isinstance(x, Tensor) and x.is_cuda:
                raise ValueError(f"{self._name}.plan reads its tables on the host; one is on {x.device}")
        return [0] * 15

    def run(self, *arguments: Any) -> None:
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        for x in tensors:
            if x.numel() and not x.is_cuda:
                raise ValueError(f"{self._name}.run takes tensors of the device, not {tuple(x.shape)} on the host")
        query = arguments[3]
        self._gpu.note("launch", self._name)
        self._gpu.access(self._name, tensors, [x for x in tensors if x is not query and x.shape == query.shape])

    paged_run = run


def use_flashinfer(gpu: FakeGpu) -> Counter[str]:
    """Puts `_Module` in place of what FlashInfer compiles; counts the modules that were asked for."""
    import flashinfer.decode
    import flashinfer.prefill
    from flashinfer.mla._batch_mla._backends import _fa_common, fa2_backend, fa3_backend

    asked: Counter[str] = Counter()

    def make(kind: str) -> Any:
        def get(*key: Any, **_: Any) -> _Module:
            asked[f"{kind} {' '.join(map(str, key))}"] += 1
            return _Module(gpu, f"flashinfer {kind}")

        return get

    for module in (flashinfer.decode, flashinfer.prefill, fa2_backend, fa3_backend):
        for kind in ("prefill", "decode", "mla"):
            name = f"get_batch_{kind}_module"
            if hasattr(module, name):
                setattr(module, name, make(kind))
    # Fake tensors' storages have no addresses.
    mechanics: Any = _fa_common._BatchMLAGeneratedFaMechanics
    mechanics._storage_interval = staticmethod(lambda x: (x.data_ptr(), 0, x.numel() * x.element_size()))
    return asked
