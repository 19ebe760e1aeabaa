"""A decode of one layer's attention over latents at DeepSeek-V3.2's head shapes on this CPU: dense, and sparse with its
indexer's scores and choice. Both in turn, medians of the runs with their range, and the ratio of each pair.

    python tools/benchmarks/sparse_attention.py --context 32768 --heads 128 --type bfloat16
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from laddertron.models.attention import StepLayout
from laddertron.models.config.latent import Index
from laddertron.models.cpu.kernels import Kernels
from laddertron.models.cpu.latent import CpuLatentAttention
from laddertron.models.latent import LatentCache
from laddertron.models.ops import Norm

RANK, TURNED, SIZE = 512, 64, 64
INDEX = Index(64, 128, 2048, False, (True,))


def decode(context: int, heads: int, dtype: torch.dtype, sparse: bool) -> Callable[[], None]:
    """A decode at the end of a context of random numbers."""
    kernels = Kernels.find()
    if kernels is None:
        raise SystemExit("the C kernels were not built here")
    config = SimpleNamespace(num_layers=1, head_dim=RANK + TURNED, latent=SimpleNamespace(index=INDEX))
    shard: Any = SimpleNamespace(config=config, num_kv_heads=1)
    blocks = -(-context // SIZE)
    cache = LatentCache(shard, blocks, SIZE, dtype, torch.device("cpu"))
    cache.latents[0].normal_()
    keys = cache.index_keys[0]
    assert keys is not None
    keys.normal_()
    attention = CpuLatentAttention(cache, 0.07, kernels, topk=INDEX.topk if sparse else None)
    at = torch.tensor([context - 1])
    table = torch.randperm(blocks)[None]
    layout = StepLayout(at, [0, 1], [context], table, table[0][at // SIZE], at % SIZE, 1)
    x, norm = torch.randn(1, (heads + 1) * (RANK + TURNED)).to(dtype), Norm(torch.ones(RANK).to(dtype), 1e-6)
    queries, key = torch.randn(1, INDEX.heads, INDEX.dim).to(dtype), torch.randn(1, INDEX.dim).to(dtype)
    weights = torch.randn(1, INDEX.heads)
    attention.prepare(layout, torch.ones(1, 1, TURNED // 2), torch.zeros(1, 1, TURNED // 2))

    def run() -> None:
        if sparse:
            attention.store_index(0, key)
            attention.choose(0, queries, weights)
        attention.attend(0, x, None, norm)

    return run


def seconds(run: Callable[[], None], times: int = 5) -> float:
    began = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - began) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--type", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    with torch.inference_mode():
        forms = [decode(given.context, given.heads, getattr(torch, given.type), sparse) for sparse in (False, True)]
        for form in forms:
            form()
        pairs = [[seconds(form) * 1e3 for form in forms] for _ in range(given.runs)]
    for name, times in zip(("dense", "sparse"), zip(*pairs, strict=True), strict=True):
        print(f"{name}: {statistics.median(times):.2f} ms ({min(times):.2f} to {max(times):.2f})")
    ratios = [dense / sparse for dense, sparse in pairs]
    print(f"ratio: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
