"""Nodes that read a checkpoint once between them: the same bits as each on its own, every byte read by one node alone,
and nobody left waiting when one of them fails."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
from laddertron.models.checkpoint import read_folder
from laddertron.models.cpu_ops import Kernels
from laddertron.models.manifest import make_manifest, write_manifest
from rank_pool import RankError
from test_weights_files import flip
from test_weights_quantised import fp8_folder
from waiting import HANG_S

Ranks = Callable[..., list[Any]]
PROMPTS = [[7, 9, 11, 13, 2], [5]]


CASES: list[tuple[str, int, int, dict[str, Any]]] = [
    ("llama", 2, 1, {"dtype": "bfloat16"}),
    ("llama", 4, 2, {}),
    ("llama_bias", 4, 1, {}),
    ("llama_bias", 4, 2, {"dtype": "bfloat16"}),
    ("llama_mqa", 4, 2, {}),
    ("llama_mqa", 4, 1, {"dtype": "float16"}),
    ("llama_tied", 4, 2, {"replicate": True}),
    ("llama", 2, 1, {"replicate": True}),
    ("qwen3", 2, 1, {}),
    ("parallel", 4, 2, {}),
    ("dolomite_bias", 2, 1, {"dtype": "bfloat16"}),
    ("dolomite", 4, 2, {}),
]


def once_a_node(folder: Path, got: list[dict[str, Any]], per_node: int) -> None:
    """Every element of every tensor is taken out of a file by one node alone."""
    for name, stored in read_folder(folder).items():
        if len(stored.shape) == 0 or name.endswith("_scale"):
            continue
        shape = (stored.shape[0], prod(stored.shape[1:]))
        often = np.zeros(shape, int)
        for first in range(0, len(got), per_node):
            seen = np.zeros(shape, bool)
            for rank in got[first : first + per_node]:
                for tensor, row, row_end, column, column_end in rank["seen"]:
                    if tensor == name:
                        seen[row:row_end, column:column_end] = True
            often += seen
        assert (often == 1).all(), (name, often.min(), often.max())


@pytest.mark.parametrize(("recipe", "size", "per_node", "how"), CASES)
def test_in_shares_every_parameter_is_what_it_is_alone(
    tmp_path: Path, ranks: Ranks, recipe: str, size: int, per_node: int, how: dict[str, Any]
) -> None:
    """Bit for bit, over several files: biases of one rank alone, replicated key/value heads, tied and replicated
    tables, other types, fused layouts. Each element leaves the files on one node, layers come in one order."""
    files = "40KB" if recipe in checkpoints.STOCK else "1GB"
    folder = checkpoints.save(tmp_path / "m", recipe, max_shard_size=files, tokenizer=False)
    got = ranks(size, "shared_cases:both_ways", {"folder": str(folder), "per_node": per_node, **how})
    assert [rank["differ"] for rank in got] == [[]] * size
    assert sum(rank["sent"] for rank in got) == sum(rank["received"] for rank in got) > 0
    assert all(rank["modules"] == got[0]["modules"] for rank in got)
    if not how.get("replicate"):  # then a node reads its part of a tied table twice, the second time from memory
        once_a_node(folder, got, per_node)
    if per_node == 1 and not how.get("replicate"):
        stored = read_folder(folder).values()
        assert sum(rank["read"] for rank in got) == sum(t.end - t.begin for t in stored)
        assert sum(rank["alone"] for rank in got) > sum(rank["read"] for rank in got)


@pytest.mark.parametrize(
    ("layout", "keeps", "size"), [*product(("fbgemm", "fp8"), (False, True), (2,)), ("fbgemm", False, 4)]
)
def test_fp8_travels_as_it_is_stored(tmp_path: Path, ranks: Ranks, layout: str, keeps: bool, size: int) -> None:
    """Scales a row and one a tensor, widened on arrival or kept: the same bits, and an fp8 value costs a byte."""
    folder, _ = fp8_folder(tmp_path / "m", layout)
    asked = {"folder": str(folder), "per_node": size // 2, "keeps_fp8": keeps}
    got = ranks(size, "shared_cases:both_ways", asked)
    assert [rank["differ"] for rank in got] == [[]] * size
    once_a_node(folder, got, size // 2)
    products = 3 * 64 * (64 + 96) // 2
    assert products <= sum(rank["sent"] for rank in got) < 2 * products


def copies(folder: Path, count: int) -> list[str]:
    made = [folder.with_name(f"{folder.name}-{i}") for i in range(count)]
    for path in made:
        shutil.copytree(folder, path)
    return [str(path) for path in made]


@pytest.mark.parametrize(("size", "per_node"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("fault", ["cut", "flip", "module"])
def test_a_fault_on_one_rank_ends_all_by_name(
    tmp_path: Path, ranks: Ranks, size: int, per_node: int, fault: str
) -> None:
    """The last rank's file shrinks, or there is no room, or its node has a flipped bit: it says so itself (or its
    neighbour, who verifies that block), whoever waited for it says the same or that it is gone, and nobody waits out a
    time limit."""
    tensor = "model.layers.1.self_attn.o_proj.weight"
    folders = copies(checkpoints.save(tmp_path / "m", "llama", max_shard_size="40KB", tokenizer=False), size)
    stored = read_folder(Path(folders[-1]))[tensor]
    if fault == "flip":
        for copy in map(Path, folders):
            write_manifest(copy, make_manifest(copy, block=4096))
        for copy in map(Path, folders[-per_node:]):
            flip(copy / stored.file.name, stored.end - 3)
    got = ranks(size, "shared_cases:with_fault", {"folders": folders, "per_node": per_node, "fault": fault})
    print(got)
    own = next((rank for rank in got if rank["error"] == "CheckpointError"), got[-1])
    others = [rank for rank in got if rank is not own]
    if fault == "module":
        assert (own["error"], own["said"]) == ("MemoryError", "no room for layers.1")
    else:
        assert own["error"] == "CheckpointError"
        assert stored.file.name in own["said"]
        assert tensor in own["said"]
    peer = got[size - 1 - per_node]
    if fault == "cut":
        assert peer["error"] == "ToldError"
        assert peer["said"] == f"rank {size - 1}: {own['said']}"
    if fault == "module":
        assert peer["error"] == "CommunicationError"
        assert "no room for layers.1" in peer["said"]
    assert all(rank["error"] in ("ToldError", "CommunicationError", "PeerLost") for rank in others)
    assert max(rank["seconds"] for rank in got) < HANG_S


def test_a_rank_that_ends_is_missed_at_once(tmp_path: Path, ranks: Ranks) -> None:
    folder = str(checkpoints.save(tmp_path / "m", "llama", tokenizer=False))
    with pytest.raises(RankError, match=r"weights (from|for) rank 1: it is gone"):
        ranks(2, "shared_cases:with_fault", {"folders": [folder] * 2, "per_node": 1, "fault": "end"})


@pytest.mark.parametrize(("size", "per_node", "weights"), [(2, 1, "stored"), (4, 2, "stored"), (2, 1, "int8")])
def test_an_engine_answers_the_same_however_its_nodes_read(
    tmp_path: Path, ranks: Ranks, size: int, per_node: int, weights: str
) -> None:
    """`model.shared_filesystem` false, true and auto on what is one machine: one and the same bits of every logit, and
    the log says what was read and sent."""
    kernels = Kernels.find()
    if weights == "int8" and (kernels is None or not kernels.int8):
        pytest.skip("no AVX-512 BF16 and VBMI here")
    folder = str(checkpoints.save(tmp_path / "m", "llama", dtype="bfloat16", tokenizer=False))
    answers = {}
    for shared in (False, True, "auto"):
        model = {"shared_filesystem": shared, "weights": weights}
        asked = {"folders": [folder] * size, "per_node": per_node, "model": model, "prompts": PROMPTS}
        answers[shared] = ranks(size, "shared_cases:built", asked)
    bits = [[rank["logits"] for rank in got] for got in answers.values()]
    assert bits[0] == bits[1] == bits[2]
    lines = {shared: got[0]["lines"] for shared, got in answers.items()}
    nodes = size // per_node
    assert len(lines[False]) == 1
    assert lines[False][0].startswith(f"weights: {size} ranks on {nodes} nodes read 0.00 GB in ")
    assert "storage gives a node" in lines[True][0]
    assert "and sent one another" in lines[True][1]
    assert "one machine with one page cache" in lines["auto"][0]
    assert not any(rank["lines"] for got in answers.values() for rank in got[1:])


def test_auto_sends_what_comes_sooner_that_way(tmp_path: Path, ranks: Ranks) -> None:
    """Two machines with one file server: over fast links columns are sent, over slow ones nothing is; the answers stay
    the same. Folders of other files: read alone; with `true`, refused by name."""
    folder = str(checkpoints.save(tmp_path / "m", "llama", tokenizer=False))
    other = str(checkpoints.save(tmp_path / "other", "llama", tokenizer=False, max_shard_size="40KB"))
    asked: dict[str, Any] = {"folders": [folder] * 2, "per_node": 1, "model": {}, "prompts": PROMPTS}
    fast = ranks(2, "shared_cases:built", {**asked, "rates": [1.0, 1e12, 0.0]})
    slow = ranks(2, "shared_cases:built", {**asked, "rates": [1e12, 1.0, 1.0]})
    assert [rank["logits"] for rank in fast] == [rank["logits"] for rank in slow]
    assert "sent one another" in fast[0]["lines"][-1]
    apart = ranks(2, "shared_cases:built", {**asked, "folders": [folder, other], "rates": [1.0, 1e12, 0.0]})
    assert "the nodes have different files" in apart[0]["lines"][0]
    refused = {**asked, "folders": [folder, other], "model": {"shared_filesystem": True}}
    with pytest.raises(RankError, match=r"shared_filesystem=true, but rank 1 sees other files"):
        ranks(2, "shared_cases:built", refused)


def test_rates_are_measured_and_agreed_on(tmp_path: Path, ranks: Ranks) -> None:
    folder = str(checkpoints.save(tmp_path / "m", "llama", tokenizer=False))
    got = ranks(4, "shared_cases:measured", {"folder": folder, "per_node": 2})
    assert all(rates == got[0] for rates in got)
    storage, link, latency = got[0]
    print(f"storage {storage / 1e9:.2f} GB/s, link {link / 1e9:.2f} GB/s, latency {latency * 1e6:.0f} us")
    assert storage > 1e6
    assert 1e6 < link < 1e12
    assert 0 < latency < 1
