"""What a run computes, counted: the scheduler plans the steps of a whole job, and no model computes them."""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from laddertron.engine.config.schema import Deployment, ModelSection
from laddertron.engine.openai import prefetch
from laddertron.engine.openai.batch_input import BatchLine
from laddertron.engine.openai.line_order import PreparedLine, Prompts
from laddertron.engine.run.files import open_run
from laddertron.engine.run.run import BatchRun
from laddertron.engine.schedule.scheduler import SchedulerLimits
from laddertron.engine.schedule.speculation import speculation_rule
from laddertron.engine.text.tokenizer import TextModel
from planned_job import PlannedJob, distinct_tokens
from test_batchrun import Direct, completion
from tiny_text import write_folder

Ids = tuple[int, ...]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.from_folder(write_folder(tmp_path_factory.mktemp("tiny")))


def ids(draw: random.Random, count: int) -> Ids:
    return tuple(draw.randrange(50_000) for _ in range(count))


def run(
    folder: Path,
    text: TextModel,
    prompts: list[Ids],
    kv_tokens: int,
    jobs: int = 1,
    changes: dict[str, Any] | None = None,
    **body: Any,
) -> list[PlannedJob]:
    """Runs a job of one line a prompt with eight sequences in each engine; every line is answered. changes: of the
    scheduler's limits."""
    lines = [
        completion(f"l{i}", list(p), **{"max_tokens": 16, "temperature": 0, **body}) for i, p in enumerate(prompts)
    ]
    (folder / "in").write_text("".join(json.dumps(line) + "\n" for line in lines))
    limits = replace(SchedulerLimits(8, 1024, 8192, 16, kv_tokens // 16), **(changes or {}))

    async def go() -> list[PlannedJob]:
        made = [PlannedJob(limits, load_turns=200, accepted=0.7) for _ in range(jobs)]
        files = open_run(folder / "in", folder / "out", folder / "errors")
        summary = await BatchRun(made, text, Direct(text), files, Deployment(ModelSection("tiny"))).run()
        assert (summary.ok, summary.reason) == (len(prompts), None)
        return made

    return asyncio.run(go())


@pytest.mark.parametrize("kv_tokens", [3200, 22_000])
@pytest.mark.parametrize("shuffled", [True, False])
def test_a_job_computes_its_distinct_tokens(
    kv_tokens: int, shuffled: bool, text: TextModel, tmp_path: Path, run_seed: int
) -> None:
    """Half the job of docs/performance.md: 120 lines, twelve prefixes of 512 tokens, of which the small cache holds
    six: each is computed once, in any order of the file, and the steps are those of full batches."""
    draw = random.Random(run_seed)
    prefixes = [ids(draw, 512) for _ in range(12)]
    prompts = [(*prefix, *ids(draw, draw.randrange(16, 65))) for prefix in prefixes for _ in range(10)]
    if shuffled:
        draw.shuffle(prompts)
    (job,) = run(tmp_path, text, prompts, kv_tokens)
    assert job.prompt_tokens <= 1.03 * distinct_tokens(prompts)
    assert job.steps <= 1.05 * 120 * 16 / 8


def test_lines_of_one_prefix_go_to_one_replica(text: TextModel, tmp_path: Path, run_seed: int) -> None:
    """Sixteen prefixes of ten lines each over two replicas: most are computed in one of these, which share the lines
    evenly; without regard to prefixes the computed tokens were 2.4 times the distinct ones."""
    draw = random.Random(run_seed)
    prefixes = [ids(draw, 512) for _ in range(16)]
    prompts = [(*prefix, *ids(draw, draw.randrange(16, 65))) for prefix in prefixes for _ in range(10)]
    draw.shuffle(prompts)
    jobs = run(tmp_path, text, prompts, 6400, jobs=2)
    assert sum(job.prompt_tokens for job in jobs) <= 1.4 * distinct_tokens(prompts)
    assert max(job.steps for job in jobs) <= 1.15 * 160 * 16 / 8 / 2


def test_a_job_without_shared_prefixes_takes_no_more_steps(text: TextModel, tmp_path: Path, run_seed: int) -> None:
    """Equal lengths, different prompts: each token is computed once, in full batches."""
    draw = random.Random(run_seed)
    prompts = [ids(draw, 40) for _ in range(80)]
    (job,) = run(tmp_path, text, prompts, 6400)
    assert job.prompt_tokens == 80 * 40
    assert job.steps <= 80 * 16 / 8 + 4


class FileOrder:
    """Lines in the order in which they were encoded."""

    def __init__(self, most: int) -> None:
        self._lines: deque[PreparedLine] = deque()

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, line: BatchLine, prompts: Prompts) -> None:
        self._lines.append(PreparedLine(line, prompts))

    def take(self) -> PreparedLine:
        return self._lines.popleft()


@pytest.mark.parametrize(
    ("lines", "jobs", "changes", "body"),
    [
        pytest.param(1, 1, {}, {}, id="one line"),
        pytest.param(1500, 1, {}, {}, id="many lines"),
        pytest.param(60, 1, {}, {"n": 4, "temperature": 1}, id="n"),
        pytest.param(120, 1, {"speculation": speculation_rule("ngram")}, {}, id="drafts"),
        pytest.param(120, 1, {"microbatches": 2}, {}, id="two stages"),
        pytest.param(120, 1, {"microbatches": 2, "speculation": speculation_rule("ngram")}, {}, id="staged drafts"),
        pytest.param(120, 2, {}, {}, id="two replicas"),
    ],
)
def test_the_order_costs_a_job_without_shared_prefixes_nothing(
    lines: int,
    jobs: int,
    changes: dict[str, Any],
    body: dict[str, Any],
    text: TextModel,
    tmp_path: Path,
    run_seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of many lengths: no more computed tokens than in the order of the file, and no more steps but for the last
    lines', of which each further replica may have one alone for its 16 tokens."""
    draw = random.Random(run_seed)
    prompts = [ids(draw, draw.randrange(8, 200)) for _ in range(lines)]
    counts = []
    for name in ("ordered", "file"):
        (tmp_path / name).mkdir()
        engines = run(tmp_path / name, text, prompts, 6400, jobs, changes, **body)
        counts.append((sum(job.prompt_tokens for job in engines), sum(job.steps for job in engines)))
        monkeypatch.setattr(prefetch, "LineOrder", FileOrder)
    (tokens, steps), (file_tokens, file_steps) = counts
    assert tokens <= file_tokens
    assert steps <= file_steps + 4 + 16 * (jobs - 1)
