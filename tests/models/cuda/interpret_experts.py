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
from laddertron.models.cuda import ops as gpu_ops
from laddertron.models.cuda.experts import TILES, GroupedExperts, TritonChoice
from laddertron.models.experts import Biased, TorchChoice, TorchExperts
from laddertron.models.latent import LatentAttention, LatentCache
from laddertron.models.ops import Norm, OtherLanes

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


def fp8_products() -> dict[str, bool]:
    """The products over weights that were widened while loading, to all bits where it is interpreted: one scale a
    row, and one a block of columns; of both matrices, and of one. In fp16: the interpreter has no bf16."""
    width, inner, count, k, found = 192, 128, 3, 2, {}
    x, weight = normal(6, width, dtype=torch.float16), torch.rand(6, k, generator=DICE)
    chosen = torch.randint(-1, count, (6, k), generator=DICE, dtype=torch.int32)
    for name, parts in {"rows": (1, 1), "blocks": (3, 2), "64 columns and a row": (3, 1), "down": (0, 2)}.items():
        held, wide, scales = [], [], []
        for matrix, n in zip((normal(count, 2 * inner, width), normal(count, width, inner)), parts, strict=True):
            scale = torch.rand(*matrix.shape[:2], max(1, n), generator=DICE) / 1000
            codes = (matrix * 100).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
            wide.append((codes.float() * scale.repeat_interleave(matrix.shape[2] // max(1, n), 2)).half())
            held.append(codes if n else wide[-1])
            scales.append(scale if n else None)
        for tile in TILES:
            got = GroupedExperts(held[0], held[1], count, (tile,), scales)(x, chosen, weight)
            want = GroupedExperts(wide[0], wide[1], count, (tile,))(x, chosen, weight)
            # Tensor cores sum in one order what lies in registers, in another what lies in shared memory.
            same = torch.equal(got, want) if DEVICE.type == "cpu" else torch.allclose(got, want, atol=0.01, rtol=0.01)
            found[f"{name} {tile}"] = same and bool(want.any())
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
    found |= {"fp8": fp8_products()}
    print(json.dumps({**found, "latents": latents(), "lanes": lanes()}))


if __name__ == "__main__":
    main()
