"""What tests of experts run on ranks: a model whose experts are shared in some way, generating and scoring at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import engine_cases
import torch
from laddertron.engine.config.schema import ParallelConfig
from laddertron.topology.comm.groups import CommOptions
from rank_pool import Rank
from safetensors.torch import load_file


def options(parallel: dict[str, Any], **comm: Any) -> CommOptions:
    return CommOptions(node_group=parallel.get("dense_path") == "node", **comm)


def answers(
    rank: Rank,
    folder: str,
    prompts: list[list[int]],
    expected: str,
    parallel: dict[str, Any],
    per_node: int | None = None,
    model: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Greedy tokens (on rank 0), the distance of this rank's logits from `expected`, and what it holds of the experts
    and of attention, in elements."""
    with rank.connect(per_node, options(parallel)) as communicator:
        d = engine_cases.deployment(folder, rank.size, model, **(engine or {}))
        d = replace(d, parallel=ParallelConfig(tensor_parallel_size=rank.size, **parallel))
        built = engine_cases.build_on(rank, d, communicator)
        logits = engine_cases.forward_all(built, prompts)
        shard = built.runner.model.shard
        want = load_file(expected)["logits"].float()[:, shard.vocab.start : shard.vocab.stop]
        distance = (logits[:, : want.shape[1]] - want).abs().max().item() if want.shape[1] else 0.0
        built.runner._apply(engine_cases.Batch(len(prompts), (0,), (), (), (), ()))
        requests = [engine_cases.request(i, prompt) for i, prompt in enumerate(prompts)]
        tokens = engine_cases.run_requests(rank, built, communicator, requests)
        accounts = {(e.layer, e.link) for e in communicator.ledger.entries() if e.op == "all_reduce" and e.layer}
    return {
        "tokens": tokens,
        "distance": distance,
        "scale": want.abs().max().item() if want.numel() else 0.0,
        "held": [len(shard.expert_ids), len(shard.expert_ffn), shard.num_heads],
        "accounts": sorted(accounts - {("start-up check", "net"), ("start-up check", "node")}),
    }


def logits_bits(rank: Rank, folder: str, prompts: list[list[int]], parallel: dict[str, Any], per_node: int) -> str:
    """A digest of this rank's logits."""
    with rank.connect(per_node, options(parallel)) as communicator:
        d = engine_cases.deployment(folder, rank.size)
        d = replace(d, parallel=ParallelConfig(tensor_parallel_size=rank.size, **parallel))
        built = engine_cases.build_on(rank, d, communicator)
        return str(torch.hash_tensor(engine_cases.forward_all(built, prompts)).item())
