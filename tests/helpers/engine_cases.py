"""What tests run on ranks: build a deployment's share on a communicator, generate, compare logits. Arguments and
results are JSON (tests/helpers/rank_pool.py)."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from laddertron.engine.batch import Batch, Chunk, NewSequence
from laddertron.engine.config.schema import Deployment, ModelSection, ParallelConfig
from laddertron.engine.config.schema import EngineConfig as EngineKeys
from laddertron.engine.request import Request, SamplingParams
from laddertron.engine.schedule.scheduler import Scheduler
from laddertron.engine.step.build import Built, build
from laddertron.engine.step.engine import Engine, StepProgress, drain, follow
from laddertron.topology.comm.groups import CommOptions, Communicator
from laddertron.topology.json_codec import build as build_section
from rank_pool import Rank
from safetensors.torch import load_file, save_file

CPU = torch.device("cpu")


def deployment(folder: str, size: int, model: dict[str, Any] | None = None, **engine: Any) -> Deployment:
    keys = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4, "kv_cache_memory": 8 << 20} | engine
    return Deployment(
        model=ModelSection(path=folder, **(model or {})),
        parallel=ParallelConfig(tensor_parallel_size=size),
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
    progress = StepProgress()
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
    parallel: dict[str, Any] | None = None,
    logits: str | None = None,
) -> dict[str, list[list[int]]] | None:
    """Greedy unless `params` say otherwise; `comm` are CommOptions' keywords, `parallel` the section's keys. Into the
    folder `logits` each rank first writes its logits of the prompts (`read_logits`)."""
    stages = (parallel or {}).get("pipeline_parallel_size", 1)
    if stages > 1:
        rank.close_kept()
    alone = not comm and not per_node and stages == 1
    own = None if alone else rank.connect(per_node, CommOptions(**(comm or {})), stages)
    communicator = own or rank.communicator
    try:
        d = deployment(folder, rank.size // stages, model, **(engine or {}))
        if comm:
            known = {k: v for k, v in comm.items() if k in ("overlap", "deterministic")}
            d = replace(d, parallel=replace(d.parallel, **known))
        d = replace(d, parallel=build_section(ParallelConfig, asdict(d.parallel) | (parallel or {})))
        built = build_on(rank, d, communicator)
        if logits is not None:
            save_file({"logits": forward_all(built, prompts)}, Path(logits) / f"{rank.rank}.safetensors")
            built.runner.apply_changes(Batch(len(prompts), (0,), (), (), (), ()))
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
        runner.apply_changes(batch)
        with torch.inference_mode():
            layout, tokens, wanted = runner.layout_of([chunk])
            rows.append(runner.model.forward(tokens, layout, runner.attention, wanted))
    return torch.cat(rows)


def read_logits(folder: Path, size: int, vocab: int) -> torch.Tensor:
    """What `size` ranks of `generate` wrote, [positions, vocab]: ranks hold consecutive ids, the last some padding."""
    return torch.cat([load_file(folder / f"{rank}.safetensors")["logits"] for rank in range(size)], -1)[:, :vocab]


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


def logits_digest(
    rank: Rank, folder: str, prompts: list[list[int]], comm: dict[str, Any], per_node: int, stages: int = 1
) -> str:
    """Of the exact bits of this rank's logits; on stages before the last, of the hidden rows that it sends."""
    if stages > 1:
        rank.close_kept()
    communicator = rank.connect(per_node, CommOptions(**comm), stages)
    try:
        d = deployment(folder, rank.size // stages)
        d = replace(d, parallel=replace(d.parallel, pipeline_parallel_size=stages))
        if comm.get("deterministic"):
            d = replace(d, parallel=replace(d.parallel, deterministic=True))
        built = build_on(rank, d, communicator)
        bits = forward_all(built, prompts).contiguous().numpy().tobytes()
        return hashlib.sha256(bits).hexdigest()
    finally:
        communicator.close()
