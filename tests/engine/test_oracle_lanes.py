"""Models of lanes through the engine, against tests/helpers/lane_reference.py in fp32: tensor-parallel sizes that
divide the lanes, heads, norms, windows, delays and both dialects of the config, chosen so that every pair of values
occurs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from random import Random
from typing import Any

import checkpoints
import lane_checkpoints
import pytest
import torch
from safetensors.torch import save_file
from test_oracle import assert_greedy, assert_near

Ranks = Callable[..., list[Any]]


def check(ranks: Ranks, folder: Path, tp: int, tmp_path: Path, stages: int = 1) -> None:
    """fp32: greedy ids equal, logits within 1e-4."""
    model = lane_checkpoints.oracle(folder)
    prompts = checkpoints.prompts(6, vocab=lane_checkpoints.VOCAB)
    args: dict[str, Any] = {"folder": str(folder), "prompts": prompts, "params": {"max_tokens": 12}}
    args |= {"parallel": {"pipeline_parallel_size": stages}} if stages > 1 else {"logits": str(tmp_path)}
    with torch.inference_mode():
        answers = ranks(tp * stages, "engine_cases:generate", args)[0]
        want = assert_greedy(lambda ids: model(torch.tensor([ids]))[0], prompts, answers, 12)
    if stages == 1:
        assert_near(want, tmp_path, tp)


VALUES: dict[str, tuple[Any, ...]] = {
    "lanes": (8, 4, 2, 1),
    "tp": (8, 4, 2, 1),
    "delay": (1, 2, 3),
    "early": (True, False),
    "comm": ((True, True), (True, False), (False, True), (False, False)),
    "head": ("replicate", "tied", "sum_first", "lane", "vocab_parallel"),
    "norm_each": (False, True),
    "windows": ((), (0, 2, 3)),
    "rope": ("default", "llama3"),
    "second": (False, True),
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
Case = dict[str, Any]


def possible(case: Case) -> bool:
    """Whether the ranks divide the lanes; dialect (a) has one word for both sub-blocks' exchange."""
    return not case["lanes"] % case["tp"] and bool(case["second"] or case["comm"][0] == case["comm"][1])


def pairs_of(case: Case) -> set[tuple[Any, ...]]:
    return {(a, case[a], b, case[b]) for a, b in combinations(VALUES, 2)}


def drawn(random: Random) -> Case:
    while not possible(case := {name: random.choice(values) for name, values in VALUES.items()}):
        pass
    return case


def pairwise(seed: int) -> list[Case]:
    """Cases in which every two values occur together that can: each the best of some random ones."""
    random, left, cases = Random(seed), set[tuple[Any, ...]](), list[Case]()
    for values in product(*VALUES.values()):
        if possible(case := dict(zip(VALUES, values, strict=True))):
            left |= pairs_of(case)
    while left:
        best = max((drawn(random) for _ in range(300)), key=lambda case: len(pairs_of(case) & left))
        if found := pairs_of(best) & left:
            left -= found
            cases.append(best)
    return cases


def arguments(case: Case) -> dict[str, Any]:
    head = case["head"] if case["head"] in ("lane", "vocab_parallel") else "replicate"
    more: dict[str, Any] = {"rope_scaling": LLAMA3} if case["rope"] == "llama3" else {}
    more |= {"tie_word_embeddings": True} if case["head"] == "tied" else {}
    plain = ("lanes", "second", "delay", "early", "comm", "norm_each", "windows")
    how = {name: case[name] for name in plain}
    return {**how, "head": head, "sum_first": case["head"] == "sum_first", **more}


def named(case: Case) -> str:
    comm = "".join("n" if not on else "y" for on in (case["early"], *case["comm"]))
    more = [word for word in ("norm_each", "second") if case[word]] + ["windows"] * bool(case["windows"])
    return "-".join(
        [f"lanes{case['lanes']}", f"tp{case['tp']}", f"d{case['delay']}", comm, case["head"], case["rope"], *more]
    )


CASES = pairwise(seed=7)
SEED = 3
MORE = [drawn(random) for random in [Random(SEED)] for _ in range(60)]


