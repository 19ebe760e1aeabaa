"""Builds a loaded runner from a deployment and a communicator: share, memory check, model, cache, sampling, warm-up.
Every rank runs this with the same Deployment; the ranks agree on values that may differ (free memory) before they
allocate anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...models.attention import AttentionBackend, Capturable, KVCache, block_bytes
from ...models.attention_choice import make_attention, make_cache
from ...models.config.model_config import ModelConfig
from ...models.config.shapes import LEAVES, replicates_embedding
from ...models.lanes import model_class
from ...models.llama import LlamaModel
from ...models.pages import HeldPages
from ...models.transfer import download
from ...models.weights.identity import Sample, check_unchanged
from ...models.weights.kv_scales import read_kv_scales
from ...models.weights.tensor_reader import FP8
from ...topology.comm.collectives import device_gather
from ...topology.comm.groups import Communicator, gather_number
from ...topology.hardware import cpu_tier
from ...topology.sum_check import check_sums
from ..config.schema import Deployment, EngineConfig, ParallelConfig
from ..request import ModelLimits
from ..sampling.drafts import PromptLookUp, Proposer
from ..sampling.grammar import Grammars, GrammarSlots, NoGrammars
from ..sampling.sampler import OnDevice, Sampler
from ..schedule.scheduler import SchedulerLimits
from ..schedule.speculation import MOST, speculation_rule
from ..schedule.split import SplitRule
from .cuda_graphs import CudaRecorder, StepGraphs, collectives_refuse, fell_back, graphed, model_refuses
from .draft_model import check_alike
from .engine import CollectiveTimeouts
from .kv_capacity import (
    CapacityError,
    agreed_budget,
    available_bytes,
    check_memory,
    count_blocks,
    describe_budget,
    sharers,
    working_bytes,
)
from .loading import give_back_freed, keep_freed, load_weights
from .memory import graph_shapes
from .runner import Runner
from .share import ModelShare, make_share
from .stage_runner import NoDraws, StageRunner
from .warm_up import compiles, warm_up

log = logging.getLogger(__name__)


SCORED_LOGITS = 1 << 26
"""Upper bound of a rank's logits of prompt positions in one step: about 400 MB in addition to the caches."""

FIRST_TIMEOUT_S = 60.0
"""A collective's timeout until a step has been measured."""


@dataclass(frozen=True, slots=True)
class Built:
    """A rank that is ready to run steps. scheduler_limits: for rank 0's scheduler; warnings: for the user."""

    runner: Runner
    config: ModelConfig
    limits: ModelLimits
    scheduler_limits: SchedulerLimits
    warnings: tuple[str, ...]
    samples: dict[str, Sample]
    """Samples of the weights that it read, by part; see engine/identity.py."""
    weights_file: int
    """The descriptor of the HeldPages that a hot standby may use; -1: none."""


def drawn_on_device(
    communicator: Communicator, device: torch.device, attention: AttentionBackend, deterministic: bool
) -> tuple[OnDevice | None, str]:
    """How plain rows are sampled on the device, so that a step can start before the previous step's ids are on the
    host; None if ids must pass through the host. The second value is the reason, in a few words."""
    if communicator.pipeline is not None:
        return None, "through the host: the first stage embeds what the last one draws"
    gather = device_gather(communicator.gathers, communicator.size)
    if device.type != "cuda":
        return None, f"through the host: it is the {device.type} that computes"
    if deterministic:
        return None, "through the host: there the masses of top_p and log-probabilities have one order of summation"
    if not isinstance(attention, Capturable):
        return None, f"through the host: attention {attention.name} may read behind a sequence's end"
    if gather is None:
        return None, f"through the host: gathers of backend {communicator.backend} do, it needs nccl"

    return OnDevice(gather, partial(download, wait=partial(communicator.wait_event, what="gather"))), (
        "stay on the device"
    )


