"""What test_gpu_experts.py starts: the kernels of experts and of latents against torch, on the CPU with
TRITON_INTERPRET=1, else on the GPU. Prints one JSON object. Not a test module."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from laddertron.models import ops
from laddertron.models.config.experts import Clamped, Router
from laddertron.models.config.quantisation import Code
from laddertron.models.cuda import ops as gpu_ops
from laddertron.models.cuda.experts import TILES, GroupedExperts, TritonChoice
from laddertron.models.cuda.packed import packed_linear
from laddertron.models.experts import Biased, TorchChoice, TorchExperts
from laddertron.models.latent import LatentAttention, LatentCache
from laddertron.models.ops import Norm, OtherLanes
from laddertron.models.packed import Packed

if "TRITON_INTERPRET" not in os.environ:
    torch.set_default_device("cuda")
DEVICE = torch.get_default_device()
DICE = torch.Generator(DEVICE).manual_seed(11)
ROUTERS = {
    "qwen3_moe": (Router("softmax", rounds=True), 12, 3),
    "glm4_moe": (Router("sigmoid", wide=True, biased=True, epsilon=1e-20, scale=2.5), 10, 4),
    "deepseek_v3": (
        Router("sigmoid", wide=True, biased=True, groups=4, chosen_groups=2, epsilon=1e-20, scale=2.5),
        16,
        5,
    ),
    "longcat_flash": (Router("softmax", wide=True, biased=True, normalises=False, scale=6.0), 24, 5),
}


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=DICE).to(dtype)


def choices() -> dict[str, bool]:
    """The same experts in the same order and, but for the last bits, the same weights; equal scores among them."""
    found = {}
    for name, (router, count, k) in ROUTERS.items():
        logits = normal(9, count, dtype=torch.float32 if router.wide else torch.bfloat16)
        logits[3] = 0.5
        logits[4, 1::2] = logits[4, ::2]
        local = torch.randperm(count, generator=DICE).int() - count // 2
        bias = normal(count) * 0.1 if router.biased else None
        want, got = (each(router, k, bias, local.clamp(min=-1))(logits) for each in (TorchChoice, TritonChoice))
        found[name] = (
            bool((want[0] == got[0]).all())
            and torch.equal(want[1], got[1])
            and torch.allclose(want[2], got[2], rtol=1e-5 if router.wide else 0.01)
        )
    return found


def not_finite() -> bool:
    """A row of NaN chooses experts that there are, by weights of NaN."""
    logits = torch.full((1, 12), torch.nan)
    chosen, _, weights = TritonChoice(Router("softmax"), 3, None, torch.arange(12).int())(logits)
    return bool((chosen >= 0).all() and (chosen < 12).all() and weights.isnan().all())


def products() -> list[dict[str, Any]]:
    """Rows without an expert here, experts without rows, one for all rows, each row its own; sizes off the tiles."""
    width, inner, count, k = 72, 40, 5, 3
    gate_up, down = normal(count, 2 * inner, width) / 8, normal(count, width, inner) / 6
    clamped = Biased(normal(count, 2 * inner), normal(count, width), Clamped(1.702, 0.5))
    elsewhere = clamped._replace(down=None)
    found = []
    cases = [(1, "random", None), (40, "random", None), (40, "one", None), (4, "own", None), (7, "nowhere", None)]
    for rows, kind, biased in (*cases, (40, "random", clamped), (40, "random", elsewhere)):
        plain = TorchExperts(gate_up, down, biased)
        chosen = torch.randint(-1, count, (rows, k), generator=DICE, dtype=torch.int32)
        if kind == "one":
            chosen[:] = torch.tensor([2, -1, -1])
        elif kind == "own":
            chosen[:] = -1
            chosen[:, 1] = torch.arange(rows)
        elif kind == "nowhere":
            chosen[:] = -1
        x, weight = normal(rows, width), torch.rand(rows, k, generator=DICE)
        want = plain(x, chosen, weight)
        for tile in TILES:
            grouped = GroupedExperts(gate_up, down, count, (tile,), biased=biased)
            got = grouped(x, chosen, weight)
            alone = torch.cat(
                [grouped(x[i : i + 1], chosen[i : i + 1], weight[i : i + 1]) for i in range(min(rows, 3))]
            )
            far = (got - want).abs().max() / max(1e-6, float(want.abs().max()))
            found.append(
                {"case": [rows, kind, tile], "distance": float(far), "same": torch.allclose(alone, got[:3], atol=1e-6)}
            )
    return found


def matrix(code: Code, *shape: int, groups: int, zeros: bool = False) -> Packed:
    """Random codes of a matrix [..., rows, columns], and scales of so many groups of columns."""
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // (1 if code == "e4m3" else 2)), generator=DICE)
    codes = codes.to(torch.uint8)
    if code == "e4m3":
        codes = torch.where((codes & 0x7F) == 0x7F, codes - 1, codes).view(torch.float8_e4m3fn)
    scale = torch.rand(*shape[:-1], groups, generator=DICE) / (4000 if code == "e4m3" else 200)
    zero = torch.randint(-8, 8, scale.shape, generator=DICE).to(torch.int8) if zeros else None
    return Packed(codes, scale if code == "e4m3" else scale.bfloat16(), zero, code)


PACKED: dict[str, tuple[Code, tuple[int, int], bool]] = {
    "fp8, a row": ("e4m3", (1, 1), False),
    "fp8, 64 columns": ("e4m3", (3, 2), False),
    "fp8, a row and 16 columns": ("e4m3", (1, 8), False),
    "int4, 32 columns": ("int4", (6, 4), False),
    "int4, 8 columns and zeros": ("int4", (24, 16), True),
    "int4, a row and zeros": ("int4", (1, 1), True),
    "e2m1, 16 columns": ("e2m1", (12, 8), False),
}
"""Code, groups of both matrices of experts, zero points."""


def packed_products() -> dict[str, bool]:
    """Experts' products and one of a dense layer, over weights that were widened while loading, to all bits where it is
    interpreted; both matrices, and one. In fp16: the interpreter has no bf16."""
    width, inner, count, k, found = 192, 128, 3, 2, {}
    x, weight = normal(6, width, dtype=torch.float16), torch.rand(6, k, generator=DICE)
    chosen = torch.randint(-1, count, (6, k), generator=DICE, dtype=torch.int32)

    def same(got: torch.Tensor, want: torch.Tensor) -> bool:
        # Tensor cores sum in one order what lies in registers, in another what lies in shared memory.
        exact = torch.equal(got, want) if DEVICE.type == "cpu" else torch.allclose(got, want, atol=0.01, rtol=0.01)
        return exact and bool(want.any())

    for name, (code, groups, zeros) in PACKED.items():
        up = matrix(code, count, 2 * inner, width, groups=groups[0], zeros=zeros)
        down = matrix(code, count, width, inner, groups=groups[1], zeros=zeros)
        plain = up.widened(torch.float16), down.widened(torch.float16)
        for tile in TILES:
            want = GroupedExperts(*plain, count, (tile,))(x, chosen, weight)
            both: tuple[tuple[str, torch.Tensor | Packed], ...] = (("both", up), ("down", plain[0]))
            for kept, first in both:
                got = GroupedExperts(first, down, count, (tile,))(x, chosen, weight)
                found[f"{name}, {kept} {tile}"] = same(got, want)
        dense, bias = next(up.each()), normal(2 * inner, dtype=torch.float16)
        full = dense.widened(torch.float16).float()
        for by_row in (False, True):
            got = packed_linear(x, dense, bias, by_row)
            want = x.float() @ full.t() + bias.float()
            alone = torch.cat([packed_linear(x[i : i + 1], dense, bias, by_row) for i in range(6)])
            near = torch.allclose(got.float(), want, atol=0.01, rtol=0.01)
            found[f"{name}, dense {by_row}"] = near and torch.equal(alone, got)
    return found


def in_pieces() -> bool:
    """More pairs than are computed at once: the same bits, for pieces that end within a tile, all pairs in the first
    piece, and one expert in several pieces."""
    gate_up, down, same = normal(5, 16, 16), normal(5, 16, 8), True
    for kind in ("random", "few", "one"):
        chosen = torch.rand(50, 5, generator=DICE).argsort(1)[:, :3].int()
        if kind == "few":
            chosen[5:] = -1
        elif kind == "one":
            chosen[:] = torch.tensor([-1, 3, -1])
        x, weight = normal(50, 16), torch.rand(50, 3, generator=DICE)
        for tile in TILES:
            experts = GroupedExperts(gate_up, down, 5, (tile,))
            want = experts(x, chosen, weight)
            for most in (16, 24, 64):
                with patch("laddertron.models.cuda.experts.expert_pairs", lambda *_, most=most: most):
                    same &= torch.equal(experts(x, chosen, weight), want)
    return same


def latents() -> dict[str, float]:
    """Rotation, norm and the write into scattered blocks."""
    heads, rank, rotary, tokens = 3, 24, 8, 5
    shard: Any = SimpleNamespace(
        config=SimpleNamespace(num_layers=1, head_dim=rank + rotary, latent=None), num_kv_heads=1
    )
    caches = [LatentCache(shard, 7, 4, torch.float32, DEVICE) for _ in range(2)]
    rows, norm = normal(tokens, (heads + 1) * (rank + rotary)), Norm(normal(rank), 1e-6)
    angle, blocks, offsets = (
        normal(tokens, 1, rotary // 2),
        torch.tensor([6, 0, 3, 3, 1]),
        torch.tensor([0, 3, 1, 2, 3]),
    )
    plain: Any = LatentAttention(caches[0], 1.0)
    plain.layout, plain._cos, plain._sin = SimpleNamespace(blocks=blocks, offsets=offsets), angle.cos(), angle.sin()
    want = plain._rotate_and_store(0, rows, norm)
    got = gpu_ops.store_latents(caches[1], 0, rows.clone(), norm, (angle.cos(), angle.sin()), blocks, offsets)
    pairs = ((want, got), (caches[0].latents[0], caches[1].latents[0]))
    return {name: float((a - b).abs().max()) for name, (a, b) in zip(("queries", "cache"), pairs, strict=True)}


def lanes() -> dict[str, bool]:
    """All bits of torch's sums; products behind one norm and behind norms of their own."""
    fused, plain, found = gpu_ops.TritonOps(), ops.TorchOps(), {}
    x, own, past, total = normal(3, 5, 40), normal(3, 5, 40), normal(3, 5, 40), normal(5, 40)
    wide = normal(1, 5, 40).expand(3, -1, -1)
    for name, arguments in {
        "join": (x, own, OtherLanes(total, past)),
        "late": (x, None, OtherLanes(total, past)),
        "expanded": (wide, own, OtherLanes(total, past)),
    }.items():
        found[name] = torch.equal(fused.join_lanes(*arguments), plain.join_lanes(*arguments))
    found["sum"] = torch.equal(fused.sum_lanes(x), plain.sum_lanes(x))
    weights, one = normal(3, 24, 40) / 6, Norm(normal(40), 1e-5)
    behind: dict[str, list[Norm | None]] = {
        "same": [one] * 3,
        "each": [Norm(normal(40), 1e-5) for _ in range(3)],
        "none": [None] * 3,
    }
    for name, norms in behind.items():
        for gated in (False, True)[: 1 + (name != "none")]:
            for rows, y in (("", x), (" of one token", normal(1, 1, 40).expand(3, -1, -1))):
                got, want = (each.lane_products(weights, norms, gated)(y) for each in (fused, plain))
                found[f"{name} {gated}{rows}"] = torch.allclose(got, want, atol=1e-5)
    return found


def main() -> None:
    found = {"choices": choices(), "not finite": not_finite(), "products": products(), "pieces": in_pieces()}
    found |= {"packed": packed_products()}
    print(json.dumps({**found, "latents": latents(), "lanes": lanes()}))


if __name__ == "__main__":
    main()
