"""A decode step of a model of 200M with latent attention on this machine's cores, with its floors and transformers.

    python tools/benchmarks/latent.py --contexts 1024,8192 --batches 1,8
    python tools/benchmarks/latent.py --prompts 256,1024,2048 --contexts 0,4096     prompts, absorbed and expanded

Floors of a step: its bytes (weights and latents, read by a bare loop), and its products at the rate that a packed
product of 48 rows reaches from the second cache. Bar: 1.5 of the larger. One thread is measured by its CPU time.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from laddertron.models.attention import StepLayout
from laddertron.models.attention_choice import make_attention
from laddertron.models.attention_choice import make_cache as cache_for
from laddertron.models.config.model_config import ModelConfig, from_folder
from laddertron.models.cpu.kernels import Kernels
from laddertron.models.cpu.ops import CpuOps
from laddertron.models.llama import LlamaModel
from laddertron.models.pages import HugePages
from laddertron.models.stages import RankShard
from laddertron.topology.comm.collectives import Done
from torch import Tensor

BLOCK, CPU, DTYPE = 16, torch.device("cpu"), torch.bfloat16
SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "first_k_dense_replace": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 2816,
    "vocab_size": 8192,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": False,
}


class Alone:
    """One rank's sum."""

    def start(self, x: Tensor, layer: str = "", at_once: bool = False, /) -> Done:
        return Done(x)


def make_step(
    config: ModelConfig, ops: CpuOps, batch: int, context: int, tokens: int = 1, absorbed: bool = False
) -> Callable[[], Tensor]:
    """`tokens` of each sequence behind `context` others. absorbed: prompts too."""
    group: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    model = LlamaModel(config, group, Alone(), ops, dtype=DTYPE, device=CPU, positions=context + tokens)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.data.fill_(1.0)
    model.prepare()
    length = context + tokens
    shard, each = RankShard(config, 1, 0), -(-length // BLOCK)
    cache = cache_for(shard, batch * each, BLOCK, DTYPE, CPU)
    for latents in cache.keys:
        latents.normal_()
    attention, why = make_attention("auto", shard, cache, DTYPE, deterministic=absorbed)
    table, rows = torch.randperm(batch * each).view(batch, each), torch.arange(1, batch + 1) * tokens - 1
    ids, at = torch.arange(batch * tokens) % config.vocab_size, torch.arange(context, length).repeat(batch)
    blocks = table[:, at[:tokens] // BLOCK].flatten()
    starts, decode = [*range(0, batch * tokens + 1, tokens)], batch if tokens == 1 else 0
    layout = StepLayout(at, starts, [length] * batch, table, blocks, at % BLOCK, decode)
    print(f"attention: {why}", flush=True)
    return lambda: model.forward(ids, layout, attention, rows)


def config_of(stock: Any) -> ModelConfig:
    with tempfile.TemporaryDirectory(prefix="laddertron-latent-") as folder:
        stock.save_pretrained(folder)
        return from_folder(folder)


def transformers_step(config: Any, batch: int, context: int) -> Callable[[], Any]:
    model = transformers.AutoModelForCausalLM.from_config(config).to(DTYPE).eval()
    past = model(torch.zeros(batch, context, dtype=torch.int64), use_cache=True).past_key_values

    def step() -> None:
        model(torch.zeros(batch, 1, dtype=torch.int64), past_key_values=past, use_cache=True)
        past.crop(-1)

    return step


def in_turns(calls: dict[str, Callable[[], Any]], args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of each."""
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(args.rounds):
        for name, call in calls.items():
            started = clock()
            call()
            took[name].append(clock() - started)
    return {name: statistics.median(times) for name, times in took.items()}


def prompts(config: ModelConfig, kernels: Kernels, tokens: int, context: int, args: argparse.Namespace) -> None:
    calls: dict[str, Callable[[], Any]] = {
        name: make_step(config, CpuOps(kernels), 1, context, tokens, name == "absorbed")
        for name in ("absorbed", "expanded")
    }
    absorbed, expanded = in_turns(calls, args).values()
    said = f"absorbed {absorbed * 1e3:.0f} ms, expanded {expanded * 1e3:.0f} ms, {absorbed / expanded:.2f}x"
    print(f"{kernels.tier}, {tokens} tokens behind {context}: {said}", flush=True)


def measure(stock: Any, kernels: Kernels, batch: int, context: int, args: argparse.Namespace) -> None:
    config = config_of(stock)
    assert config.latent is not None
    matrices = config.num_parameters - config.vocab_size * config.hidden_size  # a token reads one row of the embedding
    seen, width = batch * config.num_layers * (context + 1), config.latent.width
    nbytes, products = (
        2 * (matrices + seen * width),
        batch * matrices + seen * config.num_heads * (width + config.latent.rank),
    )
    bare = HugePages().take(nbytes).fill_(1)
    square, rows = CpuOps(kernels).product(torch.randn(512, 512).to(DTYPE), None), torch.randn(48, 512).to(DTYPE)
    calls: dict[str, Callable[[], Any]] = {
        "bytes": lambda: kernels.read(bare.data_ptr(), nbytes, kernels.threads),
        "products": lambda: square(rows),
        "laddertron": make_step(config, CpuOps(kernels), batch, context),
    }
    if not args.no_transformers:
        calls["transformers"] = transformers_step(stock, batch, context)
    median = in_turns(calls, args)
    median["products"] *= products / (48 * 512 * 512)
    floor = max(median["bytes"], median["products"])
    size = f"{nbytes / 1e6:.0f} MB, {products / 1e9:.2f} G products"
    print(f"{kernels.tier}, batch {batch} behind {context}: {size}")
    for name, seconds in median.items():
        print(f"  {name:12} {seconds * 1e3:8.2f} ms, {seconds / floor:.2f} of the floor", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--contexts", default="1024,8192")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--prompts", help="measures prompts of so many tokens, not decodes")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--no-transformers", action="store_true", help="whose keys and values take 8 GB at 8 x 8192")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    kernels = Kernels.find()
    if kernels is None:
        raise SystemExit("the kernels were not built")
    stock = transformers.DeepseekV3Config(**SIZES)
    for context in map(int, args.contexts.split(",")):
        for count in map(int, (args.prompts or args.batches).split(",")):
            if args.prompts:
                prompts(config_of(stock), kernels, count, context, args)
            else:
                measure(stock, kernels, count, context, args)


if __name__ == "__main__":
    main()