def split_rule(
    keys: ParallelConfig,
    communicator: Communicator,
    config: ModelConfig,
    device: torch.device,
    graphs: StepGraphs | None,
) -> SplitRule | None:
    """The rule for steps in two streams; None if they are disabled, or `auto` expects no gain: inside a node an
    all-reduce takes less time than half a sub-block, and on GPUs split steps were never measured."""
    near = device.type != "cpu" or (len(communicator.layout.nodes) == 1 and keys.collective != "emulated")
    if keys.split_steps == "never" or communicator.size == 1 or not keys.overlap or not config.wiring.waits:
        return None
    if keys.split_steps == "auto" and near:
        return None
    products = config.attention_parameters
    mlp = 3 * config.hidden_size * config.ffn_size_used
    return SplitRule(
        keys.split_steps == "always",
        attention_share=2 * config.num_heads * config.head_dim / (products + mlp),
        whole_decodes=0 if graphs is None else graphs.sizes[-1],
    )


def make_grammars(folder: Path, config: ModelConfig) -> Grammars:
    """Makes grammars for the model's tokenizer; if that fails, a substitute that refuses structured output."""
    source: Path | str = folder / "tokenizer.json"
    try:
        if not (folder / "tokenizer.json").is_file():
            from ..text.rank_file import grammar_source  # tokenizers, which other ranks do not need

            source = grammar_source(folder)
        return GrammarSlots(source, config.vocab_size, config.eos_token_ids)
    except (ValueError, OSError) as fault:
        return NoGrammars(f"structured output is not available: {fault}")


