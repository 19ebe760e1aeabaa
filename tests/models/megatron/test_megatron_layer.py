"""The layer spec in one process: the order of sub-blocks and all-reduces, and the settings that it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from laddertron.models import residual
from laddertron.models.config.parts import make_wiring
from laddertron.models.config.wiring import WiringError

LAYERS = 3
SIZES: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "ffn_hidden_size": 32,
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cpu_initialization": True,
    "masked_softmax_fusion": False,
}


class Log(list[str]):
    """Sub-blocks and all-reduces in the order in which they are computed, started and awaited."""

    def work(self) -> Any:
        number = sum(line.startswith("start") for line in self)
        self.append(f"start {number}")
        return type("Work", (), {"wait": lambda _: self.append(f"wait {number}")})()


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two ranks, of which only this one exists."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import random
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(random.get_cuda_rng_tracker(), "fork", lambda *_: nullcontext())
    try:
        yield ProcessGroupCollection.use_mpu_process_groups()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def block_of(groups: Any, wiring: str, layers: Any = None, **changes: Any) -> Any:
    from laddertron.models.megatron.layer import ladder_spec
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(**(SIZES | {"tensor_model_parallel_size": 2} | changes))
    return TransformerBlock(config, ladder_spec(wiring, layers), pg_collection=groups)


def planned(wiring: str, layers: Any) -> list[str]:
    """The order of the whole model under `flow`."""
    log = Log()

    class Number(float):
        def __add__(self, other: float) -> Number:
            return Number(0.0)

    class Blocks:
        def attention(self, layer: int, x: Number) -> Number:
            log.append(f"attention {layer}")
            return x

        def mlp(self, layer: int, x: Number) -> Number:
            log.append(f"mlp {layer}")
            return x

    class Sums:
        def start(self, x: Number, account: str = "", at_once: bool = False) -> Any:
            work = log.work()
            return type("Arriving", (), {"wait": lambda _: (work.wait(), x)[1]})()

    flow: Any = residual.flow
    kinds = make_wiring(wiring, LAYERS, layers)
    residual.interleave([flow(Number(0.0), residual.plan_sub_blocks(kinds), Blocks(), {"group": Sums()}, 2)])
    return log


@pytest.mark.parametrize(
    ("wiring", "layers"),
    [
        ("standard", None),
        ("ladder", None),
        ("hybrid", (1, 2)),
        ("hybrid", (0, 1)),
        ("delay-2", None),
        ("delay-5", None),
    ],
)
def test_all_reduces_are_started_and_awaited_as_planned(
    groups: Any, wiring: str, layers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer is a module of its own, and still an all-reduce ends where the plan of the whole model says."""
    block, log = block_of(groups, wiring, layers), Log()
    monkeypatch.setattr(dist.ProcessGroup, "allreduce", lambda *_: log.work())
    for index, layer in enumerate(block.layers):
        layer.self_attention.register_forward_hook(lambda *_, i=index: log.append(f"attention {i}"))
        layer.mlp.register_forward_hook(lambda *_, i=index: log.append(f"mlp {i}"))
    with torch.no_grad():
        block(torch.ones(4, 1, 16), torch.zeros(1, 1, 4, 4, dtype=torch.bool))
    assert log == planned(wiring, layers)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("sequence_parallel", {"sequence_parallel": True}),
        ("hidden_dropout", {"hidden_dropout": 0.1}),
        ("add_bias_linear", {"add_bias_linear": True}),
        ("fp32_residual_connection", {"fp32_residual_connection": True}),
        ("pipeline_model_parallel_size", {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}),
        ("recompute_granularity", {"recompute_granularity": "full", "recompute_method": "uniform"}),
        ("recompute_granularity", {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}),
        ("num_moe_experts", {"num_moe_experts": 2}),
    ],
)
def test_settings_that_sums_in_flight_exclude_are_refused(name: str, changes: dict[str, Any]) -> None:
    from laddertron.models.megatron.layer import SpecError, check
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(**(SIZES | {"tensor_model_parallel_size": 2}))
    check(config)
    for key, value in changes.items():
        setattr(config, key, value)
    with pytest.raises(SpecError, match=f"^{name}="):
        check(config)


def test_selective_recomputation_of_attention_is_allowed() -> None:
    from laddertron.models.megatron.layer import check
    from megatron.core.transformer.transformer_config import TransformerConfig

    check(TransformerConfig(**SIZES, recompute_granularity="selective", recompute_modules=["core_attn"]))


@pytest.mark.parametrize("name", ["standard", "ladder", "delay_2", "delay_3"])
def test_specs_are_found_as_megatron_lm_looks_them_up(groups: Any, name: str) -> None:
    """`--spec laddertron.models.megatron.specs NAME`: an attribute of the module, with the wiring of its name."""
    from megatron.core.transformer.spec_utils import import_module
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import TransformerConfig

    spec = import_module(("laddertron.models.megatron.specs", name))
    block = TransformerBlock(TransformerConfig(**SIZES, tensor_model_parallel_size=2), spec, pg_collection=groups)
    assert {layer.wiring.name for layer in block.layers} == {name.replace("_", "-")}


def test_ladder_layers_of_another_wiring_are_refused() -> None:
    from laddertron.models.megatron.layer import SpecError, wiring_of

    with pytest.raises(SpecError, match="ladder_layers=2"):
        wiring_of("ladder", LAYERS, 2)


@pytest.mark.parametrize("wiring", ["parallel", "desync-2", "none", "no-communication", "sideways", "hybrid"])
def test_other_wirings_are_refused_by_name(wiring: str) -> None:
    from laddertron.models.megatron.layer import SpecError, wiring_of

    with pytest.raises((SpecError, WiringError), match=wiring):
        wiring_of(wiring, LAYERS)
