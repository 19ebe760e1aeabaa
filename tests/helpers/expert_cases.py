"""What tests of experts run on ranks: a model whose experts are shared in some way, generating and scoring at once."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import engine_cases
import torch
from laddertron.engine.batch import Batch, Chunk, NewSequence
from laddertron.engine.config.schema import ParallelConfig
from laddertron.engine.request import SamplingParams
from laddertron.engine.sampling.sampler import DesyncError
from laddertron.engine.schedule.scheduler import Scheduler
from laddertron.engine.step.engine import Engine, StepProgress, drain, follow
from laddertron.launchers.rank.rank_status import ExpertRows
from laddertron.topology.comm.collectives import PeerLost
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
    """Greedy tokens (on rank 0), the distance of this rank's logits from `expected`, what it holds of the experts and
    of attention, in elements, and what it counted of experts' rows in the first pass."""
    with rank.connect(per_node, options(parallel)) as communicator:
        d = engine_cases.deployment(folder, rank.size, model, **(engine or {}))
        d = replace(d, parallel=ParallelConfig(tensor_parallel_size=rank.size, **parallel))
        built = engine_cases.build_on(rank, d, communicator)
        counted = ExpertRows((shard := built.runner.model.shard).expert_ids, leads=True)
        built.runner.model.on_rows = counted.add
        logits = engine_cases.forward_all(built, prompts)
        rows = {row.series: (row.value, sum(row.counts)) for row in counted.to_rows()}
        want = load_file(expected)["logits"].float()[:, shard.vocab.start : shard.vocab.stop]
        distance = (logits[:, : want.shape[1]] - want).abs().max().item() if want.shape[1] else 0.0
        built.runner.apply_changes(Batch(len(prompts), (0,), (), (), (), ()))
        requests = [engine_cases.request(i, prompt) for i, prompt in enumerate(prompts)]
        tokens = engine_cases.run_requests(rank, built, communicator, requests)
        accounts = {(e.layer, e.link) for e in communicator.ledger.entries() if e.op == "all_reduce" and e.layer}
    return {
        "tokens": tokens,
        "distance": distance,
        "scale": want.abs().max().item() if want.numel() else 0.0,
        "rows": rows,
        "held": [len(shard.expert_ids), len(shard.expert_ffn), shard.num_heads],
        "accounts": sorted(accounts - {("start-up check", "net"), ("start-up check", "node")}),
    }


def planted(
    rank: Rank, folder: str, prompt: list[int], parallel: dict[str, Any], per_node: int, culprit: int, at: int
) -> tuple[str, int]:
    """One bit of one router's logits, the sign of the largest, is flipped on `culprit` in the forward pass `at`; of a
    model with sparse attention the signs of its first index's weights.
    Returns the error, and how many tokens were released before."""
    stages = parallel.get("pipeline_parallel_size", 1)
    rank.close_kept()
    with rank.connect(per_node, options(parallel), stages) as communicator:
        size = rank.size // stages
        d = engine_cases.deployment(folder, size)
        d = replace(d, parallel=ParallelConfig(tensor_parallel_size=size, **parallel))
        built = engine_cases.build_on(rank, d, communicator)
        first = built.runner.model.layer_products[0]
        index = None if first.latent is None else first.latent.index
        target, name = (first.mixture, "product") if index is None else (index, "weights")
        inner, count = getattr(target, name), iter(range(1 << 30))

        def product(x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = inner(x)
            if next(count) == at and rank.rank == culprit:
                if index is not None:
                    return -logits
                row = logits[0]
                best = int(row.argmax())
                assert row[best] > 0, "the sign must change the order"
                row.view(torch.int32)[best] ^= torch.iinfo(torch.int32).min
            return logits

        object.__setattr__(target, name, product)
        released = 0
        progress = StepProgress()
        try:
            if rank.rank:
                follow(built.runner, communicator.plans, progress)
                return "", 0
            engine = Engine(Scheduler(built.scheduler_limits), built.runner, communicator.plans, progress)
            engine.add(engine_cases.request(0, prompt))
            for event in drain(engine):
                released += len(event.tokens)
            engine.close()
        except (DesyncError, PeerLost) as error:
            return str(error), released
    return "", released


def row_bits(
    rank: Rank, folder: str, prompts: list[list[int]], parallel: dict[str, Any], per_node: int
) -> tuple[list[str], list[str]]:
    """Digests of the logits of each prompt, computed in a step of its own and in one step with all others."""
    with rank.connect(per_node, options(parallel, deterministic=True)) as communicator:
        d = engine_cases.deployment(folder, rank.size, max_num_batched_tokens=256)
        d = replace(d, parallel=ParallelConfig(tensor_parallel_size=rank.size, **parallel))
        built = engine_cases.build_on(rank, d, communicator)
        lengths = [len(prompt) for prompt in prompts]
        alone = torch.split(engine_cases.forward_all(built, prompts), lengths)
        runner, block, chunks, sequences, blocks = built.runner, 0, [], [], []
        params = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
        for slot, prompt in enumerate(prompts):
            needed = -(-(len(prompt) + 1) // runner.size)
            sequences.append(NewSequence(slot, 0, len(prompt), tuple(prompt), params))
            blocks.append((slot, tuple(range(block, block + needed))))
            chunks.append(Chunk(slot, 0, len(prompt), samples=False, prompt_logprobs=True))
            block += needed
        runner.apply_changes(Batch(len(prompts), (0,), tuple(sequences), tuple(blocks), (), tuple(chunks)))
        with torch.inference_mode():
            layout, tokens, wanted = runner.layout_of(chunks)
            together = torch.split(runner.model.forward(tokens, layout, runner.attention, wanted), lengths)
        first, second = ([hashlib.sha256(x.numpy().tobytes()).hexdigest() for x in each] for each in (alone, together))
        return first, second
