"""What test_sparse_latent.py starts with TRITON_INTERPRET=1 and a seed: sparse attention's kernels on the CPU against
torch. Prints one JSON list of cases. Not a test module."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from laddertron.models.config.latent import Index, Latent
from laddertron.models.cuda import sparse_latent
from laddertron.models.cuda.sparse_latent import SparseLatent
from test_index_kernels import CHUNKS, SHAPES, Step
from torch import Tensor


def backend(step: Step, scores: int = 1 << 16) -> SparseLatent:
    """scores: of positions that are in memory at once."""
    return SparseLatent(step.backend(None).latents, 0.2, step.topk, 4 * scores)


def compared(step: Step, got: tuple[Tensor, Tensor, Tensor], want: tuple[Tensor, Tensor, Tensor]) -> dict[str, Any]:
    largest = want[2].float().abs().max()
    return {
        "chosen": float((got[0] != want[0]).any(-1).float().mean()),
        "digests": float((got[1] != want[1]).float().mean()),
        "distance": float((got[2].float() - want[2].flatten(1).float()).abs().max() / largest),
    }


def eager(dtype: torch.dtype, shape: tuple[int, int], topk: int, processors: int, scores: int) -> dict[str, Any]:
    """Of whole numbers, so that equal scores are many and sums exact; each of the pieces and parts."""
    sparse_latent.MULTIPROCESSORS = processors  # type: ignore[attr-defined]
    step = Step(dtype, *shape, topk=topk)
    result = compared(step, step.run(backend(step, scores)), step.run(step.backend(None)))
    return {"case": ["eager", str(dtype), *shape, topk, processors, scores]} | result


def turned() -> dict[str, Any]:
    """Index keys and queries that positions rotate: what is stored, and what is chosen where scores are not near."""
    step = Step(torch.float32, 16, 24)
    step.queries, step.keys = torch.randn_like(step.queries), torch.randn_like(step.keys)
    angle = torch.rand(len(step.keys), 1, 4) * 6
    step.angles = angle.cos(), angle.sin()
    attention, portable = backend(step), step.backend(None)
    result = compared(step, step.run(attention), step.run(portable))
    stored = (attention.latents.index_keys[0], portable.latents.index_keys[0])
    assert stored[0] is not None
    assert stored[1] is not None
    return {"case": ["turned"], "keys": float((stored[0] - stored[1]).abs().max())} | result


def recorded(decodes: int, rows: int, joined: bool, more: int = 3) -> list[dict[str, Any]]:
    """A recorded step's backend, prepared for one step after another: padding among decodes and after the prompts, or
    sequences with drafts. Its memory is never replaced; rows of padding are zero. more: blocks of the longest sequence
    than the step's sequences have; the page table always has one more."""
    cases = []
    step = Step(torch.float32, 3, 12, topk=13, chunks=[(90, 97), (30, 34)] if joined else CHUNKS)
    layout, tokens = step.layout, len(step.layout.positions)
    scratch, blocks = int(layout.block_table.max()) + 1, layout.block_table.shape[1]
    step.past = torch.cat((step.past, torch.full_like(step.past[:1], float("nan"))))
    step.latents = torch.cat((step.latents, torch.full_like(step.latents[:1], float("nan"))))
    attention, portable = backend(step), step.backend(None)
    captured: Any = attention.captured([(decodes, rows)], blocks + more)[decodes, rows]
    addresses = None
    for turn in range(2):
        want = step.run(portable)
        table = layout.block_table.new_full((len(layout.kv_len) + 1, blocks + 1), scratch)
        table[:-1, :blocks] = layout.block_table  # the last row is the scratch block's
        decode, total = (0 if joined else layout.decode), decodes + rows
        places = [*range(decode), *range(decodes, decodes + tokens - decode)]

        def padded(x: Tensor, fill: float = 0) -> Tensor:
            out = x.new_full((total, *x.shape[1:]), fill)  # noqa: B023
            out[places] = x  # noqa: B023
            return out

        count = len(layout.kv_len)
        chosen_rows = np.array([*range(decode), *[len(table) - 1] * (decodes - decode), *range(decode, count)])
        starts = [*range(decodes), *(start + decodes - decode for start in layout.query_start[decode:])]
        lengths = [*layout.kv_len[:decode], *[1] * (decodes - decode), *layout.kv_len[decode:]]
        fixed = replace(
            layout, positions=padded(layout.positions), query_start=[*starts, starts[-1]], kv_len=[*lengths, 1],
            block_table=table, blocks=padded(layout.blocks, scratch), offsets=padded(layout.offsets), decode=decodes,
            rows=np.append(chosen_rows, len(table) - 1),
        )  # fmt: skip
        captured.prepare(fixed, padded(step.angles[0]), padded(step.angles[1]))
        captured.store_index(0, padded(step.keys))
        digest = captured.choose(0, padded(step.queries), padded(step.weights))
        out = captured.attend(0, padded(step.x), None, step.norm)
        rest = torch.ones(total, dtype=torch.bool)
        rest[places] = False
        assert not out[rest].any()
        assert not digest[rest].any()
        assert (captured.chosen[rest] == -1).all()
        tensors = {name: x.data_ptr() for name, x in vars(captured).items() if isinstance(x, Tensor)}
        memory = {name: at for name, at in tensors.items() if name not in ("chosen", "_cos", "_sin")}
        assert len(memory) >= 3
        assert addresses in (None, memory)
        addresses = memory
        result = compared(step, (captured.chosen[places], digest[places], out[places]), want)
        cases.append({"case": ["recorded", decodes, rows, joined, turn]} | result)
        # the next step of the same shape has fewer positions, in other blocks
        layout = replace(layout, block_table=layout.block_table.flip(0))
        step.layout = layout
        portable = step.backend(None)
        captured.latents = backend(step).latents
    return cases


def faults() -> list[str | None]:
    """What the check of a start says: of right kernels; of one that chooses, stores or attends wrongly."""
    latent = Latent(32, 8, 12, 10, query_rank=16, interleaved=False, index=Index(4, 16, 30, False, (True, True)))
    check = partial(sparse_latent.kernels_fault, latent, 3, torch.float32, torch.device("cpu"))
    choose, attend = SparseLatent.choose, SparseLatent.latent_attend

    def shifted(self: SparseLatent, *arguments: Any) -> Tensor:
        digest = choose(self, *arguments)
        self.chosen[-1, 3:] += 1
        return digest

    found = [check()]
    for name, wrong in (
        ("choose", shifted),
        ("choose", lambda self, *arguments: choose(self, *arguments) + 1),
        ("store_index", lambda *_: None),
        ("latent_attend", lambda self, *arguments: attend(self, *arguments) * 1.2),
    ):
        with mock.patch.object(SparseLatent, name, wrong):
            found.append(check())
    return found


if __name__ == "__main__":
    torch.manual_seed(int(sys.argv[1]))
    kinds = [
        (SHAPES[0], 13, 1, 1 << 20), (SHAPES[1], 64, 192, 64 * 50), (SHAPES[2], 1, 20, 2048),
        (SHAPES[0], 2000, 4, 1 << 20),
    ]  # fmt: skip
    cases = [eager(dtype, *kind) for dtype in (torch.float32, torch.float16) for kind in kinds]
    cases += [turned(), *recorded(5, 80, False), *recorded(0, 16, True), *recorded(5, 80, False, 0)]
    print(json.dumps({"cases": cases, "faults": faults()}))
