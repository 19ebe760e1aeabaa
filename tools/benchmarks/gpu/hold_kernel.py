"""Triton kernels of the emulated fabric: `delay` takes time, `hold` also occupies a multiprocessor per program and
moves bytes. Needs Triton.
"""

# Triton takes annotations of kernels for types of its own: there are none for others.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import triton
import triton.language as tl

jit: Any = triton.jit

VECTOR_BYTES = 16
"""Bytes that a thread loads and stores at once."""
TILE_BYTES = 64 << 10
"""Bytes that a program has in flight: enough for about 60 GB/s at a latency of a microsecond."""
HOLD_WARPS = 32
BALLAST: Any = tl.constexpr(HOLD_WARPS * 32 * 32)
"""32 registers a thread. With those that the bytes pass through, a program has the whole register file: no other block
can run with it."""


@jit
def nanoseconds():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@jit
def nap():
    # Asleep, so that waiting neither takes issue slots from other blocks nor power from the clocks.
    tl.inline_asm_elementwise("nanosleep.u32 100; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@jit(do_not_specialize=["ns"])
def delay(ns):
    """Lets one warp sleep for `ns` nanoseconds."""
    deadline = nanoseconds() + ns
    while nanoseconds() < deadline:
        nap()


@jit(do_not_specialize=["vectors", "moved", "ns"])
def hold(x, scratch, vectors, moved, ns, VECTOR: tl.constexpr, TILE: tl.constexpr):
    """Every program occupies its multiprocessor for `ns` nanoseconds from its own start. Together they copy `moved`
    vectors of VECTOR elements, cyclically from x's `vectors`, to scratch, evenly over that time. Does not change x."""
    began = nanoseconds()
    ballast = tl.arange(0, BALLAST)
    program, programs = tl.program_id(0), tl.num_programs(0)
    elements = vectors * VECTOR
    lap = tl.maximum(tl.cdiv(elements, TILE), 1)
    tiles = tl.cdiv(moved * VECTOR, TILE)
    mine = (tiles - program + programs - 1) // programs
    for i in range(mine + 1):  # the last round moves nothing and waits for the end
        at = ((program + i * programs) % lap) * TILE + tl.arange(0, TILE)
        inside = (at < elements) & (i < mine)
        values = tl.load(x + at, inside)
        while nanoseconds() < began + ns.to(tl.int64) * (i + 1) // (mine + 1):
            nap()
            # Changed in every turn, or the compiler would make it at the end, where it holds nothing.
            ballast = ballast * 3 + 1
        tl.store(scratch + at, values, inside)
    if ns < 0:  # never; but the compiler does not know that nobody wants the ballast
        tl.store(scratch.to(tl.pointer_type(tl.int32)) + tl.arange(0, BALLAST), ballast)
