"""From a deployment and a communicator to a loaded runner: what fits, what is refused, in which order.

Every rank runs this with the same Deployment. What differs between ranks (free memory) is agreed on over the group
before anything is allocated.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...models.attention import AttentionBackend, Capturable, KVCache, block_bytes
from ...models.attention_choice import make_attention
from ...models.config.model_config import ModelConfig, from_folder
from ...models.config.shapes import check_everywhere, check_shapes, replicates_embedding
from ...models.config.wiring import check_split, choose_wiring
from ...models.cuda.fp8 import Fp8
from ...models.llama import LlamaModel
from ...models.ops import TorchOps
from ...models.ops_choice import make_ops, make_stored_products
from ...models.pages import HeldPages
from ...models.stages import RankShard, Stage, choose_layers, make_stages
from ...models.transfer import download
from ...models.weights.mapping import Source, open_source
from ...models.weights.slices import plan_fills
from ...models.weights.tensor_reader import FP8
from ...topology.comm.collectives import device_gather
from ...topology.comm.groups import Communicator
from ...topology.hardware import cpu_tier
from ...topology.sum_check import check_sums
from ..config.schema import Deployment
from ..request import ModelLimits
from ..sampling.grammar import Grammars, GrammarSlots, NoGrammars
from ..sampling.sampler import OnDevice, Sampler
from ..schedule.scheduler import SchedulerLimits
from ..schedule.speculation import speculation_rule
from ..schedule.split import SplitRule
from . import malloc as heap
from .cuda_graphs import DecodeGraphs, fell_back, make_graphs
from .draft_model import DraftWeights, check_alike
from .kv_capacity import (
    CapacityError,
    agreed_budget,
    available_bytes,
    check_memory,
    count_blocks,
    describe_budget,
    working_bytes,
)
from .loading import held_weights, load_weights
from .runner import Runner
from .stage_runner import NoDraws, StageRunner
from .timeouts import CollectiveTimeouts
from .warm_up import compiles, warm_up

log = logging.getLogger(__name__)


SCORED_LOGITS = 1 << 26
"""A rank's logits of prompt positions in one step: some 400 MB beside the caches, whatever is asked for."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = DTYPES | {"fp8": FP8}


FIRST_TIMEOUT_S = 60.0
"""A collective's timeout until a step has been measured."""


@dataclass(frozen=True, slots=True)
class Built:
    """A rank ready to step. scheduler_limits is what rank 0 makes its scheduler from; warnings are for people."""

    runner: Runner
    config: ModelConfig
    limits: ModelLimits
    scheduler_limits: SchedulerLimits
    warnings: tuple[str, ...]
    digest: str
    """Of the checkpoint's tensors by name, type, shape and place (and bytes, with a manifest): ranks that read
    different files differ here."""
    weights_file: int
    """The descriptor of HeldPages that a launch which stands by may go on with; -1: there are none."""


def model_config(deployment: Deployment) -> tuple[ModelConfig, list[str]]:
    """The checkpoint's configuration with its wiring settled and its shapes accepted.

    Raises ConfigError, WiringError or ShapeError.
    """
    keys = deployment.model
    config, warnings = choose_wiring(
        from_folder(Path(keys.path)), keys.wiring, keys.ladder_layers, keys.allow_untrained_ladder
    )
    check_shapes(config, deployment.parallel.tensor_parallel_size)
    check_split(config.wiring, deployment.parallel.split_steps)
    if deployment.parallel.deterministic == "everywhere":
        check_everywhere(config, deployment.parallel.tensor_parallel_size)
    return config, warnings


def stage_here(deployment: Deployment, config: ModelConfig, communicator: Communicator) -> Stage:
    """The stage that this rank's group is; of a group alone, all there is. Raises StageError."""
    if communicator.pipeline is None:
        return Stage(config)
    parallel = deployment.parallel
    layers = choose_layers(config, parallel.pipeline_parallel_size, parallel.pipeline_layers)
    return make_stages(config, layers)[communicator.pipeline.stage]


