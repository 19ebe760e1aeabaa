"""What test_noise_kernel.py starts with TRITON_INTERPRET=1: the kernel on the CPU against torch. Prints one JSON
object, golden noise and, for each case, the fields of a scan that differ. Not a test module."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from laddertron.engine.sampling.logits_shard import LIMIT, MASS, NOISE, ROW, Logits, TorchShard, TritonShard
from laddertron.engine.sampling.noise_triton import noisiest
from test_philox import GOLDEN, signed

FIRST = 70_001


def golden() -> list[str]:
    """The noise itself: a single logit of 0 at the id."""
    found = []
    for (seed, position, choice, token), _ in GOLDEN:
        rows = torch.stack([signed(seed), signed(position), signed(choice)])
        best, _ = noisiest(torch.zeros(1, 1), torch.ones(1, dtype=torch.float64), rows, token)
        found.append(float(best).hex())
    return found


def case(columns: int, dtype: torch.dtype, flags: int) -> dict[str, Any]:
    """Seven rows: plain ones, all equal, one id left, none left, a NaN in a late block, +inf, few before the limit."""
    dice = torch.Generator().manual_seed(columns)
    x = (torch.randn(7, columns, generator=dice) * 4).to(dtype)
    x[1] = 1.0
    x[2] = x[3] = -torch.inf
    x[2, columns - 1] = -3.0
    x[4, columns - 1] = torch.nan
    x[5, columns // 2] = torch.inf
    rows = np.zeros(7, ROW)
    rows["seed"] = [0, 2**64 - 1, 1, 2, 3, 0x0123456789ABCDEF, 4]
    rows["position"], rows["choice"] = np.arange(7) * 2**29, np.arange(7)
    rows["inv_temperature"], rows["reference"] = [1, 0.7, 3, 1, 1, 1, 1 / 1.3], np.nan
    rows["flags"], rows["limit"], rows["limit_id"] = flags, 5.0, FIRST + columns // 3
    plain, fused = rows.copy(), rows.copy()
    TorchShard(FIRST).scan(Logits(x), np.arange(7), plain)
    TritonShard(FIRST).scan(Logits(x), np.arange(7), fused)
    names = [name for name in ROW.names or () if plain[name].tobytes() != fused[name].tobytes()]
    return {"columns": columns, "differ": names, "ids": plain["best_id"].tolist()}


def main() -> None:
    shapes = ((1, torch.float32), (1024, torch.bfloat16), (2500, torch.float32))
    kinds = (NOISE, NOISE | LIMIT, NOISE | MASS, MASS)
    print(json.dumps({"golden": golden(), "cases": [case(*shape, flags) for shape in shapes for flags in kinds]}))


if __name__ == "__main__":
    main()
