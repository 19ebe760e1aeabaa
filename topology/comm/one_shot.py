"""A one-shot all-reduce between GPUs of a node: every rank reads the others' messages from their memory and adds them
up itself. One kernel, few multiprocessors, no host: for the small messages of decoding. Larger ones take two calls of
it (link_cost.in_two_shots): each rank adds its part, then gathers the others' sums. Never ran on a GPU.

Every rank has a region of memory that all of them can read and write: two buffers, and a flag for each pair of a
program of the kernel (one_shot_kernel.py) and a rank. Program b, in its call number e (its *epoch*):

1. copies its chunk of the message into slice b of this rank's buffer e % 2;
2. writes e to its flag in every rank's region (release), and waits until all its flags here are at least e (acquire);
3. reads slice b of every rank's buffer e % 2, adds in rank order in fp32, rounds once: the same bits on all ranks.

No barrier ends a call. Program b writes to buffer e % 2 again in epoch e + 2, after it has seen e + 1 from every rank.
A rank writes e + 1 after its own step 3 of epoch e, because calls follow one another on a stream: no rank still reads
what is overwritten. Programs share nothing, so messages of different sizes, which have different numbers of programs,
may alternate. Epochs are in device memory and the kernel advances them, so a replayed graph does what a call does.

The wait has no limit of its own: a slow rank is no error, and DeviceWait (nccl.py) limits the host's wait and names
the rank that is missing. It then calls `abort`, which ends the kernel and all later ones with NaN in place of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..link_cost import ONE_SHOT_BYTES, in_two_shots

_STREAM: Any = torch.cuda.Stream  # torch leaves it without types
PROGRAMS = 16
"""Most programs of a call, each of which takes a multiprocessor."""
PROGRAM_BYTES = 8 << 10
"""A call has another program for so many bytes of its message."""
MOST_RANKS = 16
_VECTOR_BYTES = 16  # what a thread moves at once
_FLAG_BYTES = 8 * PROGRAMS * MOST_RANKS
# Chunks of a part are rounded up to vectors.
_SLICE_BYTES = ONE_SHOT_BYTES // PROGRAMS + _VECTOR_BYTES * MOST_RANKS
_WARPS = 16
REGION_BYTES = _FLAG_BYTES + 2 * PROGRAMS * _SLICE_BYTES


class OneShot:
    """Sums and gathers over the ranks of a node, on the current stream, in one order on all ranks; one call follows
    another. It allocates nothing and the host waits for nothing, so calls may be captured."""

    def __init__(self, rank: int, regions: Sequence[Tensor], memory: Any = None) -> None:
        """regions: every rank's, as this rank's device sees it; uint8 [REGION_BYTES], zero before any rank's first
        call. memory: their owner, kept as long."""
        from .one_shot_kernel import exchange

        if not 2 <= len(regions) <= MOST_RANKS:
            raise ValueError(f"{len(regions)} ranks: one_shot is for 2 to {MOST_RANKS}")
        self._exchange, self.rank, self.ranks, self._regions = exchange, rank, len(regions), tuple(regions)
        self._memory, self.device = memory, (device := regions[rank].device)
        self._table = torch.tensor([region.data_ptr() for region in regions], dtype=torch.int64).to(device)
        self._epochs = torch.zeros(PROGRAMS, dtype=torch.int64, device=device)
        self._stop = torch.zeros(1, dtype=torch.int64, device=device)
        self._stopped = torch.ones(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._aborting: Any = _STREAM() if device.type == "cuda" else None

    def carries(self, x: Tensor) -> bool:
        """Whether x fits; by its size alone, so that all ranks agree."""
        return x.nbytes <= ONE_SHOT_BYTES and x.nbytes % (self.ranks * _VECTOR_BYTES) == 0

    def __call__(self, x: Tensor) -> None:
        """Replaces x (contiguous, any float type) by its sum over the ranks."""
        if in_two_shots(x.nbytes, self.ranks):
            part = x.view(self.ranks, -1)[self.rank]
            self.scatter(x, part)
            self.collect(x, part)
        else:
            self._run(x, x, x.nbytes, 1, False)

    def scatter(self, flat: Tensor, part: Tensor) -> None:
        """Writes to `part`, this rank's part of `flat`, its sum over the ranks."""
        self._run(part, flat, flat.nbytes, self.ranks, False)

    def collect(self, flat: Tensor, part: Tensor) -> None:
        """Gathers every rank's `part` in `flat`."""
        self._run(flat, part, flat.nbytes, 1, True)

    def _run(self, out: Tensor, source: Tensor, nbytes: int, parts: int, gather: bool) -> None:
        programs = max(1, min(PROGRAMS, nbytes // PROGRAM_BYTES))
        part = source.nbytes // (parts * _VECTOR_BYTES)
        values = _VECTOR_BYTES // source.itemsize
        self._exchange[(programs,)](
            out, source, self._table, self._epochs, self._stop, self.rank, part, -(-part // programs), _FLAG_BYTES,
            _SLICE_BYTES, PROGRAMS=PROGRAMS, RANKS=self.ranks, LANES=1 << (self.ranks - 1).bit_length(), PARTS=parts,
            GATHER=gather, VEC=values, BLOCK=32 * _WARPS * values, num_warps=_WARPS,
        )  # fmt: skip

    def abort(self) -> None:
        """Ends the kernel that waits, and every later one, without sums. For a group that is lost: the host's thread
        need not be the one that calls."""
        with torch.cuda.stream(self._aborting):  # other streams wait for the kernel
            self._stop.copy_(self._stopped, non_blocking=True)

    def missing(self) -> list[int]:
        """The ranks that are not in this rank's latest call. Waits for the device: after `abort`, or a call's end."""
        epochs, flags = self._epochs.cpu(), self._regions[self.rank][:_FLAG_BYTES].view(torch.int64).cpu()
        arrived = flags[: PROGRAMS * self.ranks].view(PROGRAMS, self.ranks)
        return [rank for rank in range(self.ranks) if bool((arrived[:, rank] < epochs).any())]
