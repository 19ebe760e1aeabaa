"""`laddertron bench` on its sets of ranks: variants of a deployment, cases that take turns, rows.

Everything is warmed up, repeated and reported as median, lowest and highest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ...engine.config.schema import Deployment
from ...engine.openai.batch_input import read_lines
from ...engine.openai.body import Body
from ...engine.text.tokenizer import TextModel
from ...launchers.cli.errors import UsageError
from ...models.config.model_config import from_folder
from ...topology.comm.ledger import overlap_ratio
from .bench import Case, interleaved, spread, step_bytes
from .slo import percentile

Row = dict[str, Any]
NEW_TOKENS = 128
"""For a line that does not say how many it wants."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run the model."""

    tp: int
    wiring: str

    def of(self, deployment: Deployment) -> Deployment:
        model, parallel = deployment.model, replace(deployment.parallel, tensor_parallel_size=self.tp, replicas=1)
        if self.wiring != "auto":
            model = replace(model, wiring=self.wiring, allow_untrained_ladder=True)
        return replace(deployment, model=model, parallel=parallel)

    def name(self, wiring: str) -> str:
        return f"tp {self.tp}, {wiring}"


def roomy(deployment: Deployment, cases: Sequence[Case], drafts: bool = False) -> Deployment:
    """With as many seats as the largest batch needs, one step for its prompts where that is no more than is usual, no
    cache of prefixes: what is timed is computed. Unless `drafts`, one token a step: random prompts repeat nothing."""
    engine = deployment.engine
    seats = max([engine.max_num_seqs, *(case.batch for case in cases)])
    tokens = max(seats, engine.max_num_batched_tokens)
    engine = replace(engine, max_num_seqs=seats, max_num_batched_tokens=tokens, enable_prefix_caching=False)
    if not drafts:
        engine = replace(engine, speculation=False, draft_model=None)
    return replace(deployment, engine=engine)


def check_lengths(deployment: Deployment, cases: Sequence[Case]) -> None:
    """Raises UsageError for a case that is longer than the model's context: nothing of it would run."""
    longest = deployment.model.max_model_len or from_folder(deployment.model.path).max_position_embeddings
    for case in cases:
        if case.prompt + case.generate > longest:
            raise UsageError(
                f"{case.prompt} prompt and {case.generate} new tokens are more than max_model_len={longest}: "
                "lower --prompt or --generate"
            )


class Job(Protocol):
    """Loaded ranks: `about` them, and what they answer to an order."""

    about: dict[str, Any]

    def ask(self, kind: str, **order: Any) -> Row: ...


Say = Callable[[str], None]
"""Told what runs now, before it does."""


def measure(jobs: Sequence[tuple[str, Job]], cases: Sequence[Case], repeats: int, say: Say) -> list[Row]:
    """One row for each variant and case; each is warmed up by a short run. Raises BenchError."""
    pairs = [(name, job, case) for case in cases for name, job in jobs]
    for name, job, case in pairs:
        say(f"warming up: {_about(name, case)}")
        job.ask("case", batch=case.batch, prompt=case.prompt, generate=min(case.generate, 8))
    floors: list[float] = []
    runs: list[list[Row]] = [[] for _ in pairs]
    for number, (repeat, index) in enumerate(interleaved(len(pairs), repeats), 1):
        nodes = jobs[0][1].about["nodes"]
        if len(floors) <= repeat and (floor := jobs[0][1].ask("floor", nodes=nodes)["floor"]) is not None:
            floors.append(floor)
        name, job, case = pairs[index]
        say(f"run {number} of {len(pairs) * repeats}: {_about(name, case)}")
        runs[index].append(job.ask("case", batch=case.batch, prompt=case.prompt, generate=case.generate))
    floor = max(floors, default=None)
    return [_row(name, job, case, timings, floor) for (name, job, case), timings in zip(pairs, runs, strict=True)]


def _about(name: str, case: Case) -> str:
    return f"{name}, batch {case.batch}, {case.prompt} + {case.generate} tokens"


