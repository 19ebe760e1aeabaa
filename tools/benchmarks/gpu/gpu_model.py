"""Shared by the GPU benchmarks: one rank of a model with random weights, assembled as in engine/step/build.py but
without a checkpoint; the device; the prediction of `plan`.
"""

from __future__ import annotations

import copy
import platform
import sys
from dataclasses import replace
from typing import Any, Literal

import torch
from laddertron.engine.config.schema import EngineConfig
from laddertron.engine.sampling.drafts import ComputedStep, PromptLookUp
from laddertron.engine.sampling.sampler import Sampler
from laddertron.engine.schedule.scheduler import SchedulerLimits
from laddertron.engine.schedule.speculation import speculation_rule
from laddertron.engine.step.build import drawn_on_device, make_graphs
from laddertron.engine.step.runner import Runner
from laddertron.engine.step.share import DTYPES
from laddertron.models import ops_choice
from laddertron.models.attention import KVCache
from laddertron.models.attention_choice import make_attention
from laddertron.models.config.known_models import architecture, known
from laddertron.models.config.model_config import ModelConfig, make_wiring
from laddertron.models.cuda.fp8 import LARGEST, StoredProducts, multiplies_fp8
from laddertron.models.llama import LlamaModel
from laddertron.models.ops_choice import make_ops
from laddertron.models.stages import RankShard
from laddertron.models.weights.tensor_reader import FP8
from laddertron.tools.plan.roofline import Load, SimulatedGroup, gpu_rates, links
from laddertron.topology.comm.collectives import Collective
from laddertron.topology.comm.groups import Communicator
from laddertron.topology.cost.cost import Shape
from laddertron.topology.hardware.presets import GPU_BY_NAME

BLOCK = 16
NAMES = {"no-communication": "none"}
TINY = architecture("llama", 4, 256, 16, 8, 512, 512, 4096, known("llama-3.1-70b").rope)


def device_of(name: str) -> torch.device:
    """Exits with 2 where there is no CUDA device."""
    if name == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: --device cpu --tiny runs the same code with a toy model", file=sys.stderr)
        sys.exit(2)
    return torch.device("cuda", 0) if name == "cuda" else torch.device("cpu")


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        return f"{gpu.name}, {gpu.multi_processor_count} multiprocessors, {gpu.total_memory >> 30} GiB"
    return f"{platform.machine()}, {torch.get_num_threads()} threads"


def of_layers(config: ModelConfig, layers: int, positions: int) -> ModelConfig:
    """The first layers (0: all) of a model of one wiring, for so many positions."""
    layers, experts = layers or config.num_layers, config.experts
    if experts is not None:
        experts = replace(experts, layers=experts.layers[:layers])
    wiring = make_wiring("standard", layers)
    return replace(config, num_layers=layers, max_position_embeddings=positions, experts=experts, wiring=wiring)


def make_model(
    config: ModelConfig, group: Any, all_reduce: Collective, device: torch.device, fp8: bool = False
) -> LlamaModel:
    """One rank's share, of random weights of the size that trained ones have, norms at one. fp8: all products."""
    dtype, stored = DTYPES[config.dtype], None
    if fp8:
        gpu, products = device.type == "cuda", ("qkv", "o", "gate_up", "down")
        names = frozenset(f"layers.{i}.{name}" for i in range(config.num_layers) for name in products)
        stored = StoredProducts(names, gpu and multiplies_fp8(device), fused=ops_choice._triton_ops() if gpu else None)
    model = LlamaModel(
        config, group, all_reduce, make_ops(device, dtype), dtype=dtype, device=device,
        positions=config.max_position_embeddings + 1, stored=stored,
    )  # fmt: skip
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith("weight_scale"):
            parameter.data.fill_(2e-4 if name.endswith("weight_scale") else 1.0)
        elif parameter.dtype == FP8:
            wide = torch.empty(parameter.shape, dtype=torch.bfloat16, device=device)
            parameter.data.copy_(wide.normal_(0.0, 100.0, generator=generator).clamp_(-LARGEST, LARGEST))
        else:
            parameter.data.normal_(0.0, 0.02, generator=generator)
    model.prepare()
    return model


def rewired(model: LlamaModel, wiring: str, all_reduce: Collective) -> LlamaModel:
    """The same weights, in place, behind another wiring and another collective."""
    twin = copy.copy(model)
    kind = make_wiring(NAMES.get(wiring, wiring), model.config.num_layers)
    twin.config, twin.all_reduce = replace(model.config, wiring=kind), all_reduce
    return twin


class WrongDrafts(PromptLookUp):
    """`count` drafts of each sequence that are drawn by accident alone: what is measured is a step of 1 + k rows."""

    def __init__(self, count: int) -> None:
        self._count = count

    def propose(self, step: ComputedStep) -> dict[int, list[int]]:
        return {slot: [slot] * min(most, self._count) for slot, most in step.counts.items() if most}


def make_runner(
    model: LlamaModel,
    communicator: Communicator,
    seats: int,
    step_tokens: int,
    cuda_graphs: Literal["auto"] | bool,
    drafts: int = 0,
) -> tuple[Runner, SchedulerLimits]:
    """The model with its cache and sampler, and what rank 0 makes its scheduler from; drafts: of each sequence in each
    step. Raises AttentionError or GraphsError."""
    config, dtype, device = model.config, DTYPES[model.config.dtype], model.norm.weight.device
    shard, length = RankShard(config, communicator.size, communicator.rank), config.max_position_embeddings
    blocks = seats * -(-(length + 1) // BLOCK) + 1
    cache = KVCache(shard, blocks + 1, BLOCK, dtype, device)  # the last one is padding: see make_graphs
    backend, _ = make_attention("auto", shard, cache, dtype)
    on_device, _ = drawn_on_device(communicator, device, backend, deterministic=False)
    sampler = Sampler(config.vocab_size, shard.vocab, seats, communicator.gather, device, on_device=on_device)
    kind: Literal["ngram"] | bool = "ngram" if drafts else False
    proposer = WrongDrafts(drafts) if drafts else None
    runner = Runner(
        model, cache, backend, sampler, max_slots=seats, max_model_len=length, proposer=proposer, speculates=bool(kind)
    )
    keys = EngineConfig(
        max_num_seqs=seats, max_num_batched_tokens=step_tokens, cuda_graphs=cuda_graphs, speculation=kind
    )
    graphs = make_graphs(runner, keys, False, communicator)
    runner.warmed_up(None, graphs)
    limits = SchedulerLimits(
        max_num_seqs=seats, max_num_batched_tokens=step_tokens, max_model_len=length, block_size=BLOCK,
        num_blocks=blocks, enable_prefix_caching=False, speculation=speculation_rule(kind),
    )  # fmt: skip
    return runner, limits if graphs is None else replace(limits, most_rows=graphs.most_rows)


def predicted_ms(
    config: ModelConfig, shape: Shape, device: torch.device, load: Load, wiring: str, fp8: bool = False
) -> float | None:
    """The step of one rank of a group of this shape, by `plan`; None on a device whose rates are not known."""
    gpu = GPU_BY_NAME.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if gpu is None:
        return None
    rates = gpu_rates(gpu.device(0, "0000:00:00.0", 0), "fp8" if fp8 else "bfloat16")
    group = SimulatedGroup(config, shape.size, rates, links("nccl", shape), 1.0 if fp8 else 2.0)
    return round(group.step(load, make_wiring(wiring, config.num_layers)).total_s * 1e3, 4)
