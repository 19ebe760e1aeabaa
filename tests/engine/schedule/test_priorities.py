"""Who is admitted, evicted and preempted: classes, ageing, shares of batches, large requests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from laddertron.engine.batch import decode
from laddertron.engine.request import BATCH, INTERACTIVE
from laddertron.engine.schedule.limits import RequestTooLarge
from laddertron.engine.schedule.waiting_queue import AGED_TURN
from schedule_play import Play, waiting_in
from test_scheduler import ask, last_plan, limits


def test_interactive_goes_first_and_may_evict() -> None:
    """Four batch lines run, one waits. An interactive request arrives: the latest batch line makes room in the next
    plan, comes back after it, finds its prompt in the prefix cache and ends with the same tokens."""
    game = Play(limits(enable_prefix_caching=True))
    for i in range(5):
        game.add(ask(f"b{i}", 16, 20))
    for _ in range(6):
        game.step()
    game.add(ask("urgent", 5, 4, priority=INTERACTIVE))
    game.step()
    plan = last_plan(game)
    assert len(plan.released) == 1
    assert plan.admitted[0].tokens == game.ledger.requests["urgent"].prompt
    assert game.scheduler.counters.preemptions == 1
    game.drain()
    back = [s for frame in game.plans for s in decode(frame).admitted if s.prompt_len < len(s.tokens)]
    assert [s.tokens[:16] for s in back] == [game.ledger.requests["b3"].prompt]
    assert game.scheduler.counters.prefix_hits >= 16


def test_batch_lines_never_evict() -> None:
    """The same with a batch line in the urgent one's place: it waits for a slot."""
    game = Play(limits())
    for i in range(9):
        game.add(ask(f"b{i}", 16, 20))
        game.step()
    game.drain()
    assert game.scheduler.counters.preemptions == 0


def flood(game: Play, seconds: float) -> Iterator[str]:
    """Interactive requests without end: nine wait at any time, the clock runs 10 ms a step. Yields who enters."""
    prompts = {request.prompt: name for name, request in game.ledger.requests.items()}
    end, number = game.now + seconds, 0
    while game.now < end:
        while sum(s.group.request.priority == INTERACTIVE for s in waiting_in(game.scheduler.waiting)) < 9:
            request = ask(f"i{number}", 4, 4, priority=INTERACTIVE)
            prompts[request.prompt] = request.request_id
            game.add(request)
            number += 1
        planned = len(game.plans)
        game.step()
        for frame in game.plans[planned:]:
            yield from (prompts[s.tokens] for s in decode(frame).admitted if s.tokens in prompts)
        game.now += 0.01


def test_ageing_ends_the_wait_of_batch_lines() -> None:
    """Interactive requests never cease. Until the ageing time no batch line enters; from then on every fourth who
    enters is one, none is evicted again, and interactive requests keep the other turns."""
    game = Play(limits(ageing_s=2.0))
    game.books = False
    for i in range(40):
        game.add(ask(f"b{i}", 4, 4, queue="batch"))
    early = list(flood(game, 1.9))
    assert early
    assert all(name.startswith("i") for name in early)
    late = list(flood(game, 3.0))
    lines = [at for at, name in enumerate(late) if name.startswith("b")]
    assert len(lines) >= 10
    gaps = {b - a for a, b in pairwise(lines)}
    assert gaps == {AGED_TURN}, "neither rarer nor more often than promised"
    assert game.scheduler.counters.preemptions == 0
    game.drain()


def test_a_turn_gained_by_ageing_evicts_nobody() -> None:
    """Everything is aged at once. An interactive request evicts the first batch line, which then waits; after three
    more the turn is a batch line's, and it waits for a slot like anybody of its kind."""
    game = Play(limits(max_num_seqs=6, ageing_s=0.0))
    for i in range(6):
        game.add(ask(f"b{i}", 4, 40))
    game.step()
    for i in range(6):
        game.add(ask(f"i{i}", 4, 30, priority=INTERACTIVE))
        game.step()
    assert game.scheduler.counters.preemptions == 1 + AGED_TURN - 1
    game.drain()


def test_whose_last_token_is_under_way_is_not_preempted() -> None:
    """The only slot is a batch line's whose last token is planned: an interactive request takes it over at once, and
    nothing is computed twice."""
    game = Play(limits(max_num_seqs=1))
    game.add(ask("b", 6, 1))
    game.plan()
    game.add(ask("urgent", 6, 1, priority=INTERACTIVE))
    game.plan()
    assert last_plan(game).admitted[0].slot == 0
    assert game.scheduler.counters.preemptions == 0
    game.drain()
    assert game.runner.computed_tokens == 12


