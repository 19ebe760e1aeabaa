"""The steps before a rank is ready: of every kind, without a trace, and before limits and graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import engine_cases
import pytest
import torch
from engine_cases import deployment, request, run_requests
from laddertron.engine.batch import Batch
from laddertron.engine.schedule.scheduler import SchedulerLimits
from laddertron.engine.step import build
from laddertron.engine.step import warm_up as first
from laddertron.engine.step.warm_up import DRAWS, first_steps
from rank_pool import Rank

Ranks = Callable[..., list[Any]]
LIMITS = SchedulerLimits(
    max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256, block_size=4, num_blocks=100,
    enable_prefix_caching=False,
)  # fmt: skip


def kinds(batch: Batch) -> set[str]:
    counts = [chunk.count for chunk in batch.chunks]
    return {"prompt" if count > 1 else "decode" for count in counts}


def test_every_kind_of_step_and_of_draw() -> None:
    """A prompt alone, prompts beside decodes, decodes alone; greedy, filtered with log-probabilities, edited and plain;
    no block twice, no slot left."""
    steps = [batch for _, batch in first_steps(LIMITS)]
    assert [kinds(batch) for batch in steps] == [{"prompt"}, *[{"prompt", "decode"}] * 3, *[{"decode"}] * 2, set()]
    assert [batch.admitted[0].params for batch in steps[:4]] == list(DRAWS)
    blocks = [block for batch in steps for _, given in batch.blocks for block in given]
    assert len(blocks) == len(set(blocks))
    assert steps[-1].released == (0, 1, 2, 3)
    at = [chunk.start for batch in steps for chunk in batch.chunks if chunk.slot == 0]
    assert at == [0, *range(61, 66)], "61 of 64 tokens, beside 3 decodes"


def test_the_first_prompt_is_long_where_there_is_room() -> None:
    """Decodes, short and long prompts have different kernels."""
    steps = [batch for _, batch in first_steps(replace(LIMITS, max_num_batched_tokens=512))]
    assert [sum(chunk.count for chunk in batch.chunks) for batch in steps[:5]] == [129, 34, 35, 36, 4]


@pytest.mark.parametrize(
    ("tight", "slots"),
    [({"max_num_seqs": 1}, 1), ({"num_blocks": 25}, 2), ({"num_blocks": 10}, 0), ({"max_model_len": 9}, 0)],
)
def test_a_small_cache_has_fewer_of_them(tight: dict[str, Any], slots: int) -> None:
    steps = [batch for _, batch in first_steps(replace(LIMITS, **tight))]
    assert sum(len(batch.admitted) for batch in steps) == slots
    blocks = [block for batch in steps for _, given in batch.blocks for block in given]
    assert len(blocks) == len(set(blocks))
    assert max(blocks, default=0) < tight.get("num_blocks", 100)
    positions = [(c.slot, c.start + c.count) for batch in steps for c in batch.chunks]
    room = {slot: len(given) * LIMITS.block_size for batch in steps for slot, given in batch.blocks}
    assert all(end <= room[slot] for slot, end in positions)


def case_warmed_up(rank: Rank, folder: str, prompts: list[list[int]], warm: bool) -> dict[str, Any]:
    """Answers of a rank that was warmed up or not, and in which order its start went."""
    log: list[str] = []
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        if warm:
            patch.setattr(build, "compiles", lambda device: True)
        communicator = rank.communicator
        set_timeout = communicator.set_timeout

        def limited(seconds: float) -> None:
            log.append(f"limit {seconds:g}")
            set_timeout(seconds)

        patch.setattr(communicator, "set_timeout", limited)

        def warm_up(*args: Any) -> None:
            log.append("warm up")
            first.warm_up(*args)

        patch.setattr(build, "warm_up", warm_up)
        patch.setattr(build, "make_graphs", lambda *_: log.append("graphs"))
        d = deployment(folder, rank.size)
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        built = build.build(d, communicator, engine_cases.CPU, None, told.append)
        assert not built.runner.length.any()
        assert not built.runner.num_blocks.any()
        assert built.runner.timeouts is not None
        assert built.runner.timeouts.longest == {}
        answers = run_requests(rank, built, communicator, [request(i, p, max_tokens=6) for i, p in enumerate(prompts)])
    return {"answers": answers, "log": log[:4], "told": told}


@pytest.mark.parametrize("size", [1, 2])
def test_it_leaves_nothing_behind(ranks: Ranks, tmp_path: Path, size: int) -> None:
    """The same answers as without it. Load's limit stands while kernels compile, the first one before graphs are
    recorded; what compiling took is no measure of a step."""
    folder = str(checkpoints.save(tmp_path, "llama"))
    args = {"folder": folder, "prompts": checkpoints.prompts(4, seed=8)}
    cold = ranks(size, "test_warm_up:case_warmed_up", args | {"warm": False})[0]
    warm = ranks(size, "test_warm_up:case_warmed_up", args | {"warm": True})[0]
    assert warm["answers"] == cold["answers"] is not None
    load = warm["log"][0]
    assert warm["log"] == [load, "warm up", "limit 60", "graphs"]
    assert cold["log"][:3] == [load, "limit 60", "graphs"]
    assert float(load.removeprefix("limit ")) >= 300
    assert warm["told"][0].startswith("compiling kernels for prompts, ")
    assert cold["told"] == []
