"""What tests of the loader share: a rank's parameters without a model around them, small configurations, and what runs
on ranks: how much memory a load takes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from laddertron.launchers.cli.__main__ import main
from laddertron.models.config.model_config import ModelConfig, Rope, make_wiring
from laddertron.models.stages import RankShard
from laddertron.models.weights.load import load
from laddertron.models.weights.mapping import Source, open_source
from laddertron.models.weights.rank_files import sizes_of
from laddertron.topology.comm.groups import CommOptions
from rank_pool import Rank
from waiting import HANG_S

CPU = torch.device("cpu")


def read_and_sharded(folder: Path, shards: Sequence[RankShard]) -> Iterator[tuple[bool, RankShard, Source]]:
    """Each rank's source: of the checkpoint, then, after `laddertron shard`, of its per-rank file."""
    for sharded in (False, True):
        if sharded:
            assert main(["shard", str(folder), *sizes_of(shards[0]).split(), "--set", "parallel.embedding=shard"]) == 0
        for shard in shards:
            source = open_source(folder, shard)
            assert source.sharded_over == (shard.size if sharded else 0)
            yield sharded, shard, source


def config(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "family": "llama",
        "num_layers": 2,
        "hidden_size": 64,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 8,
        "ffn_size": 96,
        "vocab_size": 323,
        "max_position_embeddings": 256,
        "norm_eps": 1e-5,
        "rope": Rope(),
        "dtype": "float32",
    }
    fields |= changes
    fields.setdefault("wiring", make_wiring("standard", fields["num_layers"]))
    return ModelConfig(**fields)


