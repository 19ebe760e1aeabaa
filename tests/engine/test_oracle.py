"""The engine against transformers (standard models) and models/reference.py (every wiring), tp = 1, 2, 4 and
8.

fp32: greedy tokens identical over 16 prompts x 32 tokens and logits within 1e-4. Matrix products change their order of
summation with batch size and tp, so a position where the oracle's own top two lie within 1e-4 is excused: the sequence
is compared up to there, and the number of excused positions is printed and bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import checkpoints
import loaded_reference as reference
import pytest
import torch
from engine_cases import read_logits
from safetensors.torch import save_file

TOLERANCE = 1e-4
USUAL = 2
"""The number of ranks that `make test` puts every recipe on; the others belong to `make slow-test`, but for MORE."""
MORE = {"llama", "ladder"}
DEAR = {"moe_delay2", "moe_desync4_tp2", "moe_ladder", "moe_parallel"}
"""Whose reference takes ten seconds: test_oracle_experts.py has shorter cases of the same wirings."""
Logits = Callable[[list[int]], torch.Tensor]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A small random checkpoint of a recipe, made once."""

    @cache
    def make(recipe: str, dtype: str = "float32") -> Path:
        return checkpoints.save(tmp_path_factory.mktemp(recipe), recipe, dtype=dtype)

    return make


def transformers_logits(folder: Path) -> Logits:
    model = checkpoints.oracle(folder)
    return lambda ids: model(torch.tensor([ids])).logits[0]


def reference_logits(folder: Path) -> Logits:
    model = reference.load(folder, dtype=torch.float32)
    return lambda ids: reference.logits(model, torch.tensor([ids]))[0]


def assert_greedy(
    logits: Logits, prompts: list[list[int]], answers: dict[str, list[list[int]]], length: int
) -> torch.Tensor:
    """Every answer is what the oracle's argmax gives; returns the oracle's logits of all prompts, [positions, V]."""
    excused, of_prompts = 0, list[torch.Tensor]()
    for number, prompt in enumerate(prompts):
        (answer,) = answers[f"r{number}"]
        assert len(answer) == length
        # One pass over prompt and answer scores every position, teacher-forced.
        whole = logits(prompt + answer)
        of_prompts.append(whole[: len(prompt)])
        scores = whole[len(prompt) - 1 : -1]
        best = scores.topk(2, -1)
        for position, token in enumerate(answer):
            if token != int(best.indices[position, 0]):
                gap = float(best.values[position, 0] - scores[position, token])
                assert gap < TOLERANCE, f"prompt {number}, position {position}: {token} is {gap:.2e} below the best"
                excused += 1
    print(f"{excused} of {len(prompts) * length} positions excused")
    assert excused * 1000 <= max(1000, len(prompts) * length)
    return torch.cat(of_prompts)


def check(
    ranks: Callable[..., list[Any]], folder: Path, logits: Logits, size: int, tmp_path: Path, **model: Any
) -> None:
    prompts = checkpoints.prompts()
    args = {"folder": str(folder), "prompts": prompts, "model": model, "logits": str(tmp_path)}
    with torch.inference_mode():
        answers = ranks(size, "engine_cases:generate", args)[0]
        want = assert_greedy(logits, prompts, answers, 32)
    assert_near(want, tmp_path, size)


def assert_near(want: torch.Tensor, written: Path, size: int) -> None:
    """Every rank's logits of the prompts lie within TOLERANCE of `want`, [positions, V]."""
    distance = (read_logits(written, size, want.shape[1]) - want).abs().max()
    assert distance < TOLERANCE * max(1.0, float(want.abs().max()) / 10)


def cases(recipes: Iterable[tuple[str, int]]) -> list[Any]:
    """Those that are not for every day are marked slow. Trained for one number of ranks, a recipe has no other."""

    def often(recipe: str, size: int) -> bool:
        if recipe in DEAR:
            return False
        return size == USUAL or recipe in MORE or "tensor_parallel_size" in checkpoints.DECLARED.get(recipe, {})

    return [pytest.param(*case, marks=() if often(*case) else pytest.mark.slow) for case in recipes]


@pytest.mark.parametrize(
    ("recipe", "size"), cases(product((r for r in checkpoints.STOCK if r != "llama_dynamic_rope"), (1, 2, 4)))
)
def test_every_family_answers_as_transformers_does(
    ranks: Callable[..., list[Any]], checkpoint: Callable[..., Path], recipe: str, size: int, tmp_path: Path
) -> None:
    """A folder that transformers wrote, unmodified, on 1, 2 and 4 ranks: same greedy tokens, logits within 1e-4."""
    folder = checkpoint(recipe)
    check(ranks, folder, transformers_logits(folder), size, tmp_path)


