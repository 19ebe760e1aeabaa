"""Computes how much KV fits on a rank: refuses models that do not fit before loading, counts the blocks afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from ...models.attention_choice import kernels_attend
from ...models.config.json_fields import Refusal
from ...models.config.model_config import ModelConfig
from ...models.config.shapes import Sharing
from ...models.cuda.workspace import too_many_latent_items
from ...models.stages import RankShard
from ...topology.comm.groups import Communicator, gather_number
from ...topology.hardware import sysfs
from ..config.schema import Deployment
from ..config.schema import EngineConfig as EngineKeys
from ..schedule.speculation import MOST
from .cuda_graphs import collectives_refuse, graphed, model_refuses
from .memory import GIB, MemoryKeys, working_memory


class CapacityError(Refusal, ValueError):
    """The model, or its longest sequence, does not fit; the message has the bytes needed and available."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of KV cache on a rank. `words`: how they were computed; `fixes`: how to get more."""

    kv: int
    words: str
    fixes: str


def sharers(deployment: Deployment, device: torch.device) -> int:
    """The ranks that share this rank's GPU (launch.share_gpu, of which all ranks are on one host)."""
    if device.type != "cuda" or not deployment.launch.share_gpu:
        return 1
    gpus: int = torch.cuda.device_count()
    return -(-deployment.parallel.world.size // gpus)


def available_bytes(device: torch.device, share: int = 1) -> int:
    """Free memory on this rank's device, in bytes; one of `share` equal parts of a GPU's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // share
    if free := sysfs.available_bytes(sysfs.Sysfs()):
        return free
    raise CapacityError("/proc/meminfo has no MemAvailable: set engine.kv_cache_memory")


def total_bytes(device: torch.device, share: int) -> int:
    """Total memory of a CUDA device, one of `share` equal parts."""
    return int(torch.cuda.get_device_properties(device).total_memory) // share


def working_bytes(
    deployment: Deployment, shard: RankShard, backend: str, dtype: torch.dtype, kv_dtype: torch.dtype, length: int,
    device: torch.device, widens_fp8: bool = False, predictor: ModelConfig | None = None,
) -> dict[str, int]:  # fmt: skip
    """Bytes that steps will need on a GPU, by name, for this deployment and device; empty on a CPU, where the KV cache
    has a configured size. backend: of the group's collectives; predictor: the predicting layer, if that drafts. Raises
    GraphsError or CapacityError."""
    if device.type != "cuda":
        return {}
    keys = deployment.engine
    kernels = kernels_attend(keys.attention, device, dtype, kv_dtype, shard.config, shard.num_heads)
    if kernels and shard.config.latent is not None and shard.config.latent.index is None:
        limits = keys.max_num_batched_tokens, keys.max_num_seqs, shard.num_heads
        if (reason := too_many_latent_items(*limits)) is not None:
            raise CapacityError(reason)
    emulated = deployment.parallel.collective == "emulated"
    refused = collectives_refuse(backend, shard.size, emulated) or model_refuses(shard.config, shard.stage)
    graphs, _ = graphed(keys.cuda_graphs, device.type, kernels, "kernels" if kernels else "torch", refused)
    memory_keys = MemoryKeys(
        max_num_seqs=keys.max_num_seqs,
        max_num_batched_tokens=keys.max_num_batched_tokens,
        max_model_len=length,
        block_size=keys.block_size,
        graphs=graphs,
        attention_kernels=kernels,
        widens_fp8=widens_fp8,
        drafts=MOST if keys.speculation else 0,
        predictor=predictor,
        deterministic=bool(deployment.parallel.deterministic),
        standby=deployment.daemon.standby > 0,
    )
    sharing = Sharing(shard.spread, shard.per_node)
    return working_memory(shard.config, shard.size, dtype.itemsize, memory_keys, sharing)


def configured_kv_bytes(keys: EngineKeys, cpu: bool) -> int | None:
    """The configured size of the KV cache; None on a GPU if free memory determines it."""
    return keys.cpu_kv_bytes if cpu else keys.kv_cache_memory


def check_memory(
    keys: EngineKeys, size: int, weights: int, free: int, working: Mapping[str, int], device: torch.device
) -> None:
    """Raises CapacityError if a rank's weights, KV and `working` memory exceed `free` (bytes)."""
    kv = configured_kv_bytes(keys, device.type == "cpu") or 0
    if weights + kv + sum(working.values()) > free:
        others = "".join(f", {amount >> 20} MiB for {name}" for name, amount in working.items() if amount)
        raise CapacityError(
            f"a rank needs about {weights >> 20} MiB for weights and {kv >> 20} MiB for KV{others}, {free >> 20} MiB "
            f"are free: use more ranks than {size}, a smaller kv_cache_memory or another dtype"
        )


def kv_budget(keys: EngineKeys, total: int | None, free: int, working: Mapping[str, int]) -> Budget:
    """Bytes for the KV cache. total: the GPU's memory, None on a CPU; free: bytes left after the weights; working:
    bytes that steps will need."""
    configured = configured_kv_bytes(keys, total is None)
    if configured is not None or total is None:
        return Budget(configured or 0, "engine.kv_cache_memory", "raise engine.kv_cache_memory to that")
    unused = int(total * (1.0 - keys.gpu_memory_utilization))
    left = max(0, free - unused - sum(working.values()))
    parts = [f"{unused / GIB:.2f} unused by engine.gpu_memory_utilization={keys.gpu_memory_utilization:g}"]
    parts += [f"{amount / GIB:.2f} for {name}" for name, amount in working.items() if amount]
    words = f"{free / GIB:.2f} GiB free after the weights, less {', '.join(parts)}"
    return Budget(left, words, "raise engine.gpu_memory_utilization, lower engine.max_num_seqs, use more ranks")


def agreed_budget(
    keys: EngineKeys, communicator: Communicator, device: torch.device, working: Mapping[str, int], share: int = 1
) -> Budget:
    """The smallest budget of the group's ranks, measured now. share: of the ranks on its GPU, see `sharers`."""
    gpu = device.type == "cuda"
    if gpu:
        communicator.gather(np.zeros(1, np.uint8))  # allocate the collective's buffers before measuring
        torch.cuda.empty_cache()  # release temporary memory of loading
    own = kv_budget(keys, total_bytes(device, share) if gpu else None, available_bytes(device, share), working)
    least = int(gather_number(communicator.gather, own.kv).min())
    return own if least == own.kv else replace(own, kv=least, words=f"another rank has less than this one: {own.words}")


def count_blocks(
    budget: Budget, one: int, block_size: int, max_num_seqs: int, max_model_len: int, spare: int = 0
) -> int:
    """The number of blocks of `one` bytes that fit in addition to `spare` others, at most as many as all slots can use.
    Raises CapacityError if the longest sequence does not fit: it could never run."""
    longest = -(-(max_model_len + 1) // block_size)
    fit = max(0, budget.kv // one - spare)
    if fit < longest:
        raise CapacityError(
            f"model.max_model_len={max_model_len} needs {longest} KV blocks of {one} bytes "
            f"({-(-longest * one >> 20)} MiB) and there is room for {fit} ({budget.kv >> 20} MiB: {budget.words}): "
            f"{budget.fixes}, or set max_model_len to at most {max(0, fit * block_size - 1)}"
        )
    return min(fit, max_num_seqs * longest)


def describe_budget(budget: Budget, blocks: int, block_size: int) -> str:
    """The log line about the budget at start."""
    return f"KV cache: {budget.kv / GIB:.2f} GiB ({budget.words}); {blocks} blocks of {block_size} positions"
