"""How much memory a load takes: a rank's own weights, and little more, whatever repacking they go through."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from laddertron.models.weights.slices import expected_shapes
from safetensors.torch import save_file
from weights_cases import config, write_config

LARGE = config(
    num_layers=12,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    ffn_size=6144,
    vocab_size=4096,
    dtype="bfloat16",
)


def test_a_rank_peaks_at_its_own_weights_a_tenth_and_200_mb(tmp_path: Path, ranks: Callable[..., list[Any]]) -> None:
    """530 MB in bf16 on two ranks: each peaks above its value after imports and groups by no more than its half, 10 %
    and 200 MB. The packed copies that products are made of replace the parameters layer by layer."""
    write_config(tmp_path, LARGE)
    layers: dict[int, dict[str, torch.Tensor]] = {}
    for name, shape in expected_shapes(LARGE).items():
        part = int(name.split(".")[2]) // 6 if ".layers." in name else 0
        layers.setdefault(part, {})[name] = torch.zeros(shape, dtype=torch.bfloat16)
    weight_map: dict[str, str] = {}
    for part, tensors in layers.items():
        save_file(tensors, tmp_path / f"model-{part}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"model-{part}.safetensors")
    del layers
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for rank, took in enumerate(ranks(2, "weights_cases:memory", {"folder": str(tmp_path)})):
        print(f"rank {rank}: { ({k: v >> 20 for k, v in took.items()}) } MiB")
        assert took["weights"] > 250e6
        assert took["kept"] > 0.9 * took["weights"], "the measure sees the weights"
        assert took["peak"] < 1.1 * took["weights"] + 200e6, took
