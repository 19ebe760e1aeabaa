"""The fused noise kernel: bitwise torch's numbers when interpreted, IEEE instructions alone when compiled, and, where
there is a GPU, the same on it."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from laddertron.engine.sampling.logits_shard import NOISE, ROW, Logits, TorchShard, TritonShard, make_shard
from test_philox import GOLDEN

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: make env ACCEL=cuda"
)


@needs_triton
def test_the_kernel_draws_what_torch_draws() -> None:
    """Interpreted on the CPU: the golden noise to the last bit, and every output of a scan alike, over ties, masked
    rows, NaN, infinities, limits and blocks that are not full."""
    command = [sys.executable, str(Path(__file__).with_name("interpret_noise.py"))]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["golden"] == [golden for _, golden in GOLDEN]
    assert len(found["cases"]) == 12
    for case in found["cases"]:
        assert case["differ"] == [], case
    assert len({tuple(case["ids"]) for case in found["cases"]}) > 4  # they are different draws


@needs_triton
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_compiled_kernel_rounds_where_the_definition_does(capability: int) -> None:
    """No product is contracted with a sum, divisions are exact ones, and constants have all their 64 bits."""
    import triton
    from laddertron.engine.sampling import noise_triton as noise_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {"x": "*fp32", "stride": "i64", "rows": "*i64", "scales": "*fp64", "best": "*fp64", "at": "*i64"}
    signature |= dict.fromkeys(("columns", "first", "count"), "i32") | {"BLOCK": "constexpr"}
    source = ASTSource(fn=noise_kernel.scan, signature=signature, constexprs={"BLOCK": noise_kernel.BLOCK})
    target = GPUTarget("cuda", capability, 32)
    ptx = triton.compile(source, target=target, options=noise_kernel.EXACT).asm["ptx"]
    assert "fma.rn.f64" not in ptx
    assert "mul.f64" not in ptx  # without .rn the assembler may contract it
    assert "add.f64" not in ptx
    assert "div.rn.f64" in ptx
    for constant in (*(1.0 / odd for odd in range(19, 1, -2)), 0.6931471805599453, 2.0**-53):
        assert struct.pack(">d", constant).hex() in ptx.lower(), constant
    contracted = triton.compile(source, target=target, options={}).asm["ptx"]
    assert "fma.rn.f64" in contracted  # what the option is there against


def test_the_kernel_is_compiled_once_for_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton specialises integers that are 1 or divisible by 16: not the rows of a batch, which differ by step."""
    fixed: dict[str, list[str]] = {}

    def jit(function: Any = None, do_not_specialize: list[str] | None = None) -> Any:
        if function is None:
            return lambda kernel: jit(kernel, do_not_specialize)
        fixed[function.__name__] = do_not_specialize or []
        return function

    language = SimpleNamespace(constexpr=lambda value: value)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(jit=jit, language=language))
    monkeypatch.setitem(sys.modules, "triton.language", language)
    spec = importlib.util.find_spec("laddertron.engine.sampling.noise_triton")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert fixed["scan"] == ["count"]


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed")
def test_without_triton_the_noise_is_torchs() -> None:
    assert type(make_shard(0, torch.device("cuda"))) is TorchShard


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_kernel_on_a_gpu() -> None:
    """8 rows over 128,256 ids: the ids and the noise that the CPU draws, to the last bit."""
    pytest.importorskip("triton")
    x = torch.randn(8, 128_256, generator=torch.Generator().manual_seed(3)) * 4
    rows = np.zeros(8, ROW)
    rows["seed"], rows["position"], rows["flags"] = np.arange(8), 5, NOISE
    rows["inv_temperature"], rows["reference"] = 0.8, np.nan
    plain, fused = rows.copy(), rows.copy()
    TorchShard(0).scan(Logits(x), np.arange(8), plain)
    shard = make_shard(0, torch.device("cuda"))
    assert isinstance(shard, TritonShard)
    shard.scan(Logits(x.cuda()), np.arange(8), fused)
    assert plain["best"].tobytes() == fused["best"].tobytes()
    assert plain["best_id"].tobytes() == fused["best_id"].tobytes()
