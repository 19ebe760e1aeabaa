"""Fabrics that are not there: what a message costs on them, and what the GPU is told to do. No GPU, no ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from laddertron.topology.comm.collectives import Done
from laddertron.topology.comm.ledger import Ledger
from laddertron.topology.cost.cost import choose, proven, shape_of
from laddertron.topology.cost.prices import emulation_of, reference
from laddertron.topology.hardware.presets import preset
from laddertron.topology.link_cost import Emulation, LinkCost
from laddertron.topology.placement.placement import PlacementError, place
from laddertron.topology.placement.world import World

GPU = Path(__file__).resolve().parents[3] / "tools" / "benchmarks" / "gpu"
sys.path.insert(0, str(GPU))

import emulated_gpu  # noqa: E402
from emulated_gpu import EmulatedOnGpu, HoldKernelLaunch, launch_of, moved_bytes  # noqa: E402

EVENT: Any = torch.cuda.Event  # torch leaves it without types


@pytest.mark.parametrize(("spec", "ranks"), [("8xH100", 8), ("2x8xH100", 16), ("8xH100-PCIe", 8), ("2x4xcpu", 2)])
def test_a_fabric_has_the_cost_models_prices_at_every_size(spec: str, ranks: int) -> None:
    """From one row of a decode step to a chunk of a prompt: what `plan` and the tuning fall back to, to the last bit
    that floats keep, whichever protocol is cheaper."""
    fabric = preset(spec)
    shape = shape_of(fabric, place(fabric, World(ranks)))
    backend = "nccl" if fabric.nodes[0].devices else "native"
    emulation = emulation_of(spec, ranks)
    for nbytes in (2, 16 << 10, 32 << 10, 512 << 10, 2 << 20, 64 << 20):
        _, wanted = choose(reference(backend, shape), shape, nbytes, proven(backend, shape))  # type: ignore[arg-type]
        assert emulation.seconds(nbytes) == pytest.approx(wanted, rel=1e-6)
    assert emulation.label == f"emulated {spec}, {ranks} ranks"


def test_a_fabric_that_is_unknown_or_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="expected NODESxGPUSxMODEL"):
        emulation_of("8xH800", 8)
    with pytest.raises(PlacementError, match="16"):
        emulation_of("8xH100", 16)


def test_the_cheaper_of_two_protocols_is_taken_by_size() -> None:
    """1 us and 1 GB/s against 10 us and 10 GB/s: they meet at 10 kB."""
    emulation = Emulation("two protocols", 1e-6, 1e9, (LinkCost(10e-6, 10e9),))
    assert emulation.parts(5_000) == pytest.approx((1e-6, 5e-6))
    assert emulation.parts(20_000) == pytest.approx((10e-6, 2e-6))


def test_bytes_through_memory_grow_with_the_group() -> None:
    """An all-reduce passes nearly twice its size through each of many ranks, once of two, nothing of one."""
    moved = [moved_bytes(n, 1 << 20) for n in (1, 2, 8, 16)]
    assert moved == [0, 1 << 20, 7 << 18, 15 << 17]


def test_what_the_gpu_is_told() -> None:
    """A 16 KiB message over 8 ranks in 24.3 us: a pure delay moves nothing; with 4 multiprocessors held, 28 KiB pass
    through memory, in vectors of 16 bytes. A message that is shorter than a vector only takes its time."""
    link = emulation_of("8xH100", 8)
    assert launch_of(link, 8, 0, 16 << 10, 16) == HoldKernelLaunch(0, 24303, 0, 0)
    assert launch_of(link, 8, 4, 16 << 10, 16) == HoldKernelLaunch(4, 24303, 1024, 1792)
    assert launch_of(link, 8, 4, 10, 16) == HoldKernelLaunch(4, 24000, 0, 1)
    with pytest.raises(ValueError, match=r"1000 bytes take 3 s, at most 2 s"):
        launch_of(Emulation("a slow one", 3.0), 8, 0, 1000, 16)


class _Inner:
    """A collective that notes what it was asked."""

    def __init__(self, noted: list[str]) -> None:
        self.noted = noted

    def start(self, x: torch.Tensor, *_: object) -> Any:
        noted = self.noted
        noted.append("inner starts")

        class Arriving:
            def wait(self) -> torch.Tensor:
                noted.append("inner waited for")
                return x

        return Arriving()


class _Kernels:
    """hold_kernel's names, noting launches instead of compiling them."""

    VECTOR_BYTES, TILE_BYTES, HOLD_WARPS = 16, 64 << 10, 32

    def __init__(self, noted: list[str]) -> None:
        self.launched: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = []
        self.delay, self.hold = (self._kernel(name, noted) for name in ("delay", "hold"))

    def _kernel(self, name: str, noted: list[str]) -> Any:
        outer = self

        class Kernel:
            def __getitem__(self, grid: tuple[int]) -> Any:
                def launch(*args: Any, **more: Any) -> None:
                    noted.append(name)
                    outer.launched.append((grid[0], args, more))

                return launch

        return Kernel()


