"""An EngineJob in this very process whose steps the scheduler plans and no model computes: it counts what one would
compute."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from random import Random

from drawn_drafts import drawn_result
from fake_job import FakeJob
from laddertron.engine.batch import Batch
from laddertron.engine.request import ModelLimits, Request
from laddertron.engine.schedule.scheduler import Scheduler, SchedulerLimits


class PlannedJob(FakeJob):
    """`prompt_tokens`: computed ones; `steps`: planned ones; `load_turns`: turns of the event loop until it
    is ready; `accepted`: how probably a draft is right after the ones before it."""

    def __init__(
        self, limits: SchedulerLimits, vocab: int = 50_000, load_turns: int = 0, accepted: float = 0.0
    ) -> None:
        kv_tokens = limits.num_blocks * limits.block_size
        super().__init__(ModelLimits(limits.max_model_len, vocab, limits.max_num_seqs, kv_tokens))
        self.scheduler, self.load_turns = Scheduler(limits), load_turns
        self.prompt_tokens, self._accepted, self._draw = 0, accepted, Random(0)

    def submit(self, request: Request) -> None:
        self.submitted.append(request)
        self.scheduler.add(request, time.time())
        self._work.set()

    def cancel(self, request_id: str) -> None:
        self.cancels.append(request_id)
        self.scheduler.cancel(request_id)
        self._work.set()

    async def _run(self) -> None:
        assert self.listener is not None
        for _ in range(self.load_turns):
            await asyncio.sleep(0)
        self.report_state("ready")
        lengths: dict[int, int] = {}
        planned: deque[Batch] = deque()
        while True:
            await self.running.wait()
            if not self.scheduler.has_work:
                self._work.clear()
                await self._work.wait()
                continue
            await asyncio.sleep(0)
            batch = self.scheduler.schedule(time.time())
            if batch is not None:
                self.steps += 1
                lengths |= {sequence.slot: sequence.prompt_len for sequence in batch.admitted}
                for chunk in batch.chunks:
                    self.prompt_tokens += max(0, min(chunk.start + chunk.count, lengths[chunk.slot]) - chunk.start)
                planned.append(batch)
                if len(planned) < self.scheduler.limits.microbatches:
                    continue
            if planned:
                batch = planned.popleft()
                self.listener.on_tokens(
                    self.scheduler.commit(batch, drawn_result(batch, self._accepted, self._draw), time.time())
                )
            else:
                self.listener.on_tokens(self.scheduler.take_events())


def distinct_tokens(prompts: list[tuple[int, ...]]) -> int:
    """Tokens of the prompts, each common prefix counted once."""
    ordered, total = sorted(set(prompts)), 0
    for number, prompt in enumerate(ordered):
        before = ordered[number - 1] if number else ()
        shared = next((i for i, (a, b) in enumerate(zip(prompt, before, strict=False)) if a != b), len(before))
        total += len(prompt) - min(shared, len(prompt))
    return total
