"""The factors of an fp8 KV cache: names and forms that are read, refusals, and what the cache and attention make of
them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoints
import fake_flashinfer
import lane_checkpoints
import pytest
import torch
from laddertron.engine.step import build
from laddertron.launchers.cli.__main__ import main
from laddertron.models.attention import TorchAttention
from laddertron.models.config.model_config import from_folder
from laddertron.models.cuda.flashinfer import FlashInferAttention
from laddertron.models.stages import RankShard, make_stages
from laddertron.models.weights.checkpoint import CheckpointError
from laddertron.models.weights.kv_scales import read_kv_scales
from laddertron.models.weights.mapping import open_source
from laddertron.models.weights.tensor_reader import FP8
from test_flashinfer import CPU, make_cache, make_layout
from test_weights_quantised import fp8_folder

BY_HEAD = [0.5, 0.25, 0.125, 0.75]
ATTENTION = "model.layers.{}.self_attn."
NAMES = {
    "llm-compressor": "{0}_scale",
    "ModelOpt": "{0}_proj.{0}_scale",
    "earlier compressed-tensors": "{0}_proj.output_scale",
    "vLLM": "attn.{0}_scale",
}


def calibrated(folder: Path, name: str, per_head: bool = False, layers: int = 3) -> Path:
    """An fp8 checkpoint of three layers and four KV heads; `layers` of them have the scales of `values`."""
    fp8_folder(folder, "compressed_channel")

    def scales(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for layer in range(layers):
            for letter, by in (("k", 1.0), ("v", 10.0)):
                numbers = by * (layer + torch.tensor(BY_HEAD if per_head else [0.5]))
                made = numbers.view(-1, 1, 1) if per_head else numbers[0]
                tensors[ATTENTION.format(layer) + name.format(letter)] = made.bfloat16()
        return tensors

    checkpoints.edit_tensors(folder, scales)
    return folder


def replaced(name: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: tensors | {name: value}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_tensor_s_scale(tmp_path: Path, name: str) -> None:
    folder = calibrated(tmp_path / "m", name)
    config = from_folder(folder)
    scales = read_kv_scales(open_source(folder, RankShard(config, 1, 0)), RankShard(config, 1, 0))
    assert scales is not None
    assert scales[0].tolist() == [[layer + 0.5] * 4 for layer in range(3)]
    assert scales[1].tolist() == [[layer * 10 + 5.0] * 4 for layer in range(3)]


def test_a_rank_has_its_heads_and_a_stage_its_layers(tmp_path: Path) -> None:
    """Scales by head over one, two and four ranks, and of the second stage alone."""
    folder = calibrated(tmp_path / "m", "{0}_scale", per_head=True)
    config = from_folder(folder)
    assert config.num_kv_heads == 4
    for size in (1, 2, 4):
        for rank in range(size):
            shard = RankShard(config, size, rank)
            scales = read_kv_scales(open_source(folder, shard), shard)
            assert scales is not None
            assert scales[0].tolist() == [
                [layer + by for by in BY_HEAD[rank * 4 // size :][: 4 // size]] for layer in range(3)
            ]
    shard = RankShard.of(make_stages(config, (1, 2))[1], 1, 0)
    scales = read_kv_scales(open_source(folder, shard, config), shard)
    assert scales is not None
    assert scales[0].tolist() == [[layer + by for by in BY_HEAD] for layer in (1, 2)]


def test_lanes_have_none(tmp_path: Path) -> None:
    """Their tensors are named by lane."""
    folder = lane_checkpoints.save(tmp_path / "lanes")
    shard = RankShard(from_folder(folder), 1, 0)
    assert read_kv_scales(open_source(folder, shard), shard) is None


def test_none_and_refusals(tmp_path: Path) -> None:
    """No scales, per-rank files, a layer without, another number of heads, and a scale that is no factor."""
    folder, _ = fp8_folder(tmp_path / "plain", "compressed_channel")
    config = from_folder(folder)
    shard = RankShard(config, 1, 0)
    assert read_kv_scales(open_source(folder, shard), shard) is None
    folder = calibrated(tmp_path / "part", "{0}_scale", layers=2)
    with pytest.raises(CheckpointError, match=r"layer 2 of 3 has no k_scale or no v_scale, and others have both: use"):
        read_kv_scales(open_source(folder, shard), shard)
    folder = calibrated(tmp_path / "whole", "{0}_scale")
    key = ATTENTION.format(1) + "k_scale"
    for value, rule in ((torch.ones(3), "one number or 4"), (torch.tensor(0.0), "a scale is above 0 and finite")):
        checkpoints.edit_tensors(folder, replaced(key, value))
        with pytest.raises(CheckpointError, match=rule):
            read_kv_scales(open_source(folder, shard), shard)
    assert main(["shard", str(folder)]) == 0
    assert read_kv_scales(open_source(folder, shard), shard) is None


def test_scales_bring_large_keys_into_fp8_s_range() -> None:
    """Keys of 1000 and more saturate without scales; with them both backends attend as over a cache in fp32, but for
    fp8's rounding, for each head's scale."""
    layout, scales = make_layout([1, 1, 3, 4], [7, 0, 9, 5], 4, CPU), torch.tensor([[6.0, 8.0], [16.0, 7.0]])
    dice = torch.Generator().manual_seed(5)
    qkv = torch.randn(9, 8 * 8, generator=dice)
    qkv[:, :32] *= 1e-4
    qkv[:, 32:] *= 700
    outputs = []
    for dtype, scaled in ((torch.float32, False), (FP8, True), (FP8, False)):
        for kind in (TorchAttention, FlashInferAttention):
            cache = make_cache(2, 8, 40, 4, dtype, CPU)
            for tensor in cache.tensors:
                tensor.zero_()
            cache.scales = (scales, scales.flip(0)) if scaled else None
            more = () if kind is TorchAttention else (4, torch.float32, fake_flashinfer.LIBRARY)
            backend = kind(cache, (None, None), 1.0, *more)
            table = layout.block_table.clamp(max=39)
            angles = torch.ones(9, 1, 4), torch.zeros(9, 1, 4)
            step = type(layout)(
                layout.positions, layout.query_start, layout.kv_len, table, layout.blocks, layout.offsets, layout.decode
            )
            backend.prepare(step, *angles)
            outputs.append(torch.stack([backend.attend(layer, qkv, None, None) for layer in (0, 1)]))
    exact, _, scaled_torch, scaled_library, _, saturated = outputs
    assert (scaled_torch - scaled_library).norm() < 0.04 * exact.norm()
    assert (scaled_torch - exact).norm() < 0.1 * exact.norm()
    assert (saturated - exact).norm() > 0.15 * exact.norm()


def test_the_start_log_says_which_scales_are_used(tmp_path: Path) -> None:
    folder = calibrated(tmp_path / "m", "{0}_scale")
    config = from_folder(folder)
    shard = RankShard(config, 1, 0)
    share: Any = SimpleNamespace(config=config, shard=shard, source=open_source(folder, shard))
    cache = make_cache(4, 8, 2, 4, FP8, CPU)
    assert build._scale(cache, share) == "scaled by the checkpoint's k_scale (0.5 to 2.5) and v_scale"
    assert cache.scales is not None
    assert cache.scales[1].amax().item() == 25.0
    assert main(["shard", str(folder)]) == 0
    share.source = open_source(folder, shard)
    assert build._scale(cache, share) == "stored with scale 1.0, as per-rank files have no k_scale and v_scale"
    share.config = SimpleNamespace(latent=object())
    assert build._scale(cache, share) == "latents are stored with scale 1.0"