def model_length(config: ModelConfig, wanted: int | None) -> int:
    """The longest sequence that is served. Raises CapacityError."""
    most = config.max_position_embeddings
    if config.rope.kind == "dynamic" and config.rope.original_max_position_embeddings:
        most = min(most, config.rope.original_max_position_embeddings)
    if wanted is not None and wanted > most:
        raise CapacityError(f"model.max_model_len={wanted}: the checkpoint knows {most} positions; use at most {most}")
    return wanted or most


def drawn_on_device(
    communicator: Communicator, device: torch.device, attention: AttentionBackend, deterministic: bool
) -> tuple[OnDevice | None, str]:
    """How plain rows are drawn without the host, so that a step may be set off before the ids of the one before are
    known; None where every id passes through the host; why, in a few words."""
    if communicator.pipeline is not None:
        return None, "through the host: the first stage embeds what the last one draws"
    gather = device_gather(communicator.gathers, communicator.size)
    if device.type != "cuda":
        return None, f"through the host: it is the {device.type} that computes"
    if deterministic:
        return None, "through the host: there the masses of top_p and log-probabilities have one order of summation"
    if not isinstance(attention, Capturable):
        return None, f"through the host: attention {attention.name} may read what lies behind a sequence's end"
    if gather is None:
        return None, f"through the host: gathers of backend {communicator.backend} do, it needs nccl"

    return OnDevice(gather, partial(download, wait=partial(communicator.wait_event, what="gather"))), (
        "stay on the device"
    )


def split_rule(
    deployment: Deployment,
    communicator: Communicator,
    config: ModelConfig,
    device: torch.device,
    graphs: DecodeGraphs | None,
) -> SplitRule | None:
    """Which steps may be computed in two streams; None where none may, or `auto` expects nothing of it: inside a node
    an all-reduce is over before half a sub-block is, and on GPUs nobody has measured two streams yet."""
    keys = deployment.parallel
    near = device.type != "cpu" or (len(communicator.layout.nodes) == 1 and keys.collective != "emulated")
    if keys.split_steps == "never" or communicator.size == 1 or not keys.overlap or not config.wiring.waits:
        return None
    if keys.split_steps == "auto" and near:
        return None
    products = config.hidden_size * (config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads))
    products += 3 * config.hidden_size * config.ffn_size
    return SplitRule(
        keys.split_steps == "always",
        attention_share=2 * config.num_heads * config.head_dim / products,
        whole_decodes=0 if graphs is None else graphs.sizes[-1],
    )


def make_grammars(deployment: Deployment, config: ModelConfig) -> Grammars:
    """Structured output with the model's tokenizer, or what refuses it request by request."""
    folder = Path(deployment.text_folder)
    try:
        return GrammarSlots(folder, config.vocab_size, config.eos_token_ids)
    except (ValueError, OSError) as fault:
        return NoGrammars(f"structured output cannot be had here: {fault}")


@dataclass(frozen=True, slots=True)
class _Share:
    """What this rank is to hold. `needed`: bytes of its weights."""

    config: ModelConfig
    warnings: list[str]
    dtype: torch.dtype
    length: int
    stage: Stage
    shard: RankShard
    source: Source
    stored: Fp8 | None
    ops: TorchOps
    needed: int


def _share(deployment: Deployment, communicator: Communicator, device: torch.device, file: int | None = None) -> _Share:
    """By the checkpoint's headers; no weight is read. file: of held weights, -1 where there is none; None: nothing will
    be loaded. Raises as `build`."""
    config, warnings = model_config(deployment)
    dtype = DTYPES[config.dtype if deployment.model.dtype == "auto" else deployment.model.dtype]
    length = model_length(config, deployment.model.max_model_len)
    stage = stage_here(deployment, config, communicator)
    shard = RankShard.of(stage, communicator.size, communicator.rank)
    source = open_source(Path(deployment.model.path), shard, config)
    stored = make_stored_products(source, shard, device, deployment.parallel.deterministic)
    pages = None
    if file is not None and device.type == "cpu" and deployment.daemon.standby:
        pages = held_weights(source, deployment, communicator, file)
    ops = make_ops(device, dtype, deployment.model.weights, deployment.parallel.deterministic, pages)
    mine = None if shard.stage is None else {fill.tensor for fill in plan_fills(shard) if fill.tensor is not None}
    needed = source.rank_bytes(dtype.itemsize, shard.size, stored is not None, ops.matrix_bytes, mine)
    if pages is not None:
        needed = max(0, needed - pages.nbytes)
    return _Share(config, warnings, dtype, length, stage, shard, source, stored, ops, needed)


