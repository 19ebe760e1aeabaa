"""The scheduler against a fake model: whatever arrives, ends, is cancelled or preempted, the books balance and every
sequence reads exactly its own prefix."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from fake_model import VOCAB, FakeRunner, RuleBroken, answer
from folders import FOLDERS
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from laddertron.engine.batch import Batch, Chunk, NewSequence, StepResult, decode
from laddertron.engine.request import INTERACTIVE, Request, SamplingParams
from laddertron.engine.schedule.scheduler import Scheduler, SchedulerLimits
from schedule_play import Play, check_books, play


def limits(**changes: object) -> SchedulerLimits:
    """Four slots, blocks of 4, room for everybody, nothing clever; what a test is about it changes."""
    return replace(SchedulerLimits(4, 64, 64, 4, 200, enable_prefix_caching=False), **changes)  # type: ignore[arg-type]


def ask(name: str, prompt: int | tuple[int, ...] = 8, tokens: int = 6, **changes: object) -> Request:
    """A request for `tokens` tokens whose prompt is its own unless given."""
    own = random.Random(name)
    ids = tuple(own.randrange(VOCAB) for _ in range(prompt)) if isinstance(prompt, int) else prompt
    of_params = {k: v for k, v in changes.items() if k in SamplingParams.__dataclass_fields__}
    rest = {k: v for k, v in changes.items() if k not in of_params}
    return Request(name, ids, SamplingParams(tokens, seed=1, **of_params), **rest)  # type: ignore[arg-type]


def last_plan(game: Play) -> Batch:
    return decode(game.plans[-1])


STOPPED_WITH_NAN = bytes.fromhex(
    "000000000202000000000300000000020000000000000000000000000000000400040000000028010000000006000000"
    "010000000000000f00000400040004000301"
)
"""A choice is stopped before it is known that its prompt gives NaN; a further one was forked from it meanwhile."""


@settings(
    max_examples=600,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.binary(min_size=60, max_size=300))
@example(STOPPED_WITH_NAN)
def test_random_schedules_keep_the_books_and_end(data: bytes) -> None:
    """Random limits, arrivals (shared prompts, n > 1, priorities, deadlines, max_tokens 0, bad logits), cancels, stops
    and commits a step late: no block is lost or used twice, every choice ends, with the tokens of its prompt alone."""
    play(data)


def test_plans_are_the_same_in_another_process() -> None:
    """The same arrivals, played here and in a process with another string hash, give the same plans, byte for byte."""
    digests = "print(*(sha256(b''.join(play(Random(i).randbytes(300)).plans)).hexdigest() for i in range(40)))"
    code = f"from hashlib import sha256; from random import Random; from schedule_play import play; {digests}"
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(FOLDERS)}
    theirs = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    ours = [hashlib.sha256(b"".join(play(random.Random(i).randbytes(300)).plans)).hexdigest() for i in range(40)]
    assert theirs.stdout.split() == ours


def test_a_plan_carries_no_more_than_its_frame_holds() -> None:
    """Sixty choices with a grammar of a megabyte each enter a few a step: no plan outgrows the channel."""
    game = Play(limits(max_num_seqs=60, num_blocks=400))
    game.add(ask("many", 4, tokens=3, n=60, grammar="x" * (1 << 20)))
    game.drain()
    assert max(map(len, game.plans)) < 16 << 20


def test_scored_prompts_are_cut_to_what_their_logits_cost() -> None:
    """A scored position costs a vocabulary of logits: a step scores few, however many tokens it may compute, and what
    is not scored is not held up."""
    game = Play(limits(max_scored_positions=6))
    game.add(ask("plain", 30))
    game.add(ask("a", 20, prompt_logprobs=0))
    game.add(ask("b", 20, prompt_logprobs=0))
    game.plan()
    assert [chunk.count for chunk in last_plan(game).chunks] == [30, 6, 1]
    scored = []
    while game.step():
        scored.append(sum(chunk.count for chunk in last_plan(game).chunks if chunk.prompt_logprobs))
    assert max(scored) <= 7
    assert not game.scheduler.has_work
    game.ledger.close()


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_batched_tokens": 5},
        {"num_blocks": 20},
        {"enable_prefix_caching": True, "num_blocks": 24},
        {"max_num_seqs": 1},
        {"block_size": 1, "num_blocks": 70},
    ],
)
def test_tokens_do_not_depend_on_the_schedule(changes: dict[str, object], ahead: int) -> None:
    """Twelve requests, some with a common beginning, in two orders, under limits that chunk, preempt or share: each
    time the tokens that the prompt alone gives (the ledger compares)."""
    common = tuple(range(17))
    requests = [ask(f"r{i}", (*common, i) if i % 3 else 9 + i, 10 + i, queue=f"q{i % 2}") for i in range(12)]
    for order in (requests, requests[::-1]):
        game = Play(limits(**changes))
        for request in order:
            game.add(request)
            game.step(ahead)
        game.drain(ahead)
        if changes.get("num_blocks") == 20:
            assert game.scheduler.counters.preemptions > 0


def test_a_plan_ahead_wastes_nothing_on_ends_that_are_certain() -> None:
    """Ends by max_tokens and by the model's length are known beforehand: no surplus token, and the slot goes to the
    next request in the very plan after the last token's."""
    game = Play(limits(max_num_seqs=1))
    for name in ("a", "b"):
        game.add(ask(name, 8, 3))
    game.add(ask("long", 62, 50))
    game.drain()
    assert game.scheduler.counters.surplus_tokens == 0
    slots = [[c.slot for c in decode(frame).chunks] for frame in game.plans]
    assert slots == [[0]] * (3 + 3 + 2), "three steps, three steps, two: none of them idle"


