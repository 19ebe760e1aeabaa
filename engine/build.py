"""From a deployment and a communicator to a loaded runner: what fits, what is refused, in which order.

Every rank runs this with the same Deployment. What differs between ranks (free memory) is agreed on over the group
before anything is allocated. Called by launchers/worker.py and by the benchmarks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from ..models.attention import AttentionBackend, Capturable
from ..models.attention_choice import make_attention
from ..models.config import ModelConfig, from_folder
from ..models.cpu_ops import CpuOps, Kernels
from ..models.kv_cache import KVCache, block_bytes
from ..models.llama import LlamaModel
from ..models.ops import Ops, TorchOps
from ..models.quantised import Fp8, multiplies_fp8
from ..models.readers import FP8
from ..models.refusal import Refusal
from ..models.shapes import check_shapes, replicates_embedding
from ..models.shard import Shard
from ..models.transfer import Arriving, download
from ..models.weights import Source, open_source
from ..models.wiring import choose_wiring
from ..topology.collectives import device_gather
from ..topology.groups import Communicator
from . import heap
from .capacity import (
    CapacityError,
    agreed_budget,
    available_bytes,
    check_memory,
    count_blocks,
    told,
    working_bytes,
)
from .config_schema import Deployment
from .grammar import GrammarSlots, NoGrammars
from .graphs import make_graphs
from .loading import load_weights
from .request import ModelLimits
from .runner import Runner
from .sampler import Grammars, OnDevice, Sampler
from .scheduler import SchedulerLimits
from .steptimes import Patience, StepTimes

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


def model_config(deployment: Deployment) -> tuple[ModelConfig, list[str]]:
    """The checkpoint's configuration with its wiring settled and its shapes accepted.

    Raises ConfigError, WiringError or ShapeError.
    """
    keys = deployment.model
    config, warnings = choose_wiring(
        from_folder(Path(keys.path)), keys.wiring, keys.ladder_layers, keys.allow_untrained_ladder
    )
    check_shapes(config, deployment.parallel.tensor_parallel_size)
    return config, warnings


def model_length(config: ModelConfig, wanted: int | None) -> int:
    """The longest sequence that is served. Raises CapacityError."""
    most = config.max_position_embeddings
    if config.rope.kind == "dynamic" and config.rope.original_max_position_embeddings:
        most = min(most, config.rope.original_max_position_embeddings)
    if wanted is not None and wanted > most:
        raise CapacityError(f"model.max_model_len={wanted}: the checkpoint knows {most} positions; use at most {most}")
    return wanted or most


class WeightsError(Refusal, ValueError):
    """`model.weights` asks for what this rank cannot compute."""


def make_ops(device: torch.device, dtype: torch.dtype, weights: str = "stored") -> Ops:
    """The fastest operators that are right on this device; `weights` as `model.weights`. Raises WeightsError."""
    if weights == "stored":
        if device.type == "cpu":
            return TorchOps() if dtype == torch.float16 else CpuOps(Kernels.find())
        try:
            from ..models.gpu_ops import TritonOps
        except ImportError:
            return TorchOps()
        return TritonOps()
    kernels = Kernels.find() if device.type == "cpu" else None
    if kernels is None or not kernels.int8 or dtype != torch.bfloat16:
        if device.type != "cpu":
            why = f"this rank computes on {device.type}"
        elif dtype != torch.bfloat16:
            why = f"this model computes in {str(dtype).removeprefix('torch.')}"
        else:
            why = "this processor has no AVX-512 BF16 and VBMI" if kernels else "the C kernels were not built here"
        raise WeightsError(f"model.weights={weights} needs bfloat16 on a CPU with AVX-512 VBMI; {why}: use stored")
    return CpuOps(kernels, int8=True)


def make_fp8(source: Source, config: ModelConfig, device: torch.device) -> Fp8 | None:
    """How fp8 weights are computed; None where they are widened while loading, as on CPUs: there a widened copy is
    quicker than widening at each use by far, and memory is what there is most of."""
    if source.quantisation is None or device.type != "cuda":
        return None
    q = source.quantisation
    return Fp8(source.kept_fp8(config), q.activations and multiplies_fp8(device), q.activation_bound)


def drawn_on_device(
    communicator: Communicator, device: torch.device, attention: AttentionBackend
) -> tuple[OnDevice | None, str]:
    """How plain rows are drawn without the host, so that a step may be set off before the ids of the one before are
    known; None where every id passes through the host; why, in a few words."""
    gather = device_gather(communicator.gathers, communicator.size)
    if device.type != "cuda":
        return None, f"through the host: it is the {device.type} that computes"
    if not isinstance(attention, Capturable):
        return None, f"through the host: attention {attention.name} may read what lies behind a sequence's end"
    if gather is None:
        return None, f"through the host: gathers of backend {communicator.backend} do, it needs nccl"

    def fetch(x: Tensor) -> Arriving:
        arriving = download(x)

        def read() -> NDArray[Any]:
            # Where the host waits for the device, and with it for every all-reduce before.
            communicator.ledger.waiting = "gather"
            values = arriving()
            communicator.ledger.waiting = ""
            return values

        return read

    return OnDevice(gather, fetch), "stay on the device"


def make_grammars(deployment: Deployment, config: ModelConfig) -> Grammars:
    """Structured output with the model's tokenizer, or what refuses it request by request."""
    folder = Path(deployment.text_folder)
    try:
        return GrammarSlots(folder, config.vocab_size, config.eos_token_ids)
    except (ValueError, OSError) as fault:
        return NoGrammars(f"structured output cannot be had here: {fault}")


