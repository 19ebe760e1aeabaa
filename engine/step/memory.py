"""A rank's memory for steps, besides weights and KV: arithmetic over shapes, without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...models.config.latent import EXPANDED_SPACE, GATHERED, Expansion, Latent
from ...models.config.model_config import ModelConfig
from ...models.config.shapes import WHOLE, Shape, Sharing
from ...models.cuda.workspace import (
    MOST_PROMPTS,
    expert_bytes,
    latent_workspace_bytes,
    most_rows,
    sparse_workspace_bytes,
    workspace_bytes,
)
from ...models.residual import lag_of
from ...models.stages import RankShard

GIB, MIB = 1 << 30, 1 << 20

GPU_CONTEXT, NCCL_BUFFERS = 600 * MIB, 512 * MIB
"""Approximate memory of a CUDA context with its libraries, and of NCCL's channels: not derived from shapes, and small
compared with the weights."""
MOST_GRAPHED = 512
"""Sequences of the largest graph: beyond, a step is long enough to be launched operator by operator."""
GRAPH_BYTES = 32 << 20
"""For each recorded size: the driver's own record and what the allocator rounds up to. Reports of other engines say 6
to 28 MiB; what ours hold is logged when they are recorded, with what was kept free for them."""
MIXED_DECODES, MIXED_PROMPTS = (8, 64, 256), (128, 256, 512, 1024)
"""Decodes and prompt rows of recorded steps with prompts. With more prompt rows the GPU takes longer than the host."""
STANDBY_RANK = 300 * MIB
"""The most host memory of a standby rank: Python, torch and its group, without weights."""


def graph_sizes(most: int) -> tuple[int, ...]:
    """Sizes that steps of 1 to `most` sequences are padded to: powers of two up to 16, then also the halves between
    them, and `most` itself, so that beyond 16 at most a third of a step is padding."""
    most = min(most, MOST_GRAPHED)
    powers = [1 << k for k in range(most.bit_length())]
    halves = [power * 3 // 2 for power in powers if power >= 16]
    return tuple(sorted({most, *powers, *(half for half in halves if half <= most)}))


def graph_shapes(most: int, tokens: int, drafts: int = 0) -> tuple[Shape, ...]:
    """The shapes of recorded steps: of 1 to `most` sequences without prompts, and with up to `tokens` prompt rows. With
    `drafts`, the most of one sequence, also of sequences with drafts, by powers of two of their rows."""
    sizes = graph_sizes(most)
    decodes = [*(size for size in MIXED_DECODES if size < sizes[-1]), sizes[-1]]
    prompts = [rows for rows in MIXED_PROMPTS if rows < tokens]
    if 1 < tokens <= MIXED_PROMPTS[-1]:
        prompts.append(tokens)
    drafted = min(most * (1 + drafts), tokens, MOST_GRAPHED) if drafts else 0
    rows_with_drafts = [1 << k for k in range(1, max(0, drafted - 1).bit_length() + 1)]
    return (
        *((size, 0) for size in sizes),
        *((size, rows) for rows in prompts for size in decodes),
        *((0, rows) for rows in rows_with_drafts),
    )


@dataclass(frozen=True, slots=True)
class MemoryKeys:
    """The deployment keys that determine memory."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    block_size: int = 16
    utilization: float = 0.9
    kv_cache_memory: int | None = None
    gpu: bool = True
    graphs: bool = True
    """Whether steps are recorded as CUDA graphs; requires attention_kernels."""
    attention_kernels: bool = True
    """Whether kernels compute attention on a GPU, FlashInfer's or those of sparse attention, not torch."""
    replicate_embedding: bool = False
    widens_fp8: bool = False
    """Whether a GPU widens fp8 weights at each use, because the GPU or the checkpoint does not allow fp8 products."""
    drafts: int = 0
    """The most drafts of a sequence in one step; each adds a row of logits."""
    draft_model: ModelConfig | None = None
    """The draft model, whole on every rank that samples; None: prompt look-up, or no drafts."""
    predictor: ModelConfig | None = None
    """The predicting layer, as a model of one layer, if that drafts."""
    predictor_ranks: int = 0
    """The number of ranks of a node, if each node has the whole predicting layer."""
    deterministic: bool = False
    """Whether all-reduces use a fixed order of summation."""
    standby: bool = False
    """Whether a standby rank shares the device, without weights."""


