"""The cache in fp8: what is stored saturates, NaN stays NaN until it is healed, blocks are copied whole."""

from __future__ import annotations

import torch
from laddertron.models.weights.tensor_reader import FP8
from test_flashinfer import CPU, make_cache


def test_fp8_saturates_and_heals() -> None:
    """1000 is kept as 448; NaN is kept, so that its own sequence's answer shows it, and healed before another has the
    block; the other values of the block stay."""
    cache = make_cache(1, 4, 3, 2, FP8, CPU, layers=1)
    keys = torch.tensor([[[1000.0, -1000.0, float("nan"), 0.5]]])
    cache.write(0, torch.tensor([1]), torch.tensor([1]), keys, keys)
    stored = cache.keys[0][1, 0, 1].float()
    assert stored[:2].tolist() == [448.0, -448.0]
    assert stored[2].isnan()
    cache.copy([(1, 2)])
    assert torch.equal(cache.keys[0][2].view(torch.uint8), cache.keys[0][1].view(torch.uint8))
    cache.zero_blocks([1])
    assert cache.keys[0][1, 0, 1].float().tolist() == [448.0, -448.0, 0.0, 0.5]
    assert cache.keys[0][2].float().isnan().any()
