"""A pipeline stage before the last does not wait for its steps on a GPU, and still zeroes non-finite values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from laddertron.engine.batch import Batch, Chunk
from laddertron.engine.step.stage_runner import CHECKS_BEHIND, StageRunner
from laddertron.models.transfer import Arriving
from laddertron.topology.comm.pipeline import NEXT, PREVIOUS
from torch import Tensor


def test_a_step_is_checked_when_later_ones_are_queued() -> None:
    """The second of two sequences has NaN in one of its prompt's rows: its blocks of that step are zeroed two steps
    later, although its slot has other blocks by then; nothing waits for the device before. A Batch without chunks,
    before a pause, ends the checks that are in flight: the pause is no part of their steps' time."""
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

    drains: list[int] = []
    observed: list[int] = []
    timeouts: Any = SimpleNamespace(before=lambda size: None, after=lambda size, seconds: observed.append(size))

    def drain() -> None:
        drains.append(len(runner.checks))

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
    assert drains == []
    runner.warmed_up(timeouts, None)
    assert (drains, observed, len(runner.checks)) == ([CHECKS_BEHIND], [], 0)
    for step in (4, 5, 6):
        runner.run(Batch(step, chunks=chunks))
    assert (observed, drains) == ([4], [2])
    runner.run(Batch(7))
    assert (observed, drains, read) == ([4] * 3, [2, 2], list(range(7)))
    runner.run(Batch(8))
    assert drains == [2, 2]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_numbers_of_drafts_go_from_host_to_host(stage: int) -> None:
    """The stages between the first and the last get tokens and drafts of each decode, and hand them on, without the
    boundary, which on a GPU takes the device's memory alone."""
    sent: list[tuple[bytes, int]] = []
    coming = np.array([[9, 2], [5, 0]], np.int32).tobytes()
    received: list[int] = []

    def receive(line: int) -> bytes:
        received.append(line)
        return coming

    pipeline: Any = SimpleNamespace(
        stage=stage, stages=4, first=stage == 0, last=stage == 3,
        send_back=lambda data, line: sent.append((data, line)), receive_back=receive,
    )  # fmt: skip
    runner: Any = SimpleNamespace(
        _pipeline=pipeline, _speculates=True, length={1: 9, 3: 5}, proposed={1: [7, 7]} if stage == 0 else {}
    )
    StageRunner.pass_lengths(
        runner, Batch(0, chunks=(Chunk(1, 9, 1, True), Chunk(3, 5, 1, True), Chunk(2, 0, 3, True)))
    )
    assert sent == ([(coming, NEXT)] if stage < 2 else [])
    assert received == ([PREVIOUS] if stage in (1, 2) else [])
    if received:
        assert runner.proposed == {1: [0, 0], 3: []}
