"""What building a model allocates: each parameter once, in the type that it has in the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from laddertron.models.config.known_models import known
from laddertron.models.config.model_config import make_wiring
from laddertron.models.cuda.fp8 import StoredProducts
from laddertron.models.cuda.megatron_layers import MegatronLayers
from laddertron.models.layers import PlainLayers
from laddertron.models.llama import LlamaModel
from laddertron.models.ops import TorchOps
from laddertron.models.weights.tensor_reader import FP8
from laddertron.topology.comm.collectives import Done
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")


@pytest.fixture
def group() -> Iterator[Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class Allocated(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums up the bytes of storages on the CPU that operators made while it was active, freed or not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "empty" in str(func) and isinstance(out, Tensor) and out.device.type == "cpu":
            self.bytes += out.untyped_storage().nbytes()
        return out


@pytest.mark.parametrize("layers", [PlainLayers, MegatronLayers])
def test_fp8_products_are_never_allocated_wider(group: Any, layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of 70B, tp 8: not a byte beyond the parameters that stay, 1 a weight and not 2, through the layers of
    a CPU and of a GPU."""
    monkeypatch.setattr("laddertron.models.llama.make_layers", lambda group, dtype, device: layers(group, dtype))
    config = replace(known("llama-3.1-70b"), num_layers=2, vocab_size=512, wiring=make_wiring("ladder", 2))
    products = frozenset(f"layers.{i}.{name}" for i in range(2) for name in ("qkv", "o", "gate_up", "down"))
    allocated = Allocated()
    alone: Any = Done
    with allocated:
        model = LlamaModel(
            config,
            group,
            alone,
            TorchOps(),
            dtype=torch.bfloat16,
            device=CPU,
            positions=8,
            stored=StoredProducts(products, True),
        )
    parameters = dict(model.named_parameters())
    assert {p.device.type for p in parameters.values()} == {"cpu"}
    assert {parameters[f"{name}.weight"].dtype for name in products} == {FP8}
    assert not any(p.requires_grad for p in parameters.values())
    kept = sum(p.untyped_storage().nbytes() for p in parameters.values())
    assert kept > 200 << 20
    assert allocated.bytes <= kept + (1 << 20)
