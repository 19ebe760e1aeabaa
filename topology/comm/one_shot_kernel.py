"""The Triton kernel of one_shot.py. Importing this needs Triton."""

# NOTE: kernels have no annotations, because Triton interprets them as its own types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _meet(regions, epochs, stop, rank, program, epoch, RANKS: tl.constexpr, LANES: tl.constexpr):
    """Signals `epoch` to every rank's region, and waits until each has signalled it here, or `stop` is set; returns
    `stop`. What any thread stored before is visible to all ranks first, and what any thread loads behind it is what the
    ranks had stored.

    The first barrier puts all threads' stores before the release (in PTX a fence of the system's scope); the second
    hands what was acquired to all threads. An acquire also empties the multiprocessor's cache."""
    tl.debug_barrier()
    lane = tl.arange(0, LANES)
    there = lane < RANKS
    word: tl.constexpr = epochs.dtype
    flags = tl.load(regions + lane, there, other=0).to(word) + program * RANKS + rank
    tl.atomic_xchg(flags, epoch + lane * 0, mask=there, sem="release", scope="sys")
    arrivals = tl.load(regions + rank).to(word) + program * RANKS + lane
    missing, stopped = 1, epoch * 0
    while (missing != 0) & (stopped == 0):
        seen = tl.atomic_add(arrivals, lane.to(tl.int64) * 0, mask=there, sem="acquire", scope="sys")
        missing = tl.sum(tl.where(there & (seen < epoch), 1, 0))
        stopped = tl.load(stop, volatile=True)
    tl.debug_barrier()
    return stopped


# Sizes are not specialised: a message of another size must not compile within a capture.
@triton.jit(do_not_specialize=["rank", "part", "chunk"])
def exchange(
    out, source, regions, epochs, stop, rank, part, chunk, flag_bytes: tl.constexpr, slice_bytes: tl.constexpr,
    PROGRAMS: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr, PARTS: tl.constexpr, GATHER: tl.constexpr,
    VEC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Publishes `source`, PARTS parts of `part` vectors of VEC values (16 bytes), in this rank's region; then, of what
    all RANKS have published: GATHER: copies every rank's part to its place in `out`; else writes this rank's part
    (of PARTS; or the only one) of the sum, added in rank order in fp32 and rounded once.

    Each program has `chunk` vectors of every part, and its own flags, epochs and slices of the two buffers."""
    program = tl.program_id(0).to(tl.int64)
    epoch = tl.load(epochs + program) + 1
    offset = flag_bytes + ((epoch % 2) * PROGRAMS + program) * slice_bytes
    first = program * chunk * VEC
    count = tl.minimum(chunk, part - program * chunk) * VEC
    at = tl.arange(0, BLOCK)
    kind: tl.constexpr = source.dtype

    mine = tl.multiple_of((tl.load(regions + rank) + offset).to(kind), 16)
    for k in tl.static_range(PARTS):
        for begin in range(0, count, BLOCK):
            inside = begin + at < count
            values = tl.load(source + k * part.to(tl.int64) * VEC + first + begin + at, inside)
            tl.store(mine + k * chunk * VEC + begin + at, values, inside)

    stopped = _meet(regions, epochs, stop, rank, program, epoch, RANKS, LANES)
    # NOTE: volatile, so from the owner's memory and not from this multiprocessor's cache; Triton drops ".cv".
    failed = tl.full([BLOCK], float("nan"), tl.float32).to(kind.element_ty)
    if GATHER:
        for r in range(RANKS):
            theirs = tl.multiple_of((tl.load(regions + r) + offset).to(kind), 16)
            for begin in range(0, count, BLOCK):
                inside = begin + at < count
                values = tl.load(theirs + begin + at, inside, volatile=True)
                values = tl.where(stopped == 0, values, failed)
                tl.store(out + r * part.to(tl.int64) * VEC + first + begin + at, values, inside)
    else:
        own = 0
        if PARTS > 1:
            own = rank * chunk * VEC
        for begin in range(0, count, BLOCK):
            inside = begin + at < count
            total = tl.zeros([BLOCK], tl.float32)
            for r in tl.static_range(RANKS):
                theirs = tl.multiple_of((tl.load(regions + r) + offset).to(kind), 16)
                total += tl.load(theirs + own + begin + at, inside, volatile=True).to(tl.float32)
            values = tl.where(stopped == 0, total.to(kind.element_ty), failed)
            tl.store(out + first + begin + at, values, inside)
    tl.store(epochs + program, epoch)