def test_a_stop_id_costs_one_surplus_token() -> None:
    """The end is discovered while the next step is under way: its token is discarded, the slot is released by the plan
    after that."""
    request = ask("a", 8, 30)
    tokens = answer(request, 0, 64).tokens
    stop = next(t for i, t in enumerate(tokens) if i > 2 and t not in tokens[:i])
    game = Play(limits())
    game.add(replace(request, params=replace(request.params, stop_token_ids=(stop,))))
    while not game.ledger.ended(("a", 0)):
        game.step()
    game.add(ask("b"))
    game.drain()
    assert game.scheduler.counters.surplus_tokens == 1
    assert next(p for p in map(decode, game.plans) if p.released).released == (0,)
    assert game.ledger.reported["a", 0][-1].stop_token == stop
    assert stop not in game.ledger.tokens["a", 0]


def test_min_tokens_lets_a_stop_id_pass() -> None:
    """Below min_tokens a stop id is a token like others (the sampler forbids it; the scheduler does not end on it)."""
    game = Play(limits())
    game.add(ask("a", 8, 9, stop_token_ids=tuple(range(VOCAB)), min_tokens=5))
    game.drain()
    assert len(game.ledger.tokens["a", 0]) == 5


def test_prompts_are_chunked_beside_running_sequences() -> None:
    """A long prompt enters while three sequences decode: each of these gets its token in every step, the prompt gets
    what the budget leaves, and no step exceeds it."""
    game = Play(limits(max_num_batched_tokens=10))
    for name in "abc":
        game.add(ask(name, 3, 30))
    for _ in range(4):
        game.step()
    game.add(ask("long", 40, 2))
    before = len(game.plans)
    for _ in range(6):
        game.step()
    plans = [decode(frame) for frame in game.plans[before:]]
    assert [[c.count for c in p.chunks] for p in plans[:6]] == [[1, 1, 1, 7]] * 5 + [[1, 1, 1, 5]]
    game.drain()