class _Side:
    """gpu_stream.StreamCollective without a stream."""

    def __init__(self, issue: Any, ledger: Ledger, strategy: str, link: str) -> None:
        self.issue, self.strategy, self.link = issue, strategy, link

    def start(self, x: torch.Tensor, *_: object) -> Any:
        self.issue(x)

        class Arriving:
            def wait(self) -> torch.Tensor:
                return x

        return Arriving()


def _on_gpu(monkeypatch: pytest.MonkeyPatch, multiprocessors: int) -> tuple[Any, _Kernels, list[str]]:
    noted: list[str] = []
    kernels = _Kernels(noted)
    monkeypatch.setattr(emulated_gpu, "StreamCollective", _Side)
    monkeypatch.setattr(emulated_gpu, "load_kernels", lambda: kernels)
    monkeypatch.setattr(emulated_gpu, "multiprocessors_here", lambda: 132)
    collective = EmulatedOnGpu(_Inner(noted), emulation_of("8xH100", 8), Ledger(), 8, multiprocessors)
    return collective, kernels, noted


def test_a_pure_delay_is_one_sleeping_warp(monkeypatch: pytest.MonkeyPatch) -> None:
    collective, kernels, noted = _on_gpu(monkeypatch, 0)
    x = torch.ones(8192, dtype=torch.bfloat16)
    assert collective.start(x).wait() is x
    assert kernels.launched == [(1, (24303,), {"num_warps": 1})]
    assert noted == ["inner starts", "delay", "inner waited for"]


def test_held_multiprocessors_move_the_bytes_of_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four programs over the message itself and a scratch of its type; a larger message gets a larger scratch, and the
    smaller one stays, since a recorded graph may write to it; x keeps its values."""
    collective, kernels, _ = _on_gpu(monkeypatch, 4)
    small, large = torch.ones(8192, dtype=torch.bfloat16), torch.ones(100_000, dtype=torch.float32)
    for x in (small, large, small):
        assert collective.start(x).wait() is x
        assert bool((x == 1).all())
    grids, args, more = zip(*kernels.launched, strict=True)
    assert grids == (4, 4, 4)
    assert [a[0] is x for a, x in zip(args, (small, large, small), strict=True)] == [True] * 3
    assert [(a[1].dtype, a[1].nbytes) for a in args] == [(x.dtype, x.nbytes) for x in (small, large, small)]
    assert [a[2:4] for a in args] == [(1024, 1792), (25_000, 43_750), (1024, 1792)]
    assert [(m["VECTOR"], m["TILE"], m["num_warps"]) for m in more] == [(8, 32768, 32), (4, 16384, 32), (8, 32768, 32)]
    assert args[0][1].data_ptr() != args[1][1].data_ptr()
    assert [s.nbytes for s in collective.scratches] == [16384, 524288]


def test_a_gpu_must_keep_multiprocessors_to_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"this GPU has 132.*use at most 131"):
        _on_gpu(monkeypatch, 132)


def test_without_triton_the_mend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "hold_kernel", raising=False)
    with pytest.raises(RuntimeError, match=r"needs Triton.*ACCEL=cuda"):
        EmulatedOnGpu(_Inner([]), emulation_of("8xH100", 8), Ledger(), 8)


# ---- on a GPU ----

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def _collective(multiprocessors: int) -> tuple[Any, Ledger]:
    class Alone:
        def start(self, x: torch.Tensor, *_: object) -> Any:
            return Done(x)

    ledger = Ledger()
    return EmulatedOnGpu(Alone(), emulation_of("8xH100", 8), ledger, 8, multiprocessors), ledger


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("held", [0, 8])
def test_messages_take_their_time_on_the_device_and_none_on_the_host(held: int) -> None:
    """Twenty messages of 16 KiB in a row: 24.3 us each, and up to 12 for launches and the timer's grain; the values
    stay."""
    collective, ledger = _collective(held)
    x = torch.randn(8192, device="cuda").to(torch.bfloat16)
    before = x.clone()
    collective.start(x).wait()
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            collective.start(x).wait()
    first, last = (EVENT(enable_timing=True) for _ in range(2))
    first.record()
    graph.replay()
    last.record()
    torch.cuda.synchronize()
    assert 24.3 <= first.elapsed_time(last) * 1e3 / 20 <= 36.3
    assert torch.equal(x, before)
    (entry,) = ledger.entries()
    assert (entry.count, entry.link) == (1, collective.emulation.label)


@pytest.mark.gpu
@needs_gpu
def test_work_beside_a_message_is_hidden() -> None:
    """A message of 2 ms and products of about as long: together less than 1.5 times the longer."""
    emulation = Emulation("2 ms", 2e-3)

    class Alone:
        def start(self, x: torch.Tensor, *_: object) -> Any:
            return Done(x)

    collective = EmulatedOnGpu(Alone(), emulation, Ledger(), 8, 8)
    a = torch.randn(4096, 4096, device="cuda").to(torch.bfloat16)
    x = torch.ones(8192, device="cuda", dtype=torch.bfloat16)

    def timed(call: Any) -> float:
        first, last = (EVENT(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last))

    def work() -> None:
        for _ in range(8):
            a @ a

    def both() -> None:
        pending = collective.start(x)
        work()
        pending.wait()

    both()
    alone = timed(work)
    assert timed(both) < 1.5 * max(alone, 2.0)
