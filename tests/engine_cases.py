"""What tests run on ranks: build a deployment's share on a communicator, generate, compare logits. Arguments and
results are JSON (tests/rank_pool.py)."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch
from laddertron.engine.batch import Batch, Chunk, NewSequence
from laddertron.engine.build import Built, build
from laddertron.engine.config_schema import Deployment, Model, Parallel
from laddertron.engine.config_schema import Engine as EngineKeys
from laddertron.engine.engine import Engine, Progress, drain, follow
from laddertron.engine.request import Request, SamplingParams
from laddertron.engine.scheduler import Scheduler
from laddertron.topology.groups import CommOptions, Communicator
from rank_pool import Rank
from safetensors.torch import load_file

CPU = torch.device("cpu")


def deployment(folder: str, size: int, model: dict[str, Any] | None = None, **engine: Any) -> Deployment:
    keys = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4, "kv_cache_memory": 8 << 20} | engine
    return Deployment(
        model=Model(path=folder, **(model or {})),
        parallel=Parallel(tensor_parallel_size=size),
        engine=EngineKeys(**keys),
    )


def build_on(rank: Rank, d: Deployment, communicator: Communicator | None = None) -> Built:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    return build(d, communicator or rank.communicator, CPU)


def request(number: int, prompt: list[int], **params: Any) -> Request:
    defaults: dict[str, Any] = {"max_tokens": 32, "seed": number, "temperature": 0.0}
    if "stop_token_ids" in params:
        params["stop_token_ids"] = tuple(params["stop_token_ids"])
    return Request(f"r{number}", tuple(prompt), SamplingParams(**defaults | params))


def run_requests(
    rank: Rank, built: Built, communicator: Communicator, requests: list[Request]
) -> dict[str, list[list[int]]] | None:
    """Tokens of every choice by request id, on rank 0; None elsewhere."""
    progress = Progress()
    if rank.rank != 0:
        follow(built.runner, communicator.plans, progress)
        return None
    engine = Engine(Scheduler(built.scheduler_limits), built.runner, communicator.plans, progress)
    tokens: dict[str, list[list[int]]] = {r.request_id: [[] for _ in range(r.params.n)] for r in requests}
    ends: dict[str, list[str]] = {r.request_id: [""] * r.params.n for r in requests}
    try:
        for r in requests:
            engine.add(r)
        for event in drain(engine):
            assert event.start == len(tokens[event.request_id][event.choice])
            tokens[event.request_id][event.choice].extend(event.tokens)
            if event.finish is not None:
                assert ends[event.request_id][event.choice] == "", "a choice ended twice"
                ends[event.request_id][event.choice] = event.finish
    finally:
        engine.close()
    assert all(end in ("stop", "length") for each in ends.values() for end in each), ends
    return tokens


def generate(
    rank: Rank,
    folder: str,
    prompts: list[list[int]],
    model: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    params: dict[str, Any] | None = None,
    comm: dict[str, Any] | None = None,
    per_node: int | None = None,
) -> dict[str, list[list[int]]] | None:
    """Greedy unless `params` say otherwise; `comm` are CommOptions' keywords."""
    own = rank.connect(per_node, CommOptions(**(comm or {}))) if comm or per_node else None
    communicator = own or rank.communicator
    try:
        d = deployment(folder, rank.size, model, **(engine or {}))
        if comm:
            known = {k: v for k, v in comm.items() if k in ("overlap", "deterministic")}
            d = replace(d, parallel=replace(d.parallel, **known))
        built = build_on(rank, d, communicator)
        requests = [request(i, prompt, **(params or {})) for i, prompt in enumerate(prompts)]
        return run_requests(rank, built, communicator, requests)
    finally:
        if own is not None:
            own.close()


def forward_all(built: Built, prompts: list[list[int]]) -> torch.Tensor:
    """This rank's logits [tokens, V / tp] of every position of every prompt, each prompt in a step of its own."""
    runner, rows = built.runner, []
    for step, prompt in enumerate(prompts):
        sequence = NewSequence(0, 0, len(prompt), tuple(prompt), SamplingParams(max_tokens=1, seed=0, temperature=0.0))
        needed = -(-(len(prompt) + 1) // runner.size)
        chunk = Chunk(0, 0, len(prompt), samples=False, prompt_logprobs=True)
        batch = Batch(step, (0,) if step else (), (sequence,), ((0, tuple(range(needed))),), (), (chunk,))
        runner._apply(batch)
        with torch.inference_mode():
            layout, tokens, wanted = runner._layout([chunk])
            rows.append(runner.model.forward(tokens, layout, runner.attention, wanted))
    return torch.cat(rows)


def logits_distance(
    rank: Rank, folder: str, prompts: list[list[int]], expected: str, model: dict[str, Any] | None = None
) -> dict[str, float]:
    """Largest distance of this rank's logits from the rows of `expected` (a safetensors file), and top-1 agreement."""
    built = build_on(rank, deployment(folder, rank.size, model))
    got = forward_all(built, prompts)
    want = load_file(expected)["logits"].float()
    vocab = built.runner.model.shard.vocab
    mine = want[:, vocab.start : min(vocab.stop, want.shape[1])]
    return {"distance": (got[:, : mine.shape[1]] - mine).abs().max().item(), "scale": want.abs().max().item()}


def logits_digest(rank: Rank, folder: str, prompts: list[list[int]], comm: dict[str, Any], per_node: int) -> str:
    """Of the exact bits of this rank's logits."""
    communicator = rank.connect(per_node, CommOptions(**comm))
    try:
        built = build_on(rank, deployment(folder, rank.size), communicator)
        bits = forward_all(built, prompts).contiguous().numpy().tobytes()
        return hashlib.sha256(bits).hexdigest()
    finally:
        communicator.close()
