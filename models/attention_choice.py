"""Chooses the attention backend: the deployment's, or the best one on this device."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..topology.hardware.cuda_stack import triton_missing
from .attention import AttentionBackend, KVCache, TorchAttention
from .config.json_fields import Refusal
from .config.latent import Expansion
from .config.model_config import ModelConfig
from .cpu.attention import MOST_HEAD_DIM, CpuAttention, RowAttention, fits_kernels
from .cpu.kernels import Kernels
from .cpu.latent import MOST_WIDTH, CpuLatentAttention
from .cpu.latent import fits_kernels as fits_latents
from .cuda import flashinfer_latent
from .cuda.flashinfer import FlashInferAttention, FlashInferRows, Store, prompt_kernel, store_by_torch, too_old, unfit
from .cuda.workspace import kernels_missing
from .latent import LatentAttention, LatentCache
from .stages import RankShard


class AttentionError(Refusal, ValueError):
    """The requested attention backend is not possible here; the message has the reason."""


def make_attention(
    setting: str,
    shard: RankShard,
    cache: KVCache,
    dtype: torch.dtype,
    deterministic: bool = False,
    sinks: Sequence[Tensor] = (),
) -> tuple[AttentionBackend, str]:
    """Makes the backend; returns it and the reason for the choice, for the log. setting: auto, torch or flashinfer.
    deterministic: a token's result must not depend on the step's other tokens. sinks: each layer's [H] in fp32, where
    the model has them. Raises AttentionError if flashinfer or deterministic is requested but impossible."""
    backend, why = _make(setting, shard, cache, dtype, deterministic)
    backend.sinks = sinks
    return backend, why


def _make(
    setting: str, shard: RankShard, cache: KVCache, dtype: torch.dtype, deterministic: bool
) -> tuple[TorchAttention, str]:
    config, device = shard.config, cache.keys[0].device
    if isinstance(cache, LatentCache):
        return _make_latent(setting, shard, cache, dtype, deterministic)
    windows, scale = _windows(config), _scale(config)
    if deterministic and device.type == "cpu":
        kernels = Kernels.find(deterministic)
        if setting != "auto" or kernels is None or not fits_kernels(cache, dtype, config.head_dim):
            raise AttentionError(
                f"parallel.deterministic=true with engine.attention={setting}, keys and values {cache.keys[0].dtype}: "
                f"on a CPU it needs the C kernels with attention auto, kv_cache_dtype auto and heads of at most "
                f"{MOST_HEAD_DIM}; or use false"
            )
        return RowAttention(cache, windows, scale, kernels), "cpu kernels, each token by itself: deterministic"
    if deterministic:
        library = flashinfer_or_reason(device, dtype, config, shard.num_heads)
        if isinstance(library, str) or setting == "torch" or cache.keys[0].dtype != dtype:
            why = f" ({library})" if isinstance(library, str) else ""
            raise AttentionError(
                f"parallel.deterministic with engine.attention={setting}, keys and values {cache.keys[0].dtype}: on a "
                f"GPU it needs flashinfer{why}, and keys and values in the model's type; or use false"
            )
        rows = FlashInferRows(
            cache, windows, scale, shard.num_heads, dtype, library, kernel_store(cache) or store_by_torch
        )
        return rows, f"flashinfer {library.__version__}, each token by itself: deterministic"
    if setting == "torch":
        return TorchAttention(cache, windows, scale), "torch, as configured"
    if device.type == "cpu" and setting == "auto":
        kernels = Kernels.find()
        if kernels is not None and fits_kernels(cache, dtype, config.head_dim):
            return CpuAttention(cache, windows, scale, kernels), "cpu kernels"
        return TorchAttention(cache, windows, scale), "torch: the CPU kernels were not built or do not fit the dtypes"
    library = flashinfer_or_reason(device, dtype, config, shard.num_heads)
    if isinstance(library, str):
        if setting == "auto":
            return TorchAttention(cache, windows, scale), f"torch, not flashinfer: {library}"
        raise AttentionError(f"engine.attention=flashinfer: {library}; use auto or torch")
    store, prompts = kernel_store(cache), prompt_kernel(_capability(device), cache.keys[0].dtype)
    backend = FlashInferAttention(cache, windows, scale, shard.num_heads, dtype, library, store or store_by_torch)
    rest = f"rotation and writes by {'triton' if store else 'torch'}; prompts by {prompts}"
    return backend, f"flashinfer {library.__version__}, {rest}"


def make_cache(shard: RankShard, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    """Makes the KV cache of the model's attention."""
    kind = KVCache if shard.config.latent is None else LatentCache
    return kind(shard, num_blocks, block_size, dtype, device)