def test_a_prompt_begun_goes_on_before_others_begin() -> None:
    """A batch prompt of four chunks is under way. A second one waits until it is through; an interactive one does
    not: it gets the next chunk."""
    game = Play(limits(max_num_batched_tokens=10))
    game.add(ask("long", 40, 1))
    game.step(ahead=0)
    game.add(ask("other", 40, 1))
    game.step(ahead=0)
    game.add(ask("urgent", 10, 1, priority=INTERACTIVE))
    for _ in range(4):
        game.step(ahead=0)
    assert [[c.slot for c in decode(frame).chunks] for frame in game.plans] == [[0], [0], [1], [0], [0], [0]]
    assert last_plan(game).admitted[0].tokens == game.ledger.requests["other"].prompt
    game.drain()


def test_one_prompt_for_all_choices() -> None:
    """n = 4: the prompt is computed once; each further choice shares its full blocks, copies the last one and computes
    one position of the prompt again. With the last position at a block's beginning there is nothing to copy."""
    for prompt, copies in ((10, 3), (9, 0), (8, 3)):
        game = Play(limits(max_num_seqs=8))
        game.add(ask("a", prompt, 5, n=4))
        game.drain()
        assert game.runner.computed_tokens == prompt + 3 + 4 * 4
        assert sum(len(decode(frame).copies) for frame in game.plans) == copies
        assert len({tuple(game.ledger.tokens["a", c]) for c in range(4)}) == 4, "choices draw with their own noise"


def test_choices_beyond_the_slots_still_share_the_prompt() -> None:
    """n = 6 with two slots: the prompt's blocks are held until the last choice has had them."""
    game = Play(limits(max_num_seqs=2))
    game.add(ask("a", 10, 3, n=6))
    game.drain()
    assert game.runner.computed_tokens == 10 + 5 + 6 * 2


def test_prompt_logprobs_compute_every_position() -> None:
    """Asked for prompt logprobs, a request takes nothing from the cache and is scored over all chunks (the ledger
    compares values and place); with max_tokens=0 that is all it does."""
    game = Play(limits(enable_prefix_caching=True, max_num_batched_tokens=5))
    prompt = tuple(range(13))
    for name, tokens in (("a", 4), ("b", 0), ("c", 1)):
        game.add(ask(name, prompt, tokens, prompt_logprobs=0, logprobs=0, n=2))
    game.drain()
    scored = [c for frame in game.plans for c in decode(frame).chunks if c.prompt_logprobs]
    assert sum(min(c.count, 12 - c.start) for c in scored) == 3 * 12
    assert game.scheduler.counters.prefix_hits == 0
    assert [len(game.ledger.reported[name, 0][0].prompt_logprobs or ()) for name in "abc"] == [13] * 3
    assert [game.ledger.reported["b", c][-1].finish for c in (0, 1)] == ["length"] * 2


def test_grammars_do_not_run_ahead() -> None:
    """A sequence under a grammar is in one uncommitted plan at most, the one beside it in every plan."""
    game = Play(limits())
    game.add(ask("g", grammar="{}", tokens=5))
    game.add(ask("free", tokens=12))
    game.drain(ahead=1)
    slots = [{c.slot for c in decode(frame).chunks} for frame in game.plans]
    assert all(not (0 in a and 0 in b) for a, b in pairwise(slots))
    assert all(1 in s for s in slots[:12])


@pytest.mark.parametrize("moment", range(9))
@pytest.mark.parametrize("how", ["cancel", "stop", "deadline"])
def test_an_end_may_come_at_any_moment(how: str, moment: int) -> None:
    """The same request ended before it is planned, with its prompt half done, with one and with two plans under way,
    with its last token under way: told once, and the next in line runs undisturbed."""
    game = Play(limits(max_num_seqs=2, max_num_batched_tokens=6, enable_prefix_caching=True))
    game.add(ask("a", 10, 4, n=2, deadline=2000.0))
    game.add(ask("b", 10, 4))
    for _ in range(moment):
        (game.plan if len(game.flight) < 2 and moment % 2 else game.step)()
    if how == "cancel":
        game.cancel("a")
        game.cancel("a")
    elif how == "deadline":
        game.now = 2000.0
    else:
        for choice in (0, 1):
            game.stop("a", choice, len(game.ledger.tokens["a", choice]))
    check_books(game.scheduler)
    game.drain()
    ends = {game.ledger.reported["a", c][-1].finish for c in (0, 1)}
    assert ends <= {{"cancel": "cancelled", "stop": "stop", "deadline": "timeout"}[how], "length"}
    if moment < 4:
        assert "length" not in ends
    assert game.scheduler.take_ended()


