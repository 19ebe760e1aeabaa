"""An emulated fabric on one GPU: a kernel on the communication stream (hold_kernel.py) takes the predicted time,
occupies multiprocessors and moves the message's bytes. Capturable in a CUDA graph once such a message was sent outside
of one. Not modelled: the peers' traffic in memory and fabric, late ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from laddertron.topology.comm.collectives import Collective, Later, Pending
from laddertron.topology.comm.gpu_stream import StreamCollective
from laddertron.topology.comm.ledger import Ledger
from laddertron.topology.hardware.cuda_stack import triton_missing
from laddertron.topology.link_cost import Emulation
from torch import Tensor

LONGEST_S = 2.0
"""A longer message would not fit the kernels' 32 bits of nanoseconds."""


@dataclass(frozen=True, slots=True)
class HoldKernelLaunch:
    """One message as the kernels take it: `programs` that hold a multiprocessor each (0: a pure delay), nanoseconds,
    vectors of the message, and how many of them pass through memory."""

    programs: int
    ns: int
    vectors: int
    moved: int


def moved_bytes(ranks: int, nbytes: int) -> int:
    """Bytes a rank reads, and writes, for an all-reduce: each part travels to its sum and back."""
    return round(2 * (ranks - 1) / ranks * nbytes)


def launch_of(emulation: Emulation, ranks: int, occupied: int, nbytes: int, vector_bytes: int) -> HoldKernelLaunch:
    """One message in a group of `ranks` that takes `occupied` multiprocessors. What is left over beyond whole vectors
    stays where it is. Raises ValueError for a message that takes more than LONGEST_S."""
    seconds = emulation.seconds(nbytes)
    if seconds > LONGEST_S:
        raise ValueError(f"{emulation.label}: {nbytes} bytes take {seconds:.3g} s, at most {LONGEST_S:g} s can be had")
    vectors, moved = nbytes // vector_bytes, moved_bytes(ranks, nbytes) // vector_bytes
    return HoldKernelLaunch(occupied, round(seconds * 1e9), vectors if occupied else 0, moved if occupied else 0)


def load_kernels() -> Any:
    """hold_kernel, whose import compiles nothing yet. Raises ImportError, also where Triton could compile nothing."""
    if fault := triton_missing():
        raise ImportError(fault)
    import hold_kernel

    return hold_kernel


def multiprocessors_here() -> int:
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


class EmulatedOnGpu:
    """`inner`, delayed by `emulation`, on a stream next to the computing one: both set off when x is
    ready, and the later one decides when x may be taken. Messages of one such group go one after another, as NCCL's
    do. x passes unchanged through the emulation."""

    def __init__(self, inner: Collective, emulation: Emulation, ledger: Ledger, ranks: int, occupied: int = 0) -> None:
        """ranks: of the emulated group; occupied: multiprocessors that a message occupies. Raises RuntimeError without
        Triton, ValueError if not one multiprocessor would be left to compute."""
        try:
            self._kernels = load_kernels()
        except ImportError as fault:
            raise RuntimeError(
                f"{emulation.label}: needs Triton, which comes with CUDA builds of torch ({fault}): make env ACCEL=cuda"
            ) from fault
        there = multiprocessors_here()
        if occupied >= there:
            raise ValueError(
                f"{emulation.label}: this GPU has {there}, and some must be left to compute: use at most {there - 1}"
            )
        self._inner, self.emulation, self._ranks, self._held = inner, emulation, ranks, occupied
        self.scratches: list[Tensor] = []
        self._side = StreamCollective(self._issue, ledger, "emulated", emulation.label)

    def start(self, x: Tensor, layer: str = "", at_once: bool = False, /) -> Pending:
        if self._held and (not self.scratches or self.scratches[-1].nbytes < x.nbytes):
            # The outgrown ones stay: a graph that was captured with one still writes to it.
            size = 1 << (x.nbytes - 1).bit_length()
            self.scratches.append(torch.empty(size, dtype=torch.uint8, device=x.device))
        inner, side = self._inner.start(x, "", at_once), self._side.start(x, layer, at_once)

        def finish() -> Tensor:
            inner.wait()
            return side.wait()

        return Later(finish)

    def _issue(self, x: Tensor) -> None:
        kernels = self._kernels
        launch = launch_of(self.emulation, self._ranks, self._held, x.nbytes, kernels.VECTOR_BYTES)
        if not launch.programs:
            kernels.delay[(1,)](launch.ns, num_warps=1)
            return
        kernels.hold[(launch.programs,)](
            x,
            self.scratches[-1][: x.nbytes].view(x.dtype),
            launch.vectors,
            launch.moved,
            launch.ns,
            VECTOR=kernels.VECTOR_BYTES // x.itemsize,
            TILE=kernels.TILE_BYTES // x.itemsize,
            num_warps=kernels.HOLD_WARPS,
        )
