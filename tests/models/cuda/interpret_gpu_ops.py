"""What test_gpu_ops.py starts with TRITON_INTERPRET=1: a layer's kernels on the CPU against torch. Prints one JSON
object with the largest differences. Not a test module."""

from __future__ import annotations

import json
from typing import Any

import torch
from laddertron.models import attention, ops
from laddertron.models.cuda import ops as gpu_ops
from laddertron.models.ops import Norm
from laddertron.models.weights.tensor_reader import FP8
from test_flashinfer import CPU, make_cache

DICE = torch.Generator().manual_seed(7)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=DICE).to(dtype)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())


def layers(dtype: torch.dtype) -> dict[str, float]:
    norm = Norm(normal(100, dtype=dtype), 1e-5)
    x, gate_up, weight = normal(3, 100, dtype=dtype), normal(3, 2 * 1500, dtype=dtype), normal(40, 100, dtype=dtype)
    fused, plain = gpu_ops.TritonOps(), ops.TorchOps()
    return {
        "norm": distance(gpu_ops.rms_norm(x, norm), ops.rms_norm(x, norm)),
        "gate": distance(gpu_ops.silu_and_mul(gate_up), ops.silu_and_mul(gate_up)),
        "product": distance(fused.product(weight, None, norm)(x), plain.product(weight, None, norm)(x)),
        "gated": distance(fused.gated_product(weight, None, norm)(x), plain.gated_product(weight, None, norm)(x)),
    }


def store(dtype: torch.dtype, kv_dtype: torch.dtype, dim: int, rotary: int, normed: bool) -> dict[str, Any]:
    heads, kv_heads, tokens = 6, 2, 5
    caches = [make_cache(kv_heads, dim, 7, 4, kv_dtype, CPU) for _ in range(2)]
    qkv = normal(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    qkv[0] *= 1000.0  # beyond fp8
    angles = normal(tokens, 1, rotary // 2)
    norms = (Norm(normal(dim, dtype=dtype), 1e-6), Norm(normal(dim, dtype=dtype), 1e-6)) if normed else (None, None)
    where = torch.tensor([6, 0, 3, 3, 1]), torch.tensor([0, 3, 1, 2, 3])
    arguments = (qkv, norms, (angles.cos(), angles.sin()), *where)
    want, _, _ = attention.rotate_and_store(caches[0], 1, *arguments)
    got = gpu_ops.rotate_and_store(caches[1], 1, *arguments)
    pairs = list(zip((*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values), strict=True))
    return {
        "case": [str(dtype), str(kv_dtype), dim, rotary, normed],
        "queries": distance(got, want),
        "cache": max(distance(b, a) for a, b in pairs),
        "unequal": max(float((a.float() != b.float()).float().mean()) for a, b in pairs),
    }


def main() -> None:
    half, full, wide = torch.float16, torch.float32, torch.bfloat16
    cases = [
        store(full, full, 16, 16, False), store(full, full, 16, 8, True), store(full, full, 24, 24, True),
        store(wide, wide, 32, 32, True), store(half, half, 16, 16, False), store(wide, FP8, 16, 16, False),
        store(wide, FP8, 16, 16, True),
    ]  # fmt: skip
    print(json.dumps({"layers": {str(kind): layers(kind) for kind in (full, wide, half)}, "stores": cases}))


if __name__ == "__main__":
    main()
