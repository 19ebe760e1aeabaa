"""Packed weights that outlive their process: who takes them over computes the same bits, and reads nearly nothing."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoints
import lane_checkpoints
import pytest
import torch
from engine_cases import CPU, deployment, forward_all
from laddertron.engine.config.schema import DaemonConfig, Deployment
from laddertron.engine.step import loading
from laddertron.engine.step import share as sharing
from laddertron.engine.step.build import Built, build
from laddertron.models.cpu.kernels import Kernels
from laddertron.models.cpu.ops import CpuOps
from laddertron.models.llama import LlamaModel
from laddertron.models.pages import HeldPages
from laddertron.models.weights.manifest import make_manifest, write_manifest
from rank_pool import Rank

Ranks = Callable[..., list[Any]]
KERNELS = Kernels.find()
needs_kernels = pytest.mark.skipif(KERNELS is None, reason="the C kernels were not built (no compiler)")


def standing(folder: str, size: int, weights: str, deterministic: Any) -> Deployment:
    d = deployment(folder, size, {"weights": weights})
    return replace(d, parallel=replace(d.parallel, deterministic=deterministic), daemon=DaemonConfig(standby=1))


def bits(built: Built) -> str:
    logits = forward_all(built, checkpoints.prompts(4))
    return hashlib.sha256(logits.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def case_held(rank: Rank, folder: str, weights: str, deterministic: Any) -> dict[str, Any]:
    """Loads, goes on twice with what is held, and once after the checkpoint was touched."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    d, c = standing(folder, rank.size, weights, deterministic), rank.communicator
    read, load, patch = list[int](), LlamaModel.load, pytest.MonkeyPatch()

    def count(*args: Any) -> int:
        read.append(load(*args))
        return read[-1]

    patch.setattr(LlamaModel, "load", count)
    try:
        own = build(replace(d, daemon=DaemonConfig()), c, CPU)
        first = build(d, c, CPU)
        found, files = [bits(own), bits(first)], [own.weights_file, first.weights_file]
        if first.weights_file >= 0:  # what lies there needs no room
            least = sharing.make_share(d, c, CPU).needed + (d.engine.kv_cache_memory or 0)
            with pytest.MonkeyPatch.context() as short:
                short.setattr(sharing, "available_bytes", lambda device: least - 1)
                assert not sharing.has_room(d, c, CPU, 1)
                assert sharing.has_room(d, c, CPU, 1, first.weights_file)
        before = first
        for _ in range(2 if first.weights_file >= 0 else 0):
            again = build(d, c, CPU, weights_file=os.open(f"/proc/self/fd/{before.weights_file}", os.O_RDONLY))
            pages: Any = again.runner.model.ops.pages
            assert pages.filled
            found.append(bits(again))
            before = again  # the other one is gone
        if before.weights_file >= 0:
            c.gather(torch.zeros(1, dtype=torch.uint8).numpy())
            if rank.rank == 0:
                os.utime(Path(folder) / "model.safetensors", (1, 1))
            c.gather(torch.zeros(1, dtype=torch.uint8).numpy())
            anew = build(d, c, CPU, weights_file=os.dup(before.weights_file))
            pages = anew.runner.model.ops.pages
            assert not pages.filled
            found.append(bits(anew))
    finally:
        patch.undo()
    return {"bits": found, "files": files, "read": read}


@needs_kernels
@pytest.mark.parametrize(
    ("recipe", "dtype", "weights", "deterministic"),
    [
        ("llama", "bfloat16", "stored", False),
        ("qwen3", "bfloat16", "stored", True),
        ("qwen3_bias", "bfloat16", "int8", False),
        ("parallel", "float32", "stored", "everywhere"),
        ("llama", "float16", "stored", False),
        ("llama", "float32", "stored", False),
        ("glm4_moe", "bfloat16", "stored", True),
        ("deepseek_v3", "bfloat16", "stored", False),
        ("glm_moe_dsa", "bfloat16", "stored", False),
        ("gpt_oss", "bfloat16", "stored", False),
        pytest.param("deepseek_v32", "float32", "stored", False, marks=pytest.mark.slow),
        pytest.param("longcat_flash", "bfloat16", "stored", False, marks=pytest.mark.slow),
        pytest.param("lanes", "bfloat16", "stored", False, marks=pytest.mark.slow),
    ],
)
def test_weights_that_are_held_compute_the_same_bits(
    ranks: Ranks, tmp_path: Path, recipe: str, dtype: str, weights: str, deterministic: Any
) -> None:
    """Two ranks: tied and untied heads, biases, int8, a joint product; with a manifest. What another process packed is
    not read again, in a second generation neither; a checkpoint that was touched since is."""
    if weights == "int8" and not (KERNELS and KERNELS.int8):
        pytest.skip("this CPU tier has no int8 products")
    save = lane_checkpoints.save if recipe == "lanes" else partial(checkpoints.save, recipe=recipe)
    folder = save(tmp_path / "model", dtype=dtype)
    write_manifest(folder, make_manifest(folder))
    args = {"folder": str(folder), "weights": weights, "deterministic": deterministic}
    for answer in ranks(2, "test_loading:case_held", args):
        assert answer["files"][0] == -1
        if answer["files"][1] < 0:
            pytest.skip("this CPU tier leaves the products to torch")
        assert len(answer["bits"]) == 5
        assert len(set(answer["bits"])) == 1
        own, first, held, again, anew = answer["read"]
        assert own == first == anew
        assert held == again < own / 2


@needs_kernels
def test_what_torch_packs_is_not_held() -> None:
    """A product that our kernels do not serve: its copy lies where torch wants it."""
    pages = HeldPages()
    CpuOps(KERNELS, pages=pages).product(torch.ones(4, 3), None)
    assert not pages.complete


def test_what_is_no_file_of_weights_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another's descriptor, or one of weights that were never finished: loaded, with a line that says so."""
    source: Any = SimpleNamespace(tensors={}, digest="d")
    alone: Any = SimpleNamespace(rank=0, pipeline=None, layout=SimpleNamespace(per_node=1))
    (tmp_path / "other").write_text("{}")
    d = standing("nowhere", 1, "stored", False)
    for file in (os.open(tmp_path / "other", os.O_RDONLY), os.memfd_create("unfinished"), 1 << 20):
        fresh: Any = loading.held_weights(source, d.model, d.parallel, alone, file)
        assert not fresh.filled
    assert caplog.text.count("loading them") == 3
    fresh.seal([])
    held: Any = loading.held_weights(source, d.model, d.parallel, alone, os.dup(fresh.file))
    assert held.filled


def test_a_system_without_files_of_memory_loads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source: Any = SimpleNamespace(tensors={}, digest="d")
    alone: Any = SimpleNamespace(rank=0, pipeline=None, layout=SimpleNamespace(per_node=1))

    def forbidden(name: str) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    d = standing("nowhere", 1, "stored", False)
    assert loading.held_weights(source, d.model, d.parallel, alone, -1) is None
    assert "a hot standby has to load the weights" in caplog.text