@pytest.mark.parametrize(
    "recipe", ["llama", "llama_mqa", "gpt_oss", pytest.param("llama_bias", marks=pytest.mark.slow)]
)
def test_more_ranks_than_kv_heads(
    ranks: Callable[..., list[Any]], checkpoint: Callable[..., Path], recipe: str, tmp_path: Path
) -> None:
    """On 8 ranks with 2 (or 1) KV heads each head lives on several ranks, as 405B's 8 do on 16."""
    folder = checkpoint(recipe)
    check(ranks, folder, transformers_logits(folder), 8, tmp_path)


def wirings_and_sizes() -> list[tuple[str, int]]:
    """Every wiring and ladder format on 1, 2 and 4 ranks; desync weights on the number they were trained for."""
    declared = checkpoints.DECLARED | {name: how for name, (_, how) in checkpoints.MIXED.items()}
    trained = {name: how.get("tensor_parallel_size") for name, how in declared.items()}
    recipes = (*declared, *checkpoints.LADDER_FORMATS)
    return [(r, size) for r in recipes for size in (1, 2, 4) if trained.get(r) in (None, size)]


@pytest.mark.parametrize(("recipe", "size"), cases(wirings_and_sizes()))
def test_every_wiring_answers_as_the_reference_does(
    ranks: Callable[..., list[Any]], checkpoint: Callable[..., Path], recipe: str, size: int, tmp_path: Path
) -> None:
    """Each wiring and each ladder checkpoint format against the single-process reference."""
    folder = checkpoint(recipe)
    check(ranks, folder, reference_logits(folder), size, tmp_path)


def test_overlapped_and_blocking_are_bitwise_equal(
    ranks: Callable[..., list[Any]], checkpoint: Callable[..., Path]
) -> None:
    """overlap: false waits inside start; every bit of the logits stays."""
    for recipe in ("ladder", "hybrid", "llama", "parallel"):
        args = {"folder": str(checkpoint(recipe)), "prompts": checkpoints.prompts(4), "per_node": 1}
        overlapped, blocking = (
            ranks(2, "engine_cases:logits_digest", args | {"comm": {"overlap": overlap}}) for overlap in (True, False)
        )
        assert overlapped == blocking


def test_bf16_stays_near_fp32(ranks: Callable[..., list[Any]], checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """bf16 has 8 bits of mantissa: logits of the same weights lie within a few hundredths of their scale."""
    for recipe in ("llama", "qwen3", "ladder"):
        folder = checkpoint(recipe, "bfloat16")
        prompts = checkpoints.prompts(8)
        logits = reference_logits(folder)
        with torch.inference_mode():
            want = torch.cat([logits(prompt) for prompt in prompts])
        save_file({"logits": want.contiguous()}, tmp_path / "want.safetensors")
        args = {"folder": str(folder), "prompts": prompts, "expected": str(tmp_path / "want.safetensors")}
        for result in ranks(2, "engine_cases:logits_distance", args):
            assert result["distance"] < 0.05 * result["scale"], result


def test_ids_do_not_change_with_what_else_is_in_the_batch(
    ranks: Callable[..., list[Any]], checkpoint: Callable[..., Path]
) -> None:
    """A sequence alone, among seven others, in small chunks, with and without cached prefixes: the same answer."""
    folder, prompts = str(checkpoint("ladder")), checkpoints.prompts(8, seed=3)
    together = ranks(2, "engine_cases:generate", {"folder": folder, "prompts": prompts})[0]
    variants: list[dict[str, Any]] = [
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 8},
        {"enable_prefix_caching": False},
        {"block_size": 7},
        {"kv_cache_memory": 64 << 10, "max_num_seqs": 4},
    ]
    for engine in variants:
        args = {"folder": folder, "prompts": prompts, "engine": engine, "model": {"max_model_len": 64}}
        assert ranks(2, "engine_cases:generate", args)[0] == together, engine
    for number, prompt in enumerate(prompts):
        alone = ranks(2, "engine_cases:generate", {"folder": folder, "prompts": [prompt]})[0]
        assert alone["r0"] == together[f"r{number}"]


def test_seeded_sampling_is_the_same_for_every_tp(
    ranks: Callable[..., list[Any]], checkpoint: Callable[..., Path]
) -> None:
    """Noise belongs to (seed, position, id, choice), not to ranks: temperature, top_p and two choices a prompt."""
    folder, prompts = str(checkpoint("llama")), checkpoints.prompts(6, seed=5)
    params = {"temperature": 0.8, "top_p": 0.9, "n": 2, "max_tokens": 12}
    answers = [
        ranks(size, "engine_cases:generate", {"folder": folder, "prompts": prompts, "params": params})[0]
        for size in (1, 2, 4)
    ]
    assert answers[0] == answers[1] == answers[2]
    assert any(first != second for first, second in answers[0].values())
