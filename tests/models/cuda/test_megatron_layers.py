"""Megatron-core's layers as GPUs use them, on a CPU: parameters alone, un-reduced, behind our norms and gates."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import prompts, save
from engine_cases import build_on, deployment, forward_all
from laddertron.engine.step import share
from laddertron.models import layers, llama
from laddertron.models.cuda.megatron_layers import MegatronLayers
from laddertron.models.layers import PlainLayers, make_layers, prepare
from laddertron.models.ops import Norm, TorchOps, rms_norm, silu_and_mul
from rank_pool import Rank
from torch.nn import functional

Ranks = Callable[..., list[Any]]

CPU, BF16 = torch.device("cpu"), torch.bfloat16


@pytest.fixture(params=[(1, 0), (4, 0), (4, 1)])
def group(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Ranks that are not there: a reduction, which nobody may ask for, would leave the values as they are."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    size, rank = request.param
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class Counted(TorchOps):
    """Multiplies with a product of its own, as deterministic operators do."""

    def __init__(self) -> None:
        self.rows = list[int]()

    def _matmul(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        def product(x: torch.Tensor) -> torch.Tensor:
            self.rows.append(len(x))
            return functional.linear(x, weight, bias)

        return product


def _filled(layer: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        assert not parameter.requires_grad
        parameter.data.normal_(generator=generator)
    return layer


@pytest.mark.parametrize("bias", [False, True])
def test_they_hold_the_same_and_multiply_the_same(group: Any, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Column, row and gated products of every rank: the bits of torch's own product, which multiplies in place of
    Megatron-core's forward, and nothing is reduced. A row's bias is rank 0's alone. parallel_state stays as it was,
    uninitialised."""
    from megatron.core import parallel_state

    def reduce(*_: Any, **__: Any) -> None:
        raise AssertionError("a layer reduces by itself")

    monkeypatch.setattr(dist, "all_reduce", reduce)
    ours, theirs = PlainLayers(group, BF16), MegatronLayers(group, BF16)
    norm = Norm(torch.randn(32, generator=torch.Generator().manual_seed(1)).to(BF16), 1e-5)
    for kind, gated in (("column", False), ("column", True), ("row", False)):
        plain, layer = (_filled(getattr(make, kind)(32, 64, bias)) for make in (ours, theirs))
        assert {n: (p.shape, p.dtype) for n, p in layer.named_parameters()} == {
            n: (p.shape, p.dtype) for n, p in plain.named_parameters()
        }
        assert (layer.bias is not None) == (bias and (kind == "column" or group.rank() == 0))
        calls = list[int]()
        layer.register_forward_hook(lambda module, args, out, calls=calls: calls.append(len(args[0])))
        behind = norm if kind == "column" else None
        ops = Counted()
        product = prepare(layer, ops, behind, gated=gated)
        x = torch.randn(5, layer.weight.shape[1], generator=torch.Generator().manual_seed(2)).to(BF16)
        with torch.inference_mode():
            y = functional.linear(x if behind is None else rms_norm(x, norm), layer.weight, layer.bias)
            want = silu_and_mul(y) if gated else y
            assert torch.equal(product(x), want)
            assert torch.equal(prepare(plain, TorchOps(), behind, gated=gated)(x), want)
        assert (calls, ops.rows) == ([], [5])
        if layer.bias is None:
            with torch.inference_mode():
                assert torch.equal(layer(x if behind is None else rms_norm(x, norm))[0], y)  # its arithmetic
    assert not parallel_state.is_initialized()
    assert not parallel_state.model_parallel_is_initialized()


def test_a_gpu_gets_megatrons_and_a_cpu_parameters_alone(group: Any) -> None:
    assert isinstance(make_layers(group, BF16, torch.device("cuda")), MegatronLayers)
    assert isinstance(make_layers(group, BF16, CPU), PlainLayers)


def case_digests(rank: Rank, folder: str, prompts: list[list[int]]) -> list[str]:
    """This rank's logits, hashed: with plain parameters, and with the layers and operators that a GPU has."""
    digests = []
    for make in (PlainLayers, MegatronLayers):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llama, "make_layers", lambda group, dtype, device, make=make: make(group, dtype))
            patch.setattr(share, "make_ops", lambda *_: TorchOps())
            built = build_on(rank, deployment(folder, rank.size))
            assert isinstance(built.runner.model.layers[0].get_submodule("qkv"), layers.Linear) == (make is PlainLayers)
            digests.append(hashlib.sha256(forward_all(built, prompts).contiguous().numpy().tobytes()).hexdigest())
    return digests


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_model_gives_the_same_bits_through_them(ranks: Ranks, family: str, tmp_path: Path) -> None:
    """Two ranks, a whole small model from its checkpoint, with biases (qwen2) and without."""
    save(tmp_path, family)
    for plain, theirs in ranks(
        2, "test_megatron_layers:case_digests", {"folder": str(tmp_path), "prompts": prompts(3)}
    ):
        assert plain == theirs