def test_unknown_ids_are_ignored() -> None:
    scheduler = Scheduler(limits())
    scheduler.cancel("nobody")
    scheduler.stop_choice("nobody", 0, 3)
    assert not scheduler.has_work
    assert scheduler.schedule(0.0) is None


def test_bad_logits_end_one_choice_and_are_not_cached() -> None:
    """NaN at a prompt's position 9: that request ends with numerical_error, all its choices, its neighbour goes on;
    the same prompt again computes everything anew. NaN after the prompt is the one choice's affair."""
    game = Play(limits(enable_prefix_caching=True, max_num_batched_tokens=12))
    prompt = tuple(range(20))
    game.poison(prompt, 9)
    game.add(ask("bad", prompt, 4, n=3))
    game.add(ask("good", 6, 8))
    game.drain()
    assert [game.ledger.reported["bad", c][-1].finish for c in range(3)] == ["numerical_error"] * 3
    assert game.ledger.reported["good", 0][-1].finish == "length"
    game.runner.poison.clear()
    game.add(ask("again", prompt, 4))
    game.drain()
    assert game.ledger.reported["again", 0][-1].cached_tokens == 0
    game.poison(prompt, 20)
    game.add(ask("late", prompt, 4))
    game.drain()
    assert game.ledger.reported["late", 0][-1].finish == "numerical_error"
    assert len(game.ledger.tokens["late", 0]) == 1


def test_bad_logits_of_a_choice_that_goes_on_are_its_own() -> None:
    """Two choices go on from tokens reported before a loss: NaN of one ends that one alone."""
    scheduler = Scheduler(limits())
    scheduler.add(ask("a", 6, 8, n=2, emitted=((1,), (2,))), 0.0)
    batch = scheduler.schedule(0.0)
    assert batch is not None
    first, _ = (chunk.slot for chunk in batch.chunks)
    events = scheduler.commit(batch, StepResult((5, 5), nonfinite=(first,)), 0.0)
    assert {(event.choice, event.finish) for event in events} == {(0, "numerical_error"), (1, None)}


def test_plans_and_commits_keep_their_order() -> None:
    """No third plan is made; a commit of another plan or of too few tokens is refused; an empty batch has events."""
    game = Play(limits())
    game.add(ask("a"))
    assert game.plan()
    assert game.plan()
    assert game.scheduler.schedule(0.0) is None
    (first, result), (second, _) = game.flight
    with pytest.raises(RuntimeError, match="step 1 is committed, 0 is due"):
        game.scheduler.commit(second, result, 0.0)
    with pytest.raises(ValueError, match="0 tokens for 1 chunks"):
        game.scheduler.commit(first, StepResult(()), 0.0)
    game.cancel("a")
    (event,) = game.scheduler.commit(Batch(step=7), StepResult(()), 0.0)
    assert event.finish == "cancelled"
    game.ledger.record([event])
    game.drain()


def test_nothing_is_remembered_of_what_has_ended() -> None:
    """3,000 lines of 300 batches with far deadlines: flows, deadlines and groups do not pile up."""
    game = Play(limits(max_num_seqs=16, max_num_batched_tokens=256, num_blocks=400))
    game.books = False
    for start in range(0, 3000, 100):
        for i in range(start, start + 100):
            game.add(ask(f"r{i}", 4, 2, queue=f"batch-{i // 10}", deadline=1e12))
        game.drain()
        assert len(game.scheduler.open_requests.deadlines) <= 300
        assert sum(len(o.turns.heap) for c in game.scheduler.waiting.priority_classes for o in c.owners.values()) <= 20
        game.scheduler.take_ended()
    assert game.scheduler.counters.generation_tokens == 6000