def _mute(line: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class StartLog:
    """Output of a start: the log (only on rank 0) and progress."""

    say: Callable[[str], None] = _mute
    warn: Callable[[str], None] = _mute
    tell: Callable[[str], None] = _mute


def build(
    deployment: Deployment,
    communicator: Communicator,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
    tell: Callable[[str], None] = lambda doing: None,
    weights_file: int = -1,
    salt: bytes = b"",
) -> Built:
    """Loads this rank's share, and on a GPU warms up. progress(done, total) in bytes of weights; tell: called with the
    later phases; weights_file: descriptor of retained weights, see Built; salt: see Sample. Raises CheckpointError,
    CapacityError, ShapeError, StageError, WiringError, ConfigError, WeightsError, AttentionError or GraphsError."""
    give_back_freed()
    leads, keys, parallel = communicator.rank == 0, deployment.engine, deployment.parallel
    start_log = StartLog(log.info, log.warning, tell) if leads else StartLog(tell=tell)
    if device.type == "cpu":
        start_log.say(f"CPU tier: {cpu_tier.described(cpu_tier.current(), cpu_tier.own())}")
    share = make_share(deployment, communicator, device, weights_file, salt)
    warnings = _announce(share, deployment, device, start_log)
    working = _check(share, deployment, communicator, device)

    model = _model(share, parallel, communicator, device)
    load_weights(model, share.source, deployment.daemon.load_timeout, communicator, progress, start_log.say)
    if communicator.size > 1:
        check_sums(communicator, share.config.hidden_size, keys.max_num_batched_tokens, share.dtype, device)
        if share.sharing.per_node > 1:
            check_sums(communicator, share.config.hidden_size, keys.max_num_batched_tokens, share.dtype, device, True)
    keep_freed()

    cache, num_blocks = _cache(share, deployment, communicator, device, working, start_log)
    rows_alone, sinks = bool(parallel.deterministic), model.sinks
    attention, why = make_attention(keys.attention, share.shard, cache, share.dtype, rows_alone, sinks)
    fallback = fell_back(device, keys.attention, attention.name != "torch")
    (start_log.warn if fallback else start_log.say)(f"attention: {why}")
    on_device, why = drawn_on_device(communicator, device, attention, bool(parallel.deterministic))
    if device.type == "cuda":
        start_log.say(f"drawn ids: {why}")
    sampler = _sampler(share, deployment, model, communicator, device, on_device)
    pipeline = communicator.pipeline
    proposer = None
    if keys.speculation and share.shard.samples:
        proposer = _proposer(share, keys, model, cache, sampler, communicator)
    check_unchanged(share.stamps)
    # NOTE: other attention may read what a step that is checked later left after a sequence's end.
    overlaps = device.type == "cuda" and isinstance(attention, Capturable)
    fetch = partial(download, wait=partial(communicator.wait_event, what="a stage's rows")) if overlaps else None
    make = Runner if pipeline is None else partial(StageRunner, pipeline=pipeline, index=communicator.rank, fetch=fetch)
    runner = make(
        model,
        cache,
        attention,
        sampler,
        max_slots=keys.max_num_seqs,
        max_model_len=share.length,
        proposer=proposer,
        speculates=bool(keys.speculation),
        drain=communicator.drain,
    )

    limits = SchedulerLimits(
        max_num_seqs=keys.max_num_seqs,
        max_num_batched_tokens=keys.max_num_batched_tokens,
        max_model_len=share.length,
        block_size=keys.block_size,
        num_blocks=num_blocks,
        enable_prefix_caching=keys.enable_prefix_caching,
        microbatches=parallel.microbatches,
        max_scored_positions=max(1, SCORED_LOGITS // len(share.shard.vocab)),
        speculation=speculation_rule(keys.speculation),
        runs_ahead=on_device is not None,
        tokens_ahead=int(keys.speculation == "mtp"),
    )
    graphs = _warmed_up(runner, limits, deployment, communicator, device, working.get("CUDA graphs", 0), start_log)
    if graphs is not None:
        limits = replace(limits, most_rows=graphs.most_rows)
    limits = replace(limits, split=split_rule(parallel, communicator, share.config, device, graphs))
    model_limits = ModelLimits(
        max_model_len=share.length,
        vocab_size=share.config.vocab_size,
        max_num_seqs=keys.max_num_seqs,
        kv_tokens=num_blocks * keys.block_size,
        eos_token_ids=share.config.eos_token_ids,
    )
    pages = share.ops.pages
    retained_fd = pages.file if isinstance(pages, HeldPages) and pages.complete else -1
    return Built(runner, share.config, model_limits, limits, tuple(warnings), share.samples, retained_fd)


def _proposer(
    share: ModelShare,
    keys: EngineConfig,
    model: LlamaModel,
    cache: KVCache,
    sampler: Sampler,
    communicator: Communicator,
) -> Proposer:
    """What makes drafts, on ranks that sample."""
    if share.draft is None and share.predictor is None:
        return PromptLookUp()
    slots, blocks, size = keys.max_num_seqs, cache.num_blocks, keys.block_size
    if share.draft is not None:
        made = share.draft.load(share.length + 1, blocks, size, slots, sampler.grammars)
        cache.draft_cache = made.cache
        return made
    assert share.predictor is not None
    predicting = share.predictor.load(model, blocks, size, share.kv_dtype, slots, sampler, communicator, keys.attention)
    cache.draft_cache = predicting.cache
    return predicting


def _sampler(
    share: ModelShare,
    deployment: Deployment,
    model: LlamaModel,
    communicator: Communicator,
    device: torch.device,
    on_device: OnDevice | None,
) -> Any:
    """Draws ids on ranks that hold a part of the head; NoDraws on other stages."""
    if not share.shard.samples:
        return NoDraws()
    config, keys = share.config, deployment.engine
    shares = LEAVES // communicator.size if deployment.parallel.deterministic == "everywhere" else 0
    grammars = make_grammars(Path(deployment.text_folder), config)
    size, ids, seqs = config.vocab_size, share.shard.vocab, keys.max_num_seqs
    sampler = Sampler(size, ids, seqs, communicator.gather, device, grammars, on_device, shares)
    if config.experts is not None:
        sampler.follow(model.routed, model.routing, communicator.layout.per_node)
    return sampler


def _announce(share: ModelShare, deployment: Deployment, device: torch.device, start_log: StartLog) -> list[str]:
    """Logs the choices that follow from the share; returns warnings."""
    stage, stored, deterministic = share.stage, share.stored, deployment.parallel.deterministic
    if stage.count > 1:
        first = stage.first_layer
        start_log.say(f"stage {stage.index} of {stage.count}: layers {first} to {first + stage.config.num_layers - 1}")
    if fell_back(device, "auto", share.ops.name != "torch"):
        start_log.warn(
            "norms, gates and rotations: several kernels each by torch, as Triton is missing: make env ACCEL=cuda"
        )
    skipped = [name for name in share.source.tensors if name.startswith(share.config.ignored)]
    if skipped and deployment.engine.speculation != "mtp":
        start_log.say(
            f"weights: {len(skipped)} tensors that predict more than one token are not used ({skipped[0]}, …)"
        )
    quantisation = share.source.quantisation
    if quantisation is not None and quantisation.unused:
        start_log.say(
            "weights: quantization_config also asks for what is not computed, which makes results more exact: "
            + ", ".join(quantisation.unused)
        )
    if share.predictor is not None:
        where = "whole on each node" if share.predictor.in_node else "split over the group"
        start_log.say(f"drafts: by the layer that predicts further tokens, {where}, {share.predictor.bytes >> 20} MiB")
    warnings = [*share.warnings, *(() if stored is None else stored.warnings)]
    if deterministic and device.type != "cpu":
        warnings.append(
            f"parallel.deterministic={str(deterministic).lower()} was proven on an H200 alone: prove it here by "
            "`laddertron verify` with this deployment"
        )
    return warnings


def _check(
    share: ModelShare, deployment: Deployment, communicator: Communicator, device: torch.device
) -> Mapping[str, int]:
    """Refuses a deployment that cannot run or does not fit, before weights are read; returns the bytes that steps need
    besides weights and KV, by name."""
    keys, size = deployment.engine, share.shard.size
    if device.type != "cpu" and keys.draft_model is not None:
        raise CapacityError(
            "engine.draft_model needs engine.device: cpu: on a GPU drafts are looked up, or the model's own: use "
            "engine.speculation ngram, mtp, auto without it, or false"
        )
    if share.sharing.per_node and communicator.pipeline is not None and device.type != "cpu":
        raise CapacityError(
            f"parallel.dense_path=node with pipeline_parallel_size={share.stage.count} needs "
            "engine.device: cpu: on a GPU earlier stages do not send which experts they chose; use 1, or whole"
        )
    widens = share.stored is not None and share.stored.widens
    working = working_bytes(
        deployment, share.shard, communicator.backend, share.dtype, share.kv_dtype, share.length, device, widens,
        None if share.predictor is None else share.predictor.config,
    )  # fmt: skip
    if share.draft is not None:
        check_alike(communicator, device, "engine.draft_model", "draft")
    if share.predictor is not None and share.predictor.in_node:
        check_alike(communicator, device, "engine.speculation=mtp", "draft")
    if share.sharing.per_node:
        check_alike(communicator, device, "parallel.dense_path=node", "choose experts")
    if share.config.latent is not None and share.config.latent.index is not None:
        check_alike(communicator, device, "sparse attention", "choose positions")
    check_memory(keys, size, share.needed, available_bytes(device, sharers(deployment, device)), working, device)
    return working


def _model(share: ModelShare, parallel: ParallelConfig, communicator: Communicator, device: torch.device) -> LlamaModel:
    """Makes the model without weights."""
    replicate = parallel.embedding == "replicate"
    if parallel.embedding == "auto":
        replicate = replicates_embedding(share.config, share.dtype.itemsize, len(communicator.layout.nodes) > 1)
    return model_class(share.config)(
        share.stage,
        communicator.tp,
        communicator.all_reduce,
        share.ops,
        dtype=share.dtype,
        device=device,
        positions=share.length + 1,
        replicate_embedding=replicate,
        stored=share.stored,
        everywhere=parallel.deterministic == "everywhere",
        boundary=None if communicator.pipeline is None else communicator.pipeline.boundary,
        sharing=share.sharing,
        node_reduce=communicator.node_reduce,
        gathers=communicator.gathers,
        keeps_states=share.predictor is not None,
    )


def _cache(
    share: ModelShare,
    deployment: Deployment,
    communicator: Communicator,
    device: torch.device,
    working: Mapping[str, int],
    start_log: StartLog,
) -> tuple[KVCache, int]:
    """Allocates the KV cache in the free memory; returns it and the number of blocks for sequences."""
    keys = deployment.engine
    if share.predictor is not None:  # which is loaded later
        working = {**working, "the predicting layer": share.predictor.bytes}
    budget = agreed_budget(keys, communicator, device, working, sharers(deployment, device))
    one = block_bytes(share.shard, keys.block_size, share.kv_dtype)
    one += 0 if share.draft is None else share.draft.block_bytes(keys.block_size)
    one += 0 if share.predictor is None else share.predictor.block_bytes(keys.block_size, share.kv_dtype)
    # NOTE: on a GPU one block more, unassigned: padding rows of a recorded step write into it.
    spare = int(device.type == "cuda")
    num_blocks = count_blocks(budget, one, keys.block_size, keys.max_num_seqs, share.length, spare)
    if communicator.pipeline is not None:
        num_blocks = communicator.pipeline.least(num_blocks)
    start_log.say(describe_budget(budget, num_blocks, keys.block_size))
    cache = make_cache(share.shard, num_blocks + spare, keys.block_size, share.kv_dtype, device)
    if share.kv_dtype == FP8:
        start_log.say(f"KV cache in fp8: {_scale(cache, share)}")
    return cache, num_blocks


def _scale(cache: KVCache, share: ModelShare) -> str:
    """Sets the factors of an fp8 cache; describes them."""
    if share.config.latent is not None:
        return "latents are stored with scale 1.0"
    scales = read_kv_scales(share.source, share.shard)
    if scales is None:
        where = "per-rank files have" if share.source.sharded_over else "the checkpoint has"
        return f"stored with scale 1.0, as {where} no k_scale and v_scale"
    keys, values = scales
    cache.scales = keys.to(cache.keys[0].device), values.to(cache.keys[0].device)
    return f"scaled by the checkpoint's k_scale ({keys.min():g} to {keys.max():g}) and v_scale"


def _warmed_up(
    runner: Runner,
    limits: SchedulerLimits,
    deployment: Deployment,
    communicator: Communicator,
    device: torch.device,
    reserved: int,
    start_log: StartLog,
) -> StepGraphs | None:
    """Warms up, sets the collectives' timeouts and records graphs. reserved: bytes kept free for the graphs."""
    if compiles(device):
        # NOTE: compilation times differ between ranks: collectives still have the timeout of a load.
        warm_up(runner, limits, start_log.tell)
        communicator.gather(np.zeros(1, np.uint8))
    timeouts = CollectiveTimeouts(FIRST_TIMEOUT_S, communicator.set_timeout)
    emulated = deployment.parallel.collective == "emulated"
    graphs = make_graphs(runner, deployment.engine, emulated, communicator, reserved, start_log)
    runner.warmed_up(timeouts, graphs)
    return graphs


def make_graphs(
    runner: Runner,
    keys: EngineConfig,
    emulated: bool,
    communicator: Communicator,
    reserved: int | None = None,
    start_log: StartLog = StartLog(),
) -> StepGraphs | None:
    """Records steps, if the deployment and the device support it. The cache's last block must be unassigned.
    emulated: whether collectives are emulated; reserved: bytes kept free for the graphs. Raises GraphsError."""
    model, attention, cache, sampler = runner.model, runner.attention, runner.cache, runner.sampler
    refused = collectives_refuse(communicator.backend, communicator.size, emulated)
    refused = refused or model_refuses(model.config, model.stage)
    use, why = graphed(keys.cuda_graphs, runner.device.type, isinstance(attention, Capturable), attention.name, refused)
    if fell_back(runner.device, keys.cuda_graphs, use):
        start_log.warn(
            f"CUDA graphs: {why}; each step is set off kernel by kernel, several times slower for few sequences"
        )
    elif runner.device.type == "cuda":
        start_log.say(f"CUDA graphs: {why}")
    if not use or not isinstance(attention, Capturable):
        return None
    graphs = StepGraphs(
        model,
        attention,
        CudaRecorder(runner.device, communicator.ledger, communicator.drain),
        graph_shapes(keys.max_num_seqs, keys.max_num_batched_tokens, MOST if keys.speculation else 0),
        scratch_block=cache.num_blocks - 1,
        most_blocks=-(-len(model.rotary.cos) // cache.block_size),
        block_size=cache.block_size,
        latest=sampler.latest,
        reserved=reserved,
        say=start_log.say,
        greatest=partial(_greatest, communicator),
    )
    graphs.record(start_log.tell)
    graphs.record_draws(sampler)
    communicator.before_close(graphs.drop)
    return graphs


def _greatest(communicator: Communicator, number: float) -> float:
    """The greatest of the numbers of the group's ranks, all of which call this."""
    return float(gather_number(communicator.gather, number).max())
