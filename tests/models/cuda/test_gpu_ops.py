"""A layer's Triton kernels: interpreted on a CPU against torch, compiled for the GPUs they are for, and on one."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import FOLDERS
from laddertron.models.weights.tensor_reader import FP8
from test_flashinfer import CUDA, make_cache

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: make env ACCEL=cuda"
)


def test_interpreted_kernels_mean_what_torch_means() -> None:
    """Norm, gate, and rotation with the write into scattered blocks; partial rotation, QK norms, dimensions that are no
    power of two. fp32 and fp16 to their last bits or so. The interpreter cuts where it should round to bfloat16, and
    loses the carry in some roundings to fp8: those have a wide bound here and their true one on a GPU."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("interpret_gpu_ops.py"))]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(FOLDERS)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for kind, distances in found["layers"].items():
        assert max(distances.values()) < {"torch.float32": 1e-6, "torch.float16": 2e-3}.get(kind, 0.05), (
            kind,
            distances,
        )
    for distances in found["fp8"]:
        assert max(distances.values()) < 0.15, distances
    assert len(found["products"]) == 4
    for product in found["products"]:
        assert product["same"], product
        # The interpreter's tl.dot multiplies fp8 as bfloat16, which holds both; sums in fp32.
        assert product["distance"] < 1e-5, product
    assert len(found["stores"]) == 8
    for case in found["stores"]:
        kind, stored = case["case"][:2]
        bound = {"torch.float32": 1e-6, "torch.float16": 2e-3}.get(kind, 0.03)
        assert case["queries"] < bound, case
        assert case["unequal"] < (0.1 if stored == str(FP8) else 1.0), case
        assert case["cache"] < (1.0 if stored == str(FP8) else bound), case


def _compile(
    name: str, capability: int, kind: str, cache: str = "", types: dict[str, str] | None = None, /, **constants: Any
) -> str:
    import triton
    from laddertron.models.cuda import kernels as gpu_kernels
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel: Any = getattr(gpu_kernels, name)
    known = {"keys": f"*{cache}", "values": f"*{cache}", "cos": "*fp32", "sin": "*fp32", "blocks": "*i64"}
    known |= {"offsets": "*i64", "eps": "fp32", "size": "i32", "width": "i32", "bound": "fp32"}
    known |= {"x_row": "i32", "added_row": "i32"} | (types or {})
    signature = {p: "constexpr" if p in constants else known.get(p, f"*{kind}") for p in kernel.arg_names}
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants), target=GPUTarget("cuda", capability, 32)
    )
    assert compiled.asm["cubin"][:4] == b"\x7fELF"
    return str(compiled.asm["ptx"])


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
def test_kernels_compile(capability: int, kind: str) -> None:
    for add in (False, True):
        _compile("rms_norm", capability, kind, ADD=add, FP8=False, BLOCK=4096)
    if capability >= 90:
        fp8 = {"out": "*fp8e4nv", "scales": "*fp32"}
        assert "e4m3" in _compile("rms_norm", capability, kind, "", fp8, ADD=True, FP8=True, BLOCK=4096)
        for gated in (False, True):
            assert "e4m3" in _compile("quantise", capability, kind, "", fp8, GATED=gated, BLOCK=16384)
    _compile("silu_and_mul", capability, kind, BLOCK=1024)
    shape = {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "HALF": 64, "BLOCK": 128}
    for norm in (False, True):
        _compile("rotate_and_store", capability, kind, kind, None, NORM=norm, FP8=False, SCALED=False, **shape)
    if capability >= 90:
        scales = {"key_scale": "*fp32", "value_scale": "*fp32"}
        for scaled in (False, True):
            assert "e4m3" in _compile(
                "rotate_and_store", capability, kind, "fp8e4nv", scales, NORM=False, FP8=True, SCALED=scaled, **shape
            )
    product = {"x_scale": "*fp32", "weight_scale": "*fp32", "out": "*fp32"}
    product |= dict.fromkeys(("tokens", "outputs", "x_row", "weight_row"), "i32")
    ptx = _compile(
        "row_product", capability, kind, "", product, INPUTS=4096, SCALED_X=False, SCALED_WEIGHT=False, SIZE=64
    )
    assert "mma" in ptx or kind == "fp32"
    if capability >= 90 and kind == "bf16":
        product |= {"x": "*fp8e4nv", "weight": "*fp8e4nv", "out": "*bf16"}
        _compile("row_product", capability, kind, "", product, INPUTS=4096, SCALED_X=True, SCALED_WEIGHT=True, SIZE=64)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
