"""The head sizes that FlashInfer supports, the memory of its wrappers on a GPU, and whether its kernels are available.

Does not import torch, for plans and `check`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ..config.latent import Latent
from ..config.shapes import Shape

MULTIPROCESSORS = 192
"""Upper bound of a GPU's multiprocessors."""
TENSOR_CORES_FROM = 4
"""Query heads per KV head from which FlashInfer's tensor-core kernel is faster for decodes."""
HEAD_DIMS = (64, 128, 256)
"""Head dimensions for which FlashInfer has kernels."""
LATENT_RANKS = (128, 256, 512)
"""Widths of latents for which FlashInfer has kernels."""
LATENT_ITEMS = 16_384
"""The most work items in a plan of attention over latents, a constant of the library."""
MOST_PROMPTS = 8
"""Prompts of a recorded step with decodes."""
_MIB = 1 << 20
EXPERT_SPACE = 256 * _MIB
"""Limit of the buffers of experts' outputs: steps that need more compute their pairs in pieces."""
SCORE_BYTES = 128 * _MIB
"""Of positions' scores of sparse attention: steps that need more are scored in pieces of rows."""
SPARSE_HEADS = 32
"""The most heads that a program of sparse attention computes."""
WRAPPER_BYTES = 8 * _MIB
"""Bytes that each wrapper allocates for its plan, a constant of the library."""


def kernels_missing() -> str | None:
    """The reason why FlashInfer cannot run kernels on this host: none are cached or installed, and it cannot compile.
    None if it can, or is not installed."""
    if find_spec("flashinfer") is None or find_spec("flashinfer_jit_cache") is not None:
        return None
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    home = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", Path.home()))
    if any((home / ".cache/flashinfer").rglob("*.so")):
        return None
    if shutil.which("nvcc") or (toolkit / "bin" / "nvcc").exists():
        if shutil.which(os.environ.get("CXX") or "c++"):
            return None
        return (
            "flashinfer has no compiled kernels, and its nvcc finds no C++ compiler (CXX or c++): install g++ or "
            "flashinfer-jit-cache, on every host"
        )
    return (
        "flashinfer has no compiled kernels and finds no nvcc to compile them: install flashinfer-jit-cache (from "
        "FlashInfer's own index) or CUDA's toolkit, on every host"
    )


def prompts_of(shape: Shape) -> int:
    """The most prompts of a recorded step; of sequences with drafts half as many as rows."""
    decodes, rows = shape
    return MOST_PROMPTS * bool(rows) if decodes else rows // 2


