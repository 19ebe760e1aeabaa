"""The engine on real ranks: whatever happens to requests at whatever moment, each is answered as if it were alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoints
import pytest
import torch
from laddertron.engine.sampling import grammar
from laddertron.models.attention import KVCache, StepLayout, TorchAttention
from tokenizers import Tokenizer

Ranks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(tmp_path_factory.mktemp("llama"), "llama")


def _close(a: list[Any], b: list[Any]) -> bool:
    return all(
        x == y or (x is not None and y is not None and x[0] == y[0] and math.isclose(x[1], y[1], abs_tol=1e-3))
        for x, y in zip(a, b, strict=False)
    )


@pytest.mark.parametrize(("size", "overlapped"), [(1, False), (2, False), (1, True), (2, True)])
def test_disturbed_and_alone_are_the_same(
    ranks: Ranks, llama: Path, size: int, overlapped: bool, run_seed: int
) -> None:
    """Requests with shared beginnings, choices, log-probabilities, prompts that fill the model; few blocks, so that
    they preempt one another; cancels and stops at random moments. What was told is what each alone is told. So it is
    where ids stay on the device and steps overlap."""
    blocks = 26 * 3072 // size  # 4 positions, 3 layers, 4 KV heads of 8, keys and values, fp32
    keys = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "kv_cache_memory": blocks}
    args = {"folder": str(llama), "seed": run_seed, "requests": 24, "engine": keys, "overlapped": overlapped}
    wild, calm = ranks(size, "engine_play:play", args)[0]
    if overlapped:
        assert wild["steps"]["late"] > wild["steps"]["waited"] > 0
        assert wild["steps"]["late"] > 20
    print(f"{wild['preemptions']} preemptions, {wild['hits']} tokens from the cache, {wild['upset']}")
    assert wild["preemptions"] > 0
    assert wild["hits"] > 0
    assert wild["heard"].keys() == calm["heard"].keys()
    for key, told in wild["heard"].items():
        alone = calm["heard"][key]
        if key.split("/")[0] not in wild["upset"]:
            assert (told["tokens"], told["end"]) == (alone["tokens"], alone["end"]), key
            assert len(told["logprobs"]) == len(alone["logprobs"]), key
            assert (told["prompt"] is None) == (alone["prompt"] is None), key
        assert told["tokens"] == alone["tokens"][: len(told["tokens"])], key
        assert _close(told["logprobs"], alone["logprobs"]), key
        assert told["prompt"] is None or _close(told["prompt"], alone["prompt"]), key


@pytest.mark.skipif(not grammar.available, reason="llguidance is not installed: laddertron[grammar]")
@pytest.mark.parametrize("overlapped", [False, True])
def test_structured_output_runs_on_the_ranks(ranks: Ranks, llama: Path, overlapped: bool) -> None:
    """A grammar constrains its own request alone, and the job lives on. Where steps overlap, the one beside it does."""
    spec = json.dumps({"grammars": [{"lark_grammar": 'start: "ab" | "ba"'}]})
    args = {"folder": str(llama), "spec": spec, "overlapped": overlapped}
    (bound, end), (_, other) = ranks(2, "engine_play:structured", args)[0]
    assert Tokenizer.from_file(str(llama / "tokenizer.json")).decode(bound) in ("ab", "ba")
    assert end == "stop"
    assert other in ("stop", "length")


def test_without_a_tokenizer_a_grammar_fails_alone(ranks: Ranks, tmp_path: Path) -> None:
    """The ranks cannot read a tokenizer: only the request that needs it ends in an error."""
    folder = checkpoints.save(tmp_path / "m", "llama", tokenizer=False)
    spec = json.dumps({"grammars": [{"lark_grammar": 'start: "ab"'}]})
    (_, end), (_, other) = ranks(1, "engine_play:structured", {"folder": str(folder), "spec": spec})[0]
    assert end == "constraint_error"
    assert other in ("stop", "length")


@pytest.mark.parametrize("overlapped", [False, True])
def test_an_end_in_the_midst_is_orderly(ranks: Ranks, llama: Path, overlapped: bool) -> None:
    """The next plan is with the other ranks already when rank 0 is told to end: it runs it, nobody waits in vain, and
    no result is left under way."""
    assert ranks(2, "engine_play:leave", {"folder": str(llama), "overlapped": overlapped}) == ["ended", "ended"]


def test_nan_of_one_sequence_stays_its_own() -> None:
    """A decode's block table is filled up behind the sequence's own blocks, with block 0 or an earlier owner's: where
    another sequence has NaN there, a weight of zero would let it in."""
    shard: Any = SimpleNamespace(config=SimpleNamespace(num_layers=1, head_dim=8), num_kv_heads=1)
    cache = KVCache(shard, 4, 4, torch.float32, torch.device("cpu"))
    cache.keys[0][0] = cache.values[0][0] = float("nan")
    attention = TorchAttention(cache, (None,), 1.0)
    layout = StepLayout(
        positions=torch.tensor([1, 9]),
        query_start=[0, 1, 2],
        kv_len=[2, 10],
        block_table=torch.tensor([[1, 0, 0], [0, 2, 3]]),
        blocks=torch.tensor([1, 3]),
        offsets=torch.tensor([1, 1]),
        decode=2,
    )
    attention.prepare(layout, torch.ones(2, 1, 4), torch.zeros(2, 1, 4))
    healthy, sick = attention.attend(0, torch.ones(2, 24), None, None)
    assert healthy.isfinite().all()
    assert sick.isnan().all()
