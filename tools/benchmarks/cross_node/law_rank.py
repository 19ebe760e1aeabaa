"""A rank of `laddertron bench` that also answers what the law needs: an all-reduce by itself, a sub-block's
computation, other threads' time. Its last argument, JSON, may change what is measured:

carried   every message is sent and taken, and no rank waits for one
right     drafts are the model's own answers to earlier requests (prompts of `prompt` tokens), each right with one of
          these probabilities, by the prompt's first id: what is measured is the engine, not how often texts repeat
"""

from __future__ import annotations

import itertools
import json
import statistics
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import torch
from laddertron.engine.batch import Batch
from laddertron.engine.sampling.drafts import ComputedStep
from laddertron.engine.schedule.speculation import Speculation
from laddertron.launchers.measure.answers import say
from laddertron.launchers.measure.rank_work import main
from laddertron.tools.bench.bench_rank import Bench, bench
from laddertron.topology.comm.collectives import Collective, Done, Pending
from laddertron.topology.comm.groups import Communicator
from laddertron.topology.comm.ledger import Record
from numpy.typing import NDArray

_PROBE = struct.Struct("<II")
"""Bytes and count of all-reduces, as a frame on the plan channel; every plan is longer."""


class Unawaited:
    """A Collective that sends, carries and takes every message, and never makes anyone wait: `start` gives back its own
    part, the sum is taken six starts later (eight may travel). What communicating costs the core that computes."""

    def __init__(self, inner: Collective) -> None:
        self._inner = inner
        self._in_flight: deque[Pending] = deque()

    def start(self, x: torch.Tensor, layer: str = "", at_once: bool = False, /) -> Pending:
        if len(self._in_flight) == 6:
            self._in_flight.popleft().wait()
        self._in_flight.append(self._inner.start(x, layer))
        return Done(x)


class Plans:
    """The plan channel, by which rank 0 may also have all ranks start all-reduces of nothing but their size."""

    def __init__(self, communicator: Communicator) -> None:
        self._inner, self._reduce, self.close = communicator.plans, communicator.all_reduce, communicator.plans.close

    def send(self, frame: bytes) -> None:
        self._inner.send(frame)

    def receive(self, timeout_s: float | None = None) -> bytes:
        while len(frame := self._inner.receive(timeout_s)) == _PROBE.size:
            self._seconds(*_PROBE.unpack(frame))
        return frame

    def all_reduces(self, nbytes: int, count: int) -> list[float]:
        """Rank 0: seconds of each."""
        self._inner.send(_PROBE.pack(nbytes, count))
        return self._seconds(nbytes, count)

    def _seconds(self, nbytes: int, count: int) -> list[float]:
        x, times = torch.zeros(nbytes // 4), []
        for _ in range(count):
            began = time.perf_counter()
            self._reduce.start(x).wait()
            times.append(time.perf_counter() - began)
        return times


def sub_blocks(records: Sequence[Record], awaited: bool) -> tuple[float, float]:
    """Seconds of a sub-block, from the last steps' all-reduces, attention and MLP in turns, a gather after each step:
    between one all-reduce and the next, which completes an attention or an MLP. From its end on where it is awaited
    (nothing but computation is between then: standard wiring), else from start to start. Each whole step's mean, of
    these the median; noughts where there is nothing to see."""
    steps: list[list[Record]] = [[]]
    for record in records:
        if record.op == "all_reduce":
            steps[-1].append(record)
        elif steps[-1]:
            steps.append([])
    kinds: tuple[list[float], list[float]] = ([], [])
    for step in steps:
        apart = [
            after.start_s - before.start_s - awaited * before.in_flight_s for before, after in itertools.pairwise(step)
        ]
        if len(apart) >= 2 and len(step) == max(map(len, steps)):
            kinds[0].append(statistics.fmean(apart[1::2]))
            kinds[1].append(statistics.fmean(apart[::2]))
    return (statistics.median(kinds[0]), statistics.median(kinds[1])) if kinds[0] else (0.0, 0.0)


def give_drafts(runner: Any, prompt: int, right: Sequence[float]) -> None:
    """Drafts of a prompt, of so many tokens, that was seen before: its answer; on all ranks alike."""
    answers: dict[bytes, NDArray[np.int32]] = {}
    apply = runner.apply_changes

    def keep(batch: Batch) -> None:
        for slot in batch.released:
            ids = runner.tokens[slot, : runner.length[slot]].copy()
            answers[ids[:prompt].tobytes()] = ids
        apply(batch)

    def look_up(ids: NDArray[np.int32], most: int) -> list[int]:
        answer, at = answers.get(ids[:prompt].tobytes(), ids), len(ids)
        drafts: list[int] = answer[at : at + max(0, most)].tolist() if np.array_equal(answer[:at], ids) else []
        chance = [Random(f"{ids[0]} {at} {i}").random() for i in range(len(drafts))]
        probability = right[ids[0] % len(right)]
        return [draft if c < probability else (draft + 1) % 1000 for draft, c in zip(drafts, chance, strict=True)]

    def propose(step: ComputedStep) -> dict[int, list[int]]:
        asked = [(slot, most) for slot, most in step.counts.items() if most]
        return {slot: look_up(step.tokens[slot, : step.length[slot]], most) for slot, most in asked}

    runner.apply_changes = keep
    if runner.proposer is not None:
        runner.proposer.propose = propose


def lead(leader: Bench, awaited: bool) -> None:
    """Rank 0's answers to orders, as bench_rank's, to `all_reduce`, and to `forget`: what `auto` learned."""
    plans, ledger = leader.engine.plans, leader.communicator.ledger
    assert isinstance(plans, Plans)
    say(leader.about)
    for order in map(json.loads, sys.stdin):
        if order["kind"] == "end":
            break
        if order["kind"] == "all_reduce":
            say({"seconds": plans.all_reduces(order["bytes"], order["count"])})
            continue
        if order["kind"] == "forget":
            planner, limits = leader.engine.scheduler._planner, leader.built.scheduler_limits
            planner.speculation = Speculation(limits.speculation, limits.microbatches)
            say({})
            continue
        began, main_s, every_s = time.monotonic(), time.thread_time(), time.process_time()
        timing = leader.ask(**order)
        other_s = time.process_time() - every_s - (time.thread_time() - main_s)
        records = [record for record in ledger.history() if record.start_s >= began]
        say(timing | {"other_threads_s": other_s, "sub_blocks_s": sub_blocks(records, awaited)})


def work(built: Any, communicator: Any) -> None:
    asked, model = json.loads(sys.argv[2]), built.runner.model
    communicator.plans = Plans(communicator)
    if asked.get("carried"):
        model.all_reduce = Unawaited(model.all_reduce)
        if built.config.experts is not None:
            built.runner.sampler.follow(bytes, None, 1)  # nodes may choose other experts for a row
    if "right" in asked:
        give_drafts(built.runner, asked["prompt"], asked["right"])
    bench(built, communicator, lambda leader: lead(leader, not asked.get("carried")))


if __name__ == "__main__":
    sys.exit(main(work))