def build(
    deployment: Deployment,
    communicator: Communicator,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> Built:
    """Loads this rank's share. progress(done, total) in bytes. Raises CheckpointError, CapacityError, ShapeError,
    WiringError, ConfigError, WeightsError, SharingError, AttentionError or GraphsError."""
    heap.give_back_freed()
    config, warnings = model_config(deployment)
    keys = deployment.engine
    dtype = DTYPES[config.dtype if deployment.model.dtype == "auto" else deployment.model.dtype]
    length = model_length(config, deployment.model.max_model_len)
    shard = Shard(config, communicator.size, communicator.rank)
    source = open_source(Path(deployment.model.path), shard)
    fp8 = make_fp8(source, config, device)
    ops = make_ops(device, dtype, deployment.model.weights)
    narrow = 1 if deployment.model.weights == "int8" else None
    needed = source.rank_bytes(dtype.itemsize, shard.size, fp8 is not None, narrow)
    working = working_bytes(deployment, config, shard.size, communicator.backend, dtype, length, device)
    check_memory(deployment, shard.size, needed, available_bytes(device), working)

    wanted = deployment.parallel.embedding
    spans_nodes = len(communicator.layout.nodes) > 1
    replicate = wanted == "replicate" or (
        wanted == "auto" and replicates_embedding(config, dtype.itemsize, spans_nodes)
    )
    model = LlamaModel(
        config,
        communicator.process_groups.tp,
        communicator.all_reduce,
        ops,
        dtype=dtype,
        device=device,
        positions=length + 1,
        replicate_embedding=replicate,
        fp8=fp8,
    )
    say: Callable[[str], None] = log.info if communicator.rank == 0 else lambda line: None
    load_weights(model, source, deployment, communicator, progress, say)
    heap.keep_freed()

    kv_dtype = dtype if keys.kv_cache_dtype == "auto" else KV_DTYPES[keys.kv_cache_dtype]
    budget = agreed_budget(keys, communicator, device, working)
    one = block_bytes(shard, keys.block_size, kv_dtype)
    # On a GPU one block more, nobody's: what pads a recorded step writes there.
    spare = int(device.type == "cuda")
    num_blocks = count_blocks(budget, one, keys.block_size, keys.max_num_seqs, length, spare)
    say(told(budget, num_blocks, keys.block_size))
    cache = KVCache(shard, num_blocks + spare, keys.block_size, kv_dtype, device)
    attention, why = make_attention(keys.attention, shard, cache, dtype)
    say(f"attention: {why}")
    grammars = make_grammars(deployment, config)
    on_device, why = drawn_on_device(communicator, device, attention)
    if device.type == "cuda":
        say(f"drawn ids: {why}")
    sampler = Sampler(
        config.vocab_size, shard.vocab, keys.max_num_seqs, communicator.gather, device, grammars, on_device
    )
    reserved = working.get("CUDA graphs", 0)
    runner = Runner(
        model,
        cache,
        attention,
        sampler,
        max_slots=keys.max_num_seqs,
        max_model_len=length,
        # A limit that the deployment names is kept to.
        patience=Patience(StepTimes(FIRST_TIMEOUT_S), communicator.set_timeout)
        if deployment.parallel.collective_timeout is None
        else None,
        graphs=make_graphs(deployment, communicator, model, attention, cache, sampler.latest, reserved, say),
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
        max_scored_positions=max(1, SCORED_LOGITS // len(shard.vocab)),
    )
    return Built(runner, config, limits, scheduler_limits, tuple(warnings), source.digest)
