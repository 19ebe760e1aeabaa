"""Plays one schedule: bytes become limits, arrivals, cancels, stops, deadlines and late commits; after every move the
books are checked, at the end every choice must have ended with the tokens that its prompt alone determines.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace

from fake_model import VOCAB, Answer, FakeRunner, answer, is_poisoned, logprob
from laddertron.engine.batch import Batch, StepResult, decode, encode
from laddertron.engine.request import BATCH, INTERACTIVE, Request, SamplingParams, TokensEvent
from laddertron.engine.schedule.limits import RequestTooLarge
from laddertron.engine.schedule.scheduler import Scheduler, SchedulerLimits
from laddertron.engine.schedule.sequence import Sequence
from laddertron.engine.schedule.speculation import SpeculationRule
from laddertron.engine.schedule.waiting_queue import WaitingQueues


class Choices:
    """Decisions read from bytes; when they are used up every decision is 0, which the play takes as "wind down"."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def below(self, bound: int) -> int:
        if not self:
            return 0
        self._at += 1
        return self._data[self._at - 1] % bound


@dataclass
class Ledger:
    """What was reported of each choice, checked as it comes."""

    max_model_len: int
    requests: dict[str, Request] = field(default_factory=dict)
    reported: dict[tuple[str, int], list[TokensEvent]] = field(default_factory=dict)
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    stops: dict[tuple[str, int], int] = field(default_factory=dict)
    poisoned: set[tuple[tuple[int, ...], int]] = field(default_factory=set)

    def enter(self, request: Request) -> None:
        self.requests[request.request_id] = request
        for choice in range(request.params.n):
            self.reported[request.request_id, choice] = []
            self.tokens[request.request_id, choice] = []

    def is_new(self, request: Request, position: int) -> bool:
        """Whether nobody else computes what this request has up to that position: weights do not change on the way."""
        others = [r for r in self.requests.values() if r is not request]
        wholes = [r.prompt + answer(r, c, self.max_model_len).tokens for r in others for c in range(r.params.n)]
        return not any(is_poisoned(whole[: position + 1], request.prompt) for whole in wholes)

    def record(self, events: list[TokensEvent]) -> None:
        for event in events:
            key = (event.request_id, event.choice)
            before = self.reported[key]
            assert not before or before[-1].finish is None, f"{key} reported something after its end"
            tokens = self.tokens[key]
            if event.finish == "stop" and event.stop_token is None:
                assert event.start <= len(tokens)
                assert not event.tokens
            else:
                assert event.start == len(tokens), f"{key}: start {event.start} after {len(tokens)} tokens"
            tokens.extend(event.tokens)
            before.append(event)

    def ended(self, key: tuple[str, int]) -> bool:
        return bool(self.reported[key]) and self.reported[key][-1].finish is not None

    def close(self) -> None:
        """Every choice has ended, with the right tokens."""
        for key, events in self.reported.items():
            assert events, f"{key} was never heard of again"
            assert events[-1].finish is not None, f"{key} never ended"
            request, tokens, last = self.requests[key[0]], tuple(self.tokens[key]), events[-1]
            full = answer(request, key[1], self.max_model_len)
            if last.finish == "numerical_error":
                whole = request.prompt + full.tokens
                assert any(at < len(whole) and is_poisoned(whole[: at + 1], p) for p, at in self.poisoned), key
                assert last.message
            if last.finish == "length" or last.stop_token is not None:
                assert Answer(tokens, str(last.finish), last.stop_token) == full, key
            else:
                assert tokens == full.tokens[: len(tokens)], key
                if last.finish == "stop":
                    assert self.stops[key] == last.start
            self._logprobs(key, request, tokens)

    def _logprobs(self, key: tuple[str, int], request: Request, tokens: tuple[int, ...]) -> None:
        whole, size = request.prompt + tokens, len(request.prompt)
        scored = [p for event in self.reported[key] for p in event.logprobs or ()]
        if request.params.logprobs is None:
            assert not scored
        else:
            stop = self.reported[key][-1].stop_token
            drawn = whole if stop is None else (*whole, stop)
            assert scored == [logprob(drawn[:at], drawn[at]) for at in range(size, len(drawn))]
        prompts = [event.prompt_logprobs for event in self.reported[key] if event.prompt_logprobs is not None]
        due = request.params.prompt_logprobs is not None and key[1] == 0
        natural = self.reported[key][-1].finish == "length" or self.reported[key][-1].stop_token is not None
        if due and (tokens or natural):
            scores = [logprob(whole[:at], whole[at]) for at in range(1, size)]
            assert prompts == [(None, *scores)]
            assert self.reported[key][0].prompt_logprobs is not None
        else:
            assert not prompts or due


