"""What tests/engine/test_engine.py runs on ranks: an engine's life by dice, structured output, an end in the midst."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from engine_cases import build_on, deployment
from laddertron.engine.request import Request, SamplingParams, TokenLogprob, TokensEvent
from laddertron.engine.schedule.scheduler import Scheduler
from laddertron.engine.step.engine import Engine, StepProgress, follow
from overlapped import overlap, told
from rank_pool import Rank

VOCAB, CROWD = 323, 6


def _request(
    number: int, dice: random.Random, prompts: list[tuple[int, ...]], length: int, plain: bool = False
) -> Request:
    start = dice.choice(prompts)
    prompt = start[: dice.randint(1, len(start))] + tuple(dice.randrange(VOCAB) for _ in range(dice.randint(0, 6)))
    room = length - len(prompt)
    if dice.random() < 0.1:
        prompt, room = (prompt * length)[:length], 0
    params = SamplingParams(
        max_tokens=min(dice.choice([1, 3, 9, 20, room]), room) if room else 0,
        seed=number,
        temperature=dice.choice([0.0, 0.0, 1.0]),
        top_p=dice.choice([1.0, 0.9]),
        repetition_penalty=dice.choice([1.0, 1.0, 1.3]),
        n=dice.choice([1, 1, 1, 2, 3]),
        logprobs=dice.choice([None, 0, 2]),
        prompt_logprobs=dice.choice([None, None, 1]) if room else 1,
        stop_token_ids=tuple(dice.sample(range(VOCAB), 12)),
    )
    if plain and dice.random() < 0.95:
        params = replace(params, top_p=1.0, repetition_penalty=1.0, logprobs=None, prompt_logprobs=None)
    return Request(f"r{number}", prompt, params, priority=dice.choice([0, 1]), queue=dice.choice(["", "a", "b"]))


def _scores(items: Any) -> list[Any]:
    return [None if p is None else [p.token, p.logprob] for p in items]


class _Heard:
    """What one engine told, choice by choice."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprob]] = {}
        self.prompts: dict[str, list[Any]] = {}
        self.ends: dict[str, str] = {}

    def take(self, events: list[TokensEvent]) -> None:
        for event in events:
            key = f"{event.request_id}/{event.choice}"
            known = self.tokens.setdefault(key, [])
            assert key not in self.ends, f"{key} went on after its end"
            assert event.start <= len(known), f"{key}: a gap before {event.start}"
            assert event.start == len(known) or (event.finish == "stop" and event.stop_token is None), key
            del known[event.start :]
            del self.logprobs.setdefault(key, [])[event.start :]
            known.extend(event.tokens)
            if event.logprobs is not None:
                assert len(event.logprobs) == len(event.tokens) + (event.stop_token is not None), key
            self.logprobs[key].extend(event.logprobs or ())
            if event.prompt_logprobs is not None:
                assert key not in self.prompts
                self.prompts[key] = _scores(event.prompt_logprobs)
            if event.finish is not None:
                self.ends[key] = event.finish

    def report(self) -> dict[str, Any]:
        return {
            key: {
                "tokens": self.tokens[key],
                "end": end,
                "logprobs": _scores(self.logprobs[key]),
                "prompt": self.prompts.get(key),
            }
            for key, end in self.ends.items()
        }


