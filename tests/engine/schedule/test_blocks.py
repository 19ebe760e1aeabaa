"""KV blocks, digests, and who is next in line: the books under the scheduler, each alone."""

from __future__ import annotations

import random

import pytest
from laddertron.engine.request import BATCH, INTERACTIVE, Request, SamplingParams
from laddertron.engine.schedule.kv_manager import LEAST_PREFIX, MOST_DEFERRALS, BlockPool, PendingBlocks
from laddertron.engine.schedule.sequence import DigestChain, RequestGroup, Sequence, end_position
from laddertron.engine.schedule.waiting_queue import WaitingQueues
from schedule_play import waiting_in


def test_blocks_are_held_shared_and_given_back() -> None:
    """Two holders share a block; it is free when the last has given it back, and not before."""
    pool = BlockPool(4)
    blocks = pool.take(3)
    pool.share(blocks[:2])
    pool.give_back(blocks)
    assert pool.available == 2
    assert [pool.references(b) for b in blocks] == [1, 1, 0]
    pool.give_back(blocks[:2])
    assert pool.available == 4


def test_blocks_refuse_what_does_not_add_up() -> None:
    pool = BlockPool(2)
    blocks = pool.take(2)
    with pytest.raises(RuntimeError, match="1 KV blocks wanted, 0 available"):
        pool.take(1)
    pool.give_back(blocks)
    with pytest.raises(RuntimeError, match="given back more often than taken"):
        pool.give_back(blocks[:1])


def test_cached_blocks_outlive_their_holder_until_they_are_needed() -> None:
    """Registered blocks are found again after their holder left; taking blocks spends unknown ones first, then the
    longest unheld, the end of a sequence before its beginning."""
    pool = BlockPool(5)
    first, second = pool.take(2), pool.take(2)
    for blocks, name in ((first, b"a"), (second, b"b")):
        for i, block in enumerate(blocks):
            pool.register(block, name + bytes([i]))
        pool.give_back(blocks)
    assert pool.available == 5
    assert pool.cached == 4
    assert pool.match([b"a\0", b"a\1", b"a\2"]) == first
    taken = pool.take(2)
    assert taken[1] == first[1], "one unknown block, then the end of the sequence that left first"
    assert pool.match([b"a\0", b"a\1"]) == first[:1]
    pool.share(first[:1])
    assert pool.references(first[0]) > 0
    assert [pool.references(block) for block in second] == [0, 0]
    assert pool.take(2) == second[::-1]
    assert pool.available == 0
    assert pool.match([b"b\0"]) == []


def test_needed_blocks_are_evicted_last_but_not_kept_for_ever() -> None:
    """Sequences of four blocks in a pool of eight: the first one's two needed blocks outlive the others', until the
    pool has been allocated eight times more. A later user that no longer needs them ends that."""
    pool = BlockPool(8)
    digests = [bytes([number]) for number in range(200)]

    def cache(first: int, needed: int) -> None:
        blocks = pool.take(4)
        pool.mark(blocks, needed)
        for block, digest in zip(blocks, digests[first:], strict=False):
            pool.register(block, digest)
        pool.give_back(blocks)

    cache(0, needed=2)
    cached = []
    for turn in range(1, 40):
        cache(4 * turn, needed=0)
        cached.append(len(pool.match(digests[:4])))
    assert cached[0] == 4
    assert 2 * 8 - 1 <= cached.count(2) <= 2 * 8 + 4
    assert cached[-1] == 0

    pool = BlockPool(8)
    cache(0, needed=4)
    blocks = pool.match(digests[:4])
    pool.share(blocks)
    pool.mark(blocks, 0)
    pool.give_back(blocks)
    cache(4, needed=0)
    cache(8, needed=0)
    assert pool.match(digests[:4]) == []


def test_one_block_for_one_content() -> None:
    """Two blocks with the same content: the first stays the known one; forgotten, neither is found."""
    pool = BlockPool(3)
    blocks = pool.take(2)
    pool.register(blocks[0], b"x")
    pool.register(blocks[1], b"x")
    assert pool.match([b"x"]) == blocks[:1]
    pool.give_back(blocks)
    assert pool.cached == 1
    pool.forget([b"x", b"never"])
    assert pool.match([b"x"]) == []
    assert (pool.cached, pool.available) == (0, 3)


def test_digests_depend_on_everything_before_and_on_the_salt() -> None:
    """Same second block after another first one, or under another salt: another digest. A fork goes on by itself."""
    tokens = list(range(12))
    chain = DigestChain("tenant", 4)
    digests = list(chain.upto(3, tokens))
    assert digests == DigestChain("tenant", 4).upto(3, tokens)
    other = DigestChain("tenant", 4).upto(3, [99, *tokens[1:]])
    assert not set(other) & set(digests)
    assert not set(DigestChain("else", 4).upto(3, tokens)) & set(digests)
    fork = chain.fork(2)
    assert fork.upto(3, [*tokens[:8], 7, 7, 7, 7])[:2] == digests[:2]
    assert fork.digests[2] != digests[2]
    assert chain.digests == digests


