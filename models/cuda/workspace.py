"""Which heads FlashInfer serves, and what its wrappers will hold on a GPU. Pure; without torch, for plans too."""

from __future__ import annotations

from collections.abc import Sequence

WORKSPACE_BYTES = 384 << 20
"""Partial results of sequences that are split among multiprocessors, one buffer for all wrappers: enough for 64 heads
of 128 on an H100's 132."""
HEAD_DIMS = (64, 128, 256)
"""Head dimensions that it has kernels for."""
WRAPPER_BYTES = 8 << 20
"""What each wrapper allocates for its plan; that is fixed in the library."""


def workspace_bytes(windows: int, sizes: Sequence[int], most_blocks: int) -> int:
    """Of a rank whose layers have so many different windows: a wrapper for prompts and one for decodes each, twice for
    steps in two streams, and one for each size of recorded steps; with these, the page tables of sequences of at most
    so many blocks, once in the buffers that stay and once on the way there."""
    wrappers = windows * (4 + len(sizes))
    tables = 2 * 4 * max(sizes) * (most_blocks + 2) if sizes else 0
    return WORKSPACE_BYTES + wrappers * WRAPPER_BYTES + tables
