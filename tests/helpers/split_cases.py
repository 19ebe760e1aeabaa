"""Cases of tests/engine/test_split_steps.py and test_drafted_answers.py: requests of all kinds through a deployment,
with what they answer."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any

import checkpoints
from engine_cases import build_on, deployment, request
from laddertron.engine.batch import Batch
from laddertron.engine.openai.structured_output import GrammarFields, grammar_of
from laddertron.engine.request import Request
from laddertron.engine.sampling import grammar
from laddertron.engine.schedule.scheduler import Scheduler
from laddertron.engine.schedule.speculation import MOST, SpeculationRule
from laddertron.engine.schedule.split import SplitRule
from laddertron.engine.step.engine import Engine, StepProgress, follow
from laddertron.engine.step.memory import graph_shapes
from laddertron.models.cuda.flashinfer import FlashInferAttention, FlashInferRows
from laddertron.topology.comm.groups import CommOptions
from overlapped import told as told_of
from rank_pool import Rank
from recorded_graph import TapeRecorder, as_on_a_gpu, build_of_operators, count_calls
from tokenizers import Tokenizer

CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "min_p": 0.02, "logprobs": 3},
    {"n": 2, "temperature": 1.0},
    {"logprobs": 2, "prompt_logprobs": 2},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "temperature": 0.8},
]
LARGE = 8
GRAMMARS = ["(ab|ba|abc)*", "[a-z ]{3,40}", "(one|two), (one|two), three"] if grammar.available else []
CLOSE = "]"
"""Ends the reasoning before some grammars; drawn after a few tokens."""


def requests(seed: int, most: int, close: int) -> list[Request]:
    """Two dozen: prompts of up to 90 tokens, half of them with a common beginning; answers of up to `most`. For any
    seed the second takes two steps of 48 tokens. So it has computed two blocks before the fourth enters, whose prompt
    has the same first 8 tokens."""
    dice = Random(seed)
    common = dice.choices(range(6, checkpoints.VOCAB), k=40)
    prompts = checkpoints.prompts(24, longest=90, seed=seed + 1)
    made = []
    for number, prompt in enumerate(prompts):
        begins = common[: dice.randrange(40)] if number % 2 else []
        params = dice.choice(CASES) | {"max_tokens": dice.randrange(1, most)}
        if number in (1, 3):
            begins, params = common[:8], {"max_tokens": most}
            prompt = prompt if number == 3 else dice.choices(range(6, checkpoints.VOCAB), k=60)
        if GRAMMARS and number % 4 == 2:
            params |= {"grammar": grammar_of(GrammarFields(guided_regex=dice.choice(GRAMMARS))), "max_tokens": most}
            if number % 8 == 2:
                preamble = {"reasoning": ["[", CLOSE], "thinking": True, "calls": []}
                params["grammar"] = f'{{"preamble":{json.dumps(preamble)},{params["grammar"][1:]}'
                params |= {"logit_bias": ((close, 4.0),), "temperature": 1.0}
        if number % 6 == 3:  # three ids over and over: some drafts are right
            params |= {"allowed_token_ids": (5, 6, 7), "max_tokens": most, "temperature": dice.choice((0.0, 1.0))}
        elif number % 5 == 0:
            params["stop_token_ids"] = dice.sample(range(300), 20)
        made.append(request(number, (begins + prompt)[:90], **params))
    return made


def answers(
    rank: Rank,
    folder: str,
    seed: int,
    split: str = "never",
    speculation: str | bool = False,
    most: int = 12,
    seats: int = 12,
    deterministic: bool = True,
    draft: str | None = None,
    overlap: bool = True,
    blocks: int = 256,
    stages: int = 1,
    microbatches: int | None = None,
    budget: int = 48,
    gpu: str = "",
) -> dict[str, Any] | None:
    """Of rank 0, with a KV cache of so many blocks at most: steps in all, counters, how many answers reach a grammar
    after reasoning, and by request and choice the ids, what they scored and how it ended. Requests enter two at a time,
    so that steps mix prompts with decodes. gpu: "eager", "recorded" or "overlapped", as recorded_graph.generate; then
    scores are left out, and there is how the steps were computed."""
    with rank.connect(None, CommOptions(deterministic=deterministic, overlap=overlap), stages=stages) as communicator:
        keys: dict[str, Any] = {"max_num_seqs": seats, "max_num_batched_tokens": budget, "kv_cache_memory": 1 << 20}
        d = deployment(folder, rank.size // stages, None, speculation=speculation, draft_model=draft, **keys)
        parallel = replace(d.parallel, split_steps=split, deterministic=deterministic, overlap=overlap)  # type: ignore[arg-type]
        if stages > 1:
            parallel = replace(parallel, pipeline_parallel_size=stages, pipeline_microbatches=microbatches)
        notes, recorder, eager = list[str](), TapeRecorder(), list[None]()
        if gpu:
            built = build_of_operators(rank, replace(d, parallel=parallel), communicator)
            eager = count_calls(built.runner.model)
            shapes = graph_shapes(seats, budget, MOST if speculation else 0)
            kind = FlashInferRows if deterministic else FlashInferAttention
            built = as_on_a_gpu(built, communicator, recorder, gpu, notes, shapes, kind)
        else:
            built = build_on(rank, replace(d, parallel=parallel), communicator)
        limits = replace(built.scheduler_limits, num_blocks=min(blocks, built.scheduler_limits.num_blocks))
        if speculation == "mtp":  # else it would draft only while that pays
            limits = replace(limits, speculation=SpeculationRule(priced=False))
        progress = StepProgress()
        if rank.rank:
            follow(built.runner, communicator.plans, progress)
            return None
        assert built.scheduler_limits.split == (None if split == "never" else SplitRule(True, ANY))
        scheduler = _Counting(limits)
        engine = Engine(scheduler, built.runner, communicator.plans, progress)
        told: dict[str, list[list[Any]]] = {}
        tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        waiting = requests(seed, most, int(tokenizer.token_to_id(CLOSE) or 0))
        if blocks < 256:  # four of 10 blocks enter first and grow by 10: one is preempted
            crowd = [Random(f"{seed}/{n}").choices(range(6, checkpoints.VOCAB), k=40) for n in range(4)]
            waiting[:0] = [request(100 + n, prompt, max_tokens=40) for n, prompt in enumerate(crowd)]
        while waiting or engine.has_work:
            for _ in range(min(2, len(waiting))):
                engine.add(waiting.pop(0))
            for event in engine.step():
                ids, scores, prompt, ends = told.setdefault(f"{event.request_id}/{event.choice}", [[], [], [], []])
                ids.extend(event.tokens)
                if gpu:  # whose operators round rows in other numbers differently
                    scores.extend(p.token for p in event.logprobs or ())
                    prompt.extend(p and p.token for p in event.prompt_logprobs or ())
                else:
                    scores.extend((p.token, p.logprob, p.top) for p in event.logprobs or ())
                    prompt.extend(p and (p.token, p.logprob, p.top) for p in event.prompt_logprobs or ())
                ends.extend([(event.finish, event.stop_token)] * (event.finish is not None))
        engine.close()
        counters = scheduler.snapshot()
        return {
            "steps": progress.step,
            "split": counters["split_steps_total"],
            "large": scheduler.large,
            "drafts": counters["spec_decode_num_draft_tokens_total"],
            "accepted": counters["spec_decode_num_accepted_tokens_total"],
            "positions": scheduler.accepted_drafts,
            "preemptions": counters["num_preemptions_total"],
            "hits": counters["prefix_cache_hits_total"],
            "reasoned": sum(tokenizer.decode(told[f"r{n}/0"][0])[:-1].find(CLOSE) > 0 for n in (2, 10, 18)),
            "answers": told,
            "replayed": recorder.replayed,
            "eager": len(eager),
            "noted": told_of(notes),
        }


class _Counting(Scheduler):
    """Counts the steps that have rows enough, without drafts, for two streams wherever their work is halved."""

    large = 0

    def schedule(self, now: float) -> Batch | None:
        batch = super().schedule(now)
        self.large += batch is not None and sum(chunk.count for chunk in batch.chunks) >= LARGE
        return batch


class _Any:
    """Equal to whatever it is compared with."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


ANY: Any = _Any()
