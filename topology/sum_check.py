"""Checks a group's all-reduces with a known pattern of every size class before they carry a model's sums. A faulty NIC,
algorithm or driver would otherwise only show as slightly wrong answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from .comm.collectives import CommunicationError
from .comm.groups import Communicator
from .comm.ledger import Entry

LAYER = "start-up check"
"""Under which the ledger has them."""
PERIOD = 1_048_573
"""After so many elements the pattern begins again: a prime, as no chunk's size is, and small against a model."""
_MIX = 0x9E3779B1


class WrongSum(CommunicationError):
    """An all-reduce gave another sum than the ranks' parts have; the message names its strategy and size."""


def size_classes(width: int, most_rows: int) -> Iterator[int]:
    """Elements of the messages that are tried: 1, 2, 4, … rows of `width` and the most. Strategies change with a
    message's size, and none changes within less than a factor of two."""
    rows = 1
    while rows < most_rows:
        yield rows * width
        rows *= 2
    yield most_rows * width


def pattern(rank: int, count: int, salt: int, device: torch.device) -> Tensor:
    """int64 [count], from -7 to 8: what this rank brings to message `salt`. Sums over 16 ranks, in any order, are exact
    in bfloat16, and no two places, ranks or messages look alike for long: what is late, twice or elsewhere shows."""
    at = torch.arange(count, device=device)
    mixed = (at * _MIX + (rank + 1) * 0x85EBCA6B + (salt + 1) * 0xC2B2AE35) & 0xFFFFFFFF
    mixed = ((mixed ^ mixed >> 15) * 0x2C1B3C6D) & 0xFFFFFFFF
    return (mixed >> 12 & 15) - 7


def check_sums(
    communicator: Communicator,
    width: int,
    most_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    node: bool = False,
) -> None:
    """All ranks call it before the first step; node: the node's all-reduce. Raises WrongSum on all."""
    size, rank, reduce = communicator.size, communicator.rank, communicator.all_reduce
    if node and communicator.node_reduce is not None:
        size, reduce = communicator.layout.per_node, communicator.node_reduce
        rank %= size
    for salt, count in enumerate(size_classes(width, most_rows)):
        before = communicator.ledger.entries()
        period = min(count, PERIOD)
        small = 1 if size <= 32 else 4  # more than 256 is not exact in bfloat16
        parts = [(pattern(r, period, salt, device) // small).to(dtype) for r in range(size)]
        want = torch.stack(parts).sum(0)
        mine = parts[rank].repeat(-(-count // period))[:count]
        total = reduce.start(mine, LAYER).wait()
        communicator.drain()  # looking at it would wait for a device without a limit
        wrong = _compare(total, want)
        _agree(communicator, wrong, f"{_strategy(before, communicator.ledger.entries())} of {mine.nbytes} bytes")


def _compare(total: Tensor, want: Tensor) -> str:
    """Compares `total` with repetitions of `want`. Returns the first difference in words, or ""."""
    for first in range(0, len(total), len(want)):
        run = total[first : first + len(want)]
        wrong = torch.nonzero(run != want[: len(run)]).flatten()
        if len(wrong):
            at = int(wrong[0])
            words = f"element {first + at} of {len(total)} is {float(run[at]):g}, not {float(want[at]):g}"
            return f"{words}, and so are {len(wrong) - 1} of the {len(run)} behind {first}"
    return ""


def _agree(communicator: Communicator, wrong: str, what: str) -> None:
    """Raises WrongSum on every rank if one has something to tell."""
    flags = communicator.gather(np.array([bool(wrong)], np.uint8))[:, 0]
    if flags.any():
        ranks = ", ".join(map(str, np.flatnonzero(flags)))
        raise WrongSum(
            f"all-reduce check: {communicator.backend}, {what}: wrong on rank {ranks} of {communicator.size}"
            f"{': ' + wrong if wrong else ''}. Choose another parallel.collective or backend, or leave that node out"
        )


def _strategy(before: Sequence[Entry], after: Sequence[Entry]) -> str:
    """Which strategy carried what came between."""
    counts = {(e.op, e.strategy, e.layer): e.count for e in before}
    grown = {e.strategy for e in after if e.op == "all_reduce" and e.count > counts.get((e.op, e.strategy, e.layer), 0)}
    return f"strategy {', '.join(sorted(grown)) or 'unknown'}"
