"""Cases of tests/engine/step/test_deterministic.py: the row check over a deployment with `parallel.deterministic`."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import checkpoints
import torch
from engine_cases import CPU, deployment, request
from laddertron.engine.batch import Batch
from laddertron.engine.config.schema import Deployment
from laddertron.engine.request import Request
from laddertron.engine.schedule.scheduler import Scheduler
from laddertron.engine.step.build import Built, build
from laddertron.engine.step.engine import Engine, StepProgress, follow
from laddertron.engine.step.row_check import RowCheck
from laddertron.models.experts import ExpertProduct
from laddertron.topology.comm.groups import CommOptions, Communicator
from rank_pool import Rank
from torch import Tensor

LONGEST = 48
CROWD = 6


def with_rows(folder: str, size: int, dtype: str, deterministic: Any = True, weights: str = "stored") -> Deployment:
    """Room for 300 sequences."""
    keys = {"max_num_seqs": 300, "max_num_batched_tokens": 512, "kv_cache_memory": 64 << 20}
    d = deployment(folder, size, {"dtype": dtype, "max_model_len": 64, "weights": weights}, **keys)
    return replace(d, parallel=replace(d.parallel, deterministic=deterministic))


def sequences(seed: int) -> list[list[int]]:
    return checkpoints.prompts(24, longest=LONGEST, seed=seed)


def differences(
    rank: Rank,
    folder: str,
    dtype: str,
    cases: int,
    seed: int,
    threads: int = 1,
    weights: str = "stored",
    deterministic: bool = True,
    planted: bool = False,
) -> list[str]:
    """What the check finds, in words. planted: layer 1's MLP is summed in another order from 7 rows on."""
    communicator = rank.connect(None, CommOptions(deterministic=deterministic))
    try:
        torch.set_num_threads(threads)
        d = with_rows(folder, rank.size, dtype, deterministic, weights)
        built = build(d, communicator, CPU)
        if planted:
            plant(built)
        check = RowCheck(built.runner, sequences(seed))
        return [str(found) for found in check.run(cases, seed) if found is not None]
    finally:
        communicator.close()


def served(rank: Rank, folder: str, dtype: str, cases: int, seed: int, threads: int, **how: Any) -> dict[str, Any]:
    """Answers' tokens and digests through the real scheduler, on rank 0: each request alone; then, with the weights
    loaded anew, another number of threads and few KV blocks, in random company, sizes of steps and orders of arrival.
    Prompts share beginnings, so that the prefix cache is hit."""
    random = Random(seed)
    common = [random.randrange(2, 300) for _ in range(24)]
    prompts = [common[: random.randrange(25)] + p for p in checkpoints.prompts(20, longest=30, seed=seed)]
    prompts += [random.choices(range(2, 300), k=8) for _ in range(CROWD)]
    prompts += [[*common, number + 2] for number in range(2)]
    draws = {"logprobs": 0, "return_digest": True}
    requests = [
        request(i, p, max_tokens=random.randrange(1, 14), temperature=i % 2, n=random.choice((1, 1, 2)), **draws)
        for i, p in enumerate(prompts[:20])
    ] + [request(i, p, max_tokens=13, temperature=i % 2, **draws) for i, p in enumerate(prompts[20:], 20)]
    communicator = rank.connect(None, CommOptions(deterministic=True))
    try:
        alone: dict[str, Any] = {}
        built = build(with_rows(folder, rank.size, dtype, **how), communicator, CPU)
        for one in requests:
            alone |= _answers(rank, built, communicator, [one])[0]
        torch.set_num_threads(threads)
        built = build(with_rows(folder, rank.size, dtype, **how), communicator, CPU)
        wrong, preempted, cached = [], 0.0, 0.0
        for case in range(cases):
            some = random.sample(requests, random.randrange(2, len(requests)))
            limits = replace(
                built.scheduler_limits,
                max_num_batched_tokens=random.choice((20, 33, 64, 512)),
                max_num_seqs=random.choice((5, 20)),
                num_blocks=random.choice((18, 40)),
                enable_prefix_caching=random.random() < 0.8,
            )
            pace: Random | None = random
            if case == 0:  # six of 2 blocks enter at once and leave 6 of 18; each grows by 3: one is preempted
                some, pace = requests[20 : 20 + CROWD], None
                limits = replace(limits, max_num_batched_tokens=512, max_num_seqs=20, num_blocks=18)
            elif case == 1:  # the second begins as the first did, and enters after its end
                some = requests[20 + CROWD :]
                limits = replace(limits, max_num_seqs=1, num_blocks=40, enable_prefix_caching=True)
            found, counters = _answers(rank, replace(built, scheduler_limits=limits), communicator, some, pace)
            wrong += [f"case {case}: {key}" for key, answer in found.items() if answer != alone[key]]
            preempted += counters.get("num_preemptions_total", 0.0)
            cached += counters.get("prefix_cache_hits_total", 0.0)
        return {"wrong": wrong, "preempted": preempted, "cached": cached, "answers": len(alone)}
    finally:
        torch.set_num_threads(1)
        communicator.close()