def test_on_a_gpu(kv_dtype: torch.dtype) -> None:
    from laddertron.models import attention, ops
    from laddertron.models.cuda import ops as gpu_ops
    from laddertron.models.cuda.fp8 import quantise_rows
    from laddertron.models.ops import Norm, RunningSum

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=CUDA, dtype=torch.bfloat16)

    x, gate_up, norm = normal(7, 4096), normal(7, 2 * 14336), Norm(normal(4096), 1e-5)
    assert (gpu_ops.rms_norm(x, norm) - ops.rms_norm(x, norm)).abs().max() <= 0.02 * norm.weight.abs().max() * 4
    assert (gpu_ops.silu_and_mul(gate_up) - ops.silu_and_mul(gate_up)).abs().max() <= 0.06
    total = RunningSum(x) + x
    assert torch.equal(gpu_ops.rms_norm(total, norm), gpu_ops.rms_norm(x + x, norm))
    assert torch.equal(total.whole(), x + x)
    if torch.cuda.get_device_capability() >= (9, 0):
        for (values, scales), plain in (
            (gpu_ops.rms_norm_fp8(x, norm, math.inf), gpu_ops.rms_norm(x, norm)),
            (gpu_ops.quantise(gate_up, 1.5, True), gpu_ops.silu_and_mul(gate_up)),
        ):
            want, want_scales = quantise_rows(plain, math.inf if plain.shape[1] == 4096 else 1.5)
            assert torch.allclose(scales, want_scales, rtol=1e-5)
            assert (values.view(torch.uint8) != want.view(torch.uint8)).float().mean() < 0.02
        x[0, 3] = math.nan
        assert bool(gpu_ops.quantise(x, math.inf)[0].float()[0, 3].isnan())
    rows, weight = normal(300, 4096), normal(6144, 4096)
    whole = gpu_ops.RowOps().product(weight, None)(rows)
    assert torch.allclose(whole.float(), torch.nn.functional.linear(rows, weight).float(), atol=2.0, rtol=0.02)
    for first, count in ((0, 1), (17, 7), (3, 64), (5, 65), (299, 1)):
        part = gpu_ops.RowOps().product(weight, None)(rows[first : first + count].clone())
        assert torch.equal(part, whole[first : first + count]), (first, count)
    caches = [make_cache(8, 128, 9, 16, kv_dtype, CUDA) for _ in range(2)]
    if not gpu_ops.stores(caches[0], torch.cuda.get_device_capability()):
        pytest.skip("fp8 conversions need compute capability 8.9")
    angles = torch.rand(7, 1, 64, device=CUDA)
    where = torch.arange(7, device=CUDA), torch.arange(7, device=CUDA) * 2
    norms = Norm(normal(128), 1e-6), Norm(normal(128), 1e-6)
    arguments: Any = (1, normal(7, 48 * 128), norms, (angles.cos(), angles.sin()), *where)
    want, _, _ = attention.rotate_and_store(caches[0], *arguments)
    got = gpu_ops.rotate_and_store(caches[1], *arguments)
    assert torch.allclose(got.float(), want.float(), atol=0.05, rtol=0.02)
    for a, b in zip((*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values), strict=True):
        assert (a.view(torch.uint8) != b.view(torch.uint8)).float().mean() < 0.02
