"""What test_gpu_ops.py starts with TRITON_INTERPRET=1: a layer's kernels on the CPU against torch. Prints one JSON
object with the largest differences. Not a test module."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import torch
from laddertron.models import ops
from laddertron.models.cuda import ops as gpu_ops
from laddertron.models.cuda.flashinfer import store_by_torch
from laddertron.models.cuda.fp8 import quantise_rows
from laddertron.models.ops import Norm, RunningSum
from laddertron.models.weights.tensor_reader import FP8
from test_flashinfer import CPU, make_cache
from triton.runtime import interpreter

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
    columns, one = normal(3, 130, dtype=dtype)[:, 20:120], normal(100, dtype=dtype).expand(3, -1)
    return {
        "norm": distance(gpu_ops.rms_norm(x, norm), ops.rms_norm(x, norm)),
        "norm of columns": distance(gpu_ops.rms_norm(columns, norm), ops.rms_norm(columns, norm)),
        "norm of one row": distance(gpu_ops.rms_norm(one, norm), ops.rms_norm(one, norm)),
        "norm of a sum of columns": distance(
            gpu_ops.rms_norm(RunningSum(columns) + one, norm), ops.rms_norm(columns + one, norm)
        ),
        "gate": distance(gpu_ops.silu_and_mul(gate_up), ops.silu_and_mul(gate_up)),
        "product": distance(fused.product(weight, None, norm)(x), plain.product(weight, None, norm)(x)),
        "summed": summed(x, normal(3, 100, dtype=dtype), norm),
        "gated": distance(fused.gated_product(weight, None, norm)(x), plain.gated_product(weight, None, norm)(x)),
    }


def summed(x: torch.Tensor, added: torch.Tensor, norm: Norm) -> float:
    """A sum that its norm adds up: the norm, and the sum itself, to the last bit but in bfloat16 (see test_gpu_ops)."""
    late = RunningSum(x) + added
    found = gpu_ops.rms_norm(late, norm)
    assert late.parts()[1] is None
    torch.testing.assert_close(late.whole(), x + added, atol=0.0, rtol=0.008 if x.dtype == torch.bfloat16 else 0.0)
    return distance(found, ops.rms_norm(x + added, norm))


def quantised(dtype: torch.dtype, bound: float) -> dict[str, float]:
    """Norm, gate and nothing before quantisation in fp8: the scales, and the values that rows stand for, in units of
    half a step of the largest."""
    norm = Norm(normal(100, dtype=dtype), 1e-5)
    x, gate_up = normal(3, 100, dtype=dtype), normal(3, 2 * 1500, dtype=dtype)
    x[1], gate_up[2] = 0.0, 0.0
    pairs = {
        "norm": (gpu_ops.rms_norm_fp8(RunningSum(x) + x, norm, bound), ops.rms_norm(x + x, norm)),
        "gate": (gpu_ops.quantise(gate_up, bound, True), ops.silu_and_mul(gate_up)),
        "rows": (gpu_ops.quantise(x, bound), x),
    }
    far = {}
    for name, ((values, scales), plain) in pairs.items():
        want, want_scales = quantise_rows(plain, bound)
        assert torch.allclose(scales, want_scales, rtol=0.02), name
        far[name] = distance(values.float() * scales, want.float() * want_scales)
    return far


def store(
    dtype: torch.dtype, kv_dtype: torch.dtype, dim: int, rotary: int, normed: bool, scaled: bool = False
) -> dict[str, Any]:
    heads, kv_heads, tokens = 6, 2, 5
    caches = [make_cache(kv_heads, dim, 7, 4, kv_dtype, CPU) for _ in range(2)]
    scales = torch.tensor([[1.0, 1.0], [0.3, 5.0]]), torch.tensor([[1.0, 1.0], [20.0, 0.7]])
    for cache in caches:
        cache.scales = scales if scaled else None
    qkv = normal(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    qkv[0] *= 1000.0  # beyond fp8
    angles = normal(tokens, 1, rotary // 2)
    norms = (Norm(normal(dim, dtype=dtype), 1e-6), Norm(normal(dim, dtype=dtype), 1e-6)) if normed else (None, None)
    where = torch.tensor([6, 0, 3, 3, 1]), torch.tensor([0, 3, 1, 2, 3])
    arguments = (qkv, norms, (angles.cos(), angles.sin()), *where)
    want = store_by_torch(caches[0], 1, *arguments)
    got = gpu_ops.rotate_and_store(caches[1], 1, *arguments)
    pairs = list(zip((*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values), strict=True))
    return {
        "case": [str(dtype), str(kv_dtype), dim, rotary, normed, scaled],
        "queries": distance(got, want),
        "cache": max(distance(b, a) for a, b in pairs),
        "unequal": max(float((a.float() != b.float()).float().mean()) for a, b in pairs),
    }


class RowWise:
    """numpy, whose product of a tile has a row's bits depend on where in the tile it lies, which a GPU's has not; and
    of bfloat16 too, whose bits the interpreter multiplies as integers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def matmul(a: Any, b: Any, dtype: Any) -> Any:
        a, b = (
            (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x.astype(dtype) for x in (a, b)
        )
        return np.stack([row @ b for row in a])


def products() -> list[dict[str, Any]]:
    """RowOps against torch, and whether a row has the same bits for any batch composition: sizes that are no multiple
    of a tile, a bias, a tree of shares, fp8 with scales."""
    interpreter.np = RowWise()
    x, weight, bias = normal(130, 200), normal(90, 200), normal(90)
    values, scales = quantise_rows(x)
    codes, columns = quantise_rows(weight)
    rows, plain = gpu_ops.RowOps(), ops.TorchOps()
    tree = ops.Tree(4, 0.5)
    fp8 = (values.float() * scales) @ (codes.float() * columns).T
    makes: dict[str, tuple[Any, torch.Tensor]] = {
        "plain": (rows.product(weight, None), plain.product(weight, None)(x)),
        "bias": (rows.product(weight, bias), plain.product(weight, bias)(x)),
        "tree": (rows.product(weight, bias, None, tree), plain.product(weight, bias, None, tree)(x)),
    }
    found = []
    for name, (product, want) in makes.items():
        whole = product(x)
        same = all(
            torch.equal(product(x[first : first + n].clone()), whole[first : first + n])
            for first in (0, 3)
            for n in (1, 7, 64, 65, 127)
        )
        found.append({"name": name, "distance": distance(whole, want), "same": same})
    one = [gpu_ops.row_product(values[i : i + 1], codes, torch.float32, scales[i : i + 1], columns) for i in range(130)]
    whole = gpu_ops.row_product(values, codes, torch.float32, scales, columns)
    found.append({"name": "fp8", "distance": distance(whole, fp8), "same": torch.equal(torch.cat(one), whole)})
    return found


def main() -> None:
    half, full, wide = torch.float16, torch.float32, torch.bfloat16
    cases = [
        store(full, full, 16, 16, False), store(full, full, 16, 8, True), store(full, full, 24, 24, True),
        store(wide, wide, 32, 32, True), store(half, half, 16, 16, False), store(wide, FP8, 16, 16, False),
        store(wide, FP8, 16, 16, True), store(wide, FP8, 16, 16, False, True),
    ]  # fmt: skip
    fp8 = [quantised(wide, bound) for bound in (math.inf, 1.5)]
    found = {
        "layers": {str(kind): layers(kind) for kind in (full, wide, half)},
        "stores": cases,
        "fp8": fp8,
        "products": products(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