def test_digests_may_depend_on_the_token_after_a_block() -> None:
    """As a predicting layer's keys do: a block is full once that token is known, and shared if it is the same."""
    tokens = list(range(13))
    chain = DigestChain("tenant", 4, ahead=1)
    assert [chain.full(count) for count in (0, 4, 5, 8, 12, 13)] == [0, 0, 1, 1, 2, 3]
    digests = list(chain.upto(3, tokens))
    for changed in range(13):
        other = DigestChain("tenant", 4, ahead=1).upto(3, [99 if i == changed else i for i in tokens])
        same = [a == b for a, b in zip(digests, other, strict=True)]
        assert same == [changed > end for end in (4, 8, 12)], changed
    assert chain.fork(2).upto(3, [*tokens[:12], 99])[:2] == digests[:2]


def test_end_position_counts_what_is_computed() -> None:
    """Prompt of 10: with 5 tokens 14 positions are computed, with 1 or 0 the prompt alone; the model's length cuts."""
    assert [end_position(10, n, 100) for n in (0, 1, 5)] == [10, 10, 14]
    assert end_position(10, 50, 12) == 11


def waiting(
    queues: WaitingQueues,
    number: int,
    queue: str,
    priority: int = BATCH,
    arrival: float = 0.0,
    order: int = 0,
    owner: str = "",
) -> Sequence:
    params = SamplingParams(4, seed=0)
    request = Request(f"r{number}", (1, 2, 3), params, priority, queue, f"{owner}\0salt", order=order)
    group = RequestGroup(request, number, arrival)
    queues.join(group)
    group.sequences.append(Sequence(group, 0, None, 64))
    queues.push(group.sequences[0])
    return group.sequences[0]


def turn(queues: WaitingQueues, now: float = 0.0, charge: int = 0) -> Sequence:
    seen = queues.peek(now)
    assert seen is not None
    queues.pop(seen)
    seen.sequence.group.queue.served += charge
    seen.sequence.group.queue.owner.served += charge
    return seen.sequence


def test_queues_take_turns_by_tokens_served() -> None:
    """B's lines cost three times A's: A has three turns for one of B's. A queue that was away does not catch up."""
    queues = WaitingQueues(60.0)
    for i in range(40):
        waiting(queues, i, "A")
    for i in range(40, 80):
        waiting(queues, i, "B")
    names = []
    for _ in range(24):
        name = "A" if (seen := queues.peek(0.0)) and seen.sequence.group.request.queue == "A" else "B"
        names.append(turn(queues, charge=100 if name == "A" else 300).group.request.queue)
    assert names.count("A") == 18
    waiting(queues, 100, "C")
    waiting(queues, 101, "C")
    names = [turn(queues, charge=100).group.request.queue for _ in range(4)]
    assert names.count("C") <= 2, "C starts level with the others"


def test_owners_take_turns_however_many_queues_they_have(run_seed: int) -> None:
    """20,000 moves against brute force: the owner that was served least since it last was away, then its queue that
    was, then the oldest request. One with nine batches gets what one with a single one gets."""
    draw = random.Random(run_seed)
    queues = WaitingQueues(60.0)
    there: dict[str, dict[str, list[Sequence]]] = {}
    owned, paid = dict[str, int](), dict[tuple[str, str], int]()
    clock, clocks = 0, dict[str, int]()
    shares = {"many": 9, "one": 1, "two": 2}
    for number in range(20_000):
        owner = draw.choice(list(shares))
        mine = there.setdefault(owner, {})
        if draw.randrange(2) and sum(map(len, mine.values())) < 40:
            queue = f"q{draw.randrange(shares[owner])}"
            if not any(mine.values()):
                owned[owner] = max(owned.get(owner, 0), clock)
            if not mine.get(queue):
                paid[owner, queue] = max(paid.get((owner, queue), 0), clocks.get(owner, 0))
            mine.setdefault(queue, []).append(waiting(queues, number, queue, owner=owner))
        elif any(any(found.values()) for found in there.values()):
            who = min((owned[name] for name, found in there.items() if any(found.values())))
            least = {name for name, found in there.items() if any(found.values()) and owned[name] == who}
            took = turn(queues, charge=(cost := draw.randrange(1, 50)))
            name, of = took.group.request.owner, took.group.request.queue
            assert name in least
            waiting_here = {queue: paid[name, queue] for queue, found in there[name].items() if found}
            assert waiting_here[of] == min(waiting_here.values())
            assert there[name][of].pop(0) is took
            clock, clocks[name] = max(clock, owned[name]), max(clocks.get(name, 0), paid[name, of])
            owned[name] += cost
            paid[name, of] += cost