def waiting_in(queues: WaitingQueues) -> list[Sequence]:
    return [s for c in queues.priority_classes for s in (*c.resumed, *c.arrivals.values())]


def check_books(scheduler: Scheduler) -> None:
    """Every block is held as often as it is listed, or cached, or free; every slot is somebody's or free."""
    residency, pool = scheduler.residency, scheduler.residency.pool
    lists = [sequence.blocks for sequence in residency.running]
    lists += [group.prompt_blocks for group in residency.holders.values()]
    held = Counter(block for blocks in lists for block in blocks)
    assert {b: n for b in range(pool.num_blocks) if (n := pool.references(b))} == held
    cached = [block for blocks in pool.cached_blocks for block in blocks]
    idle = [*pool.free_blocks, *cached]
    assert all(pool._needed[block] == needed for needed in (False, True) for block in pool.cached_blocks[needed])
    assert len(idle) == len(set(idle)), "a block is free twice"
    assert set(idle) | set(held) == set(range(pool.num_blocks)), "a block is lost"
    assert not set(idle) & set(held), "a block is free and held"
    assert {d for d in pool.digest_of_block if d is not None} == set(pool.block_of_digest)
    assert all(pool.digest_of_block[block] is not None for block in cached)
    assert all(pool.digest_of_block[block] is None for block in pool.free_blocks)
    slots = [sequence.slot for sequence in residency.running]
    assert sorted(slots + residency.slots) == list(range(scheduler.limits.max_num_seqs))
    assert residency.running == sorted(residency.running, key=lambda sequence: sequence.order())
    waiting = waiting_in(scheduler.waiting)
    assert len(waiting) == len(scheduler.waiting)
    assert {id(s) for s in waiting} == {
        id(s) for g in scheduler.open_requests.groups.values() for s in g.sequences if s.state == "waiting"
    }
    assert all(group.unforked == sum(s.fresh for s in group.sequences) for group in residency.holders.values())
    pending = residency.pending
    unfilled = {digest for s in residency.running for digest in s.digests()[s.registered :]}
    assert set(pending.owners) <= unfilled, "a block is pending that nobody fills"
    assert set(pending.deferred) <= set(pending.owners), "a sequence waits for a block that nobody fills"
    assert all(owner.state == "running" for owner in pending.owners.values())
    deferred = [s for part in (*pending.deferred.values(), pending.ready) for s in part if s.state == "waiting"]
    assert sorted(map(id, deferred)) == sorted(id(s) for s in waiting if s.deferred)


def check_nothing_left(scheduler: Scheduler) -> None:
    """Idle again: all blocks free or cached, all slots free, nobody remembered."""
    check_books(scheduler)
    assert not scheduler.residency.running
    assert not scheduler.residency.pending.owners
    assert not scheduler.residency.pending.deferred
    assert not len(scheduler.waiting)
    assert scheduler.snapshot()["kv_cache_usage_ratio"] == 0.0
    assert not scheduler.open_requests.groups
    assert not scheduler.residency.holders
    assert all(not waiting.owners for waiting in scheduler.waiting.priority_classes)