def expert_pairs(width: int, inner: int, itemsize: int) -> int:
    """Pairs of a row and an expert that are computed at once; each has `inner` values between the products and `width`
    after."""
    return int(max(16, EXPERT_SPACE // ((width + inner) * itemsize) // 16 * 16))


def expert_bytes(rows: int, slots: int, width: int, inner: int, itemsize: int) -> int:
    """Bytes of the expert buffers for a step of `rows` rows, including each slot's expert, number, weight, order and
    place, and with several pieces the fp32 sums between them."""
    pairs = rows * slots
    at_once = min(pairs, expert_pairs(width, inner, itemsize))
    sums = rows * width * 4 if at_once < pairs else 0
    return int(at_once * (width + inner) * itemsize + pairs * 6 * 4 + sums)


def partial_bytes(
    heads: int, kv_heads: int, head_dim: int, sequences: int = 0, prompt_rows: int = 0, drafted_rows: int = 0
) -> int:
    """Bytes for the partial results of contexts that FlashInfer splits among multiprocessors: one buffer for all
    wrappers. Each multiprocessor runs two programs of at most 128 rows; a row is one query head of one token.
    sequences, prompt_rows, drafted_rows: of the largest recorded steps; they have one program a tile of rows if those
    are more, but decodes only with tensor cores."""
    group = heads // kv_heads
    tile = 16 if group <= 16 else 64 if group <= 64 else 128
    tiles = -(-sequences * group // tile) + sequences if group >= TENSOR_CORES_FROM else 0
    prompt_tiles = -(-prompt_rows * group // 128) + MOST_PROMPTS if prompt_rows else 0
    drafted_tiles = -(-drafted_rows * group // 128) + drafted_rows // 2
    rows = max(2 * MULTIPROCESSORS * 128, tiles * tile * kv_heads, max(prompt_tiles, drafted_tiles) * 128 * kv_heads)
    return -(-rows * (head_dim + 1) * 4 // _MIB) * _MIB  # + 1: each row's sum of weights


def latent_partial_bytes(rank: int) -> int:
    """Bytes of partial results of attention over latents: two tiles of 64 rows a multiprocessor, in 16 bits, and their
    sums."""
    return 2 * MULTIPROCESSORS * 64 * (2 * rank + 4)


def sparse_workspace_bytes(rank: int, shapes: Sequence[Shape], most_blocks: int) -> int:
    """Bytes of sparse attention over latents: scores, partial results in fp32 of at most two programs a multiprocessor,
    and the block tables of recorded steps."""
    sequences = max((shape[0] + prompts_of(shape) for shape in shapes), default=0)
    partial = 2 * MULTIPROCESSORS * SPARSE_HEADS * (rank + 1) * 4
    return SCORE_BYTES + partial + 4 * sequences * most_blocks


def latent_items(tokens: int, sequences: int, heads: int) -> int:
    """Upper bound of the work items of a step with at most `tokens` tokens in at most `sequences` sequences; heads: a
    rank's, a divisor of 128. A tile has 128 rows (query heads of tokens), or 64 if sequences have at most 64 on
    average; splitting long contexts adds at most one item a multiprocessor."""
    return max(2 * sequences, tokens * heads // 128 + 1 + sequences) + MULTIPROCESSORS


def latent_unfit(latent: Latent, heads: int) -> str | None:
    """The reason why FlashInfer has no kernel for these latents and `heads` heads a rank, or None."""
    rank, rotated = latent.rank, latent.rotated
    if latent.index is not None:
        return "its wrapper reads all positions, not those that sparse attention chooses"
    if rank not in LATENT_RANKS or rotated != 64:
        ranks = ", ".join(map(str, LATENT_RANKS))
        return f"it has kernels for latents of {ranks} and keys of 64, not {rank} and {rotated}"
    if 128 % heads:
        return f"a tile of its kernels is 128 heads of tokens, and 128 % {heads} heads of a rank = {128 % heads}"
    return None


def too_many_latent_items(tokens: int, sequences: int, heads: int) -> str | None:
    """The reason why FlashInfer cannot plan steps of these limits, with limits that it can; None if it can."""
    if (items := latent_items(tokens, sequences, heads)) <= LATENT_ITEMS:
        return None
    most = (LATENT_ITEMS - MULTIPROCESSORS - sequences) * 128 // heads - 1
    return (
        f"engine.max_num_batched_tokens={tokens}, max_num_seqs={sequences}: FlashInfer plans at most {LATENT_ITEMS} "
        f"work items of attention over latents, a step of {heads} heads a rank could need {items}: "
        f"set max_num_batched_tokens to at most {most}, or engine.attention to torch"
    )


def latent_workspace_bytes(rank: int, shapes: Sequence[Shape], most_blocks: int) -> int:
    """Like workspace_bytes: a wrapper for all eager steps, twice for split steps, each with two plans in memory (a new
    plan is allocated before the last is freed), and one for each recorded shape."""
    sequences = max((shape[0] + prompts_of(shape) + bool(shape[1]) for shape in shapes), default=0)
    tables = 3 * 4 * sequences * (most_blocks + 3)
    return latent_partial_bytes(rank) + (4 + len(shapes)) * WRAPPER_BYTES + tables


def most_rows(shapes: Sequence[Shape], by_row: bool = False) -> tuple[int, int, int]:
    """The most decodes, prompt rows of steps with decodes, and rows of sequences with drafts. by_row: all rows are
    decodes."""
    if by_row:
        return max(map(sum, shapes), default=0), 0, 0
    return (
        max((decodes for decodes, _ in shapes), default=0),
        max((rows for decodes, rows in shapes if decodes), default=0),
        max((rows for decodes, rows in shapes if not decodes), default=0),
    )


def workspace_bytes(
    shape: tuple[int, int, int], windows: int, shapes: Sequence[Shape], most_blocks: int, by_row: bool = False
) -> int:
    """Bytes of attention workspace on a rank. shape: query heads, KV heads, head dimension; windows: distinct window
    sizes among the layers. Each window has a wrapper for prompts and one for decodes, both twice for split steps, one
    for each number of decodes and one for each number of rows of prompts, or of drafts, of a recorded step (by_row: for
    each sum).
    Recorded steps also need page tables of `most_blocks` blocks a sequence (by_row: a row): the runner's, that of a
    plan, and the persistent buffers."""
    decodes = {sum(shape) if by_row else shape[0] for shape in shapes} - {0}
    prompts = {} if by_row else {(bool(shape[0]), shape[1]): prompts_of(shape) for shape in shapes if shape[1]}
    wrappers = windows * (4 + len(decodes) + len(prompts))
    sequences = max(decodes, default=0) + max(prompts.values(), default=0)
    tables = 3 * 4 * sequences * (most_blocks + 2)
    plain = partial_bytes(*shape)
    recorded = partial_bytes(*shape, *most_rows(shapes, by_row))
    return plain + (recorded if recorded > plain else 0) + wrappers * WRAPPER_BYTES + tables
