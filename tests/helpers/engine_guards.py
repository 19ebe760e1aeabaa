"""What tests/engine/step/test_runner.py runs on ranks: an engine with a poisoned weight, with a rank that draws another
token, with a grammar. Arguments and results are JSON."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any
from unittest import mock

from engine_cases import build_on, deployment
from laddertron.engine.batch import decode
from laddertron.engine.request import Request, SamplingParams
from laddertron.engine.sampling import device_sampler as device_draw
from laddertron.engine.sampling import step as sampling_step
from laddertron.engine.sampling.sampler import DesyncError
from laddertron.engine.sampling.slots import Sampled
from laddertron.engine.sampling.step import Step
from laddertron.engine.schedule.scheduler import Scheduler
from laddertron.engine.step.build import Built
from laddertron.engine.step.engine import Engine, StepProgress, follow
from laddertron.topology.comm.collectives import CollectiveTimeout, CommunicationError
from laddertron.topology.comm.groups import Communicator
from overlapped import overlap, told
from rank_pool import Rank
from recorded_graph import parts_of
from torch import Tensor

Told = dict[str, dict[str, Any]]


def _run(built: Built, communicator: Communicator, requests: list[Request]) -> Told:
    """Rank 0: what was told of each choice ("id/choice"), and the error that ended the engine, if one did."""
    engine = Engine(Scheduler(built.scheduler_limits), built.runner, communicator.plans, StepProgress())
    told: Told = {}
    for r in requests:
        engine.add(r)
    try:
        while engine.has_work:
            for event in engine.step():
                choice = told.setdefault(f"{event.request_id}/{event.choice}", {"tokens": []})
                choice["tokens"].extend(event.tokens)
                if event.finish is not None:
                    choice |= {"finish": event.finish, "message": event.message}
    finally:
        engine.close()
    return told


def _requests(asked: list[dict[str, Any]]) -> list[Request]:
    out = []
    for number, fields in enumerate(asked):
        fields = {"max_tokens": 8, "seed": number, "temperature": 0.0} | fields
        prompt = tuple(fields.pop("prompt"))
        if "stop_token_ids" in fields:
            fields["stop_token_ids"] = tuple(fields["stop_token_ids"])
        out.append(Request(f"r{number}", prompt, SamplingParams(**fields)))
    return out


def answer(
    rank: Rank,
    folder: str,
    asked: list[dict[str, Any]],
    poisoned: int | None = None,
    model: dict[str, Any] | None = None,
    overlapped: bool = False,
    stages: int = 1,
    microbatches: int | None = None,
    **engine: Any,
) -> Told | None:
    """Answers to `asked` (a prompt and sampling parameters each). poisoned: a token whose embedding is NaN.
    overlapped: steps do, over the attention that allows for it. Nothing of the poison is left in the cache."""
    d = deployment(folder, rank.size // stages, model, **engine)
    if stages > 1:
        rank.close_kept()
        d = replace(d, parallel=replace(d.parallel, pipeline_parallel_size=stages, pipeline_microbatches=microbatches))
    communicator = rank.communicator if stages == 1 else rank.connect(stages=stages)
    built = build_on(rank, d, communicator)
    if overlapped:
        built, notes = overlap(built, communicator, **parts_of(built))
    if poisoned is not None and built.runner.model.shard.embeds:
        table = built.runner.model.embedding_table()
        first = built.runner.model.shard.vocab.start
        if first <= poisoned < first + table.shape[0]:
            table[poisoned - first] = float("nan")
    found = None
    if rank.rank == 0:
        found = _run(built, communicator, _requests(asked))
        assert not overlapped or told(notes)["late"] > 10
    else:
        follow(built.runner, communicator.plans, StepProgress())
    cache = built.runner.cache
    assert all(bool(x.isfinite().all()) for x in (*cache.keys, *cache.values))
    if stages > 1:
        communicator.close()
    return found


def disagree(
    rank: Rank, folder: str, asked: list[dict[str, Any]], liar: int, step: int, overlapped: bool
) -> dict[str, Any]:
    """Rank `liar` draws other tokens at its sampling step `step`. What ended this rank's loop; on rank 0 what was told
    by then."""
    with rank.connect() as communicator:
        built = build_on(rank, deployment(folder, rank.size), communicator)
        if overlapped:
            built, _ = overlap(built, communicator)
        honest, decided, steps = Step.run, device_draw.best_of_ranks, [0]

        def run(self: Step) -> Sampled:
            sampled = honest(self)
            steps[0] += 1
            if rank.rank == liar and steps[0] == step + 1:
                sampled.ids[0] = (sampled.ids[0] + 1) % 5
            return sampled

        def winner(every: Tensor) -> tuple[Tensor, Tensor]:
            ids, bad = decided(every)
            steps[0] += 1
            return ((ids + 1) % 5 if rank.rank == liar and steps[0] == step + 1 else ids), bad

        shown: Told = {}
        there = mock.patch.object(device_draw, "best_of_ranks", winner)
        with there, mock.patch.object(sampling_step.Step, "run", run):
            try:
                if rank.rank == 0:
                    engine = Engine(Scheduler(built.scheduler_limits), built.runner, communicator.plans, StepProgress())
                    for r in _requests(asked):
                        engine.add(r)
                    while engine.has_work:
                        for event in engine.step():
                            shown.setdefault(event.request_id, {"tokens": []})["tokens"].extend(event.tokens)
                else:
                    follow(built.runner, communicator.plans, StepProgress())
            except DesyncError as error:
                return {"ranks": list(error.ranks), "step": error.step, "ran": steps[0], "told": shown}
        return {"ranks": None, "told": shown}


def fall_silent(rank: Rank, folder: str, asked: list[dict[str, Any]], steps: int, least: float) -> dict[str, Any]:
    """Rank 1 runs some steps and then none. What ended rank 0, with its longest step and the timeout that it led to."""
    with rank.connect() as communicator:
        built = build_on(rank, deployment(folder, rank.size), communicator)
        timeouts = built.runner.timeouts
        assert timeouts is not None
        if rank.rank != 0:
            for _ in range(steps):
                built.runner.run(decode(communicator.plans.receive()))
            with contextlib.suppress(CommunicationError):
                while communicator.plans.receive():
                    pass
            return {}
        engine = Engine(Scheduler(built.scheduler_limits), built.runner, communicator.plans, StepProgress())
        for r in _requests(asked):
            engine.add(r)
        for _ in range(steps - 1):
            engine.step()
        timeouts.least = least
        try:
            while engine.has_work:
                engine.step()
        except CollectiveTimeout as error:
            longest = max(timeouts.longest.values())
            return {"message": str(error), "peer": error.peer, "timeout": timeouts.set_to, "longest": longest}
        return {"message": "it ended as if nothing were wrong"}
