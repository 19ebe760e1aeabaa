"""Filters over whole rows of a device: the ids that the host's rule keeps, by sorting and by Triton's search."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from interpret_filters import broken, differing
from laddertron.engine.sampling.device_rule import filter_rule, filtered
from laddertron.engine.sampling.logits_shard import make_shard

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: make env ACCEL=cuda"
)


def test_what_is_kept_is_what_the_host_keeps() -> None:
    """400 draws of seven kinds of rows under top_k, top_p, min_p and temperature together."""
    for seed in range(400):
        vocab = (7, 60, 251)[seed % 3]
        assert differing(filtered, seed, vocab) == [], f"seed {seed}"
    assert broken(filtered) == []


@needs_triton
def test_the_kernels_keep_what_the_host_keeps() -> None:
    """Interpreted: the same rows, each pair of filters alone and together, on several programs a row."""
    seed = int.from_bytes(os.urandom(2), "little")
    print(f"seed {seed}")
    command = [sys.executable, str(Path(__file__).with_name("interpret_filters.py")), str(seed)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 5
    assert [faults for _, faults in found] == [[]] * 5, found


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed")
def test_without_triton_rows_are_sorted() -> None:
    assert filter_rule(make_shard(0, torch.device("cuda"))) is filtered


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_kernels_on_a_gpu() -> None:
    """At the true tiles, over a whole vocabulary."""
    pytest.importorskip("triton")
    found = filter_rule(make_shard(0, torch.device("cuda")))
    assert found is not filtered

    def on_gpu(x: torch.Tensor, filters: torch.Tensor, *rest: Any) -> torch.Tensor:
        return found(x.cuda(), filters.cuda(), *rest).cpu()

    for seed in range(20):
        assert differing(on_gpu, seed, 128_256) == [], f"seed {seed}"
    assert broken(on_gpu) == []