def _make_latent(
    setting: str, shard: RankShard, cache: LatentCache, dtype: torch.dtype, deterministic: bool
) -> tuple[TorchAttention, str]:
    config, scale, stored = shard.config, _scale(shard.config), cache.latents[0]
    sizes, expansion = config.latent, None
    topk = None if sizes is None or sizes.index is None else sizes.index.topk
    kernels = Kernels.find(deterministic) if stored.device.type == "cpu" else None
    if setting == "auto" and kernels is not None and fits_latents(cache, dtype):
        if not deterministic and sizes is not None:
            expansion = Expansion(sizes, shard.num_heads, dtype.itemsize)
        return CpuLatentAttention(cache, scale, kernels, expansion=expansion, topk=topk), "cpu kernels, on latents"
    if deterministic:
        raise AttentionError(
            f"parallel.deterministic with engine.attention={setting}, latents {cache.latents[0].dtype}: attention on "
            f"latents needs the CPU's C kernels, attention auto, kv_cache_dtype auto and at most {MOST_WIDTH} values a "
            "token; or use false"
        )
    if setting == "torch" or (stored.device.type == "cpu" and setting == "auto"):
        return LatentAttention(cache, scale, topk=topk), "torch, on latents"
    if topk is not None and setting == "auto":
        if reason := sparse_unfit(dtype, stored.dtype):
            return LatentAttention(cache, scale, topk=topk), f"torch, on chosen latents: {reason}"
        assert sizes is not None
        sparse: Any = importlib.import_module(f"{__package__}.cuda.sparse_latent")
        try:
            fault = sparse.kernels_fault(sizes, shard.num_heads, dtype, stored.device)
            fault = fault and f"compute wrongly on this GPU and its Triton: {fault}"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Triton's own: of its compiler, or of what this GPU has
            fault = f"cannot be checked: {type(error).__name__}: {error}"
        if fault:
            raise AttentionError(f"the kernels of sparse attention {fault}: set engine.attention: torch, and report it")
        return sparse.SparseLatent(cache, scale, topk), "triton, on chosen latents"
    library = flashinfer_or_reason(stored.device, dtype, config, shard.num_heads)
    if stored.dtype != dtype:
        library = f"it reads latents in the model's type, not {stored.dtype}"
    if not isinstance(library, str):
        assert config.latent is not None
        store = None if (ops := _triton()) is None else ops.store_latents
        backend = flashinfer_latent.FlashInferLatent(
            cache, scale, shard.num_heads, dtype, config.latent, library, store
        )
        return backend, f"flashinfer {library.__version__}, on latents"
    if setting == "flashinfer":
        raise AttentionError(f"engine.attention=flashinfer: {library}; use auto or torch")
    return LatentAttention(cache, scale, topk=topk), f"torch, on latents, not flashinfer: {library}"


def kernels_attend(
    setting: str, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype, config: ModelConfig, heads: int
) -> bool:
    """Whether `make_attention` will choose kernels whose steps can be recorded: FlashInfer, or our own for sparse
    attention. heads: of this rank; kv_dtype: of keys and values."""
    if setting == "torch" or device.type != "cuda":
        return False
    if config.latent is not None:
        if config.latent.index is not None:
            return setting == "auto" and sparse_unfit(dtype, kv_dtype) is None
        if kv_dtype != dtype:
            return False
    return not isinstance(flashinfer_or_reason(device, dtype, config, heads), str)


def sparse_unfit(dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
    """The reason why SparseLatent cannot serve on a GPU, or None."""
    if kv_dtype != dtype:
        return f"its kernels read latents in the model's type, not {kv_dtype}"
    return triton_missing()


def _windows(config: ModelConfig) -> tuple[int | None, ...]:
    return config.sliding_window or (None,) * config.num_layers


def _scale(config: ModelConfig) -> float:
    return config.attention_scale if config.attention_scale is not None else config.head_dim**-0.5


def _triton() -> Any:
    """The module models/cuda/ops.py; None if Triton is missing or cannot compile."""
    if triton_missing():
        return None
    try:
        return importlib.import_module(f"{__package__}.cuda.ops")
    except ImportError:
        return None


def kernel_store(cache: KVCache) -> Store | None:
    """Triton's rotate_and_store, if it supports this cache; else None."""
    ops = _triton()
    serves = ops is not None and ops.stores(cache, _capability(cache.keys[0].device))
    return ops.rotate_and_store if serves else None


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def flashinfer_or_reason(device: torch.device, dtype: torch.dtype, config: ModelConfig, heads: int) -> Any:
    """The module flashinfer, or the reason why it cannot be used."""
    capability = _capability(device)
    reason = (
        unfit(device, capability, dtype, config.head_dim)
        if config.latent is None
        else flashinfer_latent.unfit(device, capability, dtype, config.latent, heads)
    )
    if reason:
        return reason
    if importlib.util.find_spec("flashinfer") is None:
        return "it is not installed (laddertron[cuda])"
    if reason := kernels_missing():
        return reason
    try:
        library = importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as fault:  # its own libraries, or a CUDA that it does not know
        return f"it is installed and cannot be imported: {type(fault).__name__}: {fault}"
    return too_old(library.__version__) or library