@dataclass
class Play:
    """One scheduler, one runner, and the plans between them."""

    limits: SchedulerLimits
    now: float = 1000.0
    plans: list[bytes] = field(default_factory=list)
    books: bool = True

    def __post_init__(self) -> None:
        self.poisoned: set[tuple[tuple[int, ...], int]] = set()
        self._build()
        self.ledger = Ledger(self.limits.max_model_len)
        self.flight: deque[tuple[Batch, StepResult]] = deque()

    def _build(self) -> None:
        limits = self.limits
        self.scheduler = Scheduler(limits)
        self.runner = FakeRunner(
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            limits.block_size,
            limits.num_blocks,
            max_model_len=None if limits.speculation is None else limits.max_model_len,
        )
        self.runner.poison = self.poisoned

    def add(self, request: Request) -> None:
        self.scheduler.add(request, self.now)
        self.ledger.enter(request)

    def poison(self, prompt: tuple[int, ...], position: int) -> None:
        """From now on this prompt's logits at this position are not finite."""
        self.poisoned.add((prompt, position))
        self.ledger.poisoned.add((prompt, position))

    def cancel(self, request_id: str) -> None:
        self.scheduler.cancel(request_id)

    def stop(self, request_id: str, choice: int, n_tokens: int) -> None:
        if not self.ledger.ended((request_id, choice)):
            self.ledger.stops.setdefault((request_id, choice), n_tokens)
            self.scheduler.stop_choice(request_id, choice, n_tokens)

    def lose(self) -> None:
        """The engine dies: what was not reported is gone, and another one goes on with what was."""
        self.flight.clear()
        self._build()
        self.ledger.stops = {key: at for key, at in self.ledger.stops.items() if self.ledger.ended(key)}
        for name, request in self.ledger.requests.items():
            keys = [(name, choice) for choice in range(request.params.n)]
            emitted = tuple(None if self.ledger.ended(key) else tuple(self.ledger.tokens[key]) for key in keys)
            if any(part is not None for part in emitted):
                kept = emitted if any(part != () for part in emitted) else ()
                self.scheduler.add(replace(request, emitted=kept), self.now)

    def plan(self) -> bool:
        """Plans and runs a step, tells nobody yet; False if there was nothing to plan."""
        batch = self.scheduler.schedule(self.now)
        if batch is None:
            assert self.flight or not self.scheduler.open_requests.groups, (
                "nothing is under way, and what waits is not planned"
            )
            self.ledger.record(self.scheduler.take_events())
            return False
        held = self.scheduler.residency.holders.values()
        assert all(group.unforked for group in held), "a prompt is held for nobody"
        self.plans.append(encode(batch))
        self.flight.append((batch, self.runner.run(batch)))
        return True

    def commit(self) -> None:
        batch, result = self.flight.popleft()
        self.ledger.record(self.scheduler.commit(batch, result, self.now))

    def step(self, ahead: int = 1) -> bool:
        """What the engine does in a step: plans while fewer than `ahead` + 1 plans are open, then commits one."""
        planned = False
        while len(self.flight) <= ahead and self.plan():
            planned = True
        if self.flight:
            self.commit()
            planned = True
        if self.books:
            check_books(self.scheduler)
        return planned

    def drain(self, ahead: int = 1, limit: int = 10_000) -> None:
        """Steps until nothing is left; raises if it stands still."""
        for _ in range(limit):
            if not self.step(ahead):
                break
            self.now += 0.01
        assert not self.scheduler.has_work, "work is left, and nothing can be planned"
        self.ledger.close()
        check_nothing_left(self.scheduler)


def times_computed(game: Play) -> Counter[tuple[int, ...]]:
    """How often the plans compute each full block of a prompt; a block is named by all tokens up to its end."""
    slots: dict[int, tuple[tuple[int, ...], int]] = {}
    counts: Counter[tuple[int, ...]] = Counter()
    size = game.limits.block_size
    for batch in map(decode, game.plans):
        slots |= {sequence.slot: (sequence.tokens, sequence.prompt_len) for sequence in batch.admitted}
        for chunk in batch.chunks:
            tokens, length = slots[chunk.slot]
            ends = range(size, length + 1, size)
            counts.update(tokens[:end] for end in ends if chunk.start < end <= chunk.start + chunk.count)
    return counts


