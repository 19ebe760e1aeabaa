"""Prompts with a common beginning: computed once, waited for, kept, and of one tenant."""

from __future__ import annotations

import random

import pytest
from fake_model import VOCAB
from laddertron.engine.batch import decode
from laddertron.engine.request import BATCH, INTERACTIVE
from laddertron.engine.schedule.scheduler import SchedulerLimits
from laddertron.engine.schedule.speculation import SpeculationRule
from schedule_play import Play, times_computed
from test_scheduler import ask, last_plan, limits


def test_prefix_cache_leaves_one_token_and_keeps_tenants_apart() -> None:
    """The same prompt of three full blocks again: two are taken up, the third is computed for its last position. With
    another salt nothing is. Hits and queries are counted, and the event says how many were cached."""
    game = Play(limits(enable_prefix_caching=True))
    prompt = tuple(range(12))
    for name, salt, hits in (("a", "x", 0), ("b", "x", 8), ("c", "y", 0), ("d", "x", 8)):
        before = game.scheduler.counters.prefix_hits
        game.add(ask(name, prompt, 3, salt=salt))
        game.drain()
        assert game.scheduler.counters.prefix_hits - before == hits
        assert game.ledger.reported[name, 0][-1].cached_tokens == hits
    assert game.scheduler.counters.prefix_queries == 48


def test_a_prefix_is_not_taken_up_in_the_step_that_computes_it() -> None:
    """Three requests with one prompt of three full blocks, too few to wait for. Two enter in one plan: both compute it.
    One that enters a plan later, before anything is committed, takes it up (the runner reads every position to see).
    """
    game = Play(limits(enable_prefix_caching=True))
    prompt = tuple(range(13))
    game.add(ask("a", prompt))
    game.add(ask("b", prompt))
    assert game.plan()
    game.add(ask("c", prompt))
    assert game.plan()
    starts = [[c.start for c in decode(frame).chunks] for frame in game.plans]
    assert starts == [[0, 0], [13, 13, 12]]
    game.drain()


def test_another_request_takes_the_place_of_one_that_waits_for_its_prefix() -> None:
    """A's prompt takes two plans. B, which begins as A does, waits for them; C, which came later, enters first. B
    enters as soon as the blocks are planned, and computes only what is its own."""
    game = Play(limits(enable_prefix_caching=True, max_num_batched_tokens=32))
    prompt = tuple(range(36))
    game.add(ask("a", (*prompt, 1)))
    game.add(ask("b", (*prompt, 2, 3)))
    game.add(ask("c", 8))
    plans = [game.plan() and last_plan(game)]
    game.commit()
    plans += [game.plan() and last_plan(game)]
    assert [[(c.start, c.count) for c in plan.chunks] for plan in plans if plan] == [[(0, 32)], [(32, 5), (0, 8)]]
    assert game.plan()
    assert [(c.start, c.count) for c in last_plan(game).chunks] == [(37, 1), (8, 1), (36, 2)]
    game.drain()
    assert game.ledger.reported["b", 0][-1].cached_tokens == 36


@pytest.mark.parametrize("how", ["cancelled", "preempted", "bad logits", "stopped", "timeout"])
def test_who_waits_for_a_prefix_takes_over_from_one_that_does_not_finish_it(how: str) -> None:
    """Three requests with one prefix of eight blocks, of which the first has computed three when it leaves: one of the
    others computes the rest, the last takes it up. (Preemption comes two blocks later, and bad logits at the end.)"""
    seqs = 2 if how == "preempted" else 4
    game = Play(limits(enable_prefix_caching=True, max_num_batched_tokens=12, max_num_seqs=seqs))
    prompt = tuple(range(32))
    deadline = game.now + 1.0 if how == "timeout" else None
    game.add(ask("a", (*prompt, 1), deadline=deadline))
    for name in ("b", "c"):
        game.add(ask(name, (*prompt, 2, ord(name)), 2))
    assert game.plan()
    if how == "bad logits":
        game.poison((*prompt, 1), 32)
    elif how == "preempted":
        for name in ("x", "y"):
            game.add(ask(name, 4, priority=INTERACTIVE))
    elif how == "cancelled":
        game.cancel("a")
    elif how == "stopped":
        game.stop("a", 0, 0)
    game.now += 2.0
    game.drain()
    twice = {"bad logits": 8, "preempted": 5}.get(how, 3)
    counts = times_computed(game)
    assert [counts[prompt[:end]] for end in range(4, 36, 4)] == [2] * twice + [1] * (8 - twice)
    assert game.ledger.reported["c", 0][-1].cached_tokens == 32
    expected = {"cancelled": "cancelled", "bad logits": "numerical_error", "stopped": "stop", "timeout": "timeout"}
    assert game.ledger.reported["a", 0][-1].finish == expected.get(how, "length")