def _answers(
    rank: Rank, built: Built, communicator: Communicator, requests: list[Request], random: Random | None = None
) -> tuple[dict[str, Any], dict[str, float]]:
    """Every choice's ids with the digests behind them, and the scheduler's counters; nothing on other ranks."""
    runner = built.runner
    # what was not released at the end of the run before
    runner.apply_changes(Batch(0, tuple(range(len(runner.length)))))
    if rank.rank != 0:
        follow(runner, communicator.plans, StepProgress())
        return {}, {}
    engine = Engine(Scheduler(built.scheduler_limits), runner, communicator.plans, StepProgress())
    found: dict[str, Any] = {}
    waiting = list(requests)
    while waiting or engine.has_work:
        while waiting and (random is None or not engine.has_work or random.random() < 0.5):
            engine.add(waiting.pop())
        for event in engine.step():
            assert event.finish in (None, "stop", "length"), event.message
            scores = event.logprobs or ()
            found.setdefault(f"{event.request_id}.{event.choice}", []).extend(
                (s.token, s.digest, s.logprob, s.top) for s in scores
            )
    engine.close()
    return found, engine.scheduler.snapshot()


def digests(
    rank: Rank, folder: str, dtype: str, seed: int, per_node: int, comm: dict[str, Any], weights: str = "stored"
) -> list[Any]:
    """RowCheck's of every sequence, under `everywhere`."""
    communicator = rank.connect(per_node, CommOptions(deterministic="everywhere", **comm))
    try:
        built = build(with_rows(folder, rank.size, dtype, "everywhere", weights), communicator, CPU)
        check = RowCheck(built.runner, sequences(seed)[:6])
        return [check.digests(sequence) for sequence in range(6)]
    finally:
        communicator.close()


def scores(rank: Rank, folder: str, dtype: str, seed: int, vocab: int) -> dict[str, Any]:
    """On rank 0 what requests of all filters draw and score, under `everywhere`."""
    communicator = rank.connect(None, CommOptions(deterministic="everywhere"))
    try:
        built = build(with_rows(folder, rank.size, dtype, "everywhere"), communicator, CPU)
        filters: list[dict[str, Any]] = [{}, {"top_p": 0.7}, {"min_p": 0.01}, {"top_p": 0.95, "top_k": 90}]
        prompts = checkpoints.prompts(8, longest=20, seed=seed, vocab=vocab)
        asked = [
            request(i, p, max_tokens=8, temperature=1.0, logprobs=3, **filters[i % 4]) for i, p in enumerate(prompts)
        ]
        return _answers(rank, built, communicator, asked)[0]
    finally:
        communicator.close()


def plant(built: Built) -> None:
    """Layer 1's MLP, or of experts what an expert adds, has another last bit from 7 of its rows on."""
    layers = built.runner.model.layer_products
    if (mixture := layers[1].mixture) is not None:
        layers[1] = replace(layers[1], mixture=replace(mixture, experts=crowded(mixture.experts)))
        return
    right = layers[1].mlp
    assert right is not None

    def crowded_mlp(x: Tensor) -> Tensor:
        y = right(x)
        return y if len(y) < 7 else y.nextafter(torch.full_like(y, torch.inf))

    layers[1] = replace(layers[1], mlp=crowded_mlp)


def crowded(right: ExpertProduct) -> ExpertProduct:
    def experts(x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        y = right(x, chosen, weight)
        crowd = (chosen[chosen >= 0].bincount() >= 7).nonzero()
        hit = torch.isin(chosen, crowd).any(1, keepdim=True)
        return torch.where(hit, y.nextafter(torch.full_like(y, torch.inf)), y)

    return experts