@pytest.mark.parametrize("case", CASES, ids=named)
def test_lanes_answer_as_the_reference_does(ranks: Ranks, tmp_path: Path, case: Case) -> None:
    """Each pair of values once, among them every number of lanes on every number of ranks that divides it."""
    folder = lane_checkpoints.save(tmp_path / "m", **arguments(case))
    check(ranks, folder, case["tp"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=named)
def test_more_lanes_answer_as_the_reference_does(ranks: Ranks, tmp_path: Path, case: Case) -> None:
    """Random combinations beyond the pairs, of a printed seed."""
    print(f"seed {SEED}")
    check(ranks, lane_checkpoints.save(tmp_path / "m", **arguments(case)), case["tp"], tmp_path)


def test_the_cases_have_every_pair() -> None:
    assert len(CASES) <= 28
    seen = set[tuple[Any, ...]]().union(*(pairs_of(case) for case in CASES))
    others = {"comm": (True, True), "second": True, "lanes": 8, "tp": 1}  # with which everything else is possible
    for (a, some), (b, more) in combinations(VALUES.items(), 2):
        for x, y in product(some, more):
            assert ((a, x, b, y) in seen) == possible(others | {a: x, b: y})


@pytest.mark.parametrize(("tp", "how"), [(2, {"delay": 2}), (1, {"delay": 1, "early": False})])
def test_lanes_in_two_stages(ranks: Ranks, tmp_path: Path, tp: int, how: dict[str, Any]) -> None:
    """Each rank sends its own copies and the sums that are pending to its peer in the next stage."""
    check(ranks, lane_checkpoints.save(tmp_path / "m", **how), tp, tmp_path, stages=2)


def test_what_else_is_in_the_step_changes_no_id(ranks: Ranks, tmp_path: Path) -> None:
    """Alone, in small chunks of prompts, with and without cached prefixes, preempted, with drafts: the same ids."""
    folder = str(lane_checkpoints.save(tmp_path / "m", head="lane", windows=(0, 2)))
    prompts = checkpoints.prompts(6, seed=3, vocab=lane_checkpoints.VOCAB)
    args = {"folder": folder, "prompts": [*prompts, prompts[0] * 2], "params": {"max_tokens": 12}}
    together = ranks(2, "engine_cases:generate", args)[0]
    variants: list[dict[str, Any]] = [
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 8},
        {"enable_prefix_caching": False},
        {"kv_cache_memory": 192 << 10, "max_num_seqs": 4},
        {"speculation": "ngram"},
    ]
    for engine in variants:
        more = {"engine": engine, "model": {"max_model_len": 64}}
        assert ranks(2, "engine_cases:generate", args | more)[0] == together, engine


def test_overlapped_and_blocking_lanes_are_bitwise_equal(ranks: Ranks, tmp_path: Path) -> None:
    """overlap: false waits inside start, deterministic adds in one order: no bit depends on when a sum arrives."""
    folder = str(lane_checkpoints.save(tmp_path / "m", delay=3))
    args = {"folder": folder, "prompts": checkpoints.prompts(4, vocab=lane_checkpoints.VOCAB), "per_node": 1}
    for deterministic in (False, True):
        comm = [{"overlap": overlap, "deterministic": deterministic} for overlap in (True, False)]
        overlapped, blocking = (ranks(2, "engine_cases:logits_digest", args | {"comm": each}) for each in comm)
        assert overlapped == blocking


@pytest.mark.parametrize("weights", ["stored", "int8"])
def test_bf16_and_int8_lanes_stay_near_fp32(ranks: Ranks, tmp_path: Path, weights: str) -> None:
    """bf16 has 8 bits of mantissa, int8 rounds the weights: logits lie within a few hundredths of their scale."""
    folder = lane_checkpoints.save(tmp_path / "m", dtype="bfloat16", norm_each=True)
    prompts = checkpoints.prompts(8, vocab=lane_checkpoints.VOCAB)
    model = lane_checkpoints.oracle(folder)
    with torch.inference_mode():
        want = torch.cat([model(torch.tensor([prompt]))[0] for prompt in prompts])
    save_file({"logits": want.contiguous()}, tmp_path / "want.safetensors")
    args = {"folder": str(folder), "prompts": prompts, "expected": str(tmp_path / "want.safetensors")}
    for result in ranks(2, "engine_cases:logits_distance", args | {"model": {"weights": weights}}):
        assert result["distance"] < (0.06 if weights == "stored" else 0.12) * result["scale"], result
