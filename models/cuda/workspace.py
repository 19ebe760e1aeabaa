"""Which heads FlashInfer serves, what its wrappers will hold on a GPU, and whether its kernels can be had.

Without torch, for plans and `check` too.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

WORKSPACE_BYTES = 384 << 20
"""Partial results of sequences that are split among multiprocessors, one buffer for all wrappers: enough for 64 heads
of 128 on an H100's 132."""
HEAD_DIMS = (64, 128, 256)
"""Head dimensions that it has kernels for."""
WRAPPER_BYTES = 8 << 20
"""What each wrapper allocates for its plan; that is fixed in the library."""


def kernels_missing(
    find: Callable[[str], Any] = find_spec,
    which: Callable[[str], str | None] = shutil.which,
    home: Path | None = None,
    toolkit: Path | None = None,
) -> str | None:
    """Why FlashInfer could run no kernel on this host: it has compiled none before, brings none, and cannot compile.
    None where it can, or is not installed. home: where its cache lies; toolkit: CUDA's folder."""
    if find("flashinfer") is None or find("flashinfer_jit_cache") is not None:
        return None
    toolkit = toolkit or Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    home = home or Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", Path.home()))
    if any((home / ".cache/flashinfer").rglob("*.so")):
        return None
    if which("nvcc") or (toolkit / "bin" / "nvcc").exists():
        if which(os.environ.get("CXX") or "c++"):
            return None
        return (
            "flashinfer has no compiled kernels, and its nvcc finds no C++ compiler (CXX or c++): install g++ or "
            "flashinfer-jit-cache, on every host"
        )
    return (
        "flashinfer has no compiled kernels and finds no nvcc to compile them: install flashinfer-jit-cache (from "
        "FlashInfer's own index) or CUDA's toolkit, on every host"
    )


def workspace_bytes(windows: int, sizes: Sequence[int], most_blocks: int) -> int:
    """Of a rank whose layers have so many different windows: a wrapper for prompts and one for decodes each, twice for
    steps in two streams, and one for each size of recorded steps; with these, the page tables of sequences of at most
    so many blocks, once in the buffers that stay and once on the way there."""
    wrappers = windows * (4 + len(sizes))
    tables = 2 * 4 * max(sizes) * (most_blocks + 2) if sizes else 0
    return WORKSPACE_BYTES + wrappers * WRAPPER_BYTES + tables