def has_room(
    deployment: Deployment, communicator: Communicator, device: torch.device, ranks_here: int, weights_file: int = -1
) -> bool:
    """Whether the weights and KV caches of this host's ranks fit beside what is there now. On a GPU they never do: who
    serves there has taken what engine.gpu_memory_utilization allows. weights_file: as of `build`. Raises as `build`."""
    share = _share(deployment, communicator, device, None if weights_file < 0 else os.dup(weights_file))
    needed = share.needed
    if (draft := deployment.engine.draft_model) is not None:
        needed += DraftWeights(Path(draft), share.config, share.dtype, share.length).bytes
    return device.type == "cpu" and (needed + deployment.engine.cpu_kv_bytes) * ranks_here <= available_bytes(device)


def build(
    deployment: Deployment,
    communicator: Communicator,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
    tell: Callable[[str], None] = lambda doing: None,
    weights_file: int = -1,
) -> Built:
    """Loads this rank's share, and on a GPU runs first steps. progress(done, total) in bytes of weights; tell: what it
    does afterwards; weights_file: of weights that are held, see Built. Raises CheckpointError, CapacityError,
    ShapeError, StageError, WiringError, ConfigError, WeightsError, AttentionError or GraphsError."""
    heap.give_back_freed()
    pipeline = communicator.pipeline
    say: Callable[[str], None] = log.info if communicator.rank == 0 else lambda line: None
    warn: Callable[[str], None] = log.warning if communicator.rank == 0 else lambda line: None
    if device.type == "cpu":
        say(f"CPU tier: {cpu_tier.described(cpu_tier.current(), cpu_tier.own())}")
    share = _share(deployment, communicator, device, weights_file)
    config, dtype, length, stage, shard = share.config, share.dtype, share.length, share.stage, share.shard
    source, stored, ops = share.source, share.stored, share.ops
    keys, deterministic = deployment.engine, deployment.parallel.deterministic
    if pipeline is not None:
        first = stage.first_layer
        say(f"stage {stage.index} of {stage.count}: layers {first} to {first + stage.config.num_layers - 1}")
    if fell_back(device, "auto", ops.name != "torch"):
        warn("norms, gates and rotations: several kernels each by torch, as Triton is missing: make env ACCEL=cuda")
    widens = stored is not None and stored.widens
    warnings = [*share.warnings, *(() if stored is None else stored.warnings)]
    if deterministic and device.type != "cpu":
        warnings.append(
            f"parallel.deterministic={str(deterministic).lower()} was never tried on a GPU of this kind: prove it by "
            "`laddertron verify` with this deployment"
        )
    if keys.speculation and device.type != "cpu":
        raise CapacityError(
            f"engine.speculation={keys.speculation} needs engine.device: cpu: on a GPU steps are set off before the "
            "ids that drafts follow are known; use false"
        )
    working = working_bytes(deployment, stage.config, shard.size, communicator.backend, dtype, length, device, widens)
    draft, needed = None, share.needed
    if keys.draft_model is not None:
        draft = DraftWeights(Path(keys.draft_model), config, dtype, length)
        check_alike(communicator)
        needed += draft.bytes
    check_memory(deployment, shard.size, needed, available_bytes(device), working, device)

    wanted = deployment.parallel.embedding
    spans_nodes = len(communicator.layout.nodes) > 1
    replicate = wanted == "replicate" or (
        wanted == "auto" and replicates_embedding(config, dtype.itemsize, spans_nodes)
    )
    model = LlamaModel(
        stage,
        communicator.tp,
        communicator.all_reduce,
        ops,
        dtype=dtype,
        device=device,
        positions=length + 1,
        replicate_embedding=replicate,
        stored=stored,
        everywhere=deterministic == "everywhere",
        boundary=None if pipeline is None else pipeline.boundary,
    )
    load_weights(model, source, deployment, communicator, progress, say)
    if communicator.size > 1:
        check_sums(communicator, config.hidden_size, keys.max_num_batched_tokens, dtype, device)
    heap.keep_freed()

    kv_dtype = dtype if keys.kv_cache_dtype == "auto" else KV_DTYPES[keys.kv_cache_dtype]
    budget = agreed_budget(keys, communicator, device, working)
    one = block_bytes(shard, keys.block_size, kv_dtype)
    one += 0 if draft is None else draft.block_bytes(keys.block_size)
    # On a GPU one block more, nobody's: what pads a recorded step writes there.
    spare = int(device.type == "cuda")
    num_blocks = count_blocks(budget, one, keys.block_size, keys.max_num_seqs, length, spare)
    if pipeline is not None:
        num_blocks = pipeline.least(num_blocks)
    say(describe_budget(budget, num_blocks, keys.block_size))
    cache = KVCache(shard, num_blocks + spare, keys.block_size, kv_dtype, device)
    attention, why = make_attention(keys.attention, shard, cache, dtype, bool(deterministic))
    (warn if fell_back(device, keys.attention, attention.name != "torch") else say)(f"attention: {why}")
    on_device, why = drawn_on_device(communicator, device, attention, bool(deterministic))
    if device.type == "cuda":
        say(f"drawn ids: {why}")
    sampler: Any = NoDraws()
    if shard.samples:
        grammars = make_grammars(deployment, config)
        sampler = Sampler(
            config.vocab_size, shard.vocab, keys.max_num_seqs, communicator.gather, device, grammars, on_device
        )
    make_runner = Runner if pipeline is None else partial(StageRunner, pipeline=pipeline, index=communicator.rank)
    runner = make_runner(
        model,
        cache,
        attention,
        sampler,
        max_slots=keys.max_num_seqs,
        max_model_len=length,
        drain=communicator.drain,
        draft_model=None
        if draft is None
        else draft.load(length + 1, num_blocks, keys.block_size, keys.max_num_seqs, sampler.grammars),
    )
    limits = ModelLimits(
        max_model_len=length,
        vocab_size=config.vocab_size,
        max_num_seqs=keys.max_num_seqs,
        kv_tokens=num_blocks * keys.block_size,
        eos_token_ids=config.eos_token_ids,
    )
    scheduler_limits = SchedulerLimits(
        max_num_seqs=keys.max_num_seqs,
        max_num_batched_tokens=keys.max_num_batched_tokens,
        max_model_len=length,
        block_size=keys.block_size,
        num_blocks=num_blocks,
        enable_prefix_caching=keys.enable_prefix_caching,
        enable_chunked_prefill=keys.enable_chunked_prefill,
        ageing_s=keys.priority_ageing,
        microbatches=deployment.parallel.microbatches,
        max_scored_positions=max(1, SCORED_LOGITS // len(shard.vocab)),
        speculation=speculation_rule(keys.speculation),
    )
    if compiles(device):
        # Compilers take as long as they take on each rank: collectives still wait as long as a load may.
        warm_up(runner, scheduler_limits, tell)
        communicator.gather(np.zeros(1, np.uint8))
    patience = None
    if (limit := deployment.parallel.collective_timeout) is None:
        patience = CollectiveTimeouts(FIRST_TIMEOUT_S, communicator.set_timeout)
    else:  # what the deployment names is kept to
        communicator.set_timeout(limit)
    reserved = working.get("CUDA graphs", 0)
    graphs = make_graphs(deployment, communicator, model, attention, cache, sampler.latest, reserved, say, tell, warn)
    runner.warmed_up(patience, graphs)
    scheduler_limits = replace(scheduler_limits, split=split_rule(deployment, communicator, config, device, graphs))
    digest = source.digest if draft is None else f"{source.digest}, draft model {draft.digest}"
    held = ops.pages.file if isinstance(ops.pages, HeldPages) and ops.pages.whole else -1
    return Built(runner, config, limits, scheduler_limits, tuple(warnings), digest, held)