def _row(name: str, job: Job, case: Case, runs: Sequence[Row], floor: float | None) -> Row:
    decode = spread([r["decode_tokens"] / r["decode_s"] if r["decode_s"] else 0.0 for r in runs])
    limit = None
    if floor is not None:
        limit = case.batch * floor * job.about["nodes"] / step_bytes(job.about, case)
    return {
        "variant": name,
        "tp": job.about["tp"],
        "wiring": job.about["wiring"],
        "ops": job.about["ops"],
        "batch": case.batch,
        "prompt": case.prompt,
        "generate": case.generate,
        "repeats": len(runs),
        "rank_bytes": job.about["rank_bytes"],
        "prefill_tok_s": spread([r["prompt_tokens"] / r["prefill_s"] if r["prefill_s"] else 0.0 for r in runs]),
        "decode_tok_s": decode,
        "step_ms": spread([r["step_s"] * 1e3 for r in runs]),
        "floor_bytes_s": floor,
        "floor_tok_s": limit,
        "floor_share": None if limit is None else decode[0] / limit,
        "hidden_share": overlap_ratio(sum(r["hidden_s"] for r in runs), sum(r["exposed_s"] for r in runs)),
        "exposed_share": sum(r["exposed_s"] for r in runs) / sum(r["prefill_s"] + r["decode_s"] for r in runs),
    }


def measure_mix(name: str, job: Job, mix: dict[str, Any], repeats: int, say: Say) -> Row:
    runs, pure = [], []
    for repeat in range(repeats + 1):
        say(f"run {repeat} of {repeats} of the mix" if repeat else "warming up")
        timing = job.ask("mix", **mix)
        seats = min(job.about["max_num_seqs"], len(timing["end_s"]))
        prompt, generate = (
            max(1, round(timing[key] / len(timing["end_s"]))) for key in ("prompt_tokens", "generated_tokens")
        )
        full = None if job.about["speculation"] else job.ask("case", batch=seats, prompt=prompt, generate=generate)
        if repeat:  # the first pair warms up
            runs.append(timing)
            pure += [full] if full else []
    names = ("prefill_s", "prompt_tokens", "decode_s", "decode_tokens") if pure else ()
    middle = {name: spread([run[name] for run in pure])[0] for name in names}
    total_s = spread([run["total_s"] for run in runs])[0]
    share = None
    if mix.get("rate") is None and middle and middle["decode_tokens"] and middle["prefill_s"]:
        ideal = runs[0]["prompt_tokens"] * middle["prefill_s"] / middle["prompt_tokens"]
        ideal += runs[0]["generated_tokens"] * middle["decode_s"] / middle["decode_tokens"]
        share = ideal / total_s
    drafted = sum(run["drafted"] for run in runs)
    first, between = ([value for run in runs for value in run[key]] for key in ("first_s", "between_s"))
    return {
        "variant": name,
        "requests": len(runs[0]["end_s"]),
        "repeats": len(runs),
        "prompt_tokens": runs[0]["prompt_tokens"],
        "generated_tokens": runs[0]["generated_tokens"],
        "total_s": spread([run["total_s"] for run in runs]),
        "generated_tok_s": spread([run["generated_tokens"] / run["total_s"] for run in runs]),
        "total_tok_s": spread([(run["generated_tokens"] + run["prompt_tokens"]) / run["total_s"] for run in runs]),
        "pure_decode_share": share,
        "drafts_right": sum(run["accepted"] for run in runs) / drafted if drafted else None,
        "first_s": [percentile(first, 0.5), percentile(first, 0.99)],
        "between_s": [percentile(between, 0.5), percentile(between, 0.99)],
    }


def read_items(deployment: Deployment, file: Path, rate: float | None, seed: int) -> list[tuple[list[int], int, float]]:
    """(prompt, tokens to generate, arrival in seconds) of every prompt of every line. Raises ValueError naming the
    first bad line, or a prompt that the model is too short for."""
    text = TextModel.from_folder(Path(deployment.text_folder))
    dice, at, out = random.Random(seed), 0.0, []
    with file.open("rb") as lines:
        for line in read_lines(lines):
            if line.body is None:
                raise ValueError(f"{file}, line {line.number}: {line.error}")
            for prompt in _prompts(text, line.body):
                at += dice.expovariate(rate) if rate else 0.0
                out.append((prompt, line.body.max_tokens or NEW_TOKENS, at))
    if not out:
        raise ValueError(f"{file}: no requests in it")
    return out


def _prompts(text: TextModel, body: Body) -> list[list[int]]:
    if body.messages:
        return [text.encode_chat(list(body.messages))]
    return [text.encode(p) if isinstance(p, str) else list(p) for p in body.prompts]