def working_memory(
    config: ModelConfig, size: int, value_bytes: float, keys: MemoryKeys, sharing: Sharing = WHOLE
) -> dict[str, int]:
    """Bytes that steps need on a rank of a group of `size`, by name, besides weights, rotary tables and KV. The engine
    reserves them before it counts KV blocks; a plan lists them. value_bytes: bytes of one activation."""
    shard, d = RankShard(config, size, 0, None, *sharing), config.hidden_size
    rows = shard.padded_vocab // size
    outputs = shard.attention_outputs
    widest = max(outputs, 3 * shard.ffn_size)  # gate, up and their product
    # On a GPU an output is kept until the following norm has added it.
    lag = max(lag_of(config.wiring, kind) for kind in config.wiring.kinds)
    copies, in_flight = shard.num_lanes, lag + 2 if keys.gpu else max(2, lag + 1)
    if (lanes := config.lanes) is not None:
        # Every sum in flight is kept in addition to the lanes' own outputs, which are subtracted when it completes.
        in_flight = (1 + copies) * (2 * lanes.delay + 1) + keys.gpu
    # A GPU's norm adds two tensors first: in memory are both, the sum and the norm, [tokens, d] each.
    per_token = max(2 * copies * d + widest, 3 * copies * d if keys.gpu else 0) * value_bytes
    tokens, logits = keys.max_num_batched_tokens, 4 * rows
    drawn = max(keys.max_num_seqs, min(tokens, keys.max_num_seqs * (1 + keys.drafts)))
    # Filters need whole rows: gathered parts and a contiguous copy; the layers' activations are free by then.
    filters = keys.max_num_seqs * (8 * shard.padded_vocab + 2 * logits) if keys.gpu else 0
    parts = {
        "activations": max(int(tokens * per_token + 2 * drawn * logits), filters),
        "all-reduces in flight": int(in_flight * tokens * d * value_bytes) if size > 1 or copies > 1 else 0,
    }
    if keys.predictor is not None:  # the model's states, and those that are joined with embeddings
        parts["activations"] += int(3 * tokens * d * value_bytes)
    if keys.gpu:
        parts["activations"] += _of_experts(shard, tokens, value_bytes)
    index = None if config.latent is None else config.latent.index
    if index is not None and not (keys.gpu and keys.attention_kernels):  # scores, or gathered latents, and copies
        parts["activations"] += 3 * GATHERED + keys.max_model_len * index.dim * 4
    if keys.standby:
        parts["standby rank"] = GPU_CONTEXT + (NCCL_BUFFERS if size > 1 else 0) if keys.gpu else STANDBY_RANK
    if not keys.gpu:
        if config.latent is not None and not keys.deterministic:
            made = Expansion(config.latent, shard.num_heads, math.ceil(value_bytes)).bytes_for(keys.max_model_len)
            parts["activations"] += min(EXPANDED_SPACE, made)
        return parts
    if keys.deterministic and size > 1:
        # One message at a time is gathered from every rank and summed in fp32.
        parts["all-reduces in flight"] += int(tokens * d * (size * value_bytes + 2 * 4))
    recorded = keys.graphs and keys.attention_kernels
    shapes = graph_shapes(keys.max_num_seqs, keys.max_num_batched_tokens, keys.drafts) if recorded else ()
    windows = len(set(config.sliding_window or (None,)))
    most_blocks = -(-(keys.max_model_len + 1) // keys.block_size)
    shape = shard.num_heads, shard.num_kv_heads, config.head_dim
    if config.latent is not None:
        workspace = _of_latents(config.latent, shapes, most_blocks)
    else:
        workspace = workspace_bytes(shape, windows, shapes, most_blocks, keys.deterministic)
    if keys.predictor is not None:
        latent = config.latent
        workspace += workspace_bytes(shape, 1, (), 0) if latent is None else _of_latents(latent, (), 0)
    parts["attention workspace"] = workspace if keys.attention_kernels else 0
    # One product's weight is widened at a time; the largest is queries, keys and values, or gate and up.
    widened = int(d * max(outputs, 2 * shard.ffn_size) * value_bytes) if keys.widens_fp8 else 0
    if widened:
        parts["widened fp8 weights"] = widened
    # Graphs share the activations of the largest one, attention's outputs, sums in flight, and three copies of its
    # logits: before, during and after the conversion to fp32.
    parts["CUDA graphs"] = 0
    if shapes:
        decodes, _, drafted = most_rows(shapes)
        sampled, largest = max(decodes + MOST_PROMPTS, drafted), max(map(sum, shapes))
        sums = in_flight * d if size > 1 or copies > 1 else 0
        graph = largest * (per_token + (outputs + sums) * value_bytes) + sampled * 3 * logits
        graph += _of_experts(shard, largest, value_bytes)
        parts["CUDA graphs"] = int(len(shapes) * GRAPH_BYTES + graph) + widened
    return parts


def _of_latents(latent: Latent, shapes: Sequence[Shape], most_blocks: int) -> int:
    """Bytes of the workspace of attention over latents on a GPU."""
    of_kernels = latent_workspace_bytes if latent.index is None else sparse_workspace_bytes
    return of_kernels(latent.rank, shapes, most_blocks)


def _of_experts(shard: RankShard, rows: int, value_bytes: float) -> int:
    """Bytes that the experts of `rows` rows need on a GPU, in addition to a layer's other activations."""
    e = shard.config.experts
    if e is None:
        return 0
    return expert_bytes(rows, e.chosen, shard.config.hidden_size, len(shard.expert_ffn), int(value_bytes))
