"""A sub-block as one kernel call: the bits of its parts called one by one, and how many calls a decode takes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoints
import pytest
import torch
from engine_cases import build_on, deployment
from laddertron.models.attention import StepLayout
from laddertron.models.cpu.attention import CpuAttention, RowAttention
from laddertron.models.cpu.kernels import Kernels
from laddertron.models.cpu.ops import CpuOps
from laddertron.models.cpu.product import FEW_TOKENS
from laddertron.models.ops import Norm, RunningSum
from laddertron.topology.comm.bootstrap import StoreBootstrap, open_store
from rank_pool import Rank
from torch import Tensor

KERNELS = Kernels.find()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="the C kernels were not built (no compiler)")
TYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS, KV_HEADS, DIM, SIZE = 4, 2, 16, 4


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.inference_mode():
        yield


def count_calls(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernel calls of products, attention and norms made with `kernels` from now on."""
    calls = list[str]()

    def counting(name: str) -> Any:
        call = getattr(kernels, name)

        def counted(*args: Any) -> Any:
            calls.append(name)
            return call(*args)

        return counted

    for name in ("sub_block", "attend", "attend_prompts", "rms_norm"):
        monkeypatch.setattr(kernels, name, counting(name))
    return calls


def store(keys: list[Tensor], values: list[Tensor], layer: int, blocks: Tensor, offsets: Tensor, *new: Tensor) -> None:
    keys[layer][blocks, :, offsets], values[layer][blocks, :, offsets] = new


def ops_of(dtype: torch.dtype, int8: bool = False) -> CpuOps:
    if KERNELS is None or dtype not in KERNELS.served or (int8 and not KERNELS.int8):
        pytest.skip(f"products in {dtype} are not the kernel's in this tier")
    return CpuOps(KERNELS, int8=int8, dtype=dtype)


@pytest.mark.parametrize(("dtype", "int8"), [*((dtype, False) for dtype in TYPES), (torch.bfloat16, True)])
@pytest.mark.parametrize("tokens", [0, 1, 7, FEW_TOKENS, FEW_TOKENS + 1])
def test_two_products_in_one_call_are_the_two(
    dtype: torch.dtype, int8: bool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a tensor, of a running sum, of one that has its sum, and of columns of a wider tensor."""
    assert KERNELS is not None
    calls, ops, width = count_calls(KERNELS, monkeypatch), ops_of(dtype, int8), 66
    norm = Norm(torch.randn(width).to(dtype), 1e-5)
    first = ops.gated_product(torch.randn(2 * 34, width).to(dtype), torch.randn(2 * 34).to(dtype), norm)
    last = ops.product(torch.randn(70, 34).to(dtype), None)
    joined: Any = ops.joined(first, last)
    summed, added = (torch.randn(tokens, width).to(dtype) for _ in range(2))
    total = summed + added
    want = last(first(total))
    calls.clear()
    running = RunningSum(summed, added)
    assert torch.equal(joined(running), want)
    assert len(calls) == (1 if tokens <= FEW_TOKENS else 2)
    assert torch.equal(running.parts()[0], total)
    assert running.parts()[1] is None
    wide = torch.cat((total, added), 1)
    for same in (running, total, wide[:, :width]):
        assert torch.equal(joined(same), want)
    columns: Any = RunningSum(torch.cat((summed, added), 1)[:, :width], torch.cat((summed, added), 1)[:, width:])
    assert torch.equal(joined(columns), want)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", [CpuAttention, RowAttention])
@pytest.mark.parametrize("case", ["decodes", "a prompt too", "one sequence's tokens", "too many"])
def test_attention_between_its_products_is_the_three(
    dtype: torch.dtype, kind: type[CpuAttention], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With norms and without, over two layers: the bits and the stored keys of three calls, and one call where all
    tokens are decodes that do not see one another."""
    assert KERNELS is not None
    decodes = FEW_TOKENS + 1 if case == "too many" else 3
    tokens = decodes + (2 if case == "a prompt too" else 0)
    starts = [*range(decodes + 1), *([tokens] if tokens > decodes else [])]
    positions = torch.tensor([*[5] * decodes, *[0, 1][: tokens - decodes]])
    table = torch.arange(2 * (len(starts) - 1)).view(-1, 2)
    if chained := case == "one sequence's tokens":
        positions, table = torch.tensor([3, 4, 5]), table[:1].expand(3, -1).contiguous()
    rows = torch.arange(tokens).clamp(max=len(starts) - 2)
    layout = StepLayout(
        positions, starts, [int(positions[last - 1]) + 1 for last in starts[1:]], table, table[rows, positions // SIZE],
        positions % SIZE, decodes, chained,
    )  # fmt: skip
    ops, width, head = ops_of(dtype), 66, HEADS + 2 * KV_HEADS
    residual = torch.randn(tokens, width).to(dtype), torch.randn(tokens, width).to(dtype)
    angles = torch.randn(tokens, 1, DIM // 2)
    stored = torch.randn(2, 2, 2 * (decodes + 1), KV_HEADS, SIZE, DIM).to(dtype)
    norms = [(None, None), tuple(Norm(torch.randn(DIM).to(dtype), 1e-5) for _ in range(2))]
    qkv = ops.product(torch.randn(head * DIM, width).to(dtype), None, Norm(torch.randn(width).to(dtype), 1e-5))
    o = ops.product(torch.randn(width, HEADS * DIM).to(dtype), None)
    outputs, caches = [], []
    for together in (False, True):
        keys, values = ([layer.clone() for layer in side] for side in stored)
        cache: Any = SimpleNamespace(block_size=SIZE, num_blocks=len(keys[0]), keys=keys, values=values, scales=None)
        cache.write = partial(store, keys, values)
        calls = count_calls(KERNELS, monkeypatch)
        backend = kind(cache, (None, None), 0.25, KERNELS)
        backend.prepare(layout, angles.cos(), angles.sin())
        made = []
        for layer, (q_norm, k_norm) in enumerate(norms):
            running: Any = RunningSum(*residual)
            if together:
                calls.clear()
                made.append(backend.sub_block(layer, running, qkv, o, q_norm, k_norm))
                if kind is CpuAttention:
                    assert bool(calls) == (case != "decodes")
            else:
                made.append(o(backend.attend(layer, qkv(running), q_norm, k_norm)))
        outputs.append(made)
        caches.append([*keys, *values])
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*caches, strict=True))


@pytest.mark.parametrize("recipe", ["llama", "ladder", "qwen3", "delay2"])
def test_a_decode_takes_two_calls_a_layer(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one for the head."""
    ops_of(torch.float32)
    folder = checkpoints.save(tmp_path, recipe)
    made = list[list[str]]()
    init = Kernels.__init__

    def counting(kernels: Kernels, *args: Any) -> None:
        init(kernels, *args)
        made.append(count_calls(kernels, monkeypatch))

    monkeypatch.setattr(Kernels, "__init__", counting)
    rank = Rank(0, 1, StoreBootstrap(open_store("127.0.0.1", 0, master=True), 0, 1))
    try:
        built = build_on(rank, deployment(str(folder), 1))
        table, here = torch.tensor([[1]]), torch.tensor([0])
        layout = StepLayout(here, [0, 1], [1], table, table[0], here, 1)
        for calls in made:
            calls.clear()
        model = built.runner.model
        model.forward(torch.tensor([5]), layout, built.runner.attention, here)
        assert [call for calls in made for call in calls] == ["sub_block"] * (2 * model.config.num_layers + 1)
    finally:
        rank.close_kept()
