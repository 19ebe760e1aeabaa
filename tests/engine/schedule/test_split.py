"""Which steps are computed in two streams and where they are cut: the choice by measured steps, on made-up clocks."""

from __future__ import annotations

import random

import pytest
from laddertron.engine.batch import Batch, Chunk, StepResult, in_order, streams
from laddertron.engine.request import Request, SamplingParams
from laddertron.engine.schedule.scheduler import Scheduler, SchedulerLimits
from laddertron.engine.schedule.split import FIRST_PAUSE, LONGEST_PAUSE, TRIAL, SplitChoice, SplitRule


def decodes(count: int, at: int = 100) -> Batch:
    return Batch(0, chunks=tuple(Chunk(slot, at, 1, True) for slot in range(count)))


def prompt(count: int, start: int = 0) -> Batch:
    return Batch(0, chunks=(Chunk(0, start, count, True),))


def rows(chunks: list[Chunk]) -> list[tuple[int, int]]:
    return [(chunk.slot, chunk.start + i) for chunk in chunks for i in range(chunk.count)]


def test_streams_hold_each_row_once_in_order(run_seed: int) -> None:
    """At any cut of random steps: all rows in order, one sample a chunk that samples, no prompt with one row left."""
    dice = random.Random(run_seed)
    for _ in range(300):
        chunks = in_order(
            Chunk(slot, dice.randrange(50), dice.choice((1, 1, 2, 3, 5, 40)), dice.random() < 0.8, dice.random() < 0.2)
            for slot in range(dice.randrange(1, 6))
        )
        total = sum(chunk.count for chunk in chunks)
        for cut in range(total + 2):
            parts = streams(chunks, cut)
            whole = [chunk for part in parts for chunk in part]
            assert rows(whole) == rows(chunks)
            assert [c.slot for c in whole if c.samples] == [c.slot for c in chunks if c.samples]
            assert all(parts)
            assert cut or len(parts) == 1
            for part in parts:
                ones = [chunk.count == 1 for chunk in part]
                assert ones == sorted(ones, reverse=True), "a single row among prompts"
            if len(parts) == 2:
                assert abs(sum(c.count for c in parts[0]) - cut) <= 1


@pytest.mark.parametrize("batch", [decodes(1), prompt(1), prompt(2), prompt(3)])
def test_what_has_no_halves_stays_whole(batch: Batch) -> None:
    assert SplitChoice(SplitRule(always=True)).cut(batch) == 0


def test_the_cut_halves_the_work() -> None:
    """Of decodes and prompts alike the rows, where attention costs nothing; else the earlier piece is longer: brute
    force over all cuts finds no better one."""
    assert SplitChoice(SplitRule(always=True)).cut(decodes(64)) == 32
    assert SplitChoice(SplitRule(always=True)).cut(prompt(1000)) == 500
    share = 1e-3

    def work(row: int) -> float:
        return sum(1 + share * (position + 0.5) for position in range(row))

    cut = SplitChoice(SplitRule(always=True, attention_share=share)).cut(prompt(1000))
    assert cut == min(range(1000), key=lambda row: abs(work(1000) - 2 * work(row)))
    assert cut > 550
    mixed = Batch(0, chunks=(Chunk(9, 0, 200, True), *decodes(8).chunks))
    assert SplitChoice(SplitRule(always=True)).cut(mixed) == 104


def test_recorded_decodes_stay_whole() -> None:
    choice = SplitChoice(SplitRule(always=True, whole_decodes=8))
    assert choice.cut(decodes(8)) == 0
    assert choice.cut(decodes(9)) == 4
    assert choice.cut(prompt(8)) == 4


class Machine:
    """Steps take 1 s a row whole and `ratio` s in two streams, as measured after the next one was planned."""

    def __init__(self, run_seed: int, ratio: float) -> None:
        self.choice, self.ratio, self.late = SplitChoice(SplitRule()), ratio, list[Batch]()
        self.dice = random.Random(run_seed)

    def run(self, batch: Batch, count: int) -> list[bool]:
        kinds = []
        for _ in range(count):
            cut = self.choice.cut(batch)
            kinds.append(cut > 0)
            self.late.append(Batch(0, chunks=batch.chunks, split=cut))
            if len(self.late) == 2:
                done = self.late.pop(0)
                noise = 10.0 if self.dice.random() < 0.02 else self.dice.uniform(0.98, 1.02)
                self.choice.observe(done, done.num_tokens * noise * (self.ratio if done.split else 1.0))
        return kinds


@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.1, 2.0])
def test_the_quicker_kind_wins_and_trials_are_rare(ratio: float, run_seed: int) -> None:
    machine, count = Machine(run_seed, ratio), 20_000
    kinds = machine.run(prompt(700), count)
    wrong = sum(kind != (ratio < 1) for kind in kinds)
    assert wrong < 0.02 * count, wrong
    trial = 1 + len(TRIAL)
    assert not kinds[0]
    assert kinds[1:trial] == list(TRIAL)
    assert machine.choice.steps == sum(kinds)


def test_each_class_is_tried_by_itself(run_seed: int) -> None:
    """A split that pays for one prompt is no reason to split decodes, several prompts, nor another size."""
    machine = Machine(run_seed, 0.5)
    machine.run(prompt(700), 20)
    assert machine.run(prompt(700), 5) == [True] * 5
    assert machine.run(decodes(64), 1) == [False]
    assert machine.run(Batch(0, chunks=tuple(Chunk(slot, 0, 350, True) for slot in range(2))), 1) == [False]
    assert machine.run(prompt(70), 1) == [False]


def test_a_link_that_changes_is_noticed(run_seed: int) -> None:
    machine = Machine(run_seed, 2.0)
    assert not any(machine.run(prompt(700), 60)[10:])
    machine.ratio = 0.5
    machine.run(prompt(700), FIRST_PAUSE + 2 * LONGEST_PAUSE)
    assert machine.run(prompt(700), 1) == [True]


def test_the_scheduler_measures_from_what_begins_a_step() -> None:
    """Steps are timed from the commit before, or from their own plan where nothing ran: an idle hour is no slow
    step. Here whole steps take 2 s and split ones 1 s, each after an hour of nothing."""
    limits = SchedulerLimits(8, 64, 64, 4, 64, enable_prefix_caching=False, split=SplitRule())
    scheduler, now, kinds = Scheduler(limits), 0.0, []
    for number in range(20):
        now += 3600.0
        scheduler.add(
            Request(f"r{number}", tuple(range(40)), SamplingParams(max_tokens=1, seed=0, temperature=0.0)), now
        )
        batch = scheduler.schedule(now)
        assert batch is not None
        kinds.append(batch.split > 0)
        now += 1.0 if batch.split else 2.0
        scheduler.commit(batch, StepResult((5,)), now)
    assert kinds[7:] == [True] * 13
    assert scheduler.snapshot()["split_steps_total"] == sum(kinds)