def rows(vocab: int, size: int) -> int:
    """Of the vocabulary on a rank: shares of sixteen, where so many can be dealt out evenly."""
    return -(-vocab // 16) * 16 // size if size in (2, 4, 8, 16) else -(-vocab // size)


def shapes(shard: RankShard, replicate_embedding: bool = False) -> dict[str, tuple[int, ...]]:
    """Of every parameter of a rank, from the arithmetic of tensor parallelism alone."""
    c, d = shard.config, shard.config.hidden_size
    size = shard.per_node or shard.size
    heads, kv, ffn = c.num_heads // size, max(1, c.num_kv_heads // size), c.ffn_size // size
    vocab, embedded = rows(c.vocab_size, shard.size), rows(c.vocab_size, size)
    out: dict[str, tuple[int, ...]] = {"embedding.weight": (c.vocab_size if replicate_embedding else embedded, d)}
    out["norm.weight"] = (d,)
    if not c.tied_embeddings or replicate_embedding:
        out["head.weight"] = (vocab, d)
    for i in range(c.num_layers):
        here = f"layers.{i}."
        qkv = (heads + 2 * kv) * c.head_dim
        out |= {f"{here}attention_norm.weight": (d,), f"{here}qkv.weight": (qkv, d)}
        out[f"{here}o.weight"] = (d, heads * c.head_dim)
        if c.experts is not None and c.experts.layers[i]:
            e = c.experts
            held, inner = (e.count // shard.size, e.ffn_size) if shard.spread else (e.count, e.ffn_size // shard.size)
            out[f"{here}experts.router.weight"] = (e.count, d)
            out[f"{here}experts.gate_up.weight"] = (held * 2 * inner, d)
            out[f"{here}experts.down.weight"] = (held * d, inner)
            if e.clamped is not None:  # gpt_oss
                out |= {f"{here}experts.router.bias": (e.count,), f"{here}experts.gate_up.bias": (held * 2 * inner,)}
                if shard.spread or shard.rank == 0:
                    out[f"{here}experts.down.bias"] = (held * d,)
            if e.router.biased:
                out[f"{here}experts.bias.weight"] = (e.count,)
            if e.shared_ffn_size:
                out[f"{here}experts.shared_gate_up.weight"] = (2 * e.shared_ffn_size // shard.size, d)
                out[f"{here}experts.shared_down.weight"] = (d, e.shared_ffn_size // shard.size)
        else:
            out |= {f"{here}gate_up.weight": (2 * ffn, d), f"{here}down.weight": (d, ffn)}
        if c.wiring.kinds[i] != "parallel":
            out[f"{here}mlp_norm.weight"] = (d,)
        if c.qk_norm:
            out |= {f"{here}q_norm.weight": (c.head_dim,), f"{here}k_norm.weight": (c.head_dim,)}
        if c.sinks:
            out[f"{here}sinks.weight"] = (heads,)
        if c.qkv_bias:
            out[f"{here}qkv.bias"] = (qkv,)
        if c.mlp_bias:
            out[f"{here}gate_up.bias"] = (2 * ffn,)
        if c.o_bias and shard.rank == 0:
            out[f"{here}o.bias"] = (d,)
        if c.mlp_bias and shard.rank == 0:
            out[f"{here}down.bias"] = (d,)
    return out


def loaded(source: Source, shard: RankShard, dtype: torch.dtype | None = None, **how: Any) -> dict[str, torch.Tensor]:
    """A rank's parameters, filled; NaN before, so that what was not filled shows."""
    chosen = dtype or getattr(torch, shard.config.dtype)
    wanted = shapes(shard, how.get("replicate_embedding", False))
    parameters = {name: torch.full(shape, torch.nan, dtype=chosen) for name, shape in wanted.items()}
    load(source, shard, parameters, **how)
    return parameters


def write_config(folder: Path, c: ModelConfig, **more: Any) -> None:
    """config.json of a stock Llama."""
    data = {
        "model_type": "llama",
        "num_hidden_layers": c.num_layers,
        "hidden_size": c.hidden_size,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.ffn_size,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": c.max_position_embeddings,
        "rms_norm_eps": c.norm_eps,
        "torch_dtype": c.dtype,
        "eos_token_id": 1,
        **more,
    }
    (folder / "config.json").write_text(json.dumps(data))


def anonymous() -> int:
    """RssAnon of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no RssAnon")


class Peak:
    """The largest RssAnon while a block runs, looked at every 2 ms by a thread of its own."""

    def __enter__(self) -> Peak:
        self.before = self.most = anonymous()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.most = max(self.most, anonymous())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.most = max(self.most, anonymous())

    @property
    def grown(self) -> int:
        return self.most - self.before


def memory(rank: Rank, folder: str) -> dict[str, int]:
    """What building a model takes on a rank above imports and groups: peak and end, beside what its weights are."""
    from engine_cases import build_on, deployment

    d = deployment(folder, rank.size, max_num_seqs=2, kv_cache_memory=4 << 20)
    with rank.connect(rank.size, CommOptions(timeout_s=HANG_S)) as communicator, Peak() as peak:
        built = build_on(rank, d, communicator)
    c = built.config
    weights = sum(torch.Size(s).numel() for s in shapes(RankShard(c, rank.size, rank.rank)).values())
    return {"peak": peak.grown, "kept": anonymous() - peak.before, "weights": weights * 2}


def fp8_distance(rank: Rank, folder: str, prompts: list[list[int]], native: bool) -> dict[str, float]:
    """How far this rank's logits with fp8 weights kept, as on a GPU, are from those with the weights widened."""
    from engine_cases import build_on, deployment, forward_all
    from laddertron.engine.step import share
    from laddertron.models.cuda.fp8 import StoredProducts

    model = {"dtype": "bfloat16" if native else "float32"}
    wide = forward_all(build_on(rank, deployment(folder, rank.size, model)), prompts)

    def kept_as_on_a_gpu(source: Any, shard: Any, device: torch.device, *_: object) -> StoredProducts | None:
        return StoredProducts(source.quantised_products(shard), native)

    with patch.object(share, "make_stored_products", kept_as_on_a_gpu):
        built = build_on(rank, deployment(folder, rank.size, model))
    kept = sum(p.dtype == torch.float8_e4m3fn for p in built.runner.model.parameters())
    got = forward_all(built, prompts)
    return {"distance": (got - wide).abs().max().item(), "scale": wide.abs().max().item(), "kept": float(kept)}
