"""`parallel.deterministic`: a row's bits are those that it has alone, whatever else is in its step.

Part of what tests/topology/hardware/test_cpu_tiers.py plays in every CPU tier. LADDERTRON_SEED repeats a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from laddertron.models import ops_choice
from laddertron.models.attention import KVCache
from laddertron.models.attention_choice import AttentionError, make_attention
from laddertron.models.config.model_config import from_folder
from laddertron.models.cpu.kernels import Kernels, OddInputsError
from laddertron.models.cpu.ops import CpuOps
from laddertron.models.ops_choice import WeightsError, make_ops
from laddertron.models.stages import RankShard

pytestmark = pytest.mark.skipif(Kernels.find() is None, reason="the C kernels were not built here")

Ranks = Callable[..., list[Any]]


def stored_as(dtype: str) -> dict[str, str]:
    """Of `int8`, which the tier `generic` does not compute: the rest is bfloat16."""
    if dtype != "int8":
        return {}
    kernels = Kernels.find()
    if kernels is None or not kernels.int8:
        pytest.skip("no int8 in this CPU tier")
    return {"weights": "int8"}


def differences(run_seed: int, ranks: Ranks, size: int, folder: Path, dtype: str, cases: int, **how: Any) -> list[Any]:
    args = {"folder": str(folder), "dtype": dtype, "cases": cases, "seed": run_seed} | how
    return ranks(size, "determinism_cases:differences", args, timeout_s=1200.0)


@pytest.mark.parametrize(
    ("family", "size", "dtype", "cases"),
    [("llama_tied", 1, "bfloat16", 3), ("ladder", 2, "float32", 2), ("parallel", 1, "float16", 2)],
)
def test_a_row_has_the_bits_that_it_has_alone(
    ranks: Ranks, family: str, size: int, dtype: str, cases: int, tmp_path: Path, run_seed: int
) -> None:
    folder = checkpoints.save(tmp_path / "m", family, dtype=dtype)
    assert differences(run_seed, ranks, size, folder, dtype, cases) == [[]] * size


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", ["llama", "ladder"])
def test_a_thousand_mixes(ranks: Ranks, family: str, size: int, dtype: str, tmp_path: Path, run_seed: int) -> None:
    """1,002 over all of these."""
    folder = checkpoints.save(tmp_path / "m", family, dtype=dtype)
    assert differences(run_seed, ranks, size, folder, dtype, 167 // 2 + 1 - size % 2, threads=2) == [[]] * size


FAMILIES = sorted((checkpoints.STOCK | checkpoints.DECLARED).keys() - {"llama_dynamic_rope"})  # 32 positions: too few


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("family", [*FAMILIES, *checkpoints.LADDER_FORMATS])
def test_every_family_is_independent_of_its_company(
    ranks: Ranks, family: str, dtype: str, tmp_path: Path, run_seed: int
) -> None:
    size = 4 if family.endswith("tp4") else 2 if family.endswith("tp2") else 1
    how = stored_as(dtype)
    dtype = dtype.replace("int8", "bfloat16")
    folder = checkpoints.save(tmp_path / "m", family, dtype=dtype)
    assert differences(run_seed, ranks, size, folder, dtype, 4, **how) == [[]] * size
    check_served(run_seed, ranks, size, folder, dtype, 6, **how)


@pytest.mark.parametrize(("size", "dtype"), [(1, "bfloat16"), (2, "float32")])
def test_answers_through_the_scheduler_are_those_alone(
    ranks: Ranks, size: int, dtype: str, tmp_path: Path, run_seed: int
) -> None:
    check_served(run_seed, ranks, size, checkpoints.save(tmp_path / "m", "ladder", dtype=dtype), dtype, 8)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [1, 2])
def test_hundreds_of_mixes_through_the_scheduler(
    ranks: Ranks, size: int, dtype: str, tmp_path: Path, run_seed: int
) -> None:
    check_served(run_seed, ranks, size, checkpoints.save(tmp_path / "m", "llama", dtype=dtype), dtype, 120)


def check_served(run_seed: int, ranks: Ranks, size: int, folder: Path, dtype: str, cases: int, **how: Any) -> None:
    args = {"folder": str(folder), "dtype": dtype, "cases": cases, "seed": run_seed, "threads": 1 + cases // 100} | how
    found = ranks(size, "determinism_cases:served", args, timeout_s=1200.0)[0]
    assert found["wrong"] == []
    assert found["answers"] >= 20
    assert found["cached"] > 0, "no hit in the prefix cache"
    assert found["preempted"] > 0, "nobody was preempted"


EVERYWHERE = [(2, 1, {"collective": "exchange"}), (4, 2, {"small_bytes": 4096, "chunk_bytes": 4096})]
MORE = [
    (2, 2, {"collective": "pipeline"}),
    (4, 2, {"collective": "two_level"}),
    (4, 1, {"collective": "doubling"}),
    (4, 1, {"collective": "pipeline", "chunk_bytes": 4096}),
    (4, 4, {"backend": "gloo"}),
    (8, 4, {}),
    (8, 2, {"collective": "two_level"}),
]


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_the_number_of_ranks_changes_no_bit(ranks: Ranks, dtype: str, tmp_path: Path, run_seed: int) -> None:
    same_everywhere(run_seed, ranks, checkpoints.save(tmp_path / "m", "llama_bias", dtype=dtype), dtype, EVERYWHERE)


def test_the_number_of_ranks_changes_no_log_probability(ranks: Ranks, tmp_path: Path, run_seed: int) -> None:
    """Ids, digests, log-probabilities and the likeliest ids', with a vocabulary that no size divides."""
    folder = checkpoints.save(tmp_path / "m", vocab_size=331, dtype="bfloat16")
    args = {"folder": str(folder), "dtype": "bfloat16", "seed": run_seed, "vocab": 331}
    alone, *others = (ranks(size, "determinism_cases:scores", args)[0] for size in (1, 2, 4))
    assert sum(map(len, alone.values())) == 8 * 8
    assert others == [alone, alone]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("family", ["llama_mqa", "qwen3", "ladder", "parallel", "hybrid", "dolomite_bias"])
