"""Kernels that a layer of a decode step launches on a GPU, counted on a CPU: operators by a dispatch recorder, Triton's
kernels and FlashInfer's by stand-ins that note a launch and compute nothing. docs/step.md has the figures."""

from __future__ import annotations

import importlib
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from laddertron.models import cuda
from laddertron.models.attention import KVCache, StepLayout
from laddertron.models.config.known_models import known
from laddertron.models.config.model_config import make_wiring
from laddertron.models.cuda.flashinfer import FlashInferAttention
from laddertron.models.cuda.fp8 import StoredProducts
from laddertron.models.llama import LlamaModel
from laddertron.models.stages import RankShard
from laddertron.topology.comm.collectives import Done, Pending
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CPU, TOKENS, SIZE = torch.device("cpu"), 4, 8
DOCS = Path(__file__).resolve().parents[3] / "docs" / "step.md"


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what would be launched while it is active, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.").removeprefix("_")
        first = next((arg for arg in args if isinstance(arg, Tensor)), None)
        # A view, or what was of that type already.
        given = isinstance(out, Tensor) and first is not None and out.data_ptr() == first.data_ptr()
        if "empty" not in name and (not given or name.split(".")[0].endswith("_")):
            self.found[name] += 1
        return out


class Reduces:
    """Counts all-reduces apart: they are not the layer's kernels."""

    def __init__(self) -> None:
        self.count = 0

    def start(self, x: Tensor, *_: object) -> Pending:
        self.count += 1
        return Done(x)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """With a Triton whose kernels are noted, and fp8 products that are."""
    noted = Launches()

    class Kernel:
        def __init__(self, function: Any) -> None:
            self._name = function.__name__

        def __getitem__(self, grid: Any) -> Any:
            return lambda *_, **__: noted.found.update([f"triton {self._name}"])

    language: Any = ModuleType("triton.language")
    language.constexpr = lambda value: value
    triton: Any = ModuleType("triton")
    triton.jit, triton.language = lambda function=None, **_: Kernel(function), language
    triton.next_power_of_2 = lambda count: 1 << (count - 1).bit_length()
    for name in ("kernels", "ops"):
        monkeypatch.delitem(sys.modules, f"laddertron.models.cuda.{name}", raising=False)
        monkeypatch.delattr(cuda, name, raising=False)
    with monkeypatch.context() as patch:  # no longer than our modules need it: torch would take it for the true one
        patch.setitem(sys.modules, "triton", triton)
        patch.setitem(sys.modules, "triton.language", language)
        importlib.import_module("laddertron.models.cuda.ops")

    def scaled_mm(x: Tensor, weight: Tensor, *_: Any, out_dtype: torch.dtype, use_fast_accum: bool) -> Tensor:
        assert use_fast_accum
        noted.found["scaled_mm"] += 1
        return torch.empty(len(x), weight.shape[1], dtype=out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)
    try:
        yield noted
    finally:
        dist.destroy_process_group()
        for name in ("kernels", "ops"):
            sys.modules.pop(f"laddertron.models.cuda.{name}", None)
            vars(cuda).pop(name, None)


def step(launches: Launches, layers: int, wiring: Any, fp8: bool, fused: bool) -> tuple[Counter[str], int]:
    """Launches and all-reduces of a decode step of a shard of 70B."""
    ops = importlib.import_module("laddertron.models.cuda.ops")
    config = replace(known("llama-3.1-70b"), num_layers=layers, vocab_size=512, wiring=make_wiring(wiring, layers))
    names = frozenset(f"layers.{i}.{name}" for i in range(layers) for name in ("qkv", "o", "gate_up", "down"))
    stored = StoredProducts(names, native=True, fused=ops if fused else None) if fp8 else None
    how: Any = ops.TritonOps()
    if not fused:
        how.sums_late = False
    reduces, group = Reduces(), dist.distributed_c10d._get_default_group()
    model = LlamaModel(
        config, group, reduces, how, dtype=torch.bfloat16, device=CPU, positions=64, stored=stored
    )  # fmt: skip
    model.prepare()
    cache = KVCache(RankShard(config, SIZE, 0), 4, 16, torch.bfloat16, CPU)

    class Wrapper:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def plan(self, *_: Any, **__: Any) -> None: ...

        def run(self, q: Tensor, kv: Any, out: Tensor, return_lse: bool) -> None:
            launches.found["flashinfer"] += 1

    library = SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper, BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    windows = (None,) * layers
    attention = FlashInferAttention(
        cache, windows, 0.1, config.num_heads // SIZE, torch.bfloat16, library, ops.rotate_and_store
    )
    at = torch.zeros(TOKENS, dtype=torch.int64)
    layout = StepLayout(at, list(range(TOKENS + 1)), [1] * TOKENS, at[:, None], at, at, TOKENS)
    attention.prepare(layout, model.rotary.cos[at], model.rotary.sin[at])
    launches.found.clear()
    with torch.inference_mode(), launches:
        model.compute(at, attention)
    return Counter(launches.found), reduces.count


def a_layer(launches: Launches, wiring: str, fp8: bool, fused: bool = True) -> tuple[Counter[str], int]:
    """What one layer more adds."""
    (few, before), (more, after) = (step(launches, layers, wiring, fp8, fused) for layers in (2, 3))
    more.subtract(few)
    return +more, after - before


def documented() -> tuple[tuple[int, int], tuple[int, int]]:
    """Kernels of a layer by docs/step.md, in bf16 and in fp8: with the fused kernels and without them."""
    said = re.search(r"launches (\d+) kernels in bf16 and (\d+) in fp8 \(.*: (\d+) and (\d+)\)", DOCS.read_text())
    assert said
    bf16, fp8, bf16_apart, fp8_apart = map(int, said.groups())
    return (bf16, bf16_apart), (fp8, fp8_apart)


@pytest.mark.parametrize("wiring", ["standard", "ladder"])
def test_a_layer_in_bf16(launches: Launches, wiring: str) -> None:
    """Two norms with the sums before them, four products, rotation and write, attention, gate."""
    found, reduces = a_layer(launches, wiring, fp8=False)
    assert found == {
        "triton rms_norm": 2, "linear.default": 4, "triton rotate_and_store": 1, "flashinfer": 1,
        "triton silu_and_mul": 1,
    }  # fmt: skip
    assert reduces == 2
    apart, _ = a_layer(launches, wiring, fp8=False, fused=False)
    assert documented()[0] == (found.total(), apart.total())


@pytest.mark.parametrize("wiring", ["standard", "ladder"])
def test_a_layer_in_fp8(launches: Launches, wiring: str) -> None:
    """Quantisation is part of the norms and of the gate; attention's output has a kernel of its own for it."""
    found, reduces = a_layer(launches, wiring, fp8=True)
    assert found == {
        "triton rms_norm": 2, "scaled_mm": 4, "triton rotate_and_store": 1, "flashinfer": 1, "triton quantise": 2,
    }  # fmt: skip
    assert reduces == 2
    apart, _ = a_layer(launches, wiring, fp8=True, fused=False)
    assert documented()[1] == (found.total(), apart.total())