def test_snapshot_counts() -> None:
    game = Play(limits(max_num_seqs=2))
    for name in "abc":
        game.add(ask(name, 8, 4))
    game.step()
    game.now += 3.0
    seen = game.scheduler.snapshot(game.now)
    assert (seen["num_requests_running"], seen["num_requests_waiting"]) == (2.0, 1.0)
    assert seen["engine_oldest_waiting_age_seconds"] == pytest.approx(3.0)
    assert 0.0 < seen["kv_cache_usage_ratio"] < 1.0
    game.drain()
    seen = game.scheduler.snapshot()
    assert (seen["prompt_tokens_total"], game.scheduler.counters.generation_tokens) == (24.0, 12)
    times = game.scheduler.take_ended()
    assert len(times) == 3
    assert all(t.arrival <= (t.admitted or 0) <= (t.first_token or 0) <= t.finished for t in times)


SEQUENCE = NewSequence(0, 0, 3, (1, 2, 3), SamplingParams(4, seed=0))
PREFILL = Batch(0, admitted=(SEQUENCE,), blocks=((0, (0,)),), chunks=(Chunk(0, 0, 3, True),))


@pytest.mark.parametrize(
    ("text", "batch"),
    [
        ("step 2 after 0", Batch(2)),
        ("released, but empty", Batch(1, released=(1,))),
        ("is taken", Batch(1, admitted=(SEQUENCE,))),
        ("does not exist", Batch(1, admitted=(replace(SEQUENCE, slot=9),))),
        ("empty slot 1", Batch(1, blocks=((1, (1,)),))),
        ("blocks", Batch(1, blocks=((0, (99,)),))),
        ("a block twice", Batch(1, blocks=((0, (0,)),), chunks=(Chunk(0, 3, 1, True),))),
        ("beyond its", Batch(2, chunks=(Chunk(0, 4, 1, True),))),
        ("known tokens", Batch(1, chunks=(Chunk(0, 3, 2, True),))),
        ("go on from", Batch(1, chunks=(Chunk(0, 2, 2, True),))),
        ("two chunks", Batch(1, chunks=(Chunk(0, 3, 1, True), Chunk(0, 3, 1, True)))),
        ("budget", Batch(1, chunks=(Chunk(0, 3, 99, True),))),
        ("depend on their order", Batch(1, copies=((0, 1), (1, 2)))),
        (
            "writes a block of another",
            Batch(
                1,
                admitted=(replace(SEQUENCE, slot=1),),
                blocks=((1, (0,)),),
                chunks=(Chunk(1, 0, 3, True),),
            ),
        ),
        (
            "position 0 reads",
            Batch(
                1,
                admitted=(replace(SEQUENCE, slot=1, tokens=(9, 2, 3)),),
                blocks=((1, (0, 1)),),
                chunks=(Chunk(1, 2, 1, True),),
            ),
        ),
    ],
)
def test_the_fake_runner_believes_nothing(text: str, batch: Batch) -> None:
    """Each rule of a Batch, broken, is found out: else the random schedules would prove nothing."""
    runner = FakeRunner(2, 20, 4, 8)
    runner.run(PREFILL)
    if batch.step == 2 and batch.chunks:
        runner.run(Batch(1, chunks=(Chunk(0, 3, 1, True),)))
    with pytest.raises(RuleBroken, match=text):
        runner.run(batch)


def test_what_a_request_forbids_itself_is_no_numerical_error() -> None:
    """A row that failed with a reason ends as such; one without is the logits' own."""
    for why, finish in (("the grammar allows nothing", "constraint_error"), (None, "numerical_error")):
        scheduler = Scheduler(limits())
        scheduler.add(ask("a", 4, 4), 0.0)
        batch = scheduler.schedule(0.0)
        assert batch is not None
        slot = batch.chunks[0].slot
        result = StepResult((5,), nonfinite=(slot,), failures={} if why is None else {slot: why})
        (event,) = scheduler.commit(batch, result, 0.0)
        assert event.finish == finish
        assert (why or "NaN") in (event.message or "")
