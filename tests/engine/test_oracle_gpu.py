"""The engine on one GPU against transformers and the plain references, computed on the CPU in fp32.

fp32: attention by torch, products and the rest by Triton, logits within 1e-4. bf16: what a deployment runs, FlashInfer
with decode steps in CUDA graphs. LADDERTRON_ORACLE_DEVICE=cpu runs the same on a CPU, for the tests' sake.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoints
import engine_cases
import lane_checkpoints
import pytest
import torch
from laddertron.engine.batch import Batch
from laddertron.engine.step.build import Built, build
from laddertron.topology.comm.bootstrap import StoreBootstrap, open_store
from rank_pool import Rank
from test_oracle import TOLERANCE, reference_logits, transformers_logits

DEVICE = torch.device(os.environ.get("LADDERTRON_ORACLE_DEVICE", "cuda"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="no CUDA device"),
]
Logits = Callable[[list[int]], torch.Tensor]
WIDE: dict[str, Any] = {"head_dim": 128, "num_key_value_heads": 2}
"""Heads that FlashInfer has kernels for; four query heads a KV head."""
LATENT: dict[str, Any] = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "head_dim": 64,
}  # fmt: skip
PLAIN = (
    "llama", "llama_tied", "llama_bias", "llama_llama3_rope", "llama_yarn_rope", "mistral", "qwen2_window", "qwen3",
    "qwen3_moe", "qwen3_moe_mixed", "mixtral", "glm4_moe", "deepseek_v3", "deepseek_v3_plain", "longcat_flash",
    "ladder", "parallel", "hybrid", "delay2", "moe_ladder", "moe_parallel", "lanes",
)  # fmt: skip
SERVED: dict[str, dict[str, Any]] = {
    "llama": WIDE,
    "llama_bias": WIDE,
    "mistral": WIDE,
    "qwen3": WIDE,
    "qwen3_moe": WIDE,
    "mixtral": WIDE,
    "glm4_moe": WIDE,
    "deepseek_v3": LATENT,
    "longcat_flash": LATENT,
    "ladder": WIDE,
    "parallel": WIDE,
    "delay2": WIDE,
    "moe_ladder": WIDE,
    "lanes": {},
}


@pytest.fixture
def rank() -> Iterator[Rank]:
    torch.set_grad_enabled(False)
    alone = Rank(0, 1, StoreBootstrap(open_store("127.0.0.1", 0, master=True), 0, 1))
    yield alone
    alone.close_kept()
    torch.set_grad_enabled(True)


def made(folder: Path, recipe: str, dtype: str, **words: Any) -> tuple[Path, Logits]:
    if recipe == "lanes":
        lane_checkpoints.save(folder, dtype=dtype, windows=(0, 2))
        lanes = lane_checkpoints.oracle(folder)
        return folder, lambda ids: lanes(torch.tensor([ids]))[0]
    checkpoints.save(folder, recipe, dtype=dtype, **words)
    stock = recipe in checkpoints.STOCK
    return folder, transformers_logits(folder) if stock else reference_logits(folder)


def answered(rank: Rank, folder: Path, prompts: list[list[int]], **engine: Any) -> tuple[Built, torch.Tensor, Any]:
    """The built rank, its logits of all prompts' positions, and the greedy answers."""
    keys = {"block_size": 16, "kv_cache_memory": 64 << 20} | engine
    d = engine_cases.deployment(str(folder), 1, **keys)
    built = build(d, rank.communicator, DEVICE)
    logits = engine_cases.forward_all(built, prompts).cpu()
    built.runner.apply_changes(Batch(len(prompts), (0,), (), (), (), ()))
    requests = [engine_cases.request(i, prompt) for i, prompt in enumerate(prompts)]
    return built, logits, engine_cases.run_requests(rank, built, rank.communicator, requests)


def hold(
    logits: Logits,
    prompts: list[list[int]],
    found: torch.Tensor,
    answers: dict[str, list[list[int]]],
    within: float,
    share: float = 1.0,
) -> None:
    """Of so many of the positions logits, and of the answers' tokens theirs, within `within` of the oracle's scale."""
    want = torch.cat([logits(prompt) for prompt in prompts])
    scale = want.abs().max().item()
    distance = (found[:, : want.shape[1]].float() - want).abs().amax(1).quantile(share).item()
    gaps: list[float] = []
    for number, prompt in enumerate(prompts):
        (answer,) = answers[f"r{number}"]
        assert len(answer) == 32
        scores = logits(prompt + answer)[len(prompt) - 1 : -1]
        gaps += (scores.amax(-1) - scores[torch.arange(32), torch.tensor(answer)]).tolist()
    gap = torch.tensor(gaps).quantile(share).item()
    print(f"logits {distance / scale:.2e} of {scale:.1f}, tokens {gap / scale:.2e} below the best")
    assert distance < within * scale
    assert gap < within * scale


@pytest.mark.parametrize("recipe", PLAIN)
def test_fp32_is_the_oracles(rank: Rank, tmp_path: Path, recipe: str) -> None:
    prompts = checkpoints.prompts(6)
    folder, logits = made(tmp_path / "m", recipe, "float32")
    _, found, answers = answered(rank, folder, prompts)
    hold(logits, prompts, found, answers, TOLERANCE / 10)


@pytest.mark.parametrize("recipe", SERVED)
def test_bf16_stays_near_the_oracle(rank: Rank, tmp_path: Path, recipe: str) -> None:
    """bf16 has 8 bits of mantissa: logits of the same weights lie within a few hundredths of their scale, but where a
    rounded router chose another expert."""
    prompts = checkpoints.prompts(6)
    folder, logits = made(tmp_path / "m", recipe, "bfloat16", **SERVED[recipe])
    built, found, answers = answered(rank, folder, prompts)
    if DEVICE.type == "cuda":
        print(built.runner.attention.name, built.runner.graphed)
        assert built.runner.graphed == (recipe != "lanes")
        assert built.runner.attention.name.startswith("torch" if recipe == "lanes" else "flashinfer")
    hold(logits, prompts, found, answers, 0.05, 1.0 if built.config.experts is None else 0.7)
