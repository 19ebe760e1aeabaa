"""A layer spec for Megatron-core's GPTModel whose sub-blocks follow a wiring: each all-reduce is started by the plan of
models/residual.py and awaited by the sub-block that reads it, in the same layer or a later one.

A layer runs as a pipeline stage of one layer. The all-reduces in flight at its end go to the next layer in `context`,
which TransformerBlock passes from layer to layer and which a decoder does not use otherwise. Backward, Megatron-core's
column-parallel layers sum the gradients of their inputs, as they do without this spec.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..config.model_config import Wiring
from ..config.wiring import wiring_named
from ..residual import flow, interleave, pending_at, plan_sub_blocks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns about every accelerator library that is not installed
    from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE, get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec as get_te_spec
    from megatron.core.tensor_parallel.layers import RowParallelLinear
    from megatron.core.transformer.transformer_layer import TransformerLayer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

KINDS = ("standard", "ladder", "delay")
_NEEDED: dict[str, tuple[Any, str]] = {
    "sequence_parallel": (False, "the residual would be split over the ranks, and its sums be reduce-scatters"),
    "pipeline_model_parallel_size": (1, "a stage hands on one tensor, without the all-reduces in flight"),
    "hidden_dropout": (0.0, "an output joins the residual in a later layer, where no mask is drawn for it"),
    "add_bias_linear": (False, "each rank would add the row-parallel bias"),
    "num_moe_experts": (None, "experts choose their own collectives"),
    "mtp_num_layers": (None, "layers behind the last have a spec of their own"),
    "fp32_residual_connection": (False, "sums are added in the type of the products"),
    "cuda_graph_impl": ("none", "a graph of one layer cannot contain an all-reduce that ends in another"),
    "cpu_offloading": (False, "a layer's activations are in use after its end"),
    "fine_grained_activation_offloading": (False, "a layer's activations are in use after its end"),
    "inference_fuse_tp_communication": (False, "its kernels sum at once"),
}


class SpecError(ValueError):
    """A setting of Megatron-core, or a wiring, that the spec does not compute; names the setting and its value."""


class PartialRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """Leaves the sum over the ranks to the wiring, as Megatron-core's own does with an expert's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.explicit_expert_comm = True


class _Started(torch.autograd.Function):
    """Starts the sum over the ranks in place. The gradient of a sum is that of each of its terms."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, group: ProcessGroup, works: list[Any]) -> Tensor:
        total = output.contiguous()
        if total is output:
            ctx.mark_dirty(output)
        works.append(group.allreduce([total]))
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None, None


class _Arriving:
    def __init__(self, total: Tensor, works: list[Any]) -> None:
        self._total, self._works = total, works

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._total


class _AllReduce:
    """The tensor-parallel group's sums, as models/residual.py starts them."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def start(self, x: Tensor, account: str = "", at_once: bool = False) -> _Arriving:
        works: list[Any] = []
        started: Any = _Started.apply
        return _Arriving(started(x, self._group, works) if self._group.size() > 1 else x, works)


class _SubBlocks:
    """One layer's attention and MLP with their norms."""

    def __init__(self, layer: LadderLayer, arguments: dict[str, Any]) -> None:
        self._layer, self._arguments = layer, arguments

    def attention(self, layer: int, residual: Tensor) -> Tensor:
        output: Tensor = self._layer.self_attention(self._layer.input_layernorm(residual), **self._arguments)[0]
        return output

    def mlp(self, layer: int, residual: Tensor) -> Tensor:
        output: Tensor = self._layer.mlp(self._layer.pre_mlp_layernorm(residual))[0]
        return output


class LadderLayer(TransformerLayer):  # type: ignore[misc]
    """`wiring`, `ladder_layers`: as in a deployment file."""

    def __init__(
        self, config: Any, *, wiring: str, ladder_layers: int | tuple[int, ...] | None = None, **options: Any
    ) -> None:
        check(config)
        super().__init__(config=config, **options)
        self.wiring = wiring_of(wiring, config.num_layers, ladder_layers)
        index = self.layer_number - 1
        pending, left = (pending_at(self.wiring, at) for at in (index, index + 1))
        self._plan = plan_sub_blocks(replace(self.wiring, kinds=self.wiring.kinds[index : index + 1]), pending, left)
        self._sums = _AllReduce(self.tp_group)

    def forward(self, hidden_states: Tensor, context: Any = None, **arguments: Any) -> tuple[Tensor, Any]:
        for name in ("context_mask", "padding_mask", "inference_params", "dynamic_inference_decode_only"):
            arguments.pop(name, None)
        blocks: Any = _SubBlocks(self, arguments)
        ((residual, left),) = interleave(
            [flow(hidden_states, self._plan, blocks, {"group": self._sums}, self.tp_group.size(), context or ())]
        )
        return residual, left or None


def check(config: Any) -> None:
    """Raises SpecError on a setting of TransformerConfig under which a sum in flight would be wrong or impossible."""
    for name, (needed, reason) in _NEEDED.items():
        if (value := getattr(config, name, needed)) != needed:
            raise SpecError(f"{name}={value!r} with laddertron's layer spec: {reason}; use {needed!r}")
    recomputed = config.recompute_modules if config.recompute_granularity == "selective" else ()
    if config.recompute_granularity == "full" or set(recomputed) - {"core_attn"}:
        raise SpecError(
            f"recompute_granularity={config.recompute_granularity!r}, recompute_modules={list(recomputed)}: a layer "
            "that is computed again would need the all-reduces that were in flight before it; use 'selective' with "
            "['core_attn'], or none"
        )


def wiring_of(wiring: str, num_layers: int, ladder_layers: int | tuple[int, ...] | None = None) -> Wiring:
    """Raises SpecError, or WiringError on a name or layers that do not exist."""
    if ladder_layers is not None and wiring != "hybrid":
        raise SpecError(f"wiring {wiring} with ladder_layers={ladder_layers}: they belong to hybrid; use that wiring")
    settled = wiring_named(wiring, ladder_layers, num_layers)
    if set(settled.kinds) - set(KINDS):
        raise SpecError(f"wiring {wiring} is not computed with Megatron-core; standard, ladder, delay-d and hybrid are")
    return settled


def ladder_spec(
    wiring: str = "ladder",
    ladder_layers: int | tuple[int, ...] | None = None,
    qk_layernorm: bool = False,
    base: Any = None,
) -> Any:
    """The ModuleSpec for GPTModel's `transformer_layer_spec`. base: the spec of a TransformerLayer to change; default:
    Transformer Engine's if it is installed, else Megatron-core's own modules with RMSNorm."""
    if base is None and HAVE_TE:
        base = get_te_spec(qk_layernorm=qk_layernorm)
    elif base is None:
        base = get_gpt_layer_local_spec(qk_layernorm=qk_layernorm, normalization="RMSNorm")
    parts = base.submodules
    row = PartialRowParallelLinear
    attention = replace(parts.self_attention, submodules=replace(parts.self_attention.submodules, linear_proj=row))
    mlp = replace(parts.mlp, submodules=replace(parts.mlp.submodules, linear_fc2=row))
    return replace(
        base,
        module=LadderLayer,
        params={**base.params, "wiring": wiring, "ladder_layers": ladder_layers},
        submodules=replace(parts, self_attention=attention, mlp=mlp),
    )
