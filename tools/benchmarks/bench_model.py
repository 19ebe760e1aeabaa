"""A model with random weights, ready to step, assembled as engine/step/build.py does it: for benchmarks that need no
checkpoint. Imported by rank programs alone (torch).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Literal

import torch
from laddertron.engine.config.schema import EngineConfig
from laddertron.engine.sampling.sampler import Sampler
from laddertron.engine.schedule.scheduler import SchedulerLimits
from laddertron.engine.step.build import drawn_on_device, make_graphs
from laddertron.engine.step.runner import Runner
from laddertron.engine.step.share import DTYPES
from laddertron.models import ops_choice
from laddertron.models.attention import KVCache
from laddertron.models.attention_choice import make_attention
from laddertron.models.config.known_models import architecture, known
from laddertron.models.config.lanes import Lanes
from laddertron.models.config.model_config import Dtype, ModelConfig, Wiring, make_wiring
from laddertron.models.config.parts import WiringKind
from laddertron.models.config.shapes import check_shapes, replicates_embedding
from laddertron.models.cuda.fp8 import LARGEST, Fp8, multiplies_fp8
from laddertron.models.lanes import model_class
from laddertron.models.llama import LlamaModel
from laddertron.models.ops_choice import make_ops
from laddertron.models.stages import RankShard
from laddertron.models.weights.tensor_reader import FP8
from laddertron.topology.comm.collectives import Collective
from laddertron.topology.comm.groups import Communicator

BLOCK = 16
NAMES = {"no-communication": "none", "carried": "standard"}  # carried: behind Unawaited (variants.py)


@dataclass(frozen=True, slots=True)
class Size:
    """A Llama's shape, as JSON carries it to the ranks; with `lanes`, of a model whose residual has so many copies.
    With `known`, the model of that name, of so many layers and positions."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    dtype: Dtype
    tied: bool = True
    positions: int = 1024
    lanes: int = 0
    known: str = ""

    def config(self) -> ModelConfig:
        if self.known:
            return of_layers(known(self.known), self.layers, self.positions)
        kind: WiringKind = "lanes"
        lanes = Wiring((kind,) * self.layers, lanes=Lanes(self.lanes, 1, self.layers))
        return architecture(
            "laneformer_tp" if self.lanes else "llama", self.layers, self.hidden, self.heads, self.kv_heads, self.ffn,
            self.vocab, self.positions, tied=self.tied, dtype=self.dtype, wiring=lanes if self.lanes else "standard",
        )  # fmt: skip


def of_layers(config: ModelConfig, layers: int, positions: int) -> ModelConfig:
    """The first layers of a model of one wiring, for so many positions."""
    experts = config.experts
    if experts is not None:
        experts = replace(experts, layers=experts.layers[:layers])
    wiring = make_wiring("standard", layers)
    return replace(config, num_layers=layers, max_position_embeddings=positions, experts=experts, wiring=wiring)


def fill(model: LlamaModel, seed: int = 0) -> None:
    """Random weights of the size that trained ones have, norms at one; then what `load` does after reading."""
    generator = torch.Generator(model.norm.weight.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(2e-4 if name.endswith("weight_scale") else 1.0)
        elif parameter.dtype == FP8:
            wide = torch.empty(parameter.shape, dtype=torch.bfloat16, device=parameter.device)
            parameter.data.copy_(wide.normal_(0.0, 100.0, generator=generator).clamp_(-LARGEST, LARGEST))
        else:
            parameter.data.normal_(0.0, 0.02, generator=generator)
    model.prepare()


def fp8_products(layers: int, device: torch.device) -> Fp8:
    """All of every layer's in fp8, as models/ops_choice.py has them computed."""
    names = frozenset(f"layers.{i}.{name}" for i in range(layers) for name in ("qkv", "o", "gate_up", "down"))
    gpu = device.type == "cuda"
    return Fp8(names, gpu and multiplies_fp8(device), fused=ops_choice._triton_ops() if gpu else None)


def make_model(
    size: Size, communicator: Communicator, device: torch.device | None = None, fp8: bool = False
) -> LlamaModel:
    """One rank's share of a random model. Raises ShapeError."""
    config, dtype = size.config(), DTYPES[size.dtype]
    device = device or torch.device("cpu")
    check_shapes(config, communicator.size)
    model = model_class(config)(
        config,
        communicator.tp,
        communicator.all_reduce,
        make_ops(device, dtype),
        dtype=dtype,
        device=device,
        positions=size.positions + 1,
        stored=fp8_products(size.layers, device) if fp8 else None,
        replicate_embedding=replicates_embedding(config, dtype.itemsize, len(communicator.layout.nodes) > 1),
    )
    fill(model)
    return model


def rewired(model: LlamaModel, wiring: str, all_reduce: Collective | None = None) -> LlamaModel:
    """The same weights, in place, behind another wiring and another collective."""
    twin = copy.copy(model)
    twin.config = replace(model.config, wiring=_wiring(model.config, NAMES.get(wiring, wiring)))
    twin.all_reduce = all_reduce or model.all_reduce
    return twin


def _wiring(config: ModelConfig, kind: str) -> Wiring:
    """Of lanes delay-d is that of their sums, in layers; standard: 1."""
    plain, lanes = make_wiring(kind, config.num_layers), config.lanes
    if lanes is None or kind == "none":
        return replace(plain, lanes=lanes)
    return replace(config.wiring, lanes=replace(lanes, delay=plain.delay or 1))


def make_runner(
    model: LlamaModel,
    communicator: Communicator,
    seats: int,
    step_tokens: int,
    attention: str = "auto",
    cuda_graphs: Literal["auto"] | bool = False,
) -> tuple[Runner, SchedulerLimits]:
    """The model with its cache and sampler, and what rank 0 makes its scheduler from. Raises AttentionError or
    GraphsError."""
    config, dtype = model.config, DTYPES[model.config.dtype]
    device = model.norm.weight.device
    shard = RankShard(config, communicator.size, communicator.rank)
    length = config.max_position_embeddings
    blocks = seats * -(-(length + 1) // BLOCK) + 1
    cache = KVCache(shard, blocks + 1, BLOCK, dtype, device)  # the last one is padding: see make_graphs
    backend, _ = make_attention(attention, shard, cache, dtype)
    keys = EngineConfig(max_num_seqs=seats, cuda_graphs=cuda_graphs)
    on_device, _ = drawn_on_device(communicator, device, backend, deterministic=False)
    sampler = Sampler(config.vocab_size, shard.vocab, seats, communicator.gather, device, on_device=on_device)
    runner = Runner(model, cache, backend, sampler, max_slots=seats, max_model_len=length)
    runner.warmed_up(None, make_graphs(runner, keys, False, communicator))
    limits = SchedulerLimits(
        max_num_seqs=seats,
        max_num_batched_tokens=step_tokens,
        max_model_len=length,
        block_size=BLOCK,
        num_blocks=blocks,
        enable_prefix_caching=False,
    )
    return runner, limits
