"""What tests of latent attention run on ranks: many schedules on one engine, its cache small enough to preempt."""

from __future__ import annotations

import logging
import random
from typing import Any

import engine_cases
import torch
from laddertron.engine.schedule.scheduler import Scheduler
from laddertron.engine.step.engine import Engine, StepProgress
from rank_pool import Rank

LONGEST, VOCAB = 40, 323


def _asked(chance: random.Random, shared: list[list[int]]) -> tuple[list[int], int]:
    """A prompt, often one that begins as others do, and how many tokens it wants."""
    head = chance.choice(shared)[: chance.choice((0, 4, 8, 12, 13))]
    prompt = [*head, *(chance.randrange(6, VOCAB) for _ in range(chance.randrange(1, 12)))]
    return prompt, chance.randrange(1, LONGEST - len(prompt))


def schedules(rank: Rank, folder: str, seed: int, count: int, engine: dict[str, Any]) -> dict[str, Any]:
    """Of `count` random schedules, one after the other: each request's prompt and tokens; how many hits and preemptions
    there were. In the first, four requests with one beginning ask for more positions than the cache has."""
    chance, answers = random.Random(seed), list[tuple[list[int], list[int]]]()
    d = engine_cases.deployment(folder, 1, {"max_model_len": LONGEST}, **engine)
    built = engine_cases.build_on(rank, d)
    runs = Engine(Scheduler(built.scheduler_limits), built.runner, rank.communicator.plans, StepProgress())
    shared = [[chance.randrange(6, VOCAB) for _ in range(16)] for _ in range(6)]
    first, number = [([*shared[0][:12], 6 + i], LONGEST - 13) for i in range(4)], 0
    try:
        for schedule in range(count):
            told: dict[str, tuple[list[int], list[int]]] = {}
            waves = [chance.randrange(1, 4) for _ in range(chance.randrange(1, 4))] if schedule else [3, 1]
            while waves or runs.has_work:
                for _ in range(waves.pop() if waves else 0):
                    prompt, wanted = first.pop() if first else _asked(chance, shared)
                    request = engine_cases.request(number, prompt, max_tokens=wanted)
                    told[request.request_id] = (prompt, [])
                    runs.add(request)
                    number += 1
                for _ in range(chance.randrange(1, 6)):
                    for event in runs.step() if runs.has_work else ():
                        assert event.finish in (None, "length", "stop"), event
                        told[event.request_id][1].extend(event.tokens)
            answers += told.values()
        stats = runs.scheduler.snapshot()
    finally:
        runs.close()
    kept = ("prefix_cache_hits_total", "num_preemptions_total", "spec_decode_num_accepted_tokens_total")
    return {"answers": answers, **{key: stats[key] for key in kept}}


def distances(rank: Rank, folder: str, prompts: list[list[int]], expected: list[list[float]]) -> dict[str, float]:
    """Of this rank's logits from `expected`, row by row: the median and the largest."""
    built = engine_cases.build_on(rank, engine_cases.deployment(folder, rank.size))
    got, want = engine_cases.forward_all(built, prompts), torch.tensor(expected)
    vocab = built.runner.model.shard.vocab
    mine = want[:, vocab.start : vocab.stop]
    each = (got[:, : mine.shape[1]] - mine).abs().amax(1)
    return {"median": each.median().item(), "largest": each.max().item(), "scale": want.abs().max().item()}


def announced(rank: Rank, folder: str) -> list[str]:
    """What the start logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("laddertron.engine.step.build")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        engine_cases.build_on(rank, engine_cases.deployment(folder, 1))
    finally:
        log.removeHandler(handler)
    return lines
