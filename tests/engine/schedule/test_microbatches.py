"""Plans for a pipeline: the books of any schedule with several plans on their way, even shares, nobody left out."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from laddertron.engine.request import Request, SamplingParams
from laddertron.engine.schedule.scheduler import SchedulerLimits
from laddertron.engine.schedule.step_planner import LEAST_CHUNK
from schedule_play import Play, play

UNEVEN_TURNS = bytes.fromhex(
    "019a0703002b00000000030003000300030003000000f4010000010000000000000000000004000400000000040000000000"
    "00010000000100000000000004000000bf010000020000000000000000000000000000000000000000000000000000000300"
    "0000000004000300000000000400030000000000000000000000000000000100000000000000000100000000000000000000"
    "0700000004000600060000000058000000000000000000000000000007000000040006"
)
"""Limits of 2 sequences, 13 tokens, 4 blocks of 5: the sequence whose turn it is needs a block, and is the last one."""


@example(UNEVEN_TURNS, 2)
@settings(max_examples=150, deadline=None, database=None)
@given(st.binary(min_size=60, max_size=300), st.integers(2, 5))
def test_random_schedules_keep_the_books_and_end(data: bytes, microbatches: int) -> None:
    """As with one plan on its way: no block is lost, every choice ends with the tokens of its prompt alone."""
    play(data, microbatches)


@settings(max_examples=300, deadline=None, database=None, print_blob=True)
@given(st.binary(min_size=60, max_size=300), st.integers(1, 3))
def test_requests_go_on_in_another_engine(data: bytes, microbatches: int) -> None:
    """Engines die at any moment, and others go on with what was reported: every choice ends with the tokens, the
    log-probabilities and the prompt's that an undisturbed one gives, each reported once."""
    play(data, microbatches, mortal=True)


def test_what_goes_on_is_refused_where_it_makes_no_sense() -> None:
    """Entries for other choices than n, nothing open, more tokens than it may have."""
    one, two = ask("r", 4, 3), replace(ask("r", 4, 3), params=SamplingParams(3, seed=1, n=2))
    for request in (
        replace(two, emitted=((1,),)),
        replace(two, emitted=(None, None)),
        replace(one, emitted=((1, 2, 3),)),
    ):
        with pytest.raises(ValueError, match="request r"):
            game(1).add(request)


def test_what_goes_on_counts_its_prompt_no_second_time() -> None:
    """Nor does it tell of cached tokens: both were reported when it began."""
    played = game(1)
    played.add(ask("a", 64, 9))
    played.step()
    played.step()
    before = played.ledger.reported["a", 0][-1].start
    played.lose()
    played.add(ask("b", 64, 9))
    played.drain()
    assert played.scheduler.counters.prompt_tokens == 64
    events = played.ledger.reported["a", 0]
    assert [event.start for event in events] == list(range(9))
    assert {event.cached_tokens for event in events[before + 1 :]} == {0}


