"""What planning costs: microseconds a step for schedule, encode, decode and commit, one JSON line a case.

    python benchmarks/scheduler.py [--steps 300]

No model: tokens are drawn from a counter. `step_us` is schedule + commit, what rank 0 pays; encode is paid by rank 0
too, decode by every other rank. Medians, with the 99th percentile beside the median of the sum.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from laddertron.engine.batch import Batch, StepResult, decode, encode
from laddertron.engine.request import INTERACTIVE, Request, SamplingParams
from laddertron.engine.schedule.scheduler import Scheduler, SchedulerLimits
from laddertron.engine.schedule.speculation import SpeculationRule

NOW = 1_700_000_000.0


def requests(
    count: int, prompt: int, output: int, *, shared: int = 0, queues: int = 4, interactive_every: int = 0
) -> Iterator[Request]:
    for number in range(count):
        tokens = (*range(shared), *((number * 31 + i * 7) % 8192 for i in range(prompt - shared)))
        interactive = interactive_every and number % interactive_every == 0
        yield Request(
            f"r{number}",
            tokens,
            SamplingParams(max_tokens=output, seed=number, stop_token_ids=(8191,)),
            priority=INTERACTIVE if interactive else 1,
            queue="" if interactive else f"batch-{number % queues}",
        )


@dataclass
class Times:
    """Seconds by part, one entry a step."""

    schedule: list[float] = field(default_factory=list)
    commit: list[float] = field(default_factory=list)
    encode: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    tokens: int = 0

    def line(self, case: str, scheduler: Scheduler, running: int, waiting: int) -> dict[str, object]:
        total = sorted(a + b for a, b in zip(self.schedule, self.commit, strict=True))
        micro = {
            f"{name}_us": round(statistics.median(getattr(self, name)) * 1e6, 1)
            for name in ("schedule", "commit", "encode", "decode")
        }
        return {
            "case": case,
            "running": running,
            "waiting": waiting,
            "steps": len(total),
            "tokens_per_step": round(self.tokens / len(total), 1),
            **micro,
            "step_us": round(statistics.median(total) * 1e6, 1),
            "step_p99_us": round(total[int(len(total) * 0.99)] * 1e6, 1),
            "preemptions": scheduler.counters.preemptions,
            "prefix_hits": scheduler.counters.prefix_hits,
        }


class Loop:
    """Rank 0's loop without a model: one plan ahead, like engine/step/engine.py."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.times, self.now = scheduler, Times(), NOW
        self.ahead: Batch | None = None
        self.drawn = 0

    def timed(self, plan: Callable[[], Batch | None]) -> Batch | None:
        start = time.perf_counter()
        batch = plan()
        self.times.schedule.append(time.perf_counter() - start)
        return batch

    def step(self) -> None:
        self.now += 0.01
        batch = self.ahead or self.timed(lambda: self.scheduler.schedule(self.now))
        assert batch is not None, "nothing to run: give the case more requests"
        self.ahead = self.timed(lambda: self.scheduler.schedule(self.now))
        count = sum(chunk.samples for chunk in batch.chunks)
        tokens = [(self.drawn + i) % 8191 for i in range(count)]
        self.drawn += count
        right = {chunk.slot: chunk.drafts * (chunk.slot % 3) // 2 for chunk in batch.chunks if chunk.drafts}
        more = {slot: [(7, None)] * count for slot, count in right.items() if count}
        drafted = {chunk.slot: chunk.drafts for chunk in batch.chunks if chunk.drafts}
        a = time.perf_counter()
        frame = encode(batch)
        b = time.perf_counter()
        decode(frame)
        c = time.perf_counter()
        self.scheduler.commit(batch, StepResult(tokens, more=more, drafted=drafted), self.now)
        d = time.perf_counter()
        self.times.encode.append(b - a)
        self.times.decode.append(c - b)
        self.times.commit.append(d - c)
        self.times.tokens += batch.num_tokens

    def run(self, warm: int, steps: int) -> None:
        for _ in range(warm):
            self.step()
        self.times = Times()
        for _ in range(steps):
            self.step()


def scheduler(
    seqs: int, *, budget: int = 2048, length: int = 8192, blocks: int = 40_000, drafts: SpeculationRule | None = None
) -> Scheduler:
    return Scheduler(SchedulerLimits(seqs, budget, length, 16, blocks, speculation=drafts))


def decode_only(
    name: str, running: int, waiting: int, steps: int, drafts: SpeculationRule | None = None
) -> dict[str, object]:
    """All slots decode, for as long as the steps last; the rest waits. drafts: none, half or all of a sequence's are
    right, by its slot."""
    loop = Loop(scheduler(running, blocks=80_000, drafts=drafts))
    for request in requests(running + waiting, 128, 4096):
        loop.scheduler.add(request, NOW)
    loop.run(running * 128 // 2048 + 20, steps)
    return loop.times.line(name, loop.scheduler, loop.scheduler.num_running, loop.scheduler.num_waiting)


def churn(name: str, running: int, waiting: int, steps: int, **mix: int) -> dict[str, object]:
    """Requests end and enter all the time: prompt 128, output 64, so that a 64th of the slots changes hands a step."""
    loop = Loop(scheduler(running))
    ends = steps * running // 32 + waiting
    stream = requests(ends + 4 * running, 128, 64, **mix)
    for _ in range(running + waiting):
        loop.scheduler.add(next(stream), NOW)
    loop.run(100, 0)
    for _ in range(steps):
        while loop.scheduler.num_waiting < waiting:
            loop.scheduler.add(next(stream), loop.now)
        loop.step()
    return loop.times.line(name, loop.scheduler, running, waiting)


def pressure(name: str, running: int, steps: int) -> dict[str, object]:
    """KV for half of what runs: preemption and recompute."""
    loop = Loop(scheduler(running, blocks=running * 12))
    for request in requests(steps * running // 64 + 8 * running, 128, 256):
        loop.scheduler.add(request, NOW)
    loop.run(100, steps)
    return loop.times.line(name, loop.scheduler, loop.scheduler.num_running, loop.scheduler.num_waiting)


def arrivals(waiting: int) -> dict[str, object]:
    """What one add and one cancel cost with so many waiting."""
    books = scheduler(256)
    for request in requests(waiting, 128, 64):
        books.add(request, NOW)
    more = [Request(f"x{i}", r.prompt, r.params, queue="late") for i, r in enumerate(requests(2000, 128, 64))]
    start = time.perf_counter()
    for request in more:
        books.add(request, NOW)
    middle = time.perf_counter()
    for request in more:
        books.cancel(request.request_id)
    end = time.perf_counter()
    micro = {"add_us": (middle - start) / len(more) * 1e6, "cancel_us": (end - middle) / len(more) * 1e6}
    return {"case": "arrivals", "waiting": waiting, **{k: round(v, 1) for k, v in micro.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    cases: list[Callable[[], dict[str, object]]] = [
        lambda: decode_only("decode", 1, 0, steps),
        lambda: decode_only("decode", 8, 0, steps),
        lambda: decode_only("decode", 64, 1_000, steps),
        lambda: decode_only("decode", 256, 10_000, steps),
        lambda: decode_only("decode, all drafts", 256, 0, steps, SpeculationRule(priced=False)),
        lambda: decode_only("decode, drafts that pay", 256, 0, steps, SpeculationRule()),
        lambda: churn("churn", 256, 10_000, steps),
        lambda: churn("churn, shared prefix of 96", 256, 10_000, steps, shared=96),
        lambda: churn("churn, every fifth interactive", 256, 10_000, steps, interactive_every=5),
        lambda: pressure("preemption", 256, steps),
        lambda: arrivals(10_000),
    ]
    for case in cases:
        gc.collect()
        print(json.dumps(case()), flush=True)


if __name__ == "__main__":
    main()