def test_no_layout_of_any_wiring_changes_a_bit(
    ranks: Ranks, family: str, dtype: str, tmp_path: Path, run_seed: int
) -> None:
    how = stored_as(dtype)
    dtype = dtype.replace("int8", "bfloat16")
    same_everywhere(
        run_seed, ranks, checkpoints.save(tmp_path / "m", family, dtype=dtype), dtype, EVERYWHERE + MORE, **how
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "ladder"])
def test_sixteen_ranks_change_no_bit(ranks: Ranks, family: str, dtype: str, tmp_path: Path, run_seed: int) -> None:
    """A head and a share of each product a rank."""
    folder = checkpoints.save(tmp_path / "m", family, dtype=dtype, num_attention_heads=16)
    same_everywhere(run_seed, ranks, folder, dtype, [(16, 4, {}), (16, 8, {"collective": "two_level"})])


def same_everywhere(run_seed: int, ranks: Ranks, folder: Path, dtype: str, layouts: list[Any], **how: Any) -> None:
    args = {"folder": str(folder), "dtype": dtype, "seed": run_seed} | how
    (alone,) = ranks(1, "determinism_cases:digests", args | {"per_node": 1, "comm": {}})
    assert len({row for sequence in alone for _, rows in sequence for row in rows}) > 100, "digests of nothing"
    for size, per_node, comm in layouts:
        for found in ranks(size, "determinism_cases:digests", args | {"per_node": per_node, "comm": comm}):
            assert found == alone, f"tp {size}, {per_node} on a node, {comm}"


def test_a_planted_product_is_found_with_its_layer_and_step(ranks: Ranks, tmp_path: Path, run_seed: int) -> None:
    folder = checkpoints.save(tmp_path / "m")
    for size in (1, 2):
        found = differences(run_seed, ranks, size, folder, "float32", 6, planted=True)
        said = [line for each in found for line in each]
        assert said, "nothing was found"
        assert all(": layer 1 mlp of sequence" in line and ", step " in line for line in said), said


def test_what_cannot_be_had_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = from_folder(checkpoints.save(tmp_path / "m"))
    shard = RankShard(config, 1, 0)
    cache = KVCache(shard, 4, 4, torch.float32, torch.device("cpu"))
    with pytest.raises(AttentionError, match=r"deterministic=true with engine\.attention=torch"):
        make_attention("torch", shard, cache, torch.float32, True)
    with pytest.raises(AttentionError, match=r"keys and values torch\.float32"):
        make_attention("auto", shard, cache, torch.bfloat16, True)
    with pytest.raises(AttentionError, match="heads of at most 1024; or use false"):
        make_attention("auto", RankShard(replace(config, head_dim=1040), 1, 0), cache, torch.float32, True)
    with monkeypatch.context() as patch:
        patch.setattr(ops_choice, "_triton_ops", lambda: None)
        with pytest.raises(WeightsError, match="deterministic=everywhere on a GPU needs Triton"):
            make_ops(torch.device("cuda"), torch.bfloat16, "stored", "everywhere")
    with monkeypatch.context() as patch:
        patch.setattr(Kernels, "find", lambda deterministic=False: None)
        with pytest.raises(WeightsError, match="deterministic=true: the C kernels were not built here"):
            make_ops(torch.device("cpu"), torch.float32, "stored", True)
    with pytest.raises(OddInputsError, match="a product of 7 inputs"):
        CpuOps(Kernels.find(deterministic=True)).product(torch.ones(4, 7), None)
