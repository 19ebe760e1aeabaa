"""The FlashInfer backend over latents against the portable one, on a stand-in of the library
(tests/helpers/fake_flashinfer.py); its arguments against the installed library."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_flashinfer
import numpy as np
import pytest
import torch
from laddertron.models.attention import Capturable
from laddertron.models.config.latent import Latent
from laddertron.models.cuda.flashinfer_latent import FlashInferLatent, unfit
from laddertron.models.cuda.workspace import LATENT_ITEMS, MULTIPROCESSORS, latent_items, too_many_latent_items
from laddertron.models.latent import LatentAttention, LatentCache
from laddertron.models.ops import Norm
from test_flashinfer import CPU, CUDA, _parameters, full, make_layout, padded

RANK, ROTARY, HEADS, SIZE = 24, 8, 3, 4
SIZES = Latent(RANK, ROTARY, 12, 10, 0, False)


def make_cache(blocks: int) -> LatentCache:
    config = SimpleNamespace(num_layers=2, head_dim=RANK + ROTARY, latent=None)
    shard: Any = SimpleNamespace(config=config, num_kv_heads=1)
    cache = LatentCache(shard, blocks, SIZE, torch.float32, CPU)
    for latents in cache.latents:
        latents.copy_(torch.randn(latents.shape, generator=torch.Generator().manual_seed(1)))
    return cache


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(
    ("counts", "before"), [([1, 1, 5, 9, 3], [7, 0, 0, 6, 20]), ([1, 1, 1], [0, 63, 5]), ([6], [0])]
)
def test_the_same_attention_as_the_portable_one(counts: list[int], before: list[int], recorded: bool) -> None:
    """Decodes, prompts and pieces of prompts in scattered blocks; as a recorded step, with padding if it has prompts,
    whose output is zero."""
    layout = make_layout(counts, before, SIZE, CPU)
    layout.block_table.clamp_(max=int(layout.blocks.max()))
    blocks = int(layout.block_table.max()) + 2
    dice, tokens = torch.Generator().manual_seed(2), len(layout.positions)
    rows = torch.randn(tokens, (HEADS + 1) * (RANK + ROTARY), generator=dice)
    norm, angle = Norm(torch.rand(RANK, generator=dice) + 0.5, 1e-6), torch.rand(tokens, 1, ROTARY // 2, generator=dice)
    caches = make_cache(blocks), make_cache(blocks)
    plain = LatentAttention(caches[0], 0.3)
    latents = FlashInferLatent(caches[1], 0.3, HEADS, torch.float32, SIZES, fake_flashinfer.LIBRARY)
    assert isinstance(latents, Capturable)
    plain.prepare(layout, angle.cos(), angle.sin())
    want, decode = plain.attend(1, rows.clone(), None, norm), layout.decode
    shape, at = (len(counts), 0), torch.arange(tokens)
    if recorded and decode < len(counts):
        shape = max(1, decode) + 2, tokens - decode + 5
        layout, at = padded(layout, *shape, blocks - 1, SIZE)
    ours: Any = latents.captured([shape], 40)[shape] if recorded else latents.twin()
    wide, angles = torch.zeros(len(layout.positions), rows.shape[1]), torch.zeros(len(layout.positions), 1, ROTARY // 2)
    if shape[1]:
        ours.prepare(full(*shape, blocks - 1, SIZE), angles.cos(), angles.sin())
    wide[at], angles[at] = rows, angle
    ours.prepare(layout, angles.cos(), angles.sin())
    got = ours.attend(1, wide, None, norm)
    assert (want - got[at]).abs().max() < 1e-5
    if shape[1]:
        assert ours.replayable
        assert not got[shape[0] + tokens - decode :].any()
        assert got[at].any()
    assert torch.equal(caches[0].latents[1][:-1], caches[1].latents[1][:-1])


def test_a_step_of_padding_may_be_longer_than_a_sequence() -> None:
    latents = FlashInferLatent(make_cache(9), 0.3, HEADS, torch.float32, SIZES, fake_flashinfer.LIBRARY)
    recorded: Any = latents.captured([(1, 128)], 2)[1, 128]
    recorded.prepare(full(1, 128, 8, SIZE), torch.ones(129, 1, ROTARY // 2), torch.zeros(129, 1, ROTARY // 2))
    assert recorded.replayable


def test_where_it_cannot_serve() -> None:
    v3, bf16 = Latent(512, 64, 128, 128, 1536, True), torch.bfloat16
    assert unfit(CUDA, (9, 0), bf16, v3, 8) is None
    for reason, arguments in {
        "CUDA device, not cpu": (CPU, (0, 0), bf16, v3, 8),
        "not float32": (CUDA, (9, 0), torch.float32, v3, 8),
        "latents of 128, 256, 512 and keys of 64, not 24 and 8": (CUDA, (9, 0), bf16, SIZES, 8),
        "128 % 12 heads of a rank = 8": (CUDA, (9, 0), bf16, v3, 12),
    }.items():
        assert reason in str(unfit(*arguments))


@pytest.mark.parametrize("heads", [1, 16, 128])
def test_no_step_within_the_limits_needs_more_items_than_a_plan_has(heads: int, run_seed: int) -> None:
    """Steps of decodes, of prompts and of both, with contexts of very different lengths; and one that comes near."""
    dice = np.random.default_rng(run_seed)
    for _ in range(40):
        sequences = int(dice.integers(1, 64))
        most = int(dice.choice([1, 3, 100, 3000]))
        queries = np.where(dice.random(sequences) < 0.5, 1, dice.integers(1, most + 1, sequences))
        lengths = queries + dice.integers(0, int(dice.choice([1, 100, 100_000])), sequences)
        processors = int(dice.integers(2, MULTIPROCESSORS + 1))
        items = fake_flashinfer.work_items(torch.as_tensor(queries), torch.as_tensor(lengths), heads, processors)
        assert items <= latent_items(int(queries.sum()), sequences, heads)
    most = 128 // heads * 15_000
    assert fake_flashinfer.work_items(torch.tensor([most - 1, 1]), torch.tensor([most - 1, 1]), heads) >= 15_000
    assert too_many_latent_items(most, 2, heads) is None
    words = too_many_latent_items(128 // heads * 17_000, 256, heads)
    assert words is not None
    room = int(words.partition("set max_num_batched_tokens to at most ")[2].partition(",")[0])
    assert too_many_latent_items(room, 256, heads) is None
    assert too_many_latent_items(room + 2 * 128 // heads, 256, heads) is not None


def test_the_installed_library_takes_what_is_given() -> None:
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("flashinfer is not installed: laddertron[cuda]")
    folder = Path(spec.submodule_search_locations[0]) / "mla" / "_batch_mla"
    assert f"MAX_WORK_ITEMS = {LATENT_ITEMS}\n" in (folder / "_backends" / "_fa_common.py").read_text()
    for file, name, methods in (
        ("_wrapper.py", "BatchMLAPagedAttentionWrapper", ("__init__", "plan", "run")),
        ("_contracts.py", "MLAPlanMetadata", ("csr",)),
    ):
        tree = ast.parse((folder / file).read_text())
        for method in methods:
            used = set(inspect.signature(getattr(getattr(fake_flashinfer, name), method)).parameters) - {"self"}
            assert used <= _parameters(tree, name, method), method