def _limits(choices: Choices) -> SchedulerLimits:
    seqs, size, length = 1 + choices.below(6), 1 + choices.below(5), 6 + choices.below(30)
    least = -(-length // size)
    budget = seqs + choices.below(20)
    blocks = max(1, least - 2 + choices.below(2 * least + 4))
    return SchedulerLimits(
        seqs,
        budget,
        length,
        size,
        blocks,
        enable_prefix_caching=choices.below(4) != 0,
        ageing_s=5.0,
        watermark=choices.below(3) * 0.05,
        max_scored_positions=1 + choices.below(30),
        speculation=(None, SpeculationRule(), SpeculationRule(priced=False))[choices.below(3)],
    )


def _request(choices: Choices, number: int, limits: SchedulerLimits, now: float) -> Request:
    family, shared, own = choices.below(3), choices.below(limits.max_model_len), choices.below(6)
    prompt = tuple((family * 7 + i * 3) % VOCAB for i in range(shared)) + tuple(
        choices.below(VOCAB) for _ in range(own + (shared == 0))
    )
    flags = choices.below(256)
    params = SamplingParams(
        max_tokens=choices.below(14) if flags & 1 else 1 + choices.below(limits.max_model_len),
        seed=choices.below(3),
        min_tokens=choices.below(3),
        n=1 + choices.below(4) if flags & 6 == 6 else 1,
        stop_token_ids=tuple(range(choices.below(6))),
        logprobs=0 if flags & 24 == 24 else None,
        prompt_logprobs=0 if flags & 96 == 96 else None,
        grammar="{}" if flags & 129 == 129 else None,
    )
    return Request(
        f"r{number}",
        prompt,
        params,
        priority=INTERACTIVE if choices.below(3) == 0 else BATCH,
        queue=f"q{choices.below(3)}",
        salt=f"s{choices.below(8) == 7}",
        shared=choices.below(len(prompt)) if flags & 32 else None,
        order=choices.below(3) - 1,
        deadline=now + choices.below(30) * 0.3 if choices.below(8) == 7 else None,
    )


def fits(request: Request, limits: SchedulerLimits) -> bool:
    """The rule at the door, written down again and differently."""
    params, length = request.params, len(request.prompt)
    most = length if params.max_tokens == 0 else min(length + params.max_tokens, limits.max_model_len)
    if length > limits.max_model_len or (params.max_tokens and length == limits.max_model_len):
        return False
    computed = most if params.max_tokens == 0 else most - 1
    return computed <= limits.num_blocks * limits.block_size


def play(data: bytes, microbatches: int = 1, mortal: bool = False) -> Play:
    """One random schedule from `data`, played to its end; with so many micro-batches on their way. mortal: the engine
    dies now and then."""
    choices = Choices(data)
    game = Play(replace(_limits(choices), microbatches=microbatches))
    number = 0
    while choices:
        move = choices.below(8)
        if mortal and choices.below(16) == 15:
            game.lose()
        elif move <= 2:
            request = _request(choices, number, game.limits, game.now)
            number += 1
            try:
                game.add(request)
            except RequestTooLarge:
                assert not fits(request, game.limits)
            else:
                assert fits(request, game.limits)
            if choices.below(16) == 15 and game.ledger.is_new(request, at := choices.below(game.limits.max_model_len)):
                game.poison(request.prompt, at)
        elif move == 3 and number:
            request_id = f"r{choices.below(number)}"
            if request_id in game.ledger.requests:
                if choices.below(2):
                    game.cancel(request_id)
                else:
                    choice = choices.below(game.ledger.requests[request_id].params.n)
                    game.stop(request_id, choice, choices.below(1 + len(game.ledger.tokens[request_id, choice])))
        elif move <= 5 and len(game.flight) <= microbatches:
            game.plan()
        elif game.flight:
            game.commit()
        game.now += choices.below(4) * 0.25
        check_books(game.scheduler)
    game.drain(ahead=microbatches)
    return game