def game(microbatches: int, seqs: int = 64, tokens: int = 4096, length: int = 4096) -> Play:
    return Play(SchedulerLimits(seqs, tokens, length, 16, 40 * length // 16, microbatches=microbatches))


def ask(name: str, prompt: int, tokens: int) -> Request:
    ids = random.Random(name)
    return Request(name, tuple(ids.randrange(50) for _ in range(prompt)), SamplingParams(tokens, seed=1))


def run(play: Play, rounds: int, microbatches: int) -> list[set[int]]:
    """Slots of each plan, with as many plans on their way as there may be."""
    slots = []
    for _ in range(rounds):
        while len(play.flight) <= microbatches and play.plan():
            slots.append({chunk.slot for chunk in play.flight[-1][0].chunks})
        play.commit()
    return slots


@pytest.mark.parametrize(("count", "microbatches"), [(8, 2), (9, 2), (10, 3), (3, 4), (1, 2)])
def test_each_round_takes_everybody_once_in_even_shares(count: int, microbatches: int) -> None:
    """After the prompts: in any `microbatches` plans on end nobody decodes twice; shares differ by one at most."""
    play = game(microbatches)
    for number in range(count):
        play.add(ask(f"r{number}", 5, 400))
    plans = run(play, 20 * microbatches, microbatches)[4 * microbatches :]
    groups = min(count, microbatches)
    for at in range(len(plans) - groups):
        turn = plans[at : at + groups]
        assert sum(map(len, turn)) == count
        assert len(set.union(*turn)) == count, "somebody twice in a round, and somebody not at all"
        assert max(map(len, turn)) - min(map(len, turn)) <= 1


def test_shares_are_even_again_after_ends_and_admissions() -> None:
    """Eight of sixteen end in one micro-batch, then others come: within two rounds shares are even, nobody starves."""
    play = game(2)
    for number in range(16):
        play.add(ask(f"r{number}", 5, 400))
    before = run(play, 12, 2)[-1]
    ending = [s.group.request.request_id for s in play.scheduler.residency.running if s.slot in before]
    for name in ending:
        play.cancel(name)
    after = run(play, 12, 2)[6:]
    assert {len(plan) for plan in after} == {4}
    for number in range(6):
        play.add(ask(f"late{number}", 7, 400))
    last = run(play, 30, 2)[-16:]
    assert {len(plan) for plan in last} == {7}
    assert set(Counter(slot for plan in last for slot in plan).values()) == {8}


@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("budget", [12, 24, 400])
def test_nan_in_a_shared_prefix_misleads_nobody(microbatches: int, budget: int) -> None:
    """Twelve prompts with NaN in their common beginning, twelve that share only what lies before it, each entering
    while the one before is under way: the ones fail, whatever they took from the cache, the others answer as they do
    alone, and what they share stays in the cache."""
    limits = SchedulerLimits(8, budget, 100, 4, 400, enable_prefix_caching=True, microbatches=microbatches)
    play = Play(limits)
    beginning = tuple(range(20))
    play.add(Request("first", (*beginning[:9], 40), SamplingParams(2, seed=1)))
    play.drain(microbatches)
    play.poison(beginning, 10)
    for number in range(12):
        tail = (30 + number, 31)
        play.add(Request(f"bad{number}", (*beginning, *tail), SamplingParams(1 + number % 3, seed=1, n=1 + number % 2)))
        play.add(Request(f"good{number}", (*beginning[:10], *tail), SamplingParams(1 + number % 3, seed=1)))
        if number % 3 == 0:
            play.step(microbatches)
    play.drain(microbatches)
    for (name, _), events in play.ledger.reported.items():
        assert events[-1].finish == ("numerical_error" if name.startswith("bad") else "length"), name
    play.add(Request("again", (*beginning[:9], 41), SamplingParams(2, seed=1)))
    play.drain(microbatches)
    assert play.ledger.reported["again", 0][-1].cached_tokens == 8


def test_the_rest_decodes_where_the_turn_is_preempted() -> None:
    """Three blocks for two sequences: `a` has two, so that `b`, whose turn it is, preempts itself. Nothing is in
    flight, so the same plan decodes `a`."""
    play = Play(SchedulerLimits(2, 64, 16, 4, 3, enable_prefix_caching=False, microbatches=2))
    play.add(ask("a", 4, 3))
    play.add(ask("b", 4, 3))
    for slots in ({0, 1}, {0}, {0}):
        assert play.plan()
        assert {chunk.slot for chunk in play.flight[0][0].chunks} == slots
        play.commit()
    assert play.scheduler.counters.preemptions == 1
    play.drain(2)


def test_chunks_of_one_prompt_go_through_consecutive_plans() -> None:
    """A prompt that one plan could hold is cut, so that every stage has work: none waits for another's result."""
    play = game(2)
    play.add(ask("long", 2048, 3))
    while play.plan() and len(play.flight) < 3:
        pass
    chunks = [batch.chunks[0] for batch, _ in play.flight]
    assert [(c.start, c.count) for c in chunks] == [(0, 512), (512, 512), (1024, 512)]
    small = game(2)
    small.add(ask("short", LEAST_CHUNK, 3))
    assert small.plan()
    assert small.flight[0][0].chunks[0].count == LEAST_CHUNK
