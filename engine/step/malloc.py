"""How glibc's allocator treats big blocks: given back to the system while weights are loaded, kept while steps run.

Elsewhere than under glibc both do nothing.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_MOST = 32 << 20
"""What glibc takes at most: blocks beyond always come from the system. Zeroing their pages costs little against the
work done on a tensor of that size."""
_KEPT = 256 << 20


def give_back_freed() -> None:
    """Blocks of a MiB and more come from the system and go back to it when freed. glibc raises that bound whenever a
    bigger block is freed, and then keeps the weights that were just repacked."""
    _mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def keep_freed() -> None:
    """Freed blocks of up to 32 MiB stay with the process for the next step's activations: a fresh block's pages are
    zeroed one by one as they are touched, which took a tenth of a prompt's step. Only what is free at the heap's end
    goes back, beyond 256 MiB; below a block in use all of it stays, so count with what the largest step needed."""
    _mallopt(_M_MMAP_THRESHOLD, _MMAP_MOST)
    _mallopt(_M_TRIM_THRESHOLD, _KEPT)


def _mallopt(key: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(key, value)
