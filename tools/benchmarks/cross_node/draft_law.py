"""The law of drafts over two nodes, and the scheduler on a clock that follows it: counts without a machine's noise.

    python tools/benchmarks/cross_node/draft_law.py     # the table of docs/layouts.md, a minute

A sequence with k drafts of which each is accepted with probability a, after the ones before it, gets
(1 - a^(k + 1)) / (1 - a) tokens a round and has 1 + k rows. A round crosses the link 2 L + 2 times in a tensor-parallel
group of L layers (embedding, two all-reduces a layer, the gather), one after the other, and twice in a pipeline of two
stages, however many rows it has.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random

sys.path[:0] = [str(Path(__file__).resolve().parents[3] / "tests" / "helpers")]

from drawn_drafts import drawn_result  # noqa: E402
from laddertron.engine.batch import Batch, StepResult  # noqa: E402
from laddertron.engine.request import Request, SamplingParams  # noqa: E402
from laddertron.engine.schedule.scheduler import Scheduler, SchedulerLimits  # noqa: E402
from laddertron.engine.schedule.speculation import SpeculationRule, speculation_rule  # noqa: E402

LAYERS = 12
DELAYS_S = (0.1e-3, 0.5e-3, 1e-3, 2e-3)
BATCHES = (1, 8, 32)
ACCEPTED = (0.0, 0.4, 0.7, 0.9)
TOKENS = 600
"""Of each sequence in a cell; the first third is not counted, while `auto` learns."""
SHORT = 50
"""Tokens of the answers of a cell in which new sequences follow those that end."""


@dataclass(frozen=True)
class Layout:
    """Two ranks. A step of R rows computes on a rank for `fixed_s` + `row_s` R seconds: fits of the measured rates of
    docs/layouts.md without drafts."""

    name: str
    stages: int
    fixed_s: float
    row_s: float

    @property
    def crossings(self) -> int:
        return 2 if self.stages == 2 else 2 * LAYERS + 2

    def compute_s(self, rows: int) -> float:
        return self.fixed_s + self.row_s * rows


LAYOUTS = (Layout("tp 2", 1, 11.2e-3, 0.6e-3), Layout("pp 2", 2, 8.5e-3, 0.5e-3))


@dataclass(frozen=True)
class Counts:
    """Of a cell, on the law's clock."""

    rate: float
    """Tokens a second."""
    rounds: float
    """Steps of a sequence, a token; `rows` likewise."""
    rows: float
    crossings: float
    """Crossings of the link a step and a sequence's token: what one sequence waits for."""


class _Stages:
    """Executes plans in order on the law's clock; each draft is right with probability `accepted`."""

    def __init__(self, layout: Layout, delay_s: float, accepted: float, seed: int) -> None:
        self._layout, self._delay_s, self._accepted, self._dice = layout, delay_s, accepted, Random(seed)
        self.free_s = [0.0] * layout.stages
        self.flight: deque[tuple[float, Batch, StepResult]] = deque()

    def start(self, batch: Batch, now: float) -> float:
        """When the step starts; during it the next one is planned."""
        slots = {chunk.slot for chunk in batch.chunks}
        waits = [at for at, other, _ in self.flight if not slots.isdisjoint(c.slot for c in other.chunks)]
        compute_s = self._layout.compute_s(batch.num_tokens)
        began = at = max([now, self.free_s[0], *waits])
        for stage in range(self._layout.stages):
            at = self.free_s[stage] = max(at, self.free_s[stage]) + compute_s
            at += self._layout.crossings / self._layout.stages * self._delay_s
        if self._layout.stages == 1:
            self.free_s[0] = at  # the all-reduces are within the step
        self.flight.append((at, batch, drawn_result(batch, self._accepted, self._dice)))
        return began


def simulate(
    layout: Layout,
    rule: SpeculationRule | None,
    sequences: int,
    accepted: float,
    delay_s: float,
    seed: int = 0,
    answer: int = TOKENS,
) -> Counts:
    """Answers of `answer` tokens one after the other, TOKENS in all for each of the sequences that run at once."""
    limits = SchedulerLimits(
        sequences, 4096, 2 * TOKENS, 16, sequences * 2 * TOKENS // 16 + sequences, microbatches=layout.stages,
        speculation=rule, enable_prefix_caching=False,
    )  # fmt: skip
    scheduler, stages = Scheduler(limits), _Stages(layout, delay_s, accepted, seed)
    every = range(sequences * TOKENS // answer)
    waiting = deque(Request(f"r{n}", (2, 3), SamplingParams(max_tokens=answer, seed=n)) for n in every)
    for _ in range(sequences):
        scheduler.add(waiting.popleft(), 0.0)
    now, began, first, tokens, rows, steps = 0.0, 0.0, 0, 0, 0, 0
    while True:  # until a sequence ends that none follows
        arrived = bool(stages.flight) and stages.flight[0][0] <= now
        if not arrived and (batch := scheduler.schedule(now)) is not None:
            now = stages.start(batch, now)
            continue
        at, done, result = stages.flight.popleft()
        now = max(now, at)
        ended = sum(event.finish is not None for event in scheduler.commit(done, result, now))
        if ended > len(waiting):
            break
        for _ in range(ended):
            scheduler.add(waiting.popleft(), now)
        generated = scheduler.counters.generation_tokens
        if began:
            rows, steps, tokens = rows + done.num_tokens, steps + len(done.chunks), generated - first
        elif generated > sequences * TOKENS // 3:
            began, first = now, generated
    scale = 1.0 / max(1, tokens)
    return Counts(tokens / (now - began), steps * scale, rows * scale, steps * layout.crossings * scale)


def main() -> None:
    """Prints a row for each layout, batch and acceptance; counts are those of the longest delay."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    rules = None, speculation_rule("ngram"), speculation_rule("auto")
    delays = " | ".join(f"{delay_s * 1e3:g} ms" for delay_s in DELAYS_S)
    print(f"| layout, batch, accepted | crossings | rows | {delays} | of better | of better, short |")
    print("|---" * (5 + len(DELAYS_S)) + "|")
    for layout, batch, accepted in product(LAYOUTS, BATCHES, ACCEPTED):
        gains, shares = [], dict[int, list[float]]()
        for delay_s, answer in product(DELAYS_S, (SHORT, TOKENS)):
            off, on, auto = (simulate(layout, rule, batch, accepted, delay_s, 0, answer) for rule in rules)
            shares.setdefault(answer, []).append(auto.rate / max(off.rate, on.rate))
            if answer == TOKENS:
                gains.append(f"{auto.rate / off.rate:.2f}")
        cells = [f"{layout.name}, {batch}, {100 * accepted:.0f} %", f"{auto.crossings:.2f}", f"{auto.rows:.2f}", *gains]
        print(f"| {' | '.join([*cells, *(f'{min(shares[answer]):.2f}' for answer in (TOKENS, SHORT))])} |", flush=True)


if __name__ == "__main__":
    main()
