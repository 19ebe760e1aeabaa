"""The C kernels of lanes (models/cpu/lane_loops.h, products.c) against the portable operators."""

from __future__ import annotations

import pytest
import torch
from laddertron.models.cpu.kernels import Kernels
from laddertron.models.cpu.ops import CpuOps
from laddertron.models.ops import LaneStream, Norm, OtherLanes, TorchOps

KERNELS = Kernels.find(deterministic=True)
pytestmark = pytest.mark.skipif(KERNELS is None, reason="the C kernels were not built here")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("lanes", "tokens"), [(1, 1), (3, 5), (8, 40)])
def test_sums_and_orders_are_those_of_torch_bit_for_bit(dtype: torch.dtype, lanes: int, tokens: int) -> None:
    ops, torch_ops = CpuOps(KERNELS), TorchOps()
    x, own, past = (drawn(lanes, tokens, 66, dtype=dtype, seed=seed) for seed in (1, 2, 3))
    embedded = drawn(tokens, 66, dtype=dtype, seed=5).expand(lanes, -1, -1)
    others = OtherLanes(drawn(tokens, 66, dtype=dtype, seed=4), past)
    for start in (x, embedded):  # lanes that share one embedding lie no distance apart
        for summands in ((own, others), (own, None), (None, others)):
            assert torch.equal(ops.join_lanes(start, *summands), torch_ops.join_lanes(start, *summands))
    assert torch.equal(ops.sum_lanes(x), torch_ops.sum_lanes(x))
    qkv = drawn(lanes, tokens, 4 * 6, dtype=dtype)
    assert torch.equal(ops.by_head(qkv, 2 * lanes, lanes, 6), torch_ops.by_head(qkv, 2 * lanes, lanes, 6))


def test_a_stream_adds_up_in_the_order_of_its_summands() -> None:
    """Whichever kernel serves: an own output with what others computed, an early sum for all lanes, a stage's rows."""
    x, own, past = (drawn(3, 5, 8, dtype=torch.bfloat16, seed=seed) for seed in (1, 2, 3))
    others, early = OtherLanes(drawn(5, 8, dtype=torch.bfloat16), past), drawn(5, 8, dtype=torch.bfloat16, seed=6)
    late = others.total - others.own
    for ops in (CpuOps(KERNELS), TorchOps()):
        assert torch.equal((LaneStream(ops, x) + own + others).whole(), x + own + late)
        assert torch.equal((LaneStream(ops, x) + early).whole(), x + early)
        assert torch.equal((LaneStream(ops, x) + early + others).whole(), x + early + late)
        assert torch.equal((LaneStream(ops, x) + own + past).whole(), x + own + past)
        stream = LaneStream(ops, x) + own
        assert torch.equal(stream.whole(), stream.whole())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("tokens", [1, 8, 40, 200])
def test_lanes_have_the_bits_of_their_products(dtype: torch.dtype, int8: bool, tokens: int) -> None:
    """Each lane by its own weight and norm, in one call: as by a product of its own, few tokens or many, and from rows
    that lie apart (a lane's heads among those of all)."""
    assert KERNELS is not None
    if int8 and (dtype != torch.bfloat16 or not KERNELS.int8):
        pytest.skip("int8 weights take bf16 tokens")
    ops, lanes, inputs = CpuOps(KERNELS, int8=int8), 3, 48
    weights = torch.stack([drawn(80, inputs, dtype=dtype, seed=i) for i in range(lanes)])
    norms = [Norm(1 + drawn(inputs, dtype=dtype, seed=10 + i) / 4, 1e-5) for i in range(lanes)]
    x = drawn(lanes, tokens, inputs, dtype=dtype, seed=20)
    apart = x.transpose(0, 1).contiguous().transpose(0, 1)
    for gated in (False, True):
        together = ops.lane_products(weights, norms, gated)
        make = ops.gated_product if gated else ops.product
        want = torch.stack([make(w, None, n)(one) for w, n, one in zip(weights, norms, x, strict=True)])
        assert torch.equal(together(x), want)
        assert torch.equal(together(apart), want)
    plain = ops.lane_products(weights, [None] * lanes, False)
    want = torch.stack([ops.product(w, None)(one) for w, one in zip(weights, x, strict=True)])
    assert torch.equal(plain(apart), want)
