"""A pipeline stage before the last does not wait for its steps on a GPU, and still zeroes non-finite values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from laddertron.engine.batch import Batch, Chunk
from laddertron.engine.step.stage_runner import CHECKS_BEHIND, StageRunner
from laddertron.models.transfer import Arriving
from torch import Tensor


def test_a_step_is_checked_when_later_ones_are_queued() -> None:
    """The second of two sequences has NaN in one of its prompt's rows: its blocks of that step are zeroed two steps
    later, although its slot has other blocks by then; nothing waits for the device before."""
    zeroed: list[list[int]] = []
    read: list[int] = []
    runner: StageRunner
    hidden: Tensor

    def fetch(x: Tensor) -> Arriving:
        step = len(read) + len(runner.checks)
        assert not torch.nan_to_num(x.float()).any(), "a row's number is 0 or NaN"

        def arrive() -> Any:
            read.append(step)
            return x.numpy()

        return arrive

    class Cache:
        block_size = 4

        def copy(self, pairs: object) -> None: ...

        def zero_blocks(self, blocks: list[int]) -> None:
            zeroed.append(blocks)

    rotary = SimpleNamespace(cos=torch.ones(32, 1, 2))
    model: Any = SimpleNamespace(rotary=rotary, forward_streams=lambda streams, during_collective: hidden)
    sampler: Any = SimpleNamespace(latest=None, release=lambda slot: None)
    pipeline: Any = SimpleNamespace(stages=2, last=False, first=False)
    cache: Any = Cache()
    attention: Any = None

    def drain() -> None:
        raise AssertionError("the stage waits for the device")

    runner = StageRunner(
        model, cache, attention, sampler, max_slots=4, max_model_len=31, drain=drain, pipeline=pipeline, index=0,
        fetch=fetch,
    )  # fmt: skip
    hidden = torch.zeros(4, 8)
    chunks = (Chunk(0, 3, 1, True), Chunk(2, 0, 3, True))
    runner.run(Batch(0, blocks=((0, (7,)), (2, (5, 6))), chunks=chunks))
    hidden[2, 1] = torch.nan
    runner.run(Batch(1, chunks=chunks))
    hidden = torch.zeros(4, 8)
    runner.run(Batch(2, released=(2,), blocks=((2, (1,)),), chunks=chunks))
    assert (read, zeroed) == ([0], [])
    runner.run(Batch(3, chunks=chunks))
    assert (read, zeroed) == ([0, 1], [[5, 6]])
    assert len(runner.checks) == CHECKS_BEHIND
    assert np.array_equal(runner.blocks[2, :1], [1])
