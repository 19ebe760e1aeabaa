"""tools/gpu_dry: each check of the fake GPU fires; one case of `make gpu-dry` runs where its environment exists."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import stream_order
import torch

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / "tools" / "gpu_dry"
sys.path.append(str(TOOLS))

import gpu_dry  # noqa: E402
from cases import CASES  # noqa: E402
from fake_gpu import DEVICE, FakeGpu, allocated  # noqa: E402
from stand_ins import written  # noqa: E402

CUDA: Any = torch.cuda
needs_cuda_build = pytest.mark.skipif(not torch.version.cuda, reason="torch is a CPU build: make gpu-dry")


@pytest.fixture(name="gpu")
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    C: Any = torch._C
    C._ensureCUDADeviceGuardSet()
    for name, value in (("_lazy_init", lambda: None), ("current_device", lambda: 0)):
        monkeypatch.setattr(CUDA, name, value)
    found = FakeGpu(80 << 30, (9, 0))
    with found, torch.inference_mode():
        yield found


def pinned(gpu: FakeGpu, *shape: int) -> torch.Tensor:
    return gpu.pin(torch.zeros(shape))


@needs_cuda_build
def test_operators_are_counted_and_views_are_not(gpu: FakeGpu) -> None:
    x = torch.zeros(4, 8, device=DEVICE)
    gpu.counts.clear()
    y = x.t()[1:].float() @ x
    assert y.shape == (7, 8)
    assert dict(gpu.counts) == {("launch", "matmul"): 1}


@needs_cuda_build
def test_copies_wait_unless_host_memory_is_pinned(gpu: FakeGpu) -> None:
    there = pinned(gpu, 3).to(DEVICE, non_blocking=True)
    back = pinned(gpu, 3)
    back.copy_(there, non_blocking=True)
    assert not any(kind == "wait" for kind, _ in gpu.counts)
    torch.zeros(3).to(DEVICE)
    there.to("cpu")
    assert there.sum().item() == 0
    waits = {name for kind, name in gpu.counts if kind == "wait"}
    assert waits == {"to of pageable memory", "to to pageable memory", "item"}


@needs_cuda_build
@pytest.mark.parametrize("what", ["item", "to_host", "to_device", "pin"])
def test_a_capture_refuses(gpu: FakeGpu, what: str) -> None:
    x, buffer = torch.zeros(3, device=DEVICE), pinned(gpu, 3)
    actions: dict[str, Any] = {
        "item": lambda: x.sum().item(),
        "to_host": lambda: buffer.copy_(x),
        "to_device": lambda: x.copy_(buffer),
        "pin": lambda: gpu.pin(torch.zeros(3)),
    }
    with gpu.capture(stream_order.Stream(gpu.order)):
        x.add_(1)
        assert not gpu.forbidden
        actions[what]()
    assert len(gpu.forbidden) == 1


@needs_cuda_build
def test_streams_are_ordered(gpu: FakeGpu) -> None:
    side, x = stream_order.Stream(gpu.order), torch.zeros(4, device=DEVICE)
    with gpu.order.on(side):
        x.add_(1)
    assert {fault.split(":")[0] for fault in gpu.order.faults} == {"add_"}


@needs_cuda_build
def test_a_replay_is_ordered_with_what_it_reads(gpu: FakeGpu) -> None:
    side, x = stream_order.Stream(gpu.order), torch.zeros(4, device=DEVICE)
    with gpu.capture(side) as graph:
        y = x + 1
    with gpu.order.on(side):
        side.wait_stream(gpu.order.streams[0])
        x.add_(1)
    assert not gpu.order.faults
    gpu.replay(graph)
    assert gpu.order.faults
    del y


@needs_cuda_build
def test_the_host_must_not_write_what_is_still_read(gpu: FakeGpu) -> None:
    buffer = pinned(gpu, 4)
    x = buffer.to(DEVICE, non_blocking=True)
    event = stream_order.Event(gpu.order)
    event.record()
    gpu.host_waits("the copy", event.clock)
    buffer.zero_()
    assert not gpu.order.faults
    x.copy_(buffer, non_blocking=True)
    buffer.zero_()
    assert gpu.order.faults == ["zero_ on the host: write unordered with copy_"]


@needs_cuda_build
def test_memory_is_counted_as_the_allocator_rounds_it(gpu: FakeGpu) -> None:
    assert [allocated(n) for n in (1, 513, 11 << 20)] == [512, 1024, 12 << 20]
    before = gpu.live
    x = torch.zeros(1000, device=DEVICE)
    kept = x[:10]
    del x
    assert gpu.live == before + 4096
    del kept
    assert gpu.live == before
    assert gpu.peak == before + 4096


def test_stores_are_found_in_triton_ir() -> None:
    ir = """tt.func public @kernel(%out: !tt.ptr<f32> {x = 1}, %x: !tt.ptr<f32>) attributes {noinline = false} {
      %0 = tt.splat %x : !tt.ptr<f32>
      %1 = tt.load %0 : tensor
      %2 = tt.splat %out : !tt.ptr<f32>
      %3 = tt.addptr %2, %at : tensor
      tt.store %3, %1 : tensor"""
    assert written(ir) == {0}


def test_the_table_on_the_page_is_read_back() -> None:
    before, table, after = gpu_dry.written()
    assert before + table + after == gpu_dry.DOCS.read_text()
    assert table.startswith(gpu_dry.HEAD)
    assert len(table.splitlines()) == 2 + len(CASES)


def test_jobs_that_fail_are_faults_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    def raises() -> dict[str, Any]:
        raise ValueError("no such case")

    def dies() -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def well(number: int) -> dict[str, Any]:
        print("words of the case")
        return {"faults": [], "rows": {"launches": number}}

    jobs: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("raises", raises),
        ("dies", dies),
        ("one", partial(well, 1)),
        ("two", partial(well, 2)),
    ]
    error, death, one, two = gpu_dry.run_all(jobs)
    assert "no such case" in error["faults"][0]
    assert "Killed" in death["faults"][0]
    assert [one, two] == [well(1), well(2)]
    assert "\n  Killed" in capsys.readouterr().out


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed: make gpu-dry")
def test_spilled_registers_are_found() -> None:
    sys.path.insert(0, str(TOOLS.parent / "benchmarks" / "gpu"))
    import hold_kernel
    from stand_ins import compiled, spilled
    from triton.compiler import ASTSource

    signature = {"x": "*bf16", "scratch": "*bf16"} | dict.fromkeys(("vectors", "moved", "ns"), "i32")
    constants = {"VECTOR": 8, "TILE": 32768}
    aligned = {(place,): [["tt.divisibility", 16]] for place in (0, 1)}
    source = ASTSource(hold_kernel.hold, signature | dict.fromkeys(constants, "constexpr"), constants, aligned)
    own, fewer = (
        spilled(compiled(source, {"num_warps": hold_kernel.HOLD_WARPS, "maxnreg": most}, 90).asm["cubin"])
        for most in (None, 32)
    )
    assert own == 0
    assert fewer > 0


def test_a_case_of_gpu_dry() -> None:
    """The whole list is `make gpu-dry`."""
    python = ROOT / "build" / "gpu-dry" / "bin" / "python"
    if not python.exists():
        pytest.skip("build/gpu-dry does not exist (7 GB): make gpu-dry")
    command = [str(python), str(TOOLS / "gpu_dry.py"), "8B"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
