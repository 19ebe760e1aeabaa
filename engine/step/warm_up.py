"""Runs a rank's first steps before it reports ready, so that everything that compiles, loads or connects at first use
does so before serving. All ranks of a job call it at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import accumulate

import torch

from ..batch import Batch, Chunk, NewSequence
from ..request import SamplingParams
from ..schedule.scheduler import SchedulerLimits
from .runner import Runner

PROMPT = 33
"""Tokens of a prompt: more than a block, so that a page table has several entries."""
FIRST_PROMPT = 129
"""Tokens of the first prompt, if there is room: kernels for at most 16, 64 and more tokens differ."""
DRAWS = (
    SamplingParams(max_tokens=8, seed=1, temperature=0.0),
    SamplingParams(max_tokens=8, seed=2, temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, logprobs=1),
    SamplingParams(max_tokens=8, seed=3, temperature=0.8, repetition_penalty=1.1, logit_bias=((0, 1.0),)),
    SamplingParams(max_tokens=8, seed=4, temperature=0.8),
)
"""One sequence for each kind of sampling."""


def compiles(device: torch.device) -> bool:
    """Whether operators are compiled at first use on this device; a CPU's were compiled at installation."""
    return device.type == "cuda"


def warm_up(runner: Runner, limits: SchedulerLimits, tell: Callable[[str], None]) -> None:
    """Runs steps of every kind; slots and blocks are empty again afterwards. Raises what a step raises."""
    began = time.monotonic()
    for name, batch in first_steps(limits):
        tell(f"compiling kernels for {name}, {time.monotonic() - began:.0f} s")
        runner.run(batch)
        while runner.wait_result() is not None:
            pass


def first_steps(limits: SchedulerLimits) -> Iterator[tuple[str, Batch]]:
    """Yields a prompt, then for each kind of sampling a prompt together with earlier sequences' decodes, then decodes
    alone and an empty step."""
    beyond, size = 2 * len(DRAWS), limits.block_size
    blocks_per_sequence = -(-(PROMPT + beyond) // size)
    room = min(limits.max_num_seqs, limits.num_blocks // blocks_per_sequence, len(DRAWS))
    most = min(limits.max_num_batched_tokens - room + 1, limits.max_model_len - beyond)
    if room < 1 or most < 2:
        return  # too small for more than its own requests
    spare = (limits.num_blocks - (room - 1) * blocks_per_sequence) * size - beyond
    counts = [min(FIRST_PROMPT, most, spare), *[min(PROMPT, most)] * (room - 1)]
    ends = list(accumulate(-(-(count + beyond) // size) for count in counts))
    drafts = 0 if limits.speculation is None else 2
    for slot, (params, count) in enumerate(zip(DRAWS[:room], counts, strict=True)):
        decodes = tuple(
            Chunk(before, counts[before] + slot - before - 1, 1, True, False, drafts, drafts) for before in range(slot)
        )
        yield (
            "prompts" if slot == 0 else "mixed steps",
            Batch(
                slot,
                admitted=(NewSequence(slot, 0, count, (0,) * count, params),),
                blocks=((slot, tuple(range(ends[slot - 1] if slot else 0, ends[slot]))),),
                chunks=(*decodes, Chunk(slot, 0, count, True, proposals=drafts)),
            ),
        )
    for step in range(room, room + 2):
        chunks = [Chunk(slot, counts[slot] + step - slot - 1, 1, True, False, drafts, drafts) for slot in range(room)]
        yield "decodes", Batch(step, chunks=tuple(chunks))
    yield "the end", Batch(room + 2, released=tuple(range(room)))