def test_a_client_orders_its_own_queue(run_seed: int) -> None:
    """By `order`, which waiting outweighs at ageing_s a step, against a sorted list; other queues keep their turns, a
    clock that is set back changes nothing, and those that left leave nothing behind."""
    draw = random.Random(run_seed)
    queues = WaitingQueues(5.0)
    there = [waiting(queues, i, "A", arrival=i * 0.5, order=draw.randrange(-3, 4)) for i in range(400)]
    for sequence in draw.sample(there, 300):
        there.remove(sequence)
        queues.remove(sequence)
        queues.leave(sequence.group)
    last = waiting(queues, 400, "A", arrival=0.0)
    there.sort(key=lambda s: (s.group.arrival + 5.0 * s.group.request.order, s.number))
    place = sum(s.group.arrival + 5.0 * s.group.request.order <= 199.5 for s in there)
    there.insert(place, last)
    waiting(queues, 401, "B")
    served = [turn(queues, charge=1) for _ in range(102)]
    assert [s.number for s in served if s.group.request.queue == "A"] == [s.number for s in there]
    assert 401 in [s.number for s in served[:2]]
    queue = last.group.queue
    for number in range(1000, 3000):
        gone = waiting(queues, number, "A", order=2**31)
        queues.remove(gone)
        queues.leave(gone.group)
    assert len(queue.heap) < 200


def test_whoever_ran_before_goes_before_new_requests() -> None:
    """A preempted sequence waits in front, the oldest first, but not before a better priority."""
    queues = WaitingQueues(60.0)
    old = [waiting(queues, i, "A") for i in range(3)]
    for _ in range(3):
        turn(queues)
    waiting(queues, 3, "A")
    for sequence in reversed(old):
        queues.push_back(sequence)
    urgent = waiting(queues, 4, "", INTERACTIVE)
    assert [turn(queues).number for _ in range(5)] == [4, 0, 1, 2, 3]
    assert urgent.number == 4
    assert queues.peek(0.0) is None
    assert queues.oldest_arrival() is None


def test_any_order_of_calls_keeps_the_line(run_seed: int) -> None:
    """1,000 random pushes, removals and turns against a list: nobody is lost, nobody is served twice."""
    draw = random.Random(run_seed)
    queues, there = WaitingQueues(5.0), dict[int, Sequence]()
    for number in range(1000):
        now = number * 0.1
        move = draw.randrange(4)
        if move <= 1:
            there[number] = waiting(queues, number, f"q{draw.randrange(5)}", draw.randrange(2), now)
        elif move == 2 and there:
            sequence = there.pop(draw.choice(list(there)))
            queues.remove(sequence)
            queues.leave(sequence.group)
        elif there:
            sequence = turn(queues, now, draw.randrange(50))
            if draw.randrange(3):
                del there[sequence.number]
                queues.leave(sequence.group)
            else:
                queues.push_back(sequence)
        assert len(queues) == len(there)
        assert {s.number for s in waiting_in(queues)} == set(there)
        assert queues.oldest_arrival() == min((s.group.arrival for s in there.values()), default=None)


def test_a_sequence_waits_for_pending_blocks_a_bounded_number_of_times() -> None:
    """For a prefix of LEAST_PREFIX blocks and more, to its last pending block, MOST_DEFERRALS times; never for one
    whose rank is worse."""
    queues, pending = WaitingQueues(5.0), PendingBlocks()
    owner, waiter = waiting(queues, 0, "A"), waiting(queues, 1, "A")
    digests = [bytes([number]) for number in range(LEAST_PREFIX + 2)]
    pending.claim(owner, digests[:LEAST_PREFIX])
    assert not pending.defer(waiter, owner.rank, digests[1:], 0), "too short"
    assert not pending.defer(waiter, owner.rank - 1, digests, 0), "of a worse rank"
    assert not pending.defer(waiter, owner.rank, digests, LEAST_PREFIX), "the next block is not pending"
    for _ in range(MOST_DEFERRALS):
        pending.claim(owner, digests[:LEAST_PREFIX])
        assert pending.defer(waiter, owner.rank, digests, 1)
        pending.planned(digests[1 : LEAST_PREFIX - 1])
        assert not pending.ready
        pending.disclaim(waiter, digests)
        assert not pending.ready
        pending.disclaim(owner, digests)
        assert pending.ready == [waiter]
        pending.ready.clear()
    pending.claim(owner, digests)
    assert not pending.defer(waiter, owner.rank, digests, 0)
