"""The measurements of `laddertron bench` on rank 0's engine: fixed batches for latency, a mix of requests for
throughput. Times are of whole engine steps, prefill and decode separately.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Any

from ...engine.request import Request, SamplingParams
from ...engine.step.engine import Engine
from ..plan.roofline import distinct_experts

FIRST_ID = 3


@dataclass(frozen=True, slots=True)
class Case:
    """`batch` requests at once, each of `prompt` random tokens and `generate` new ones."""

    batch: int
    prompt: int
    generate: int


@dataclass(frozen=True, slots=True)
class Timing:
    """One run of a case. prefill_s: steps that computed prompts; decode_s and decode_tokens: steps in which every
    sequence took one token; step_s: the median of these."""

    prefill_s: float
    prompt_tokens: int
    decode_s: float
    decode_tokens: int
    step_s: float


def random_prompt(dice: random.Random, vocab: int, length: int) -> tuple[int, ...]:
    return tuple(dice.randrange(min(FIRST_ID, vocab - 1), vocab) for _ in range(length))


def run_case(engine: Engine, case: Case, vocab: int, seed: int, top_p: float = 1.0) -> Timing:
    """One run of prompts that no earlier seed had (a prefix cache would compute nothing): greedily, or with top_p."""
    dice = random.Random(seed)
    heat = 0.0 if top_p == 1.0 else 0.8
    for number in range(case.batch):
        params = SamplingParams(max_tokens=case.generate, seed=number, temperature=heat, top_p=top_p)
        engine.add(Request(f"bench-{seed}-{number}", random_prompt(dice, vocab, case.prompt), params))
    if engine.scheduler.limits.microbatches > 1:
        return _by_tokens(engine, case)
    prefill = 0.0
    decode: list[float] = []
    last = time.perf_counter()
    while engine.has_work:
        before = engine.progress.step
        engine.step()
        if engine.progress.step == before:
            continue  # where steps overlap, one was set off: it ends with a later call
        took, last = time.perf_counter() - last, time.perf_counter()
        if engine.progress.last_tokens > case.batch or (not decode and engine.progress.last_tokens < case.batch):
            prefill += took
        elif engine.progress.last_tokens == case.batch:
            decode.append(took)
    if case.prompt == 1 and decode:
        prefill = decode.pop(0)
    step = statistics.median(decode) if decode else 0.0
    return Timing(prefill, case.batch * case.prompt, sum(decode), case.batch * len(decode), step)


def _by_tokens(engine: Engine, case: Case) -> Timing:
    """Times a pipeline, whose steps are parts of the batch and overlap: prompts until every sequence has a token,
    decoding from then until the first one has all. step_s: between two tokens of a sequence."""
    came: dict[str, list[float]] = defaultdict(list)
    began = time.perf_counter()
    while engine.has_work:
        events, now = engine.step(), time.perf_counter()
        for event in events:
            came[event.request_id] += [now] * len(event.tokens)
    full, end = max(times[0] for times in came.values()), min(times[-1] for times in came.values())
    decoding = [[at for at in times if full <= at <= end] for times in came.values()]
    between = [b - a for times in decoding for a, b in pairwise(times)]
    tokens = sum(at > full for times in decoding for at in times)
    step = statistics.median(between) if between else 0.0
    return Timing(full - began, case.batch * case.prompt, max(0.0, end - full), tokens, step)


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a mix: prompt ids, tokens to generate, seconds after the start at which it arrives."""

    prompt: tuple[int, ...]
    generate: int
    at: float = 0.0


def random_mix(
    count: int, prompt: tuple[int, int], generate: tuple[int, int], rate: float | None, vocab: int, seed: int
) -> list[Item]:
    """Lengths uniform in the inclusive ranges; arrivals at random (Poisson) at `rate` a second, None: all at once."""
    dice, at, items = random.Random(seed), 0.0, []
    for _ in range(count):
        at += dice.expovariate(rate) if rate else 0.0
        items.append(Item(random_prompt(dice, vocab, dice.randint(*prompt)), dice.randint(*generate), at))
    return items


@dataclass(frozen=True, slots=True)
class MixTiming:
    """One run of a mix, in seconds: the whole, and of each request the time to its first token, between its tokens
    (mean) and to its end."""

    total_s: float
    prompt_tokens: int
    generated_tokens: int
    steps: int
    first_s: list[float]
    between_s: list[float]
    end_s: list[float]


def run_mix(engine: Engine, items: Sequence[Item], name: str) -> MixTiming:
    """Every request to its end: what is drawn does not end one early."""
    waiting = sorted(enumerate(items), key=lambda pair: pair[1].at)
    first: dict[int, float] = {}
    end: dict[int, float] = {}
    tokens = [0] * len(items)
    steps, started, behind = engine.progress.step, time.perf_counter(), 0
    while behind < len(waiting) or engine.has_work:
        now = time.perf_counter() - started
        while behind < len(waiting) and waiting[behind][1].at <= now:
            number, item = waiting[behind]
            params = SamplingParams(max_tokens=item.generate, seed=number, temperature=0.0)
            engine.add(Request(f"{name}-{number}", item.prompt, params))
            behind += 1
        if not engine.has_work:
            time.sleep(waiting[behind][1].at - now)  # nothing happens until the next one arrives
            continue
        events = engine.step()
        now = time.perf_counter() - started
        for event in events:
            number = int(event.request_id.rpartition("-")[2])
            tokens[number] += len(event.tokens)
            if event.tokens:
                first.setdefault(number, now)
            if event.finish is not None:
                end[number] = now
    return MixTiming(
        total_s=time.perf_counter() - started,
        prompt_tokens=sum(len(item.prompt) for item in items),
        generated_tokens=sum(tokens),
        steps=engine.progress.step - steps,
        first_s=[first[i] - items[i].at for i in first],
        between_s=[(end[i] - first[i]) / (tokens[i] - 1) for i in first if tokens[i] > 1],
        end_s=[end[i] - items[i].at for i in end],
    )


def step_bytes(about: Mapping[str, Any], case: Case) -> float:
    """Bytes that a decode step of the case must read, on average over its generation: the weights in each micro-batch
    of a pipeline, of experts those that its rows are expected to choose, and keys and values."""
    parts, weights, kv_bytes = (
        min(int(about["microbatches"]), case.batch),
        float(about["weights"]),
        about["kv_per_token"],
    )
    if about["experts"]:
        expert_weights, count, chosen = about["experts"]
        weights -= float(expert_weights * (1.0 - distinct_experts(count, chosen, ceil(case.batch / parts)) / count))
    return parts * weights + float(kv_bytes * case.batch * (case.prompt + case.generate / 2))


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, lowest, highest."""
    return statistics.median(values), min(values), max(values)


def interleaved(cases: int, repeats: int) -> Iterator[tuple[int, int]]:
    """(repeat, case): each repeat goes through all cases, every other one backwards, so that a machine that drifts
    drifts alike under all of them."""
    for repeat in range(repeats):
        order = range(cases) if repeat % 2 == 0 else range(cases - 1, -1, -1)
        for case in order:
            yield repeat, case
