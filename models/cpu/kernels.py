"""The C library of a CPU's kernels (models/cpu/kernels.h) behind ctypes, at the CPU tier in force."""

from __future__ import annotations

import ctypes
import logging
import time
from ctypes import c_float, c_int, c_int64, c_uint64, c_void_p

import torch

from ...topology.hardware import cpu_tier
from ...topology.hardware.cpu_quota import usable_cpus
from ...topology.transport import native
from ...topology.transport.native import bind
from ..config.json_fields import Refusal
from ..pages import HugePages

log = logging.getLogger(__name__)

ROWS = 32
"""Output rows of a block of models/cpu/products.c's packed weights."""
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""kernels.h's numbers."""
INT8 = 3
FORMS = {"int4": 4, "e2m1": 5, "e4m3": 6}
"""kernels.h's numbers of quantised weights."""


class OddInputsError(Refusal, ValueError):
    """`parallel.deterministic` is wanted of a product that products.c does not serve."""


class Kernels:
    """The built library in the tier in force. `threads`: torch's number when it is made; `served`: types whose
    products models/cpu/products.c computes (under `deterministic` all, else those of the tier `generic`, where
    torch's libraries are not faster); `int8`: it can on int8 weights; `vector_floats`: fp32 values of a vector, by
    which weights are packed."""

    def __init__(self, library: ctypes.CDLL, deterministic: bool = False) -> None:
        self.library = library
        tiers, tier = cpu_tier.TIERS[::-1], cpu_tier.current()
        self.tier: cpu_tier.Tier = tier
        """As which it computes; without AMX's tiles, the one below."""
        if not library.kernels_set_tier(tiers.index(tier)):
            self.tier = "avx512_bf16"
            log.warning(
                "AMX is not to be had (the system refuses it, or the compiler knew none): products run on AVX-512 BF16"
            )
        self.deterministic = deterministic
        self.threads = torch.get_num_threads()
        if self.threads > usable_cpus():
            bind(library.kernels_sleep_at_once, None)()
        p, i, n, f = c_void_p, c_int, c_int64, c_float
        self.read = bind(library.kernels_read, c_uint64, p, n, i)
        self.served = frozenset(TYPES if deterministic or tier != "generic" else ())
        self.int8: bool = library.kernels_has_products(INT8) == 1
        self.vector_floats: int = library.kernels_vector_floats()
        self.sub_block = bind(library.kernels_sub_block, i, *[p] * 8, n)
        self._pack = bind(library.kernels_pack, None, i, p, p, n, n, i)
        self.pack_int8 = bind(library.kernels_pack_int8, None, p, p, p, n, n, i, i)
        self.rms_norm = bind(library.kernels_rms_norm, None, i, p, p, p, n, n, f)
        self.lane_products = bind(library.kernels_lane_products, i, p, n, p, n, n, p, n)
        self.join_lanes = bind(library.kernels_join_lanes, None, i, p, p, n, p, p, p, n, n)
        self.sum_lanes = bind(library.kernels_sum_lanes, None, i, p, p, n, n)
        self.by_head = bind(library.kernels_by_head, None, p, p, *[n] * 5)
        self.silu_and_mul = bind(library.kernels_silu_and_mul, None, i, p, p, n, n)
        self.attend = bind(library.kernels_attend, i, *[p] * 4, n, i)
        self.attend_prompts = bind(library.kernels_attend_prompts, i, p, i)
        self.has_prompts = bind(library.kernels_has_prompts, i, n)

    def pack(self, address: int, matrix: torch.Tensor, gated: bool, unit: int | None = None) -> None:
        """Packs a row-major matrix [rows, n]. unit: bytes of a row that stay together; None: as products.c reads values
        of the matrix's type."""
        item = matrix.element_size()
        unit = unit or (2 if matrix.dtype == torch.float16 else 4)
        self._pack(unit, address, matrix.data_ptr(), len(matrix), matrix.shape[1] * item, gated)

    @staticmethod
    def find(deterministic: bool = False) -> Kernels | None:
        library = native.load("laddertron.models.cpu._kernels")
        return None if library is None else Kernels(library, deterministic)


def read_bandwidth(size: int) -> float | None:
    """Bytes a second that torch's threads together read of `size` bytes: the best of twelve rounds, None without
    kernels. The floor of a decode step is what it must read divided by this."""
    kernels = Kernels.find()
    if kernels is None:
        return None
    data = HugePages().take(size).fill_(1)
    best = float("inf")
    for _ in range(12):
        started = time.perf_counter()
        kernels.read(data.data_ptr(), size, kernels.threads)
        best = min(best, time.perf_counter() - started)
    return size / best
