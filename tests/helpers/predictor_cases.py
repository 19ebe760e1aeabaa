"""What tests of the predicting layer run on ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from engine_cases import build_on, deployment, request
from laddertron.engine.schedule import speculation
from laddertron.engine.schedule.scheduler import Scheduler
from laddertron.engine.schedule.speculation import SpeculationRule
from laddertron.engine.step.engine import Engine, StepProgress, drain, follow
from laddertron.engine.step.memory import graph_shapes
from laddertron.topology.comm.groups import CommOptions
from rank_pool import Rank
from recorded_graph import TapeRecorder, as_on_a_gpu, build_of_operators, count_calls


def drafts(
    rank: Rank,
    folder: str,
    prompts: list[list[int]],
    stages: int = 1,
    per_node: int | None = None,
    engine: dict[str, Any] | None = None,
    blocks: int = 1 << 20,
    most: int = speculation.MOST,
    every: int = 1,
    poisoned: int | None = None,
    gpu: str = "",
    **params: Any,
) -> dict[str, Any]:
    """Of a rank: for every step with drafts the known ids, then the drafts. Of rank 0: ids by request and choice, and
    counters. Every decode gets `most` drafts, or one out of `every` decodes; at most `blocks` blocks hold keys and
    values. per_node: ranks of a node, if each node has the whole layer. poisoned: an id whose embedding is NaN.
    gpu: how steps are computed, as recorded_graph.generate."""
    opened = rank.connect(per_node, CommOptions(node_group=per_node is not None), stages=stages)
    asked = count()

    def wanted(*_: Any) -> int:
        return most if next(asked) % every == 0 else 0

    with opened as communicator, patch.multiple(speculation.Speculation, wanted=wanted):
        d = deployment(folder, rank.size // stages, None, **{"speculation": "mtp", **(engine or {})})
        d = replace(d, parallel=replace(d.parallel, pipeline_parallel_size=stages))
        if gpu:
            built = build_of_operators(rank, d, communicator)
            eager = count_calls(built.runner.model)
            shapes = graph_shapes(d.engine.max_num_seqs, d.engine.max_num_batched_tokens, speculation.MOST)
            built = as_on_a_gpu(built, communicator, TapeRecorder(), gpu, [], shapes)
        else:
            built, eager = build_on(rank, d, communicator), list[None]()
        if poisoned is not None:
            built.runner.model.embedding.weight.data[poisoned] = torch.nan
        runner, made, progress = built.runner, list[tuple[list[int], list[int]]](), StepProgress()
        if runner.proposer is not None:
            propose = runner.proposer.propose

            def note(step: Any) -> Any:
                proposed, tokens = propose(step), step.tokens
                made.extend((tokens[slot, : step.length[slot]].tolist(), ids) for slot, ids in proposed.items() if ids)
                return proposed

            runner.proposer.propose = note  # type: ignore[method-assign]
        cached = [] if runner.cache.draft_cache is None else runner.cache.draft_cache.tensors
        if rank.rank:
            follow(runner, communicator.plans, progress)
            return {"drafts": made}
        limits = replace(built.scheduler_limits, speculation=SpeculationRule(priced=False))
        scheduler = Scheduler(replace(limits, num_blocks=min(blocks, limits.num_blocks)))
        runs, answers = Engine(scheduler, runner, communicator.plans, progress), dict[str, list[int]]()
        try:
            for number, prompt in enumerate(prompts):
                runs.add(request(number, prompt, **params))
            for event in drain(runs):
                answers.setdefault(f"{event.request_id}/{event.choice}", []).extend(event.tokens)
        finally:
            runs.close()
        stats = scheduler.snapshot()
        return {
            "drafts": made,
            "finite": all(bool(tensor.isfinite().all()) for tensor in cached),
            "answers": answers,
            "eager": len(eager),
            "messages": sum(entry.count for entry in communicator.ledger.entries() if entry.link == "net"),
            "steps": progress.step,
            "preemptions": stats["num_preemptions_total"],
            "hits": stats["prefix_cache_hits_total"],
            "accepted": stats["spec_decode_num_accepted_tokens_total"],
        }
