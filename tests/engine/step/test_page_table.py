"""The table of all slots' blocks on the device: as the host's, and changed by as much as is new."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fake_flashinfer
import numpy as np
import pytest
import torch
from laddertron.engine.batch import Batch, Chunk, NewSequence
from laddertron.engine.request import SamplingParams
from laddertron.engine.step import runner
from laddertron.engine.step.runner import Runner
from laddertron.models.attention import TorchAttention
from laddertron.models.cuda import flashinfer
from laddertron.models.cuda.flashinfer import FlashInferAttention
from test_flashinfer import CPU, make_cache

BLOCKS, SIZE = 4000, 4


def make_runner(portable: bool = False) -> Runner:
    cache, windows = make_cache(1, 8, BLOCKS, SIZE, torch.float32, CPU, layers=1), (None,)
    attention: Any = TorchAttention(cache, windows, 1.0)
    if not portable:
        attention = FlashInferAttention(cache, windows, 1.0, 1, torch.float32, fake_flashinfer.LIBRARY)
    nothing: Any = lambda *_: None  # noqa: E731
    model: Any = SimpleNamespace(rotary=SimpleNamespace(cos=torch.zeros(1)))
    sampler: Any = SimpleNamespace(release=nothing, admit=nothing, latest=None)
    return Runner(model, cache, attention, sampler, max_slots=3, max_model_len=BLOCKS)


def admit(made: Runner, length: int) -> None:
    """Slots 0 and 1 with `length` positions each, in blocks from both ends of the cache."""
    count, params = -(-length // SIZE), SamplingParams(max_tokens=8, seed=1)
    made.apply_changes(
        Batch(
            0,
            admitted=tuple(NewSequence(slot, 0, length, (7,) * length, params) for slot in (0, 1)),
            blocks=((1, tuple(range(count))), (0, tuple(range(BLOCKS - 2, BLOCKS - 2 - count, -1)))),
        )
    )


def decodes(made: Runner, length: int) -> Any:
    return made.layout_of([Chunk(slot, length - 1, 1, True) for slot in (1, 0)])[0]


def test_pages_are_those_of_the_host_s_table() -> None:
    """Also after a block more and after a slot was used again; the last row is of the scratch block."""
    made, plain = make_runner(), make_runner(portable=True)
    for again in (made, plain):
        admit(again, 13)
        again.apply_changes(Batch(1, blocks=((1, (70,)),)))
        again.apply_changes(
            Batch(2, released=(0,), admitted=(NewSequence(0, 0, 5, (3,) * 5, SamplingParams(max_tokens=8, seed=1)),))
        )
        again.apply_changes(Batch(3, blocks=((0, (80, 81, 82, 83)),)))
    whole, rows = decodes(made, 14), decodes(plain, 14)
    tables = [flashinfer.pages(layout.block_table, flashinfer.contexts(layout), SIZE, CPU) for layout in (whole, rows)]
    assert all(torch.equal(a, b) for a, b in zip(*tables, strict=True))
    assert tables[0][1].tolist() == [0, 1, 2, 3, 80, 81, 82, 83]
    assert set(whole.block_table[-1].tolist()) == {BLOCKS - 1}


def test_a_step_s_work_on_the_host_does_not_grow_with_the_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that a decode step and its plan read or copy on the host, with contexts of 13 and of 3,600 positions."""
    numbers = list[int]()

    def counted(function: Any) -> Any:
        def call(values: Any, *more: Any) -> Any:
            numbers.append(np.size(values))
            return function(values, *more)

        return call

    for module, name in ((runner, "upload"), (flashinfer, "upload"), (flashinfer, "pinned")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    totals = []
    for length in (13, 3601):
        made = make_runner()
        admit(made, length)
        numbers.clear()
        made.apply_changes(Batch(1, blocks=((1, (9,)),)))
        made.attention.prepare(decodes(made, length), torch.zeros(2, 1, 4), torch.zeros(2, 1, 4))
        totals.append(sum(numbers))
    assert totals[0] == totals[1] < 40