def play(
    rank: Rank, folder: str, seed: int, requests: int, engine: dict[str, Any], overlapped: bool = False
) -> list[dict[str, Any]] | None:
    """The same requests twice: all at once with cancels, stops and deadlines at random moments, in few KV blocks; then
    each alone, with no cache. The first CROWD enter at once and grow to 38 tokens each, more than the cache holds: some
    are preempted, before anything is cancelled. Rank 0 gives both reports and what was interrupted. overlapped: the
    steps of the first time do, and most requests let them."""
    reports = []
    for calm in (False, True):
        keys = dict(engine)
        if calm:
            keys |= {"enable_prefix_caching": False, "kv_cache_memory": 8 << 20, "max_num_batched_tokens": 64}
        built = build_on(rank, deployment(folder, rank.size, {"max_model_len": 40}, **keys))
        notes: list[str] = []
        if overlapped and not calm:
            built, notes = overlap(built, rank.communicator)
        progress = StepProgress()
        if rank.rank != 0:
            follow(built.runner, rank.communicator.plans, progress)
            continue
        dice = random.Random(seed)
        prompts = [tuple(dice.randrange(VOCAB) for _ in range(24)) for _ in range(2)]
        waiting = [_request(n, dice, prompts, 40, overlapped) for n in range(requests)]
        params = SamplingParams(max_tokens=32, seed=0, temperature=0.0)
        waiting[:0] = [Request(f"crowd{n}", (*prompts[0][:5], n), params) for n in range(CROWD)]
        heard, scheduler = _Heard(), Scheduler(built.scheduler_limits)
        e = Engine(scheduler, built.runner, rank.communicator.plans, progress)
        upset = set()
        for _ in range(0 if calm else CROWD):
            e.add(waiting.pop(0))
        while waiting or e.has_work:
            if waiting and (not e.has_work if calm else dice.random() < 0.7):
                e.add(waiting.pop(0))
            if (
                not calm
                and scheduler.counters.preemptions
                and dice.random() < 0.12
                and (open_ := list(scheduler.open_requests.groups))
            ):
                victim = dice.choice(open_)
                upset.add(victim)
                if dice.random() < 0.5:
                    scheduler.cancel(victim)
                else:
                    group = scheduler.open_requests.groups[victim]
                    for sequence in group.sequences[:1]:
                        scheduler.stop_choice(victim, 0, dice.randint(0, sequence.outputs))
            heard.take(e.step())
        e.close()
        assert not scheduler.residency.running
        assert not len(scheduler.waiting)
        counters = scheduler.counters
        reports.append(
            {
                "heard": heard.report(),
                "upset": sorted(upset),
                "preemptions": counters.preemptions,
                "hits": counters.prefix_hits,
                "steps": told(notes),
            }
        )
    return reports or None


def structured(rank: Rank, folder: str, spec: str, overlapped: bool = False) -> list[list[Any]] | None:
    """One request with a grammar beside one without; the tokens and ends of both on rank 0."""
    built = build_on(rank, deployment(folder, rank.size))
    if overlapped:
        built, _ = overlap(built, rank.communicator)
    if rank.rank != 0:
        follow(built.runner, rank.communicator.plans, StepProgress())
        return None
    heard = _Heard()
    e = Engine(Scheduler(built.scheduler_limits), built.runner, rank.communicator.plans, StepProgress())
    eos = built.limits.eos_token_ids
    for number, grammar in enumerate((spec, None)):
        params = SamplingParams(max_tokens=12, seed=number, grammar=grammar, stop_token_ids=eos)
        e.add(Request(f"r{number}", (5, 6, 7), params))
    while e.has_work:
        heard.take(e.step())
    e.close()
    return [[heard.tokens[key], heard.ends[key]] for key in ("r0/0", "r1/0")]


def leave(rank: Rank, folder: str, overlapped: bool = False) -> str:
    """Rank 0 closes in the midst of a request; the other must come to its end in order, with nothing under way."""
    built = build_on(rank, deployment(folder, rank.size))
    if overlapped:
        built, _ = overlap(built, rank.communicator)
    if rank.rank != 0:
        follow(built.runner, rank.communicator.plans, StepProgress())
        assert built.runner.pending_step is None
        return "ended"
    e = Engine(Scheduler(built.scheduler_limits), built.runner, rank.communicator.plans, StepProgress())
    e.add(Request("r", (5, 6, 7), SamplingParams(max_tokens=20, seed=0, temperature=0.0)))
    for _ in range(3):
        e.step()
    assert (built.runner.pending_step is not None) == overlapped
    e.close()
    assert built.runner.pending_step is None
    return "ended"