def test_batches_share_by_tokens() -> None:
    """Batch A's 300 lines wait first, B's 60 come later with prompts four times as long, C's in between. While all
    three wait, each has been served as many tokens as the others, but for what a full house may hold."""
    game = Play(limits(max_num_seqs=4, max_num_batched_tokens=64, enable_prefix_caching=False))
    game.books = False
    served = {"A": 0, "B": 0, "C": 0}
    sizes = {"A": (6, 4), "B": (24, 6), "C": (6, 16)}

    def add(queue: str, count: int) -> None:
        for i in range(count):
            game.add(ask(f"{queue}{i}", *sizes[queue], queue=queue))

    def serve(steps: int) -> None:
        for _ in range(steps):
            game.step()
        for queue in served:
            served[queue] = sum(
                len(game.ledger.requests[key[0]].prompt) + len(tokens)
                for key, tokens in game.ledger.tokens.items()
                if key[0].startswith(queue) and tokens
            )

    add("A", 300)
    serve(100)
    assert served["A"] > 500
    add("B", 60)
    add("C", 60)
    before = dict(served)
    serve(250)
    gained = {queue: served[queue] - before[queue] for queue in served}
    waiting = {s.group.request.queue for s in waiting_in(game.scheduler.waiting)}
    assert waiting == {"A", "B", "C"}, "all three must wait for the comparison to mean something"
    assert max(gained.values()) - min(gained.values()) <= 30 * 5, gained
    assert min(gained.values()) > 400, gained
    game.drain()


def test_the_latest_of_the_lowest_priority_is_preempted() -> None:
    """KV runs out under three sequences: the batch line goes, then the later of the two interactive ones; the first
    is never touched, and everybody ends."""
    game = Play(limits(num_blocks=12, max_model_len=48, watermark=0.0))
    game.add(ask("late-batch", 8, 30, priority=BATCH))
    game.add(ask("first", 8, 30, priority=INTERACTIVE))
    game.add(ask("second", 8, 30, priority=INTERACTIVE))
    game.drain()
    back = [s.tokens[:8] for frame in game.plans for s in decode(frame).admitted if s.prompt_len < len(s.tokens)]
    prompts = {game.ledger.requests[name].prompt: name for name in ("late-batch", "first", "second")}
    assert [prompts[p] for p in back][:1] != ["first"]
    assert {prompts[p] for p in back} == {"late-batch", "second"}


def test_admission_leaves_room_for_those_who_run() -> None:
    """Two sequences run and will soon need blocks: a third is let in only where a block for each is left over."""
    game = Play(limits(num_blocks=9, max_model_len=32))
    game.add(ask("a", 12, 20))
    game.add(ask("b", 12, 9))
    for _ in range(2):
        game.step()
    game.add(ask("c", 8, 4))
    game.step()
    assert len(game.scheduler.waiting) == 1, "two blocks are free, c needs both, and a and b are about to grow"
    game.drain()


def test_a_large_request_is_not_passed_over_for_ever() -> None:
    """One line needs nearly all blocks; small ones keep coming behind it. It enters as soon as those before it end."""
    game = Play(limits(num_blocks=16, max_model_len=64))
    for i in range(4):
        game.add(ask(f"s{i}", 8, 8))
    game.step()
    game.add(ask("large", 56, 4))
    for i in range(4, 30):
        game.add(ask(f"s{i}", 8, 8))
    entered = []
    while "large" not in entered:
        game.step()
        entered += game.scheduler.request_ids(s.slot for s in last_plan(game).admitted)
    assert set(entered) <= {"s0", "s1", "s2", "s3", "large"}
    game.drain()


def test_refused_at_the_door() -> None:
    """What could never run is refused with value, rule and fix; what just fits runs."""
    game = Play(limits(num_blocks=8, max_model_len=64))
    with pytest.raises(RequestTooLarge, match=r"a prompt of 64 tokens: max_model_len=64 leaves room for 63"):
        game.add(ask("a", 64, 1))
    with pytest.raises(RequestTooLarge, match=r"33 KV positions, 9 blocks of 4, and there are 8 \(32 tokens\)"):
        game.add(ask("a", 30, 4))
    game.add(ask("a", 30, 3))
    with pytest.raises(ValueError, match="request a is running: ids are unique"):
        game.add(ask("a", 3, 3))
    game.add(ask("whole", 32, 0, prompt_logprobs=0))
    with pytest.raises(ValueError, match="0 prompt tokens"):
        game.add(ask("empty", ()))
    with pytest.raises(ValueError, match="n=0"):
        game.add(ask("none", n=0))
    game.drain()