def test_nobody_waits_for_a_prefix_of_a_worse_rank() -> None:
    """An interactive request computes what a batch line has only begun."""
    game = Play(limits(enable_prefix_caching=True, max_num_batched_tokens=8))
    prompt = tuple(range(32))
    game.add(ask("line", (*prompt, 1)))
    assert game.plan()
    game.add(ask("urgent", (*prompt, 2), priority=INTERACTIVE))
    assert game.plan()
    assert {c.slot: c.start for c in last_plan(game).chunks} == {1: 8}
    game.drain()


@pytest.mark.parametrize("told", [True, False])
def test_a_prefix_that_lines_to_come_need_outlives_other_requests(told: bool) -> None:
    """Lines of one prefix, between them interactive requests that fill the cache: if each line says how many of its
    tokens the next ones begin with, these are computed once. The last line says that they are not needed."""
    game = Play(limits(enable_prefix_caching=True, num_blocks=16, max_num_seqs=1))
    prefix = tuple(range(32))
    for number in range(6):
        game.add(ask(f"line{number}", (*prefix, number), 2, shared=32 * (number < 5) if told else None))
        game.drain()
        for chat in ("a", "b"):
            game.add(ask(f"{chat}{number}", 30, 2, priority=INTERACTIVE))
            game.drain()
    assert times_computed(game)[prefix] == (1 if told else 6)
    game.add(ask("again", (*prefix, 7), 2))
    game.drain()
    assert times_computed(game)[prefix] == (2 if told else 7)


@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_prefix_is_computed_once_also_while_it_is_in_flight(run_seed: int, microbatches: int, drafts: bool) -> None:
    """Sixty requests of a tree of prefixes in random order and with random arrivals: with room for all, every block is
    computed once; with cancels and bad logits at most once more for each of these; with few blocks the answers are
    the same (the ledger compares)."""
    draw = random.Random(run_seed)
    for blocks, troubles in ((4000, 0), (4000, 6), (40, 6)):
        rule = SpeculationRule(priced=False) if drafts else None
        game = Play(SchedulerLimits(6, 24, 100, 4, blocks, microbatches=microbatches, speculation=rule))
        tree = {(i, j): tuple(draw.randrange(VOCAB) for _ in range(20)) for i in range(3) for j in range(-1, 3)}
        trouble = 0
        for number in range(60):
            i, j = draw.randrange(3), draw.randrange(3)
            own = tuple(draw.randrange(VOCAB) for _ in range(draw.randrange(1, 9)))
            prompt = (*tree[i, -1], *tree[i, j], *own) if draw.randrange(4) else (*tree[i, -1], *own)
            priority = INTERACTIVE if blocks == 40 and draw.randrange(4) == 0 else BATCH
            game.add(ask(f"r{number}", prompt, draw.randrange(1, 9), queue=f"q{number % 2}", priority=priority))
            for _ in range(draw.randrange(3)):
                game.step(microbatches)
            if troubles and number % (60 // troubles) == 5:
                trouble += 1
                if draw.randrange(2):
                    game.cancel(f"r{draw.randrange(number + 1)}")
                elif game.ledger.is_new(game.ledger.requests[f"r{number}"], len(prompt)):
                    game.poison(prompt, len(prompt))
        game.drain(microbatches)
        if blocks == 4000:
            assert max(times_computed(game).values()) <= 1 + trouble
